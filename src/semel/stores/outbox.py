"""The outbox in a database: its statements, put together. In which transaction they run, others say.

What takes several statements is a generator: it yields each, and gets what that has read. ``carry_out`` runs one in a
transaction of the store's own, in either colour.

Cost, on PostgreSQL: ``add`` is one statement in the application's transaction, which writes a row and three index
entries (two without a key). A batch is claimed in one statement and settled in another, each with its COMMIT; of a
message, that is one heap-only update and one deletion.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Generator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

from semel.core.commands import CommitAlone, Open, Undo
from semel.core.cursor import Walk
from semel.core.outbox import UNSENT_AFTER, Claimed, Ending, Message
from semel.core.value import value
from semel.errors import MessageReused
from semel.stores.base import AsyncStore, Store, this_process
from semel.stores.dialect import PACKAGES, POSTGRESQL, Dialect
from semel.stores.statement import Joined, Names, Query, load_queries

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]
Statements = Generator[Joined[Any], Any, T]

#: How many messages of a key are taken together with one that was freed.
MAX_RUN = 100
#: How many dead letters are requeued or dropped in one statement.
MAX_CHANGED = 1000
#: How many entries of an index a list walks past, unless told.
MAX_WALK = 2**31
#: How many messages are looked at for a sign of a destination's relay.
MAX_SIGNS = 1000
#: How many destinations are counted.
MAX_DESTINATIONS = 20
STATES = ("ready", "waiting", "behind", "dead", "sent")

_LOCK_BYTES = 8


@value
class Stored:
    """A message, as people see it."""

    id: str
    to: str
    key: str | None
    type: str
    state: str
    attempts: int
    created_at: float
    due_at: float | None
    ended_at: float | None
    error: str | None
    size: int
    #: Whether a relay has it now.
    is_taken: bool

    def is_overdue(self, now: float) -> bool:
        """Whether it could have been sent by *now*, and no relay has it."""
        return self.state == "ready" and not self.is_taken and now - self.created_at > UNSENT_AFTER.total_seconds()


@value
class Whole:
    """A message with all that it consists of."""

    stored: Stored
    content_type: str
    headers: tuple[tuple[str, str], ...]
    traceparent: str | None
    payload: bytes


@value
class Waiting:
    """What waits at one destination. None is counted beyond a cap."""

    to: str
    ready: int
    waiting: int
    behind: int
    #: How long the oldest ready one waits.
    lag: timedelta | None


@value
class Lag:
    """What waits in an outbox."""

    destinations: tuple[Waiting, ...]
    dead: int
    #: Not sent yet, and not dead.
    unsent: int
    #: When it was read, by the store's clock.
    now: float


class OutboxStatements:
    """Builds the statements for one outbox."""

    def __init__(self, dialect: Dialect) -> None:
        """Load the queries of *dialect*."""
        self.dialect = dialect
        self._queries = _queries(dialect.name, dialect.names)
        self._is_postgres = dialect.name == POSTGRESQL
        self._channel = channel_of(dialect.names) if self._is_postgres else ""

    def add(self, message: Message, *, again: bool = False) -> Statements[None]:
        """Write one message. One that is there already, with the same content, is left as it is; but with *again*, one
        that was sent, and kept, is sent once more.
        """
        values: dict[str, Any] = {
            "id": message.id,
            "to": message.to,
            "key": message.key,
            "type": message.type,
            "payload": message.payload,
        }
        more: dict[str, Any] = {
            "content_type": message.content_type,
            "headers": json.dumps(message.headers, ensure_ascii=False) if message.headers else None,
            "traceparent": message.traceparent,
        }
        if self._is_postgres:
            more |= {"asleep": sleep_lock(self.dialect.names, message.to), "channel": self._channel}
        if (yield self._joined("add", **values, **more)):
            return
        if (same := (yield self._joined("same", **values))) and same[0][0]:
            if again:
                yield self._joined("again", id=message.id)
            return
        raise MessageReused(f"The outbox has another message with the id {message.id}: other content needs its own id.")

    def claim(self, to: str, token: bytes, lease: timedelta, limit: int, **how: Any) -> Statements[Claimed]:
        """Take up to *limit* messages, and as many *bytes*, for as long as *lease*; see ``core/cursor.py`` for *after*,
        *due_from* and *floor*. With *aside*, those that can't be taken because of another of their key are set aside.
        """
        due = max(1, limit // 2)
        if not self._is_postgres:
            aside = 0
            if how["aside"]:
                aside = len((yield self._joined("set_aside", to=to, limit=limit)))
            yield self._joined("set_behind", to=to, due=due)
            rows = yield self._joined(
                "claim",
                to=to,
                token=token,
                lease=_milliseconds(lease),
                limit=limit,
                due=due,
                run=MAX_RUN,
                bytes=how["bytes"],
            )
            walked = len(rows)
            if walked < limit:
                walked = (yield self._joined("walked", to=to, limit=limit))[0][0]
            return Claimed(_messages(to, sorted(rows)), None, walked, aside)
        first, *rest = yield self._joined(
            "claim", to=to, token=token, lease=lease.total_seconds(), limit=limit, due=due, run=MAX_RUN, **how
        )
        messages = _messages(to, [(row[1], row[5], *row[6:]) for row in rest])
        walk = Walk(first[0], first[1], first[3], first[4], due=first[10], entries=int(first[6]))
        return Claimed(messages, walk, first[2], first[5])

    def renew(self, ids: Sequence[str], token: bytes, lease: timedelta) -> Statements[int]:
        """Prolong the lease of messages; return how many are still held."""
        if self._is_postgres:
            rows = yield self._joined("renew", ids=list(ids), token=token, lease=lease.total_seconds())
            return int(rows[0][0])
        return len((yield self._joined("renew", ids=json.dumps(ids), token=token, lease=_milliseconds(lease))))

    def settle(self, to: str, token: bytes, endings: Sequence[Ending], *, keep: bool) -> Statements[int]:
        """Write back what became of a batch; return of how many this relay still had the lease."""
        if self._is_postgres:
            rows = yield self._joined(
                "settle",
                to=to,
                token=token,
                keep=keep,
                ids=[each.id for each in endings],
                ends=[each.ending for each in endings],
                pauses=[None if each.pause is None else each.pause.total_seconds() for each in endings],
                errors=[each.error for each in endings],
                **self._author(),
            )
            return int(rows[0][0])
        asked = json.dumps([_as_asked(each) for each in endings])
        kept = yield self._joined("settle", token=token, keep=keep, asked=asked)
        gone: Rows = ()
        if not keep:
            gone = yield self._joined("gone", token=token, asked=asked)
        if self.dialect.has_trail and (dead := [row[0] for row in kept if row[1] == "dead"]):
            yield self._joined("note", ids=json.dumps(dead), actor=this_process())
        keys = {row[-1] for row in (*gone, *kept)} - {None}
        if keys:
            yield self._joined("free_keys", to=to, keys=json.dumps(sorted(keys)))
        return len(kept) + len(gone)

    def free(self, to: str, after_key: str, limit: int) -> Statements[tuple[str | None, int]]:
        """Free what is behind nothing any more, of some keys; return the last of them, and how many were freed."""
        if self._is_postgres:
            rows = yield self._joined("free", to=to, after_key=after_key, limit=limit)
            return rows[0][0], int(rows[0][1])
        found = yield self._joined("set_aside_keys", to=to, after_key=after_key, limit=limit)
        if not found:
            return None, 0
        keys = [key for (key,) in found]
        freed = yield self._joined("free_keys", to=to, keys=json.dumps(keys))
        return keys[-1], len(freed)

    def pending(self, names: Sequence[str], after: Sequence[int]) -> Statements[list[str]]:
        """Return those of the destinations that have something to be sent now, *after* a number of each."""
        if self._is_postgres:
            rows = yield self._joined("pending", names=list(names), after=list(after))
        else:
            rows = yield self._joined("pending", names=json.dumps(names))
        return [name for (name,) in rows]

    def browse(self, state: str, to: str | None, limit: int, walk: int = MAX_WALK) -> Statements[tuple[Stored, ...]]:
        """Read messages in one state; look at no more than *walk*."""
        name = f"browse_{state}" if to is None or state in {"dead", "sent"} else f"browse_{state}_of_one"
        rows = yield self._joined(name, to=to, limit=limit, walk=walk)
        return tuple(_stored(row) for row in rows)

    def is_quiet(self, to: str) -> Statements[bool]:
        """Whether nothing shows that a relay serves this destination: none has a message, and none was ever tried."""
        for state in ("dead", "waiting", "behind"):
            if (yield from self.browse(state, to, 1, MAX_SIGNS)):
                return False
        return not any(each.is_taken for each in (yield from self.browse("ready", to, 1, MAX_SIGNS)))

    def lag(self, cap: int, each: int) -> Statements[Lag]:
        """Count up to *cap* messages of each kind, and up to *each* at each of the first destinations."""
        rows = yield self._joined("lag", cap=cap, each=each, most=MAX_DESTINATIONS - 1)
        waiting = [
            Waiting(to, ready, waits, behind, None if lag is None else timedelta(seconds=float(lag)))
            for to, ready, waits, behind, lag, *_ in rows
            if ready or waits or behind
        ]
        return Lag(tuple(waiting), rows[0][5], min(rows[0][6], cap), float(rows[0][7]))

    def look(self, message_id: str) -> Statements[Whole | None]:
        """Read one message."""
        rows = yield self._joined("look", id=message_id)
        if not rows:
            return None
        *stored, content_type, headers, traceparent, payload = rows[0]
        return Whole(_stored(stored), content_type, _pairs(headers), traceparent, bytes(payload))

    def requeue(self, **which: Any) -> Statements[int]:
        """Give dead letters another series of tries, by ``id``, ``to`` or ``since``; return how many, MAX_CHANGED at
        most. With ``seen``, only if it is still as it was seen; ``before`` a time, only what had died then: one that is
        requeued may be dead again at once.
        """
        return self._change("requeue", "requeued", **which)

    def drop(self, **which: Any) -> Statements[int]:
        """Delete dead letters, by ``id``, ``to`` or ``since``; return how many. The rest is as with ``requeue``."""
        return self._change("drop", "dropped", **which)

    def reap(self, to: str, older_than: timedelta, limit: int, after: float = 0.0) -> Statements[tuple[int, float]]:
        """Delete messages to one destination that were sent, kept, and are old; return how many, and after which time
        the next ones are, to be given as *after*: on PostgreSQL, what was deleted is slow to walk past.
        """
        if self._is_postgres:
            seconds = older_than.total_seconds()
            rows = yield self._joined("reap", to=to, older_than=seconds, limit=limit, after=after)
            return int(rows[0][0]), float(rows[0][1])
        return len((yield self._joined("reap", to=to, older_than=_milliseconds(older_than), limit=limit))), 0.0

    def _change(
        self,
        name: str,
        event: str,
        *,
        id: str | None = None,  # noqa: A002 - as it is called everywhere
        to: str | None = None,
        since: timedelta | None = None,
        before: float | None = None,
        actor: str | None = None,
        seen: Stored | None = None,
    ) -> Statements[int]:
        which: dict[str, Any] = {"id": id, "to": to, "limit": MAX_CHANGED}
        which |= {"seen_at": seen and seen.ended_at, "seen_attempts": seen and seen.attempts}
        author = self._author(actor)
        if self._is_postgres:
            seconds = None if since is None else since.total_seconds()
            rows = yield self._joined(name, **which, since=seconds, before=before, **author)
            return int(rows[0][0])
        which["since"] = None if since is None else _milliseconds(since)
        which["before"] = None if before is None else round(before * 1000)
        yield self._joined("note_change", **which, event=event, **author)
        return len((yield self._joined(name, **which)))

    def _author(self, actor: str | None = None) -> dict[str, Any]:
        return {"audit": self.dialect.has_trail, "actor": actor or this_process()}

    def _joined(self, name: str, **parameters: Any) -> Joined[Rows]:
        return Joined(self._queries[name], parameters, _as_they_are)


async def carry_out(store: Store | AsyncStore, statements: Statements[T]) -> T:
    """Run *statements* in a transaction of its own. With a store for threads, nothing in here waits for a loop."""
    transaction: Any = store.transaction()
    await _done(transaction.perform(Open()))
    try:
        answer = await run(transaction.run, statements)
    except BaseException:
        await _done(transaction.perform(Undo()))
        raise
    await _done(transaction.perform(CommitAlone()))
    return answer


async def run(run_one: Any, statements: Statements[T]) -> T:
    """Run *statements* one after the other, each by *run_one*, in a transaction that is open."""
    rows: Any = None
    while True:
        try:
            joined = statements.send(rows)
        except StopIteration as end:
            answer: T = end.value
            return answer
        rows = await _done(run_one(joined))


async def _done(result: Any) -> Any:
    return await result if isinstance(result, Awaitable) else result


def channel_of(names: Names) -> str:
    """Return the channel of the hints of PostgreSQL: that of the keys."""
    from semel.stores.postgres.signals import channel_of as channel  # noqa: PLC0415 - a store's own, where it is that one

    return channel(names)


@lru_cache
def sleep_lock(names: Names, to: str) -> int:
    """Return the lock that a relay holds while it sleeps at a destination: it tells others to wake it."""
    text = f"semel outbox asleep {names.schema or ''}.{names.outbox} {to}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_LOCK_BYTES], "big", signed=True)


@lru_cache
def _queries(dialect: str, names: Names) -> dict[str, Query]:
    queries = load_queries(PACKAGES[dialect], names, "outbox.sql")
    browse = queries.pop("browse")
    lists = {f"browse_{state}": browse.with_parts(state) for state in STATES}
    return queries | lists | {f"browse_{state}_of_one": browse.with_parts(state, "one") for state in STATES[:3]}


def _messages(to: str, rows: Rows) -> tuple[Message, ...]:
    made = []
    for _, attempts, message_id, kind, payload, more, created_at in rows:
        content_type, key, headers, traceparent = json.loads(more)
        made.append(
            Message(
                id=message_id,
                type=kind,
                to=to,
                payload=bytes(payload),
                content_type=content_type,
                key=key,
                headers=_pairs(headers),
                traceparent=traceparent,
                created_at=float(created_at),
                attempts=attempts,
            )
        )
    return tuple(made)


def _pairs(headers: str | None) -> tuple[tuple[str, str], ...]:
    return tuple((name, text) for name, text in json.loads(headers)) if headers else ()


def _stored(row: Sequence[Any]) -> Stored:
    values: list[Any] = [*row[:-1], bool(row[-1])]
    return Stored(*values)


def _as_asked(ending: Ending) -> dict[str, Any]:
    pause = None if ending.pause is None else ending.pause.total_seconds()
    return {"id": ending.id, "ending": ending.ending, "pause": pause, "error": ending.error}


def _milliseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


def _as_they_are(rows: Rows) -> Rows:
    return rows
