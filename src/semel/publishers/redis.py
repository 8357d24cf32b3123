"""Publishes to Redis Streams (``redis://``, ``rediss://``): one stream per destination, under its name. It makes no
consumer groups.

An entry has the fields ``id``, ``type``, ``payload``, ``key`` (empty where there is none) and ``headers``, a JSON
object with the content type and the trace among the application's own. A message is delivered when Redis has replied
to ``XADD``. What that reply is worth is up to the server: with ``appendfsync always`` the entry is on disk, with
``everysec`` a crash may lose a second, without ``appendonly`` everything; and a fail-over may lose what no replica had
yet. ``?wait=1`` asks for that many replicas to have it. With ``?maxlen=`` old entries are deleted, read or not: a
consumer that is behind loses them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from semel.core.outbox import BROKER_SCHEDULE, Delivered, Failed, Message, Rejected, Schedule, Unreachable, Verdict
from semel.errors import ConfigurationError
from semel.publishers.address import TIMEOUT_SECONDS, Table, address, dropped, host_and_port, late

try:
    from redis import exceptions
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("Redis Streams need redis. Run: pip install 'semel[redis]'") from error

_TLS = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_keyfile")
_SETTINGS = frozenset({"maxlen", "stream", "timeout", "wait", *_TLS})

_PORT = 6379

_AWAY = (Unreachable, "Redis at {place} takes no writes at the moment")
#: What the client has no class for.
_BY_WORD: dict[str, tuple[type[Rejected | Unreachable], str]] = {
    "WRONGTYPE": (Rejected, "{stream!r} is no stream at Redis. Rename it, or set stream= in the URL"),
    "MISCONF": _AWAY,
    "NOREPLICAS": _AWAY,
    "MASTERDOWN": _AWAY,
}
_MEANINGS: Table = (
    (exceptions.OutOfMemoryError, Failed, "Redis at {place} is out of memory: raise maxmemory, or trim what was read"),
    (exceptions.ReadOnlyError, Unreachable, "Redis at {place} is a replica: name its master in the URL"),
    (
        (exceptions.AskError, exceptions.MovedError, exceptions.ClusterDownError),
        Unreachable,
        "Redis at {place} is not the node of its Cluster that has the stream",
    ),
    (
        (exceptions.NoPermissionError, exceptions.AuthenticationError),
        Unreachable,
        "Redis refuses the user: give it +xadd on the stream",
    ),
    (exceptions.BusyLoadingError, Unreachable, "Redis at {place} is not ready yet"),
    ((exceptions.TimeoutError, TimeoutError), late, "Redis at {place} did not reply in time"),
    ((exceptions.ConnectionError, OSError), dropped, "The connection to Redis at {place} was lost"),
    (Exception, Failed, "Redis refused the entry"),
)


class RedisStreams:
    """Appends to a stream."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        stream: str = "",
        maxlen: int | None = None,
        wait: int = 0,
        timeout: float = TIMEOUT_SECONDS,
        schedule: Schedule = BROKER_SCHEDULE,
    ) -> None:
        """Append what is sent to *name* to a stream at *url*; what the URL says has precedence."""
        self.schedule = schedule
        self._address = address(name, url, _SETTINGS)
        self._stream = self._address.text("stream", stream) or name
        self._maxlen = int(self._address.number("maxlen", maxlen or 0)) if maxlen or self._is_set("maxlen") else None
        self._replicas = int(self._address.number("wait", wait)) if wait or self._is_set("wait") else 0
        self._timeout, self.limit = self._address.seconds(timeout)
        if self._address.path and not self._address.path.isdecimal():
            raise ConfigurationError(f"Destination {name!r}: a Redis database is a number: redis://host:6379/0.")
        self._client: Redis | None = None

    def _is_set(self, setting: str) -> bool:
        return self._address.text(setting, "") != ""

    async def open(self) -> None:
        """Connect."""
        await self.close()
        where = self._address
        host, port = host_and_port(where.hosts[0], _PORT)
        tls: dict[str, Any] = {each: where.text(each, "") for each in _TLS if self._is_set(each)}
        self._client = Redis(
            # The replies are read here, one by one: those that have come before the time limit count.
            single_connection_client=True,
            host=host,
            port=port,
            db=int(where.path or 0),
            username=where.user,
            password=where.password,
            ssl=where.scheme == "rediss",
            # Its limits for reading and writing are set around each call: its own are asyncio.wait_for(), which in
            # Python 3.11 may not notice that it is cancelled.
            socket_timeout=None,
            socket_connect_timeout=self._timeout,
            # By itself it sends again what may have arrived.
            retry=Retry(NoBackoff(), 0),
            **tls,
        )
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.ping()
        except exceptions.AuthenticationError as error:
            await self.close()
            raise PermissionError(
                where.reason(f"Redis at {where.place} refuses user {where.user or 'default'!r}: check password", error)
            ) from None
        except (exceptions.RedisError, OSError) as error:
            await self.close()
            raise ConnectionError(where.reason(f"Redis at {where.place} can't be used", error)) from None

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Append all in one round trip, and read a reply for each."""
        connection = None if self._client is None else self._client.connection
        if connection is None:
            return [Unreachable(f"The connection to Redis at {self._address.place} is lost.")] * len(messages)
        trim = () if self._maxlen is None else ("MAXLEN", "~", self._maxlen)
        commands: list[Any] = [("XADD", self._stream, *trim, "*", *_fields(message)) for message in messages]
        if self._replicas:
            commands.append(("WAIT", self._replicas, int(self._timeout * 1000 / 2)))
        replies: list[Any] = []
        sending = asyncio.ensure_future(connection.send_packed_command(connection.pack_commands(commands)))
        try:
            async with asyncio.timeout(self._timeout):
                while len(replies) < len(commands):
                    replies.append(await _reply(connection))
                await sending
        except (exceptions.RedisError, OSError) as error:
            await self.close()
            replies += [error] * (len(commands) - len(replies))
        except BaseException:  # Cancelled: what is still to be read belongs to no other call.
            await self.close()
            raise
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        verdicts = [self._verdict(reply) for reply in replies[: len(messages)]]
        if not self._replicas:
            return verdicts
        reached = replies[-1]
        if isinstance(reached, int) and reached >= self._replicas:
            return verdicts
        # It is in the stream, and will be a second time: what no replica has is lost with its server.
        alone = Unreachable(self._too_few(reached))
        return [alone if isinstance(verdict, Delivered) else verdict for verdict in verdicts]

    def _too_few(self, reached: object) -> str:
        if isinstance(reached, Exception):
            return self._address.reason(f"Redis at {self._address.place} can't say what its replicas have", reached)
        return f"{reached} of {self._replicas} replicas of Redis at {self._address.place} confirmed: start the others."

    def _verdict(self, reply: object) -> Verdict:
        if not isinstance(reply, Exception):
            return Delivered()
        if isinstance(reply, exceptions.ResponseError):
            word = str(reply).partition(" ")[0]
            if word in _BY_WORD:
                kind, text = _BY_WORD[word]
                return kind(self._address.reason(text.format(place=self._address.place, stream=self._stream), reply))
        return self._address.verdict(_MEANINGS, reply)

    async def close(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(exceptions.RedisError, OSError):
                await client.aclose()


async def _reply(connection: Any) -> Any:
    """Read the next reply, or refusal."""
    try:
        return await connection.read_response()
    except exceptions.ResponseError as refusal:
        return refusal


def _fields(message: Message) -> Sequence[str | bytes]:
    headers = {**dict(message.headers), "content-type": message.content_type}
    if message.traceparent is not None:
        headers["traceparent"] = message.traceparent
    own = ("id", message.id, "type", message.type, "payload", message.payload, "key", message.key or "")
    return (*own, "headers", json.dumps(headers, ensure_ascii=False, separators=(",", ":")))
