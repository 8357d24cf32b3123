"""The outbox: messages that commit with the business change that they tell of. Sending them is the relay's affair.

    outbox = Outbox("postgresql://…")
    with connection.transaction():
        connection.execute("INSERT INTO orders …")
        outbox.add(connection, "order.paid", {"order": 17}, key="order-17")

Inside a guarded handler, ``operation.publish("order.paid", …)`` does the same in the transaction of atomic mode, or of
the phase that it is called in: the answer, the business row and the message commit together.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from semel.core.outbox import (
    MAX_HEADERS,
    MAX_PAYLOAD,
    Message,
    check_name,
    message_id,
    time_ordered_id,
)
from semel.errors import ConfigurationError, MessageInvalid, StepUnfinished, StoreNotReady
from semel.stores import either_store
from semel.stores.dialect import Dialect, messages_of
from semel.stores.joining import joining, lacks_table
from semel.stores.outbox import OutboxStatements, run
from semel.stores.transaction import at_once

#: Where a message goes that does not say.
DEFAULT_DESTINATION = "events"

JSON = "application/json"
BYTES = "application/octet-stream"

Headers = Mapping[str, str] | Iterable[tuple[str, str]] | None

_AS_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,255}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Outbox:
    """The outbox of one database, for sync and async connections alike."""

    def __init__(self, store: Any, *, to: str = DEFAULT_DESTINATION, max_payload: int = MAX_PAYLOAD) -> None:
        """Use the outbox of *store*: a URL, a store, an engine or a pool. Messages go *to* this destination, unless
        they name another. Nothing is opened: messages are written through the connections that ``add`` is given.
        """
        self.dialect = messages_of(either_store(store), "outbox")
        self._to = check_name("to", to)
        self._max_payload = max_payload
        self._statements = OutboxStatements(self.dialect)

    def add(
        self,
        connection: Any,
        type: str,  # noqa: A002 - as brokers and CloudEvents call it
        payload: Any,
        /,
        *,
        key: str | None = None,
        to: str | None = None,
        headers: Headers = None,
        content_type: str | None = None,
        id: str | UUID | None = None,  # noqa: A002 - the same
        source: str | None = None,
        traceparent: str | None = None,
    ) -> Any:
        """Write one message in the transaction that is open on *connection*, and return its id. Nothing is committed.

        *connection* is one of psycopg, asyncpg, sqlite3, SQLAlchemy (or a session) or Django; with an async one, await
        the call. *payload* is what JSON can hold, or bytes. Messages with the same *key* are sent in their order.
        *source* adds the headers of CloudEvents. Without an *id*, it is a new UUID of version 7.
        """
        message = made(
            _new_id() if id is None else _checked_id(id),
            type,
            payload,
            key=key,
            to=self._to if to is None else to,
            headers=headers,
            content_type=content_type,
            source=source,
            traceparent=traceparent,
            max_payload=self._max_payload,
        )
        on = joining(connection)
        if on.dialect != self.dialect.name:
            raise ConfigurationError(
                f"This outbox is in {self.dialect.name}, and the connection leads to {on.dialect}: a message has to "
                "commit with what it tells of, so both have to be one database."
            )
        adding = self._added(on, message)
        return adding if on.waits else at_once(adding)

    async def _added(self, on: Any, message: Message) -> str:
        try:
            await run(on.run, self._statements.add(message))
        except Exception as error:
            if lacks_table(error):
                raise StoreNotReady(
                    f"{self.dialect.where} has no table {self.dialect.names.outbox!r} of Semel's, or an old one. "
                    "Run: semel migrate (in Django: manage.py migrate)"
                ) from error
            raise
        return message.id


class Publishing:
    """The transaction that messages of an operation are published in: that of atomic mode, or of one phase."""

    def __init__(self, transaction: Any, step: str = "", promised: list[str] | None = None) -> None:
        """Write in *transaction*; *step* is the phase, or empty. While a message is to be awaited, it is in
        *promised*.
        """
        self._transaction = transaction
        self._step = step
        self._promised: list[str] = [] if promised is None else promised
        self._counts: dict[tuple[str, str], int] = {}

    def publish(self, scope: str, operation_key: str, type_: str, payload: Any, **how: Any) -> Any:
        """Write one message, with an id that is the same whenever the handler runs again; return the id. On an event
        loop, this is to be awaited.
        """
        dialect: Dialect | None = self._transaction.dialect
        if dialect is None:
            raise ConfigurationError(
                f"publish {type_!r}: this store shares no transaction, so it has no outbox. Use PostgreSQL or SQLite."
            )
        given = how.pop("to", None)
        to = _checked_name("to", DEFAULT_DESTINATION if given is None else given)
        number = self._counts.get((type_, to), 0)
        identity = message_id(scope, operation_key, step=self._step, type_=str(type_), to=to, number=number)
        message = made(identity, type_, payload, to=to, **how)
        self._counts[type_, to] = number + 1
        statements = OutboxStatements(dialect)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if _is_awaited(self._transaction.connection):
                raise ConfigurationError(
                    f"publish {type_!r}: this transaction is awaited, and this code runs in a thread. Publish in the "
                    "`async def` function, on the event loop; or use a store for threads."
                ) from None
            return at_once(self._added(statements, message))
        adding = self._added(statements, message)
        return self._awaited(adding, type_) if self._transaction.waits else at_once(adding)

    def check(self) -> None:
        """Raise where a message was not awaited: what it tells of must not be committed without it."""
        if self._promised:
            raise StepUnfinished(self._promised[0])

    def _awaited(self, adding: Coroutine[Any, Any, str], type_: str) -> Coroutine[Any, Any, str]:
        promise = f"publish {type_}"
        self._promised.append(promise)
        return self._kept(adding, promise)

    async def _kept(self, adding: Coroutine[Any, Any, str], promise: str) -> str:
        try:
            return await adding
        finally:
            self._promised.remove(promise)

    async def _added(self, statements: OutboxStatements, message: Message) -> str:
        await run(self._transaction.run, statements.add(message, again=True))
        return message.id


def _is_awaited(connection: Any) -> bool:
    # Unwrapped: the connections of asyncpg's pools have wrappers, which do not say that they are awaited.
    return inspect.iscoroutinefunction(inspect.unwrap(getattr(connection, "execute", _is_awaited)))


#: The phase that this code is part of, if it is part of one.
publishing: ContextVar[Publishing | None] = ContextVar("semel.publishing", default=None)


def made(
    identity: str,
    type_: str,
    payload: Any,
    *,
    to: str,
    key: str | None = None,
    headers: Headers = None,
    content_type: str | None = None,
    source: str | None = None,
    traceparent: str | None = None,
    max_payload: int = MAX_PAYLOAD,
) -> Message:
    """Check what was given, and make a message of it."""
    type_ = _checked_name("The type of a message", type_)
    data, kind = _encoded(type_, payload, content_type)
    if len(data) > max_payload:
        raise MessageInvalid(
            f"{type_!r}: its payload has {len(data):,} bytes, and {max_payload:,} are the limit. Store it elsewhere "
            "and send where it is, or raise max_payload of Outbox if the broker takes it."
        )
    if key is not None:
        _checked_name("The key of a message", key)
    pairs = _checked_headers(type_, headers)
    if source is not None:
        _checked_name("source", source)
        events = (("ce-specversion", "1.0"), ("ce-id", identity), ("ce-source", source), ("ce-type", type_))
        pairs = (*pairs, *events)
    trace: Any = traceparent or _current_trace()
    if trace is not None and (not isinstance(trace, str) or not _TRACEPARENT.fullmatch(trace)):
        raise MessageInvalid(f"{type_!r}: {str(trace)[:80]!a} is not a traceparent, such as 00-<32 hex>-<16 hex>-01.")
    return Message(
        id=identity,
        type=type_,
        to=_checked_name("to", to),
        payload=data,
        content_type=kind,
        key=key,
        headers=pairs,
        traceparent=trace,
    )


def _checked_name(what: str, name: object) -> str:
    """Return *name*, if it can be that; a message's names may be made of what a request says."""
    try:
        return check_name(what, name)
    except ConfigurationError as error:
        raise MessageInvalid(str(error)) from None


def _encoded(type_: str, payload: Any, content_type: str | None) -> tuple[bytes, str]:
    kind = None if content_type is None else _checked_content_type(type_, content_type)
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload), kind or BYTES
    try:
        if isinstance(payload, str) and kind is not None:
            return payload.encode(), kind
        return _AS_JSON.encode(payload).encode(), kind or JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageInvalid(
            f"{type_!r}: its payload can't be written as JSON ({error}). Give what JSON can hold, or bytes with "
            "content_type=."
        ) from error


def _checked_content_type(type_: str, content_type: str) -> str:
    given: object = content_type
    if not isinstance(given, str) or not given.isprintable() or not given.isascii():
        raise MessageInvalid(f"{type_!r}: {content_type!a} is not a content type, such as application/json.")
    return content_type


def _checked_headers(type_: str, headers: Headers) -> tuple[tuple[str, str], ...]:
    if headers is None:
        return ()
    given: Any = headers.items() if isinstance(headers, Mapping) else headers
    try:
        pairs = tuple((name, text) for name, text in given)
    except (TypeError, ValueError):
        raise MessageInvalid(f"{type_!r}: headers are a mapping, or pairs of names and values.") from None
    for name, text in pairs:
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise MessageInvalid(f"{type_!r}: {name!a} is not the name of a header: letters, digits and dashes.")
        if not isinstance(text, str) or not text.isprintable():
            raise MessageInvalid(f"{type_!r}: the value of header {name!r} is not one line of text: {text!a}.")
    if sum(len(name) + len(text) for name, text in pairs) > MAX_HEADERS:
        raise MessageInvalid(f"{type_!r}: its headers have more than {MAX_HEADERS:,} characters.")
    return pairs


def _checked_id(given: str | UUID) -> str:
    try:
        return str(UUID(str(given)))
    except ValueError:
        raise MessageInvalid(f"id {str(given)[:80]!a} is not a UUID, which every broker takes.") from None


def _new_id() -> str:
    # Only for the order of ids in an index: nothing is decided by this clock.
    return time_ordered_id(time.time_ns() // 1_000_000, os.urandom(10))


def _current_trace() -> str | None:
    """Return the trace that this code is part of, where the application uses OpenTelemetry."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
