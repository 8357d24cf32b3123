"""Statements as values, read from ``.sql`` files. Nothing here runs one.

A file holds blocks that begin ``-- name: claim``; parameters are spelled ``:scope``. The files name the table
``semel_keys``, and its objects after it (``semel_keys_reap``); another name is inserted on loading.
Lines between ``--[kept`` and ``--]`` are a part: a variant of the statement has it or not (``Query.with_parts``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Generic, TypeVar

from semel.core.value import value
from semel.errors import ConfigurationError
from semel.stores.words import PARTS, PREFIXES, RESERVED

T = TypeVar("T")

DEFAULT_TABLE = "semel_keys"
DEFAULT_AUDIT = "semel_audit"
DEFAULT_WATERMARK = "semel_keys_watermark"
DEFAULT_OUTBOX = "semel_outbox"
DEFAULT_INBOX = "semel_inbox"
DEFAULT_WEBHOOKS = "semel_webhooks"
DEFAULT_COUNTS = "semel_counts"
#: The table of the partitioned layout on PostgreSQL; it is not there in the plain one.
DEFAULT_ANSWERS = "semel_answers"
#: PostgreSQL's functions, which are called by their names alone.
FUNCTIONS = ("semel_answer", "semel_forget_answer", "semel_move_answer", "semel_rotate_answers")
MIGRATIONS = "migrations"

_TABLES = (
    DEFAULT_TABLE,
    DEFAULT_AUDIT,
    DEFAULT_OUTBOX,
    DEFAULT_INBOX,
    DEFAULT_WEBHOOKS,
    DEFAULT_COUNTS,
    DEFAULT_ANSWERS,
)
_USUAL = (*_TABLES, *FUNCTIONS)

_BLOCK = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
# Not the second colon of a cast (::text).
_PARAMETER = re.compile(r"(?<!:):([a-z_]+)\b")
_PART = re.compile(r"^--\[(\w+)\n(.*?)^--\]\n?", re.MULTILINE | re.DOTALL)
_WORDS = re.compile(r"[a-z0-9_. -]*")
#: Tables that are called so beside ``semel_keys``.
_BESIDE = frozenset({DEFAULT_AUDIT, DEFAULT_OUTBOX, DEFAULT_INBOX, DEFAULT_WEBHOOKS, DEFAULT_COUNTS})
_OTHER = "Give another, such as shop_keys."
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,47}")


@dataclass(frozen=True, slots=True)
class Names:
    """What the table is called, and where."""

    table: str = DEFAULT_TABLE
    schema: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is no plain identifier: it goes into SQL as it stands."""
        for what, name in (("table", self.table), ("schema", self.schema)):
            if name is not None and not _IDENTIFIER.fullmatch(name):
                raise ConfigurationError(
                    f"{name!r} is not a {what} name. Use at most 48 lower-case letters, digits and underscores."
                )
            if name is not None and (name in RESERVED or name.startswith(PREFIXES)):
                raise ConfigurationError(f"{name!r} is a word of SQL or of the database, and no {what} name. {_OTHER}")
        if self.table in PARTS or self.table in _BESIDE:
            raise ConfigurationError(f"{self.table!r} is a name that Semel itself uses in its statements. {_OTHER}")

    @property
    def audit(self) -> str:
        """The name of the audit trail's table: ``semel_audit`` for ``semel_keys``."""
        return self._beside(DEFAULT_AUDIT)

    @property
    def outbox(self) -> str:
        """The table of messages to be sent."""
        return self._beside(DEFAULT_OUTBOX)

    @property
    def inbox(self) -> str:
        """The table of messages that consumers have handled."""
        return self._beside(DEFAULT_INBOX)

    @property
    def webhooks(self) -> str:
        """The table of endpoints."""
        return self._beside(DEFAULT_WEBHOOKS)

    @property
    def counts(self) -> str:
        """The table of how requests have ended, by minute."""
        return self._beside(DEFAULT_COUNTS)

    @property
    def answers(self) -> str:
        """The table of large answers in the partitioned layout."""
        return self._beside(DEFAULT_ANSWERS)

    @property
    def watermark(self) -> str:
        """The table that says how far the services have walked along the records."""
        return f"{self.table}_watermark"

    @property
    def tables(self) -> frozenset[str]:
        """All of Semel's tables that every store has."""
        messages = (self.outbox, self.inbox, self.webhooks)
        own = (self.table, self.audit, self.watermark, self.counts, f"{self.table}_migrations")
        return frozenset({*own, *messages})

    def has(self, table: str) -> bool:
        """Whether a table is Semel's: one that every store has, or of the partitioned layout."""
        return table in self.tables or re.fullmatch(rf"{self.answers}(_rest|_\d{{6}})?", table) is not None

    def put_into(self, sql: str) -> str:
        """Return *sql* with these names in place of the usual ones."""
        prefix = f"{self.schema}." if self.schema else ""
        sql = sql.replace(DEFAULT_WATERMARK, prefix + self.watermark)
        for usual in _USUAL:
            name = self._beside(usual)
            sql = re.sub(rf"\b{usual}(?=_)", name, sql)
            sql = re.sub(rf"\b{usual}\b", prefix + name, sql)
        return sql

    def _beside(self, usual: str) -> str:
        """Return what a table is called that is *usual* beside ``semel_keys``."""
        if self.table == DEFAULT_TABLE:
            return usual
        return self.table if usual == DEFAULT_TABLE else self.table + usual.removeprefix("semel")


@dataclass(frozen=True)
class Query:
    """The text of a statement, its parameters spelled ``:name``."""

    text: str

    # Both are needed in every request, and a search through the text would cost time.
    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The parameters' names, in the order of their first appearance."""
        return tuple(dict.fromkeys(_PARAMETER.findall(self.text)))

    @cached_property
    def numbered(self) -> str:
        """The text with its parameters spelled ``$1``, ``$2``."""
        numbers = {name: f"${number}" for number, name in enumerate(self.parameters, 1)}
        return _PARAMETER.sub(lambda match: numbers[match[1]], self.text)

    @cached_property
    def formatted(self) -> str:
        """The text with its parameters spelled ``%(name)s``, for a driver that inserts them into the text."""
        return _PARAMETER.sub(lambda match: f"%({match[1]})s", self.text)

    def with_parts(self, *names: str) -> Query:
        """Return the variant that has these parts, and no others."""
        return Query(_PART.sub(lambda match: match[2] if match[1] in names else "", self.text))

    def with_words(self, **words: str) -> Query:
        """Return the variant in which these parameters are words of the text, as strings of SQL."""
        for name, word in words.items():
            if not _WORDS.fullmatch(word):
                raise ValueError(f"{name}: {word!r} can't be written into a statement")
        return Query(_PARAMETER.sub(lambda match: f"'{words[match[1]]}'" if match[1] in words else match[0], self.text))


@value
class Statement(Generic[T]):
    """One statement to run: text, parameters in order, and how to read the rows that come back."""

    sql: str
    parameters: Sequence[Any]
    read: Callable[[Sequence[Sequence[Any]]], T]


@value
class Joined(Generic[T]):
    """A statement that joins the application's transaction, on any driver.

    Each driver spells parameters in its own way, so they keep their names. Casts are spelled ``CAST(:token AS bytea)``:
    SQLAlchemy would parse the colons of ``::`` as a parameter.
    """

    query: Query
    parameters: Mapping[str, Any]
    read: Callable[[Sequence[Sequence[Any]]], T]
    #: Run right after this one, if this one returned a row: SQLite can't change one table and write a line about it to
    #: another in a single statement. It returns a row as well, which is ignored.
    also: Joined[Any] | None = None
    #: Takes the place of ``query`` in a transaction that was begun DEFERRABLE, as a mark: it fails in any other.
    marked: Query | None = None

    @property
    def in_order(self) -> list[Any]:
        """The parameters in the order in which ``query.numbered`` counts them."""
        return [self.parameters[name] for name in self.query.parameters]


def load_queries(package: str, names: Names, file: str = "queries.sql") -> dict[str, Query]:
    """Read the queries of a store's package."""
    parts = _BLOCK.split((files(package) / file).read_text("utf-8"))
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {name: Query(names.put_into(_without_comments(text))) for name, text in pairs}


def load_migrations(package: str, names: Names) -> list[tuple[str, str]]:
    """Read a store's migrations, in order: their names and their SQL."""
    found = [each for each in (files(package) / MIGRATIONS).iterdir() if each.name.endswith(".sql")]
    return [(_stem(each), names.put_into(each.read_text("utf-8"))) for each in sorted(found, key=_stem)]


def _stem(file: Traversable) -> str:
    return file.name.removesuffix(".sql")


def _without_comments(text: str) -> str:
    # Comments are for readers of the file; the server's logs and statistics are clearer without.
    return "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("-- "))
