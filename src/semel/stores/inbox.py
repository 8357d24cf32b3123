"""The statements of the inbox, for the database that a store is in: they join the transaction of a message's handler.
It runs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from enum import StrEnum
from typing import Any

from semel.core.canonical import pack
from semel.core.inbox import Receipt, ReceiptState, Seen
from semel.core.value import value
from semel.errors import StoreNotPermitted, StoreReadOnly
from semel.stores.dialect import PACKAGES, POSTGRESQL, Dialect
from semel.stores.statement import DEFAULT_INBOX, Joined, Query, load_queries

Rows = Sequence[Sequence[Any]]

_LOCK_BYTES = 8
#: How many consumers a list is made of.
MAX_CONSUMERS = 50

#: A conflict with another transaction: serialization failure, deadlock, lock not available. The handler did no wrong.
_CONFLICTS = frozenset({"40001", "40P01", "55P03"})

#: As ``postgres/joined.py`` has it: in a transaction that was begun DEFERRABLE, as a mark, the receipt's statement
#: fails where the handler has ended that one and begun another.
_ATTEMPTS = "ELSE '0' END"
_ATTEMPTS_IF_MARKED = f"WHEN current_setting('transaction_deferrable') <> 'on' THEN 'semel: ended' {_ATTEMPTS}"


@value
class Listed:
    """One message, for an operator. Times are seconds since 1970, by the store's clock."""

    consumer: str
    message_id: str
    receipt: Receipt
    received_at: float
    changed_at: float
    #: When it was read.
    now: float


class Change(StrEnum):
    """How an operator's change of a message has ended."""

    DONE = "done"
    #: A consumer has the message in its hands.
    BUSY = "busy"
    #: It is not as it was seen any more.
    CHANGED = "changed"


class InboxStatements:
    """Builds them for one store."""

    def __init__(self, messages: Dialect) -> None:
        """Speak to the tables that *messages* names."""
        self._messages = messages
        self._table = messages.names.put_into(DEFAULT_INBOX).encode()
        self._queries = load_queries(PACKAGES[messages.name], messages.names, "inbox.sql")
        done = self._queries["note_done"].text
        self._done_if_marked = Query(done.replace(_ATTEMPTS, _ATTEMPTS_IF_MARKED))

    def look(self, consumer: str, message_id: str) -> Joined[Seen]:
        """Take the message's lock, and read its receipt."""
        lock = self._lock(consumer, message_id)
        return self._joined("look", self._seen, consumer=consumer, message_id=message_id, lock=lock)

    def note_done(self, consumer: str, message_id: str, digest: bytes | None) -> Joined[Receipt | None]:
        """Write the receipt of a message that was handled."""
        values = {"consumer": consumer, "message_id": message_id, "digest": digest}
        marked = self._done_if_marked if self._messages.name == POSTGRESQL else None
        return Joined(self._queries["note_done"], values, _written, marked=marked)

    def note_failure(
        self, consumer: str, message_id: str, digest: bytes | None, error: str, max_attempts: int
    ) -> Joined[Receipt | None]:
        """Count a failed try."""
        return self._joined(
            "note_failure",
            _written,
            consumer=consumer,
            message_id=message_id,
            digest=digest,
            error=error,
            max_attempts=max_attempts,
        )

    def list(self, consumer: str | None, state: ReceiptState | None, limit: int) -> Joined[tuple[Listed, ...]]:
        """Read what waits for another try or for a person."""
        wanted = None if state is None else str(state)
        return self._joined("list", _listed, consumer=consumer, state=wanted, limit=limit, most=MAX_CONSUMERS)

    def find(self, consumer: str, message_id: str) -> Joined[tuple[Listed, ...]]:
        """Read one receipt."""
        return self._joined("find", _listed, consumer=consumer, message_id=message_id)

    def consumers(self) -> Joined[tuple[str, ...]]:
        """Read which consumers there are."""
        return self._joined("consumers", lambda rows: tuple(name for (name,) in rows))

    def requeue(self, consumer: str, message_id: str, seen: Listed | None = None) -> Joined[bool]:
        """Let the next delivery be the first try again; with *seen*, only if it is still so."""
        return self._joined("requeue", bool, consumer=consumer, message_id=message_id, **_guard(seen))

    def drop(self, consumer: str, message_id: str, seen: Listed | None = None) -> Joined[bool]:
        """Give a message up; with *seen*, only if it is still so."""
        return self._joined("drop", bool, consumer=consumer, message_id=message_id, **_guard(seen))

    def change(self, event: str, seen: Listed, actor: str) -> Generator[Joined[Any], Any, Change]:
        """Do what an operator has decided: the message is ``requeued`` or ``dropped``, if it is still as it was *seen*,
        with a line of the audit trail.
        """
        place = seen.consumer, seen.message_id
        if not (yield self.look(*place)).has_lock:
            return Change.BUSY
        if not (yield (self.drop if event == "dropped" else self.requeue)(*place, seen)):
            return Change.CHANGED
        if self._messages.has_trail:
            yield self._note(seen, event, actor)
        return Change.DONE

    def _note(self, listed: Listed, event: str, actor: str) -> Joined[None]:
        return self._joined(
            "note",
            _nothing,
            scope=f"inbox:{listed.consumer}",
            message_id=listed.message_id,
            attempts=listed.receipt.attempts,
            event=event,
            actor=actor.encode("utf-8", "replace").decode(),
            detail=listed.receipt.error,
        )

    def _joined(self, name: str, read: Any, **values: object) -> Joined[Any]:
        query = self._queries[name]
        return Joined(query, {each: values[each] for each in query.parameters}, read)

    def _lock(self, consumer: str, message_id: str) -> str:
        """Return the number of the message's advisory lock. The table counts: two of them in one database share the
        numbers. With keys' locks there is no clash: they are packed of other tables' names.
        """
        packed = pack((self._table, consumer.encode(), message_id.encode()))
        return str(int.from_bytes(hashlib.sha256(packed).digest()[:_LOCK_BYTES], "big", signed=True))

    def _seen(self, rows: Rows) -> Seen:
        has_lock, is_read_only, powerless_role, *receipt = rows[0]
        seen = Seen(None if receipt[0] is None else _receipt(receipt), has_lock=bool(has_lock))
        if seen.receipt is not None and seen.receipt.state is not ReceiptState.FAILING:
            return seen  # Nothing will be written.
        if is_read_only:
            raise StoreReadOnly(
                f"{self._messages.where} takes no writes: it is a replica, or was made read-only. "
                "Give the address of the primary, or let it be written."
            )
        if powerless_role is not None:
            table = self._messages.names.put_into(DEFAULT_INBOX)
            raise StoreNotPermitted(
                f"{self._messages.where}: {powerless_role} needs SELECT, INSERT and UPDATE on {table}. See GRANT."
            )
        return seen


def _guard(seen: Listed | None) -> dict[str, object]:
    """Return what a receipt must still be like."""
    if seen is None:
        return {"seen_at": None, "seen_state": None, "seen_attempts": None}
    return {
        "seen_at": seen.changed_at,
        "seen_state": str(seen.receipt.state),
        "seen_attempts": seen.receipt.attempts,
    }


def is_conflict(error: BaseException) -> bool:
    """Whether an *error* of the handler's says that another transaction was in the way, whichever driver raised it."""
    around = (error, getattr(error, "orig", None), error.__cause__)
    return any(getattr(each, "sqlstate", None) in _CONFLICTS for each in around)


def _receipt(row: Sequence[Any]) -> Receipt:
    state, attempts, digest, error, mark = row
    return Receipt(ReceiptState(state), attempts, None if digest is None else bytes(digest), error, int(mark))


def _written(rows: Rows) -> Receipt | None:
    return _receipt(rows[0]) if rows else None


def _listed(rows: Rows) -> tuple[Listed, ...]:
    return tuple(
        Listed(consumer, message_id, _receipt((*receipt, 0)), *map(float, times))
        for consumer, message_id, *receipt, times in ((*row[:6], row[6:]) for row in rows)
    )


def _nothing(_rows: Rows) -> None:
    """Read no row."""
