"""What the pages show, read from the store. It changes nothing, and makes no HTML.

Each read is bounded, however large the tables are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from semel.console.examination import Found
from semel.console.filters import LIMIT, Asked
from semel.console.rates import MINUTES, Rates, rates
from semel.core.commands import (
    CommitAlone,
    Filter,
    Look,
    Open,
    Page,
    ReadCounts,
    ReadRequest,
    ReadTrail,
    Search,
    Survey,
    Surveyed,
    Undo,
)
from semel.core.delivery import Endpoint
from semel.core.inbox import ReceiptState
from semel.core.message import Request
from semel.core.outbox import message_id
from semel.core.record import Entry, Record
from semel.core.recovery import read_back
from semel.core.state import State
from semel.core.trail import story
from semel.core.value import value
from semel.errors import SemelError, StoreError
from semel.flows.upkeep import hold_of
from semel.stores import Store
from semel.stores.dialect import PACKAGES, POSTGRESQL, durable_of, keeps_messages, messages_of
from semel.stores.inbox import InboxStatements, Listed
from semel.stores.outbox import STATES, Lag, OutboxStatements, Statements, Stored, Whole, carry_out
from semel.stores.statement import DEFAULT_TABLE, Joined, Query, load_migrations
from semel.stores.transaction import at_once
from semel.stores.webhooks import EndpointStatements, unsent

T = TypeVar("T")

#: None is counted beyond this: milliseconds.
CAP = 1000
#: The same at one destination of messages, of which there may be many.
EACH = 100
#: How many of the newest records are looked at for how operations end.
NEWEST = 2000
#: How many records a list walks past at first; the overview no more than that for each of its lists.
WALK = 500
#: How many troubles, and how many accepted operations, the overview shows.
SHOWN = 8
#: Messages of one state that a list shows; and that are looked through for those of one operation.
MESSAGES = 50
LOOKED_THROUGH = 500
#: Of each type and destination, so many messages of one step are looked for.
NUMBERS = 10

#: How often it is looked whether the store's tables are too new.
SECONDS_BETWEEN_LOOKS = 60.0
#: Seconds that a statement about messages may take on PostgreSQL, with its waiting for locks.
MESSAGE_SECONDS = 3
#: Each walks along an index, and stops early. A planner that trusts old figures reads all of it, and sorts; one that
#: compiles the statement takes longer for that than for the rest.
_LIMIT: Joined[None] = Joined(
    Query(
        "SELECT set_config('statement_timeout', :limit, true), set_config('jit', 'off', true),"
        " set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true),"
        " set_config('enable_sort', 'off', true)"
    ),
    {"limit": f"{MESSAGE_SECONDS}s"},
    lambda _: None,
)

_SURROGATE = re.compile("[\ud800-\udfff]")


@value
class Trouble:
    """Something that waits for a person."""

    #: ``parked``, ``stuck``, ``dead letter``, ``inbox``, ``endpoint off``.
    kind: str
    what: str
    why: str
    at: datetime
    #: Which page has it: its kind, and its name there.
    page: str
    name: tuple[str, ...]


@value
class Overview:
    """What the first page shows."""

    counts: Surveyed
    troubles: tuple[Trouble, ...]
    #: Accepted operations: those that are under way, then those that wait.
    accepted: tuple[Record, ...]
    #: Each is None where the store keeps no messages; ``unread`` says what could not be read.
    lag: Lag | None
    parked_messages: int | None
    endpoints: tuple[Endpoint, ...] | None
    unread: tuple[str, ...] = ()
    #: How requests have ended in the last hour. None: the store can't tell.
    rates: Rates | None = None
    #: What ``semel doctor`` has found. None: it was not asked, or has not answered yet.
    findings: tuple[Found, ...] | None = None


@value
class Operation:
    """Everything about one operation; the record is None where only its audit trail is left."""

    scope: str
    key: str
    record: Record | None
    trail: tuple[Entry, ...]
    request: Request | None = None
    messages: tuple[Stored, ...] = ()


class Reader:
    """Reads from one store. It is called in threads."""

    def __init__(self, store: Store) -> None:
        """Nothing is read yet."""
        self.store = store
        #: What waited in the outbox when it was last counted, and why that could not be read.
        self._lag: Lag | None = None
        self._unread: list[str] = []
        self._newer: str | None = None
        self._newer_at = -SECONDS_BETWEEN_LOOKS
        #: Where to ask what ``semel doctor`` has found. None: it has no URL to ask about.
        self.findings: Callable[[], tuple[Found, ...] | None] | None = None

    @property
    def has_messages(self) -> bool:
        """Whether the store has an outbox, an inbox and endpoints."""
        return keeps_messages(self.store)

    def can_hold(self, text: str) -> bool:
        """Whether the store can have this *text* at all. If not, to ask for it would be an error of the database."""
        dialect = durable_of(self.store).dialect
        if dialect is None:
            return True
        return _SURROGATE.search(text) is None and not ("\0" in text and dialect.name == POSTGRESQL)

    def newer(self) -> str | None:
        """Say in one line that a newer version of Semel has changed the tables; None: it has not, or can't tell."""
        if time.monotonic() - self._newer_at >= SECONDS_BETWEEN_LOOKS:
            self._newer, self._newer_at = self._find_newer(), time.monotonic()
        return self._newer

    def _find_newer(self) -> str | None:
        dialect = durable_of(self.store).dialect
        if dialect is None:
            return None
        names = dialect.names
        book = f"SELECT name FROM {names.put_into(DEFAULT_TABLE)}_migrations"  # noqa: S608 - see Names
        try:
            there = [name for (name,) in self.run(Joined(Query(book), {}, list))]
        except SemelError:
            return None  # It has none, since Django keeps its own; or it is not there at all.
        known = {name for name, _ in load_migrations(PACKAGES[dialect.name], names)}
        strange = sorted(name for name in there if name not in known)
        if not strange:
            return None
        return (
            f"A newer version of Semel has changed this store's tables ({', '.join(strange)}): what this one shows may "
            "be wrong. Update Semel here."
        )

    def count(self, since: datetime | None) -> tuple[Surveyed, int | None]:
        """Count records, and messages that are not sent yet."""
        counts = self.store.perform(Survey(CAP, NEWEST, since))
        unread: list[str] = []
        lag = self._optional("The outbox", unread, self.lag)
        # Only now: while this thread counts, others show what was counted before.
        self._lag, self._unread = lag, unread
        return counts, None if lag is None else lag.unsent

    def overview(self, counts: Surveyed) -> Overview:
        """Read what the first page shows beside *counts*."""
        lag, unread = self._lag, list(self._unread)
        # In one transaction; where a part of it fails, each by itself.
        inbox, endpoints, dead = self._optional("", [], self._trouble) or (
            self._optional("The inbox", unread, lambda: self.inbox(ReceiptState.PARKED)),
            self._optional("The webhooks' endpoints", unread, self.endpoints),
            self._optional("The dead letters", unread, lambda: self.outbox(("dead",), None, SHOWN)[0]),
        )
        parked = self._search(Filter(state=State.UNKNOWN), SHOWN) if counts.gauges.parked != 0 else ()
        stuck = self._search(Filter(is_stuck=True), SHOWN) if counts.lapsed else ()
        troubles = [
            *map(_parked, parked),
            *(_stuck(each) for each in stuck if not each.is_free),
            *map(_dead, dead or ()),
            *map(_unhandled, inbox or ()),
            *(_off(each) for each in endpoints or () if not each.is_on),
        ]
        troubles.sort(key=lambda each: each.at, reverse=True)
        if (newer := self.newer()) is not None:
            unread.append(newer)
        return Overview(
            counts,
            tuple(troubles[:SHOWN]),
            self._accepted(counts),
            lag,
            None if inbox is None else len(inbox),
            endpoints,
            tuple(unread),
            self._rates(),
            None if self.findings is None else self.findings(),
        )

    def operations(self, asked: Asked) -> Page:
        """Read one page of a list. A key that fits no record may be the digest of one.

        Most pages are full after a short walk; what is rare takes the long one, too.
        """
        ways = [asked.wanted]
        if asked.may_be_digest:
            ways.append(replace(asked.wanted, key=None, digest=asked.typed["key"]))
        page = Page(())
        for scan in sorted({min(WALK, asked.scan), asked.scan}):
            for wanted in ways:
                page = self.store.perform(Search(wanted, LIMIT, scan, asked.after))
                if page.records and (scan == asked.scan or not page.is_cut):
                    return page
            if not page.is_cut:
                break
        return page

    def operation(self, scope: str, key: str) -> Operation:
        """Read one operation."""
        record = self.store.perform(Look(scope, key))
        trail = self.store.perform(ReadTrail(scope, key))
        if record is None:
            return Operation(scope, key, None, trail)
        request = self.store.perform(ReadRequest(hold_of(record)))
        messages = self._optional("", [], lambda: self._published(record)) or ()
        return Operation(scope, key, record, story(record, trail), request, messages)

    def outbox(self, states: Sequence[str], to: str | None, limit: int = MESSAGES) -> list[tuple[Stored, ...]]:
        """Read the messages in each of some states."""
        return self.carry_out(self._browse(states, to, limit))

    def waiting(self, states: Sequence[str], to: str | None) -> tuple[Lag, list[tuple[Stored, ...]]]:
        """Read what waits at each destination, and the messages in each of some states."""

        def statements() -> Statements[tuple[Lag, list[tuple[Stored, ...]]]]:
            lag = yield from self._outbox.lag(CAP, EACH)
            return lag, (yield from self._browse(states, to, MESSAGES))

        return self.carry_out(statements())

    def message(self, name: str) -> tuple[Whole, tuple[Entry, ...]] | None:
        """Read one message, with its audit trail; None: there is none."""
        whole = self.carry_out(self._outbox.look(name))
        if whole is None:
            return None
        return whole, self.store.perform(ReadTrail(f"outbox:{whole.stored.to}", whole.stored.id))

    def lag(self) -> Lag:
        """Read what waits at each destination."""
        return self.carry_out(self._outbox.lag(CAP, EACH))

    def inbox(self, state: ReceiptState | None = None) -> tuple[Listed, ...]:
        """Read the messages that consumers could not handle."""
        return self.run(self._inbox.list(None, state, MESSAGES))

    def receipt(self, consumer: str, message_id: str) -> Listed | None:
        """Read one message of the inbox."""
        found = self.run(self._inbox.find(consumer, message_id))
        return found[0] if found else None

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Read the endpoints of webhooks."""
        return self.run(EndpointStatements(self.store).list())

    def hints(self, messages: Sequence[Stored], now: float) -> dict[str, str]:
        """Return what to do about destinations of *messages* that no relay seems to serve."""
        with suppress(SemelError):  # The table of endpoints may be for other roles.
            return self.carry_out(unsent(self.store, messages, now))
        return {}

    def carry_out(self, statements: Statements[T]) -> T:
        """Run statements about the outbox in a transaction of their own."""
        return at_once(carry_out(durable_of(self.store), self._limited(statements)))

    def run(self, joined: Joined[T]) -> T:
        """Run one statement in a transaction of its own."""
        transaction = durable_of(self.store).transaction()
        transaction.perform(Open())
        try:
            for limit in self._limits:
                transaction.run(limit)
            answer: T = transaction.run(joined)
            transaction.perform(CommitAlone())
        finally:
            transaction.perform(Undo())
        return answer

    def _limited(self, statements: Statements[T]) -> Statements[T]:
        yield from self._limits
        return (yield from statements)

    @property
    def _limits(self) -> tuple[Joined[None], ...]:
        """What goes before a statement about messages, which runs on a connection with the application's settings."""
        return (_LIMIT,) if messages_of(self.store).name == POSTGRESQL else ()

    def _browse(self, states: Sequence[str], to: str | None, limit: int) -> Statements[list[tuple[Stored, ...]]]:
        lists = []
        for state in states:
            found = yield from self._outbox.browse(state, to, limit, CAP)
            lists.append(found)
        return lists

    def _trouble(self) -> tuple[tuple[Listed, ...], tuple[Endpoint, ...], tuple[Stored, ...]]:
        """Read the parked messages, the endpoints and the dead letters in one transaction."""

        def statements() -> Statements[tuple[Any, Any, Any]]:
            inbox = yield self._inbox.list(None, ReceiptState.PARKED, MESSAGES)
            endpoints = yield EndpointStatements(self.store).list()
            (dead,) = yield from self._browse(("dead",), None, SHOWN)
            return inbox, endpoints, dead

        return self.carry_out(statements())

    @property
    def _inbox(self) -> InboxStatements:
        return InboxStatements(messages_of(self.store, "inbox"))

    @property
    def _outbox(self) -> OutboxStatements:
        return OutboxStatements(messages_of(self.store, "outbox"))

    def _optional(self, what: str, unread: list[str], read: Callable[[], T]) -> T | None:
        """Read what a store may not have, or a role may not see: the rest of the page does not depend on it."""
        if not self.has_messages:
            return None
        try:
            return read()
        except SemelError as error:
            unread.append(f"{what} can't be read: {error}")
            return None

    def _search(self, wanted: Filter, limit: int) -> tuple[Record, ...]:
        return self.store.perform(Search(wanted, limit, WALK)).records

    def _rates(self) -> Rates | None:
        """Read how requests have ended. A store of an older schema has no table for it, and a role may not see it."""
        try:
            return rates(self.store.perform(ReadCounts(MINUTES)))
        except StoreError:
            return None

    def _accepted(self, counts: Surveyed) -> tuple[Record, ...]:
        running: Iterable[Record] = ()
        if counts.gauges.in_flight != 0 or counts.lapsed:
            running = self._search(Filter(state=State.PROCESSING), 10 * SHOWN)
        pending = self._search(Filter(state=State.PENDING), SHOWN) if counts.gauges.accepted != 0 else ()
        return (*(each for each in running if each.is_accepted), *pending)[:SHOWN]

    def _published(self, record: Record) -> tuple[Stored, ...]:
        """Find the messages of an operation that are in the outbox: their ids follow from its key."""
        messages = [each for found in self.outbox(STATES, None, LOOKED_THROUGH) for each in found]
        kinds = {(each.type, each.to) for each in messages}
        steps = ("", *(step.name for step in read_back(record.steps).steps if step.kind == "phase"))
        ids = {
            message_id(record.scope, record.key, step=step, type_=kind, to=to, number=number)
            for step in steps
            for kind, to in kinds
            for number in range(NUMBERS)
        }
        return tuple(each for each in messages if each.id in ids)


def _parked(record: Record) -> Trouble:
    step = read_back(record.steps).unknown
    why = (
        f"effect {step.name}: outcome unknown"
        if step
        else "its worker or its upstream was lost, and it may not run again"
    )
    return Trouble("to be resolved", _named(record), why, record.created_at, "operation", (record.scope, record.key))


def _stuck(record: Record) -> Trouble:
    at = record.lease_expires_at or record.created_at
    return Trouble(
        "stuck",
        _named(record),
        "its worker is gone, and no other has come",
        at,
        "operation",
        (record.scope, record.key),
    )


def _dead(message: Stored) -> Trouble:
    at = _time(message.ended_at or message.created_at)
    return Trouble("dead letter", f"{message.type} to {message.to}", message.error or "", at, "message", (message.id,))


def _unhandled(listed: Listed) -> Trouble:
    what = f"{listed.message_id} at {listed.consumer}"
    return Trouble("inbox", what, listed.receipt.error or "", _time(listed.changed_at), "inbox", ())


def _off(endpoint: Endpoint) -> Trouble:
    at = _time(endpoint.failing_since or endpoint.created_at)
    return Trouble("endpoint off", endpoint.name, endpoint.reason or "", at, "webhooks", ())


def _named(record: Record) -> str:
    return record.request_line or record.key


def _time(seconds: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
