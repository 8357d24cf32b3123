"""Connections to servers, for threads and for an event loop, and the checks whether a server is fit for records. They
only send and receive bytes; commands and retries are in ``cluster.py``.

A server that evicts would lose the record of an operation that was done; a replica takes no writes. This is checked at
every new connection, and whether it evicts every few seconds, since its settings may be changed while it runs.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from hiredis import ProtocolError, Reader, ReplyError
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

from semel.errors import StoreError, StoreNotReady, StoreUnavailable
from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.redis.address import Address, Login, Node
from semel.stores.redis.protocol import Reply, code_of, lost, packed, read_only, translated

_CHUNK = 64 * 1024
#: How long a server may evict before no operation begins in it any more. To look goes with other commands, and costs
#: the server a twentieth of a millisecond.
LOOK_SECONDS = 5.0
_LOOK = packed("INFO", "memory")
_HUNG_UP = "The server has closed the connection."

_logger = logging.getLogger("semel")


@dataclass(slots=True)
class Pipeline:
    """Some commands for one server, packed together, and how many replies will come."""

    node: Node
    data: bytes
    count: int


@dataclass(slots=True)
class Failure:
    """The result in place of replies: no connection, or a lost one."""

    error: BaseException
    #: Whether any of it may have reached the server.
    was_sent: bool

    @property
    def is_too_slow(self) -> bool:
        """Whether it was a time-out: sending it again would only add to the load."""
        return isinstance(self.error, TimeoutError)


class Servers(Protocol):
    """Connections, sync or async, as ``cluster.py`` uses them: those for threads return without waiting for a loop."""

    async def exchange(self, pipeline: Pipeline) -> list[Reply] | Failure:
        """Send commands to one server, and return the replies."""

    async def exchange_all(self, pipelines: Sequence[Pipeline]) -> list[list[Reply] | Failure]:
        """Send commands to several servers at the same time."""

    async def find_master(self) -> Node:
        """Ask the sentinels."""


class Connections:
    """One connection to each server, opened when it is needed, and again after it is lost. Used by one thread at
    a time.
    """

    def __init__(self, address: Address, *, looks: bool = True) -> None:
        """Connect to nothing yet. One that only ends what has begun never *looks* whether the server evicts by now."""
        self._address = address
        self._looks = looks and address.is_durable
        self._open: dict[Node, Connection] = {}

    def close(self) -> None:
        """Disconnect."""
        connections, self._open = self._open, {}
        for connection in connections.values():
            connection.close()

    async def exchange(self, pipeline: Pipeline) -> list[Reply] | Failure:
        """Send commands to one server, and return the replies."""
        [replies] = await self.exchange_all((pipeline,))
        return replies

    async def exchange_all(self, pipelines: Sequence[Pipeline]) -> list[list[Reply] | Failure]:
        """Send commands to several servers at the same time."""
        try:
            # All are sent before the first reply is read, so that the servers work at the same time.
            sent = [self._send(each) for each in pipelines]
            return [
                connection if isinstance(connection, Failure) else self._receive(connection, each)
                for connection, each in zip(sent, pipelines, strict=True)
            ]
        except BaseException:
            # Interrupted in the middle: the next reply on a connection would belong to another command.
            self.close()
            raise

    async def find_master(self) -> Node:
        """Ask the sentinels."""
        errors: list[RedisError] = []
        options = client_options(self._address, self._address.sentinel_login)
        for node in self._address.nodes:
            with Redis(node.host, node.port, **options) as sentinel:
                try:
                    found: Any = sentinel.sentinel_get_master_addr_by_name(self._address.service)
                except RedisError as error:
                    errors.append(error)
                    continue
            if found:
                return Node(found[0], int(found[1]))
        raise _no_master(errors, self._address)

    def _send(self, pipeline: Pipeline) -> Connection | Failure:
        connection = self._open.get(pipeline.node)
        if connection is None:
            try:
                connection = self._open[pipeline.node] = Connection(self._address, pipeline.node)
            except Exception as error:  # noqa: BLE001 - it is the caller's to judge
                return Failure(error, was_sent=False)
        try:
            connection.is_looking = self._looks and time.monotonic() >= connection.looks_at
            connection.send(_LOOK + pipeline.data if connection.is_looking else pipeline.data)
        except OSError as error:
            self._drop(pipeline.node)
            return Failure(error, was_sent=True)
        return connection

    def _receive(self, connection: Connection, pipeline: Pipeline) -> list[Reply] | Failure:
        try:
            if not connection.is_looking:
                return connection.receive(pipeline.count)
            look, *replies = connection.receive(1 + pipeline.count)
        except (OSError, ProtocolError) as error:
            self._drop(pipeline.node)
            return Failure(error, was_sent=True)
        connection.looks_at = time.monotonic() + LOOK_SECONDS
        if _evicts(look, self._address, pipeline.node):
            self._drop(pipeline.node)  # The next one is refused.
        return replies

    def _drop(self, node: Node) -> None:
        connection = self._open.pop(node, None)
        if connection is not None:
            connection.close()


class AsyncConnections:
    """The same for an event loop. Used by one task at a time."""

    def __init__(self, address: Address, *, looks: bool = True) -> None:
        """As of ``Connections``."""
        self._address = address
        self._looks = looks and address.is_durable
        self._open: dict[Node, AsyncConnection] = {}
        start_afresh_in_children(self)

    def drop(self) -> None:
        """Disconnect at once."""
        connections, self._open = self._open, {}
        for connection in connections.values():
            connection.drop()

    def start_afresh(self) -> None:
        """Start without connections: the old ones are the parent's."""
        leave_alone(self._open)
        self._open = {}

    async def exchange(self, pipeline: Pipeline) -> list[Reply] | Failure:
        """Send commands to one server, and return the replies."""
        node = pipeline.node
        connection = self._open.get(node)
        if connection is None or connection.is_lost:
            try:
                connection = self._open[node] = await AsyncConnection.open(self._address, node)
            except Exception as error:  # noqa: BLE001 - it is the caller's to judge
                self._open.pop(node, None)
                return Failure(error, was_sent=False)
        seconds = self._address.command_seconds
        try:
            if not self._looks or time.monotonic() < connection.looks_at:
                return await connection.exchange(pipeline.data, pipeline.count, seconds)
            look, *replies = await connection.exchange(_LOOK + pipeline.data, 1 + pipeline.count, seconds)
        except (OSError, ProtocolError) as error:
            self._open.pop(node, None)
            return Failure(error, was_sent=True)
        connection.looks_at = time.monotonic() + LOOK_SECONDS
        if _evicts(look, self._address, node):
            connection.drop()  # The next one is refused.
        return replies

    async def exchange_all(self, pipelines: Sequence[Pipeline]) -> list[list[Reply] | Failure]:
        """Send commands to several servers at the same time."""
        return await asyncio.gather(*map(self.exchange, pipelines))

    async def find_master(self) -> Node:
        """Ask the sentinels."""
        errors: list[RedisError] = []
        options = client_options(self._address, self._address.sentinel_login)
        for node in self._address.nodes:
            async with AsyncRedis(host=node.host, port=node.port, **options) as sentinel:
                try:
                    found: Any = await sentinel.sentinel_get_master_addr_by_name(self._address.service)
                except RedisError as error:
                    errors.append(error)
                    continue
            if found:
                return Node(found[0], int(found[1]))
        raise _no_master(errors, self._address)


class Connection:
    """One connection of a thread, greeted and checked."""

    def __init__(self, address: Address, node: Node) -> None:
        """Connect. Raises ``OSError``, or a ``StoreError`` if the server can't be used."""
        #: When to look next whether the server evicts, and whether that was sent.
        self.looks_at = time.monotonic() + LOOK_SECONDS
        self.is_looking = False
        self._reader = Reader()
        context = address.tls.context() if address.tls else None
        connected = socket.create_connection((node.host, node.port), timeout=address.connect_seconds)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if context is not None:
                connected = context.wrap_socket(connected, server_hostname=node.host)
            self._socket = connected
            words, count = _greeting(address)
            self.send(words)
            _check(self.receive(count), address, node)
            connected.settimeout(address.command_seconds)
        except BaseException:
            connected.close()
            raise

    def send(self, data: bytes) -> None:
        """Send all of *data*."""
        self._socket.sendall(data)

    def receive(self, count: int) -> list[Reply]:
        """Read *count* replies."""
        replies: list[Reply] = []
        gets = self._reader.gets
        while len(replies) < count:
            reply = gets()
            if reply is not False:  # None, which is nil, is a reply.
                replies.append(reply)
                continue
            received = self._socket.recv(_CHUNK)
            if not received:
                raise ConnectionResetError(_HUNG_UP)
            self._reader.feed(received)
        return replies

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()


class AsyncConnection(asyncio.Protocol):
    """One connection of an event loop, greeted and checked.

    A protocol, not streams: a batch waits for one future, whatever the number of replies.
    """

    def __init__(self) -> None:
        """Not connected yet."""
        self.looks_at = time.monotonic() + LOOK_SECONDS
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None
        self._replies: list[Reply] = []
        self._count = 0
        self._answer: asyncio.Future[list[Reply]] | None = None

    @classmethod
    async def open(cls, address: Address, node: Node) -> AsyncConnection:
        """Connect. Raises ``OSError``, or a ``StoreError`` if the server can't be used."""
        context = address.tls.context() if address.tls else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(address.connect_seconds):
            _, connection = await loop.create_connection(cls, node.host, node.port, ssl=context)
        try:
            words, count = _greeting(address)
            _check(await connection.exchange(words, count, address.connect_seconds), address, node)
        except BaseException:
            connection.drop()
            raise
        return connection

    @property
    def is_lost(self) -> bool:
        """Whether the server has closed it, for example in a restart."""
        return self._transport is None

    async def exchange(self, data: bytes, count: int, seconds: float) -> list[Reply]:
        """Send *data*, and wait at most *seconds* for *count* replies."""
        if self._transport is None:
            raise ConnectionResetError(_HUNG_UP)
        loop = asyncio.get_running_loop()
        self._count = count
        answer: asyncio.Future[list[Reply]] = loop.create_future()
        self._answer = answer
        self._transport.write(data)
        end = loop.call_later(seconds, self._fail, TimeoutError("It did not answer in time."))
        try:
            return await answer
        except BaseException:
            # Lost, too slow, or cancelled: the next reply on this connection would belong to another command.
            self.drop()
            raise
        finally:
            end.cancel()

    def drop(self) -> None:
        """Disconnect at once."""
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(RuntimeError):  # the loop that it was opened on may be closed
                transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the task that waits."""
        self._transport = None
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError(_HUNG_UP))

    def data_received(self, data: bytes) -> None:
        """Read replies, and wake the task when all are there."""
        gets, replies = self._reader.gets, self._replies
        self._reader.feed(data)
        try:
            while (reply := gets()) is not False:
                replies.append(reply)
        except ProtocolError as error:
            self._fail(error)
            return
        if len(replies) >= self._count:
            self._replies = []
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(replies)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def client_options(address: Address, login: Login) -> dict[str, Any]:
    """Return redis-py's options for a server of *address*. Semel retries by itself, so redis-py does not."""
    tls = address.tls
    options: dict[str, Any] = {
        "username": login.user,
        "password": login.password,
        "socket_connect_timeout": address.connect_seconds,
        "socket_timeout": address.command_seconds,
        "retry": None,
        "protocol": 2,
        "decode_responses": True,
    }
    if tls is not None:
        options |= {
            "ssl": True,
            "ssl_ca_certs": tls.ca_certs,
            "ssl_certfile": tls.certfile,
            "ssl_keyfile": tls.keyfile,
            "ssl_cert_reqs": "required" if tls.is_checked else "none",
            "ssl_check_hostname": tls.is_checked,
        }
    return options


def _no_master(errors: list[RedisError], address: Address) -> StoreError:
    if errors:
        return lost(errors[0], address, None, was_sent=False)
    return StoreNotReady(
        f"The sentinels of {address} do not know {address.service!r}. Write redis+sentinel://host/NAME/0."
    )


#: Addresses with a logged warning: one is enough.
_warned: set[str] = set()

_REPLICAS = frozenset({"slave", "replica"})


def _greeting(address: Address) -> tuple[bytes, int]:
    """Return what to send first, and how many replies will come."""
    words = []
    login = address.login
    if login.password is not None:
        words.append(packed("AUTH", *([login.user] if login.user else []), login.password))
    if address.kind != "cluster":
        words.append(packed("SELECT", address.database))
    words += [packed("CLIENT", "SETNAME", "semel"), packed("INFO"), packed("CONFIG", "GET", "save")]
    return b"".join(words), len(words)


def _check(replies: list[Reply], address: Address, node: Node) -> None:
    """Raise a ``StoreError`` if the server can't be used."""
    *login, named, info, saving = replies
    for reply in login:
        if isinstance(reply, ReplyError):
            raise _refused(reply, address)
    if isinstance(info, ReplyError):
        if code_of(info) == "NOPERM":
            raise StoreNotReady(f"{address} does not allow INFO for this user, which shows whether it evicts.")
        raise translated(info, address)
    # A server may not support names of connections, or not allow them: nothing depends on it.
    del named
    facts = _facts(info)
    _judge(facts, address, node)
    if address.is_durable:
        _warn_of_no_persistence(facts, saving, address)


def _facts(info: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)


def _evicts(info: Reply, address: Address, node: Node) -> bool:
    """Whether a server has been set to evict since it was connected to. An error says nothing of that."""
    try:
        _judge({} if isinstance(info, ReplyError) else _facts(info), address, node)
    except StoreNotReady:
        return True
    return False


def _refused(error: ReplyError, address: Address) -> StoreError:
    if "invalid password" in str(error) or "without any password" in str(error):
        # The message of servers before version 6, and of those without users.
        return StoreUnavailable(f"{address} refuses the login. The password is wrong, or the server has none.")
    if "DB index is out of range" in str(error):
        return StoreNotReady(f"{address}: there is no such database. Redis has 0 to 15, unless configured otherwise.")
    return translated(error, address)


def _judge(facts: dict[str, str], address: Address, node: Node) -> None:
    # A replica in a Cluster knows the slots, too, and redirects what it can't do.
    if facts.get("role") in _REPLICAS and address.kind != "cluster":
        if address.kind == "standalone":
            raise read_only(address)
        raise StoreUnavailable(f"{address}: {node} was reported as a master, and is a replica now.")
    if facts.get("cluster_enabled") == "1" and address.kind != "cluster":
        raise StoreNotReady(f"{node} belongs to a Redis Cluster. Use redis+cluster://{node}")
    policy = facts.get("maxmemory_policy", "noeviction")
    if address.is_durable and policy != "noeviction":
        raise StoreNotReady(
            f"{address} has maxmemory-policy {policy}: when its memory is full it would delete records of "
            "operations that were done, and they would run again. Set it to noeviction, or give Semel its own Redis."
        )


def _warn_of_no_persistence(facts: dict[str, str], saving: Reply, address: Address) -> None:
    # If CONFIG is not allowed, it is not known whether there are snapshots: then there is no warning.
    has_snapshots = isinstance(saving, ReplyError) or not saving or bool(saving[1])
    if facts.get("aof_enabled") == "1" or has_snapshots or str(address) in _warned:
        return
    _warned.add(str(address))
    _logger.warning(
        "%s keeps nothing on disk: after a restart every key is new, and a retry runs again. "
        "Set appendonly yes (and appendfsync always, to lose nothing).",
        address,
    )
