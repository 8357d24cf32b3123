"""Connections for threads. They carry parcels, and know nothing of what is in them."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TypeVar

from hiredis import ProtocolError, Reader

from semel.stores.redis.address import Address, Node
from semel.stores.redis.courier import Carried, Talk
from semel.stores.redis.greeting import check, greeting
from semel.stores.redis.wire import Parcel, Reply, Trouble

T = TypeVar("T")

_CHUNK = 64 * 1024
HUNG_UP = "The server has closed the connection."


class Wires:
    """One connection to each server that is needed, opened when it is, and again when it is lost. Used by one thread at
    a time.
    """

    def __init__(self, address: Address) -> None:
        """Connect to nothing yet."""
        self._address = address
        self._links: dict[Node, Link] = {}

    def run(self, talk: Talk[T]) -> T:
        """Carry what *talk* yields, and return what it returns."""
        try:
            parcels = next(talk)
            while True:
                parcels = talk.send(self._carry(parcels))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # StopIteration is not generic

    def close(self) -> None:
        """Disconnect."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def _carry(self, parcels: list[Parcel]) -> list[Carried]:
        try:
            # All are sent before the first is waited for, so that the servers work at the same time.
            sent = [self._send(parcel) for parcel in parcels]
            return [
                each if isinstance(each, Trouble) else self._receive(each, parcel)
                for each, parcel in zip(sent, parcels, strict=True)
            ]
        except BaseException:
            # Interrupted in the middle: what comes back on a connection next would be somebody else's answer.
            self.close()
            raise

    def _send(self, parcel: Parcel) -> Link | Trouble:
        link = self._links.get(parcel.node)
        if link is None:
            try:
                link = self._links[parcel.node] = Link(self._address, parcel.node)
            except Exception as error:  # noqa: BLE001 - it is the talk's to judge
                return Trouble(error, was_sent=False)
        try:
            link.send(parcel.data)
        except OSError as error:
            self._drop(parcel.node)
            return Trouble(error, was_sent=True)
        return link

    def _receive(self, link: Link, parcel: Parcel) -> Carried:
        try:
            replies = link.receive(parcel.count)
        except (OSError, ProtocolError) as error:
            self._drop(parcel.node)
            return Trouble(error, was_sent=True)
        if parcel.node.is_sentinel:
            # It is asked again only when the master is lost, which may be in a year.
            self._drop(parcel.node)
        return replies

    def _drop(self, node: Node) -> None:
        link = self._links.pop(node, None)
        if link is not None:
            link.close()


class Link:
    """One connection, greeted and checked."""

    def __init__(self, address: Address, node: Node) -> None:
        """Connect. Raises ``OSError``, or a ``StoreError`` where the server is not one to use."""
        self._reader = Reader()
        context = address.tls.context() if address.tls else None
        connected = socket.create_connection((node.host, node.port), timeout=address.connect_seconds)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if context is not None:
                connected = context.wrap_socket(connected, server_hostname=node.host)
            self._socket = connected
            words, count = greeting(address, node)
            self.send(words)
            check(self.receive(count), address, node)
            connected.settimeout(address.command_seconds)
        except BaseException:
            connected.close()
            raise

    def send(self, data: bytes) -> None:
        """Send all of *data*."""
        self._socket.sendall(data)

    def receive(self, count: int, seconds: float | None = None) -> list[Reply]:
        """Wait for so many replies, and for each part of them so long, or as long as usual."""
        if seconds is not None:
            self._socket.settimeout(seconds)
        replies: list[Reply] = []
        gets = self._reader.gets
        while len(replies) < count:
            reply = gets()
            if reply is not False:  # None, which is nil, is a reply.
                replies.append(reply)
                continue
            received = self._socket.recv(_CHUNK)
            if not received:
                raise ConnectionResetError(HUNG_UP)
            self._reader.feed(received)
        return replies

    def wake(self) -> None:
        """Have another thread, which waits for a reply, wait no longer."""
        with suppress(OSError):  # it may be lost already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()
