"""Servers that say on the wire what their library of HTTP would not: interim answers, and HTTP/2 that ends in the
middle. A client makes of it what it is: an answer that has not come.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import httpx2
import pytest

from semel.client.httpx import IdempotentTransport
from semel.client.options import Quotas
from semel.errors import RequestOutcomeUnknown
from tests.client.callers import Caller

Talk = Callable[[socket.socket, int], None]
Call = Callable[..., Caller]

FINAL = b"HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\npaid"
#: The server's last word, which a client reads before it may go on with its body. In one piece, they are read at once.
GOAWAY = bytes.fromhex("000008 07 00 00000000 00000001 00000002")
WINDOW_UPDATE = bytes.fromhex("000004 08 00 00000000 00010000")


@pytest.fixture
def listen() -> Iterator[Callable[[Talk], str]]:
    """Have *talk* with each connection, by its number from 0 on; return the URL."""
    with ExitStack() as stack:

        def listening(talk: Talk) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.callback(listener.shutdown, socket.SHUT_RDWR)

            def accept() -> None:
                with suppress(OSError):
                    for number in range(1000):
                        connection, _ = listener.accept()
                        threading.Thread(target=conversed, args=(connection, number), daemon=True).start()

            def conversed(connection: socket.socket, number: int) -> None:
                with suppress(OSError), connection:
                    talk(connection, number)

            threading.Thread(target=accept, daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield listening


def read(connection: socket.socket) -> bytes:
    """Read a request without a body."""
    said = b""
    while not said.endswith(b"\r\n\r\n"):
        part = connection.recv(65536)
        if not part:
            return b""
        said += part
    return said


@pytest.mark.parametrize("interim", [b"100 Continue", b"102 Processing", b"103 Early Hints"])
def test_interim_answers(call: Call, listen: Callable[[Talk], str], interim: bytes) -> None:
    """An interim answer is never the operation's, and what comes after it is never that of another request."""

    def talk(connection: socket.socket, number: int) -> None:
        while request := read(connection):
            if number == 0:
                connection.sendall(b"HTTP/1.1 %s\r\n\r\n" % interim)
            path = request.split()[1]
            connection.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: %d\r\n\r\n%s" % (len(path), path))

    caller, url = call(), listen(talk)
    assert caller.post(f"{url}/one")[::2] == (201, b"/one")
    assert caller.post(f"{url}/two")[::2] == (201, b"/two")


def test_only_interim_answers(listen: Callable[[Talk], str]) -> None:
    """Where requests takes each interim answer for the last, the outcome is unknown, and is said to be."""

    def talk(connection: socket.socket, _: int) -> None:
        while read(connection):
            connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n" + FINAL)

    caller = Caller("requests", deadline=timedelta(seconds=1))
    with pytest.raises(RequestOutcomeUnknown, match="Its key is") as caught:
        caller.post(listen(talk))
    assert "103" in str(caught.value.__cause__)
    caller.close()


def test_http2_that_ends_in_the_middle(listen: Callable[[Talk], str], library: Any) -> None:
    """A server that closes its connection of HTTP/2 while it is sent the body has lost the request: it is sent again,
    with the same key. A request that HTTP/2 does not allow is an error at once.
    """
    keys = []

    def talk(connection: socket.socket, number: int) -> None:
        protocol = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        protocol.initiate_connection()
        connection.sendall(protocol.data_to_send())
        while data := connection.recv(65536):
            for event in protocol.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    keys.append(dict(event.headers)[b"idempotency-key"])
                    if number == 0:
                        connection.sendall(GOAWAY + WINDOW_UPDATE)
                elif isinstance(event, h2.events.DataReceived) and number:
                    protocol.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    protocol.send_headers(event.stream_id, [(":status", "201")], end_stream=True)
            connection.sendall(protocol.data_to_send())

    inner = library.HTTPTransport(http1=False, http2=True, verify=False)
    with library.Client(transport=IdempotentTransport(inner, quotas=Quotas())) as client:
        url = listen(talk)
        assert client.post(url, content=bytes(2**20)).status_code == 201
        assert len(keys) == 2
        assert len(set(keys)) == 1
        with pytest.raises(library.LocalProtocolError):
            client.post(url, content=b"", headers={"TE": "gzip"})


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def library(request: pytest.FixtureRequest) -> Any:
    return request.param
