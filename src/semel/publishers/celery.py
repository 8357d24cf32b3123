"""Publishes to Celery workers (``celery+amqp://``, ``celery+redis://``): each message is a task. It runs none, and
needs none of their code.

The message's type is the task's name, its id the ``task_id``. A payload that is a JSON object holds the task's keyword
arguments, an array its arguments, anything else is the one argument. A message is delivered when the broker has it:
RabbitMQ confirms it, Redis has replied to ``LPUSH`` (what that is worth on disk is up to its settings). What happens
from there is up to Celery: by default a worker acknowledges a task before it runs it, and a crash then loses it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any
from urllib.parse import quote

from semel.core.outbox import BROKER_SCHEDULE, Delivered, Failed, Message, Rejected, Schedule, Unreachable, Verdict
from semel.errors import ConfigurationError
from semel.publishers.address import TIMEOUT_SECONDS, Table, address, dropped, late

try:
    from amqp.exceptions import (
        AccessRefused,
        ChannelError,
        MessageNacked,
        NotAllowed,
        NotFound,
        PreconditionFailed,
    )
    from amqp.exceptions import ConnectionError as AMQPConnectionError
    from celery import Celery as App
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("Celery tasks need celery. Run: pip install 'semel[celery]'") from error

_SETTINGS = frozenset({"queue", "timeout"})

#: Celery's own headers. Those of the application must not overwrite them: a worker reads the task's name there.
_OWN_HEADERS = frozenset(
    {
        *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit", "root_id"),
        *("parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting"),
        *("stamped_headers", "stamps"),
    }
)

_NOT_SENT = "An earlier message of the same batch lost the connection: this one was not sent."
_NO_TIME = "The broker is slow, and this message's turn has not come yet."

_MEANINGS: Table = (
    (PreconditionFailed, Rejected, "The broker will not take this task"),
    (AccessRefused, Unreachable, "The broker refuses the user: give it the right to write"),
    (ChannelError, Unreachable, "Queue {queue!r} is gone: it is declared again at the next try"),
)
#: Redis takes no writes, and none of the messages is to blame. By name, since redis-py is another extra.
_AWAY = frozenset({"ReadOnlyError", "MasterDownError"})
#: Python's own, and redis-py's.
_LATE = "TimeoutError"
#: After what its broker's own client calls a refusal.
_OTHERS: Table = (
    (
        (AMQPConnectionError, ConnectionResetError, BrokenPipeError),
        dropped,
        "The connection to the broker at {place} was lost",
    ),
    (Exception, Unreachable, "The connection to the broker at {place} was lost"),
)


class Celery:
    """Sends tasks."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        queue: str = "celery",
        timeout: float = TIMEOUT_SECONDS,
        schedule: Schedule = BROKER_SCHEDULE,
    ) -> None:
        """Publish what is sent to *name* through the broker at *url*; what the URL says has precedence."""
        self.schedule = schedule
        self._address = address(name, url, _SETTINGS)
        self._queue = self._address.text("queue", queue)
        self._timeout, self.limit = self._address.seconds(timeout)
        self._is_amqp = self._address.scheme == "celery+amqp"
        if not self._is_amqp:
            _check_packages(name)
        self._app: Any = None
        self._connection: Any = None
        self._producer: Any = None
        #: Celery waits where it stands, and its connections belong to one thread.
        self._thread: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        """Connect, and declare the queue as Celery does, unless it is there."""
        await self.close()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="semel-celery")
        try:
            await self._in_thread(self._connect)
        except (AccessRefused, NotAllowed) as error:
            await self.close()
            where = self._address
            raise PermissionError(
                where.reason(f"The broker at {where.place} refuses user {where.user!r}: check password, vhost", error)
            ) from None
        except Exception as error:  # noqa: BLE001 - three libraries, and each raises its own.
            await self.close()
            where = self._address
            raise ConnectionError(where.reason(f"The broker at {where.place} can't be reached", error)) from None

    def _connect(self) -> None:
        app = App("semel", broker=self._broker(), set_as_current=False, fixups=[])
        app.conf.broker_connection_timeout = self._timeout
        # It has its own ideas about a broker that is away, and they have no end.
        once = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
        limits = {"socket_timeout": self._timeout, "socket_connect_timeout": self._timeout}
        waits = {"confirm_publish": True, "read_timeout": self._timeout, "write_timeout": self._timeout}
        app.conf.broker_transport_options = {**once, **(waits if self._is_amqp else limits)}
        connection = app.connection_for_write()
        connection.ensure_connection(**once, timeout=self._timeout, reraise_as_library_errors=False)
        self._app, self._connection = app, connection
        if self._is_amqp:
            self._declare(app, connection)
        else:
            connection.default_channel.client.ping()
        self._producer = app.amqp.Producer(connection, auto_declare=False)

    def _declare(self, app: Any, connection: Any) -> None:
        """A queue that is there stays as it is: Celery's own declaration fails where the worker's settings differ."""
        try:
            with connection.channel() as channel:
                channel.queue_declare(self._queue, passive=True)
        except NotFound:
            with connection.channel() as channel:
                app.amqp.queues[self._queue](channel).declare()

    def _broker(self) -> str:
        where = self._address
        user = "" if where.user is None and where.password is None else f"{quote(where.user or '', safe='')}"
        password = "" if where.password is None else f":{quote(where.password, safe='')}"
        login = f"{user}{password}@" if user or password else ""
        path = quote(where.path or ("/" if self._is_amqp else "0"), safe="")
        return f"{where.scheme.removeprefix('celery+')}://{login}{where.place}/{path}"

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the tasks one after the other, in a thread."""
        if self._thread is None:
            return [Unreachable(f"The connection to the broker at {self._address.place} is lost.")] * len(messages)
        is_cancelled = threading.Event()
        try:
            verdicts: list[Verdict] = await self._in_thread(self._send_all, messages, is_cancelled)
        except asyncio.CancelledError:
            is_cancelled.set()  # What is still to come is not sent; what was sent is in order.
            raise
        return verdicts

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _send_all(self, messages: Sequence[Message], is_cancelled: threading.Event) -> list[Verdict]:
        deadline = time.monotonic() + self._timeout
        verdicts: list[Verdict] = []
        for message in messages:
            verdict = self._sent(message)
            verdicts.append(verdict)
            if isinstance(verdict, Unreachable):
                rest = Unreachable(_NOT_SENT)
            elif is_cancelled.is_set() or time.monotonic() > deadline:
                rest = Unreachable(_NO_TIME)
            else:
                continue
            verdicts += [rest] * (len(messages) - len(verdicts))
            break
        return verdicts

    def _sent(self, message: Message) -> Verdict:
        try:
            arguments, keywords = _arguments(message.payload)
        except (ValueError, RecursionError) as error:
            return Rejected(
                self._address.reason("The payload is not JSON: Celery takes a task's arguments as JSON", error)
            )
        try:
            if self._producer is None:
                self._connect()
            self._app.send_task(
                message.type,
                arguments,
                keywords,
                task_id=message.id,
                producer=self._producer,
                queue=self._queue,
                declare=[],
                headers=_headers(message),
                ignore_result=True,
                retry=False,
                mandatory=self._is_amqp,
                confirm_timeout=self._timeout,
            )
        except Exception as error:  # noqa: BLE001 - three libraries, and each raises its own.
            return self._verdict(error)
        return Delivered()

    def _verdict(self, error: Exception) -> Verdict:
        # Celery says that all is a connection error, because of another.
        told = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if isinstance(told, MessageNacked):
            return Failed("The broker refused the task: its queue is full. Does a worker run?")
        refusals = self._connection.channel_errors if self._connection else ()
        # An answer that comes late must not be taken for that to the next message.
        self._disconnect()
        if type(told).__name__ == _LATE:
            return late(self._address.reason(f"The broker at {self._address.place} did not confirm in time", told))
        if type(told).__name__ in _AWAY:
            refusals = ()
        table = (*_MEANINGS, (refusals, Failed, "The broker at {place} refused the task"), *_OTHERS)
        return self._address.verdict(table, told, queue=self._queue)

    def _disconnect(self) -> None:
        connection, self._connection, self._producer, self._app = self._connection, None, None, None
        if connection is not None:
            with suppress(Exception):
                connection.collect(socket_timeout=1)

    async def close(self) -> None:
        """Disconnect."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._disconnect)
            thread.shutdown(wait=False)


def _check_packages(name: str) -> None:
    """See that what Celery reaches Redis with is there: it says so late, and as an error of the connection."""
    try:
        import_module("redis")
        import_module("kombu.transport.redis")
    except ImportError as error:
        raise ConfigurationError(
            f"Destination {name!r}: Celery can't use Redis ({error}). Run: pip install 'semel[celery]'"
        ) from error


def _arguments(payload: bytes) -> tuple[list[Any], dict[str, Any]]:
    said = json.loads(payload)
    if isinstance(said, dict):
        return [], said
    return (said if isinstance(said, list) else [said]), {}


def _headers(message: Message) -> dict[str, str]:
    headers = {name: text for name, text in message.headers if name not in _OWN_HEADERS}
    if message.traceparent is not None:
        headers["traceparent"] = message.traceparent
    if message.key is not None:
        headers["semel-key"] = message.key
    return headers
