"""What each kind of statement in a migration locks, how much of the table it reads, and whether old code goes on. These
are PostgreSQL's own rules, as one table; nothing here connects, and a test compares it with a server's ``pg_locks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from semel.errors import ConfigurationError
from semel.stores.migration import PlannedStatement, Work, phase_of
from semel.stores.statement import DEFAULT_ANSWERS, DEFAULT_AUDIT, DEFAULT_TABLE, Names


class Lock(IntEnum):
    """The locks on a table, weakest first, as PostgreSQL numbers them."""

    NONE = 0
    ROW_EXCLUSIVE = 3
    SHARE_UPDATE_EXCLUSIVE = 4
    SHARE = 5
    SHARE_ROW_EXCLUSIVE = 6
    ACCESS_EXCLUSIVE = 8

    def __str__(self) -> str:
        """Return it as PostgreSQL's manual spells it."""
        return self.name.replace("_", " ")

    @property
    def mode(self) -> str:
        """Its name in ``pg_locks``."""
        return self.name.title().replace("_", "") + "Lock"


#: Who waits for as long as a lock is held: on a table that every request's statements name, and on another.
_BLOCKS = {
    Lock.NONE: ("nothing",) * 2,
    Lock.ROW_EXCLUSIVE: ("nothing but requests for the rows that it changes",) * 2,
    Lock.SHARE_UPDATE_EXCLUSIVE: ("nothing; only VACUUM and other migrations wait",) * 2,
    Lock.SHARE: ("claims, answers and replays", "what writes to it"),
    Lock.SHARE_ROW_EXCLUSIVE: ("claims, answers and replays", "what writes to it"),
    Lock.ACCESS_EXCLUSIVE: ("claims, answers and replays", "what reads it or writes to it"),
}
_HOW_LONG: dict[Work, str] = {
    "nothing": "for an instant",
    "reads": "while it reads the whole table",
    "rewrites": "while it writes the whole table anew",
}


class Kind(NamedTuple):
    """A kind of statement, or of one action of ALTER TABLE."""

    pattern: str
    lock: Lock
    work: Work = "nothing"
    #: Whether the code of the version before goes on serving once it was run.
    is_survived: bool = True
    #: Whether it can be part of a transaction.
    joins: bool = True
    #: The table that it locks, where it names none.
    table: str = ""


_NAME = r"(?:IF (?:NOT )?EXISTS )?(?:ONLY )?(?P<{}>[\w.]+)"
_INDEX, _TABLE = _NAME.format("index"), _NAME.format("table")

#: The first that fits is it. What stands in none of them is not run on tables that are in use.
STATEMENTS = (
    Kind(rf"CREATE TABLE {_TABLE}", Lock.ACCESS_EXCLUSIVE),
    Kind(rf"CREATE INDEX CONCURRENTLY {_INDEX} ON {_TABLE}", Lock.SHARE_UPDATE_EXCLUSIVE, "reads", joins=False),
    # Rows that old code writes have to fit.
    Kind(
        rf"CREATE UNIQUE INDEX CONCURRENTLY {_INDEX} ON {_TABLE}",
        Lock.SHARE_UPDATE_EXCLUSIVE,
        "reads",
        is_survived=False,
        joins=False,
    ),
    Kind(rf"CREATE INDEX {_INDEX} ON {_TABLE}", Lock.SHARE, "reads"),
    Kind(rf"CREATE UNIQUE INDEX {_INDEX} ON {_TABLE}", Lock.SHARE, "reads", is_survived=False),
    # Its statements may be slow without it, or can't do without it: ON CONFLICT.
    Kind(rf"DROP INDEX CONCURRENTLY {_INDEX}", Lock.SHARE_UPDATE_EXCLUSIVE, is_survived=False, joins=False),
    Kind(rf"DROP INDEX {_INDEX}", Lock.ACCESS_EXCLUSIVE, is_survived=False),
    Kind(rf"DROP TABLE {_TABLE}", Lock.ACCESS_EXCLUSIVE, is_survived=False),
    Kind(rf"INSERT INTO {_TABLE}", Lock.ROW_EXCLUSIVE),
    Kind(rf"(?:UPDATE|DELETE FROM) {_TABLE}", Lock.ROW_EXCLUSIVE, "reads"),
    Kind(rf"COMMENT ON TABLE {_TABLE}", Lock.SHARE_UPDATE_EXCLUSIVE),
    Kind(rf"GRANT .+? ON {_TABLE} TO ", Lock.NONE),
    Kind(rf"CREATE OR REPLACE FUNCTION {_TABLE}\(", Lock.NONE),
    # What old code writes goes another way.
    Kind(rf"CREATE OR REPLACE TRIGGER \w+ .+? ON {_TABLE}", Lock.SHARE_ROW_EXCLUSIVE, is_survived=False),
    Kind(rf"DROP TRIGGER (?:IF EXISTS )?\w+ ON {_TABLE}", Lock.ACCESS_EXCLUSIVE),
    # It makes a partition, or drops one.
    Kind(r"SELECT made FROM [\w.]+_rotate_answers\(", Lock.ACCESS_EXCLUSIVE, table=DEFAULT_ANSWERS),
)
#: The strongest of its actions is what an ALTER TABLE locks.
ACTIONS = (
    Kind(r"ADD COLUMN .* GENERATED ", Lock.ACCESS_EXCLUSIVE, "rewrites"),
    Kind(r"ADD COLUMN .* (?:UNIQUE|PRIMARY KEY|REFERENCES|CHECK)\b", Lock.ACCESS_EXCLUSIVE, "reads"),
    # A default that is the same for every row is kept in the catalogue; one that has to be called is not.
    Kind(r"ADD COLUMN .* DEFAULT [^(]*\(", Lock.ACCESS_EXCLUSIVE, "rewrites"),
    Kind(r"ADD COLUMN .* NOT NULL DEFAULT ", Lock.ACCESS_EXCLUSIVE),
    Kind(r"ADD COLUMN .* NOT NULL", Lock.ACCESS_EXCLUSIVE, "reads", is_survived=False),
    Kind(r"ADD COLUMN ", Lock.ACCESS_EXCLUSIVE),
    # Rows that old code writes have to fit too.
    Kind(r"ADD CONSTRAINT \S+ (?:UNIQUE|PRIMARY KEY) USING INDEX ", Lock.ACCESS_EXCLUSIVE, is_survived=False),
    Kind(r"ADD CONSTRAINT \S+ FOREIGN KEY .* NOT VALID", Lock.SHARE_ROW_EXCLUSIVE, is_survived=False),
    Kind(r"ADD CONSTRAINT \S+ FOREIGN KEY ", Lock.SHARE_ROW_EXCLUSIVE, "reads", is_survived=False),
    Kind(r"ADD CONSTRAINT \S+ CHECK .* NOT VALID", Lock.ACCESS_EXCLUSIVE, is_survived=False),
    Kind(r"ADD CONSTRAINT ", Lock.ACCESS_EXCLUSIVE, "reads", is_survived=False),
    Kind(r"VALIDATE CONSTRAINT ", Lock.SHARE_UPDATE_EXCLUSIVE, "reads"),
    Kind(r"DROP CONSTRAINT ", Lock.ACCESS_EXCLUSIVE),
    Kind(r"DROP COLUMN ", Lock.ACCESS_EXCLUSIVE, is_survived=False),
    Kind(r"RENAME ", Lock.ACCESS_EXCLUSIVE, is_survived=False),
    Kind(r"ALTER COLUMN \S+ (?:SET|DROP) DEFAULT", Lock.ACCESS_EXCLUSIVE),
    Kind(r"ALTER COLUMN \S+ DROP NOT NULL", Lock.ACCESS_EXCLUSIVE),
    Kind(r"ALTER COLUMN \S+ SET NOT NULL", Lock.ACCESS_EXCLUSIVE, "reads", is_survived=False),
    Kind(r"ALTER COLUMN \S+ SET STATISTICS ", Lock.SHARE_UPDATE_EXCLUSIVE),
    Kind(r"ALTER COLUMN \S+ (?:SET DATA )?TYPE ", Lock.ACCESS_EXCLUSIVE, "rewrites", is_survived=False),
    Kind(r"(?:RE)?SET \(", Lock.SHARE_UPDATE_EXCLUSIVE),
)
_ALTER = re.compile(rf"ALTER TABLE {_TABLE} (?P<actions>.+)", re.IGNORECASE)
#: Why a statement may stand in a migration that is run before the new code, though its kind may not.
WAIVER = re.compile(r"^\s*-- old code: \S.*$", re.MULTILINE)
#: As long as the longest words, a comment, a string, a name in quotes, or a body in dollars are one piece.
_PIECES = re.compile(
    r"(?P<comment>--[^\n]*|/\*.*?\*/)|'(?:[^']|'')*'|\"[^\"]*\"|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$|[^-/'\"$;,()]+|.",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of a migration."""

    #: As it stands in the file, with the comments in front of it.
    text: str
    #: On one line, without comments.
    sql: str
    lock: Lock
    work: Work
    is_survived: bool
    joins: bool
    table: str
    index: str
    #: Whether every request's statements name the table.
    is_for_requests: bool
    #: Whether the table is made by an earlier statement of the same migration: no code uses it yet.
    is_on_new: bool

    @property
    def blocks(self) -> str:
        """Who waits, and for how long."""
        if self.is_on_new:
            return "nothing: no code uses the new table yet"
        who = _BLOCKS[self.lock][not self.is_for_requests]
        return who if self.lock <= Lock.SHARE_UPDATE_EXCLUSIVE else f"{who}, {_HOW_LONG[self.work]}"

    @property
    def planned(self) -> PlannedStatement:
        """What a plan says of it."""
        shown = "\n".join(line.rstrip() for line in _without_comments(self.text).strip().splitlines() if line.strip())
        return PlannedStatement(shown, self.table, str(self.lock), self.work, self.blocks)


def steps_of(script: str, names: Names) -> tuple[Step, ...]:
    """Return the statements of a *script* that has these *names*. An index belongs to the table it is named after."""
    known, made = sorted(names.tables, key=len, reverse=True), set[str]()
    prefix = f"{names.schema}." if names.schema else ""
    for_requests = {names.put_into(DEFAULT_TABLE), names.put_into(DEFAULT_AUDIT)}
    steps = []
    for text in _split(script, ";"):
        sql = " ".join(_without_comments(text).split())
        if not sql:
            continue
        kinds, match = _kinds(sql)
        named = match.groupdict().get("table") or names.put_into(kinds[0].table)
        table = named or prefix + _owner(match["index"], known)
        is_on_new = table in made or sql.upper().startswith("CREATE TABLE")
        if is_on_new:
            made.add(table)
        steps.append(
            Step(
                text,
                sql,
                max(kind.lock for kind in kinds),
                max((kind.work for kind in kinds), key=("nothing", "reads", "rewrites").index),
                is_on_new or all(kind.is_survived for kind in kinds),
                all(kind.joins for kind in kinds),
                table,
                match.groupdict().get("index") or "",
                table in for_requests,
                is_on_new,
            )
        )
    return tuple(steps)


def faults_of(name: str, script: str) -> list[str]:
    """Return what in a migration would stop a large table, or the old code that still serves on it; for its author.

    A statement may say in a comment of its own, ``-- old code: …``, why the old code goes on nevertheless.
    """
    faults = []
    is_pre = phase_of(name) == "pre"
    for number, step in enumerate(steps_of(script, Names()), 1):
        where = f"{name}, statement {number}"
        if step.is_on_new:
            continue
        if step.work != "nothing" and step.lock > Lock.SHARE_UPDATE_EXCLUSIVE:
            faults.append(f"{where} blocks {step.blocks}. Use CONCURRENTLY; NOT VALID, and VALIDATE in the next one.")
        if step.work == "reads" and step.lock == Lock.ROW_EXCLUSIVE:
            faults.append(f"{where} is one transaction over all rows. Let the services change them in batches.")
        if is_pre and not step.is_survived and not WAIVER.search(step.text):
            faults.append(
                f"{where} may break the version before. Put it into a post migration, or say why it does not."
            )
    return faults


def _kinds(sql: str) -> tuple[list[Kind], re.Match[str]]:
    if altered := _ALTER.fullmatch(sql):
        found = [(action, _first(ACTIONS, action.strip())) for action in _split(altered["actions"], ",")]
        if all(kind for _, kind in found):
            return [kind[0] for _, kind in found if kind], altered
    elif kind := _first(STATEMENTS, sql):
        return [kind[0]], kind[1]
    raise ConfigurationError(f"It is not known what this statement locks, so it can't be a migration: {sql[:200]}")


def _first(kinds: Iterable[Kind], sql: str) -> tuple[Kind, re.Match[str]] | None:
    matches = ((kind, re.match(kind.pattern, sql, re.IGNORECASE)) for kind in kinds)
    return next(((kind, match) for kind, match in matches if match), None)


def _owner(index: str, tables: Iterable[str]) -> str:
    return next((table for table in tables if index.startswith(f"{table}_")), index)


def _split(sql: str, separator: str) -> Iterator[str]:
    """Cut *sql* at each *separator* that is in no parentheses, string or comment."""
    depth, part = 0, ""
    for match in _PIECES.finditer(sql):
        piece = match[0]
        depth += (piece == "(") - (piece == ")")
        if piece == separator and depth == 0:
            yield part
            part = ""
        else:
            part += piece
    if part.strip():
        yield part


def _without_comments(sql: str) -> str:
    return "".join("" if match["comment"] else match[0] for match in _PIECES.finditer(sql))
