"""Servers that hang, close early, lie about lengths or answer nonsense: each gets a reason, and none an exception."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from semel.errors import ConfigurationError
from semel.verify.connection import MAX_BODY, Client, Place, connected, tls
from semel.verify.message import Answer, NoAnswer, Outcome, Request
from semel.verify.model import Verdict
from tests.verify.asking import told, verified
from tests.webhooks.test_guarding import certificate

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = Request("POST", "/payments", (), b"{}")


@asynccontextmanager
async def talking(talk: Talk, secured: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve each connection with *talk*; yields the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "localhost", 0, family=socket.AF_INET, ssl=secured)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def saying(*parts: bytes) -> Talk:
    """Read a request with a body of two bytes, say these bytes, and close."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()

    return talk


async def asked(talk: Talk, request: Request = POST, hang: float = 5.0) -> Outcome:
    async with talking(talk) as port:
        return await Client(Place("127.0.0.1", port), hang).send(request)


async def hanging(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(1024 * 1024))
        await writer.drain()


async def endless_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: and more\r\n" * 100)
        await writer.drain()


@pytest.mark.parametrize(
    "talk, reason",
    [
        (saying(), "closed before the answer was whole"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Len"), "closed after 'Content-Len'"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"), "closed after 3 of 10 bytes"),
        (saying(b"220 mail.example ESMTP\r\n"), "no HTTP/1.1 status line"),
        (saying(b"\x15\x03\x01\x00\x02\x02F\r\n"), "no HTTP/1.1 status line"),
        (saying(b"HTTP/2 200\r\n\r\n"), "no HTTP/1.1 status line"),
        (saying(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"), "header line 'no colon'"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n"), "no readable Content-Length"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"), "no readable Content-Length"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"), "99999999999 bytes long"),
        (saying(CHUNKED + b"xyz\r\n"), "chunk size 'xyz'"),
        (saying(CHUNKED + b"2\r\nabc\r\n"), "longer than its size"),
        (saying(CHUNKED + b"ffffffff\r\n"), f"longer than {MAX_BODY}"),
        (saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n"), "transfer coding"),
        (saying(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n"), "line of the answer does not end"),
        (endless, f"longer than {MAX_BODY}"),
        (endless_headers, "header section does not end"),
    ],
)
async def test_nonsense(talk: Talk, reason: str) -> None:
    """What is no answer is told, with what is wrong with it."""
    outcome = await asked(talk)
    assert isinstance(outcome, NoAnswer)
    assert reason in outcome.reason


async def test_silence() -> None:
    """A server that never answers is left after the given time, and one that is not there at once."""
    silent = await asked(hanging, hang=0.1)
    assert silent == NoAnswer("no whole answer within 0.1 s")
    gone = await Client(Place("127.0.0.1", 1), 5).send(POST)
    assert isinstance(gone, NoAnswer)
    assert gone.is_unsent


@pytest.mark.parametrize(
    "said, body",
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nab\r\n1\r\nc\r\n0\r\nTrailer: x\r\n\r\n",
            b"abc",
        ),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\nHTTP/1.1 204 No\r\n\r\n", b""),
        (b"HTTP/1.1 200\r\nContent-Length: 3\r\n\r\nabcdef", b"abc"),
        (b"HTTP/1.1 200 OK\nContent-Length: 1\n\na", b"a"),
    ],
)
async def test_odd_answers(said: bytes, body: bytes) -> None:
    """Chunks, interim answers, an end without a length, and a body that is longer than it says are read."""
    outcome = await asked(saying(said))
    assert isinstance(outcome, Answer)
    assert outcome.body == body


async def test_continue() -> None:
    """The body waits for 100 Continue; a final answer before it is the answer; silence brings the body anyway."""
    got: list[bytes] = []

    async def asks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        got.append(await reader.readexactly(2))
        writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")

    async def is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        got.append(await reader.readexactly(2))
        writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")

    expecting = Request("POST", "/", (), b"{}", expects=True)
    refusing = saying(b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n")
    outcomes = [await asked(talk, expecting) for talk in (asks, is_silent, refusing)]
    assert [each.status for each in outcomes if isinstance(each, Answer)] == [201, 202, 417]
    assert got == [b"{}", b"{}"]


async def test_a_race_is_released_together() -> None:
    """No request of a race is whole before all of them have come but for their last bytes."""
    waiting, most, early = 0, 0, 0
    bodies = [b"{}"] * 8

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting, most, early
        await reader.readuntil(b"\r\n\r\n{")
        waiting += 1
        most = max(most, waiting)
        await reader.readexactly(1)
        early += waiting < len(bodies) and most < len(bodies)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with talking(talk) as port:
        outcomes = await Client(Place("127.0.0.1", port), 5).race([Request("POST", "/", (), body) for body in bodies])
    assert all(isinstance(each, Answer) for each in outcomes)
    assert (most, early) == (8, 0)


async def test_tls(tmp_path: Path) -> None:
    """TLS works in races too; a certificate that is not trusted is told, and accepted only if that is asked for."""
    serves, trusts = certificate(tmp_path, "localhost")
    ok = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    async with talking(ok, serves) as port:
        trusting = Client(Place("localhost", port, trusts), 5)
        outcomes = [await trusting.send(POST), *await trusting.race([POST] * 3)]
        assert [each.body for each in outcomes if isinstance(each, Answer)] == [b"ok"] * 4
        careless = await Client(Place("localhost", port, tls(is_checked=False)), 5).send(POST)
        assert isinstance(careless, Answer)
        with pytest.raises(ConfigurationError, match="certificate is not valid"):
            await connected(Client(Place("localhost", port, tls(is_checked=True)), 5), "https://localhost")
        plain = await Client(Place("localhost", port), 5).send(POST)
        assert isinstance(plain, NoAnswer)


@pytest.mark.parametrize(
    "talk, reason",
    [
        (hanging, "no whole answer within 0.2 s"),
        (saying(b"garbage\r\n"), "no HTTP/1.1 status line"),
        (saying(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"), "credentials"),
        (saying(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"), "answered with 500"),
        (saying(b"HTTP/1.1 307 No\r\nLocation: https://there/\r\nContent-Length: 0\r\n\r\n"), "https://there/"),
    ],
)
async def test_nothing_can_be_verified(talk: Talk, reason: str) -> None:
    """Where the request itself does not succeed, every check is inconclusive, and the reason is told."""
    async with talking(talk) as port:
        report = await verified(f"http://127.0.0.1:{port}", "replay-*", "race-8", count=None, hang=0.2)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert {each.verdict for each in report.findings} == {Verdict.INCONCLUSIVE}
    assert all(reason in each for each in told(report, Verdict.INCONCLUSIVE).values())


COUNTS = {
    b"GET /text": b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"n":"a"}',
    b"GET /html": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n<p>",
    b"GET /404": b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
    b"GET /list": b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"n":[1]}',
    b"GET /head": b"HTTP/1.1 200 OK\r\nX-Total: many\r\nContent-Length: 0\r\n\r\n",
}


async def counts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    for start, said in COUNTS.items():
        if head.startswith(start):
            writer.write(said)
            return
    writer.write(b'HTTP/1.1 201 OK\r\nContent-Length: 8\r\n\r\n{"id":1}')


@pytest.mark.parametrize(
    "count, reason",
    [
        ("/text#$.n", '$.n is "a", and not a whole number'),
        ("/html#$.n", "the answer is no JSON"),
        ("/404#$.n", "answered with 404"),
        ("/list#$.m", "there is no $.m in the answer"),
        ("/head#header:X-Total", "the header X-Total is"),
        ("/head#header:X-None", "no header X-None"),
        ("http://127.0.0.1:1/#$.n", "no connection"),
    ],
)
async def test_a_counter_that_fails(count: str, reason: str) -> None:
    """A counter that can't be read is an error before anything is created."""
    async with talking(counts) as port:
        with pytest.raises(ConfigurationError) as failed:
            await verified(f"http://127.0.0.1:{port}", count=count)
    assert reason in str(failed.value)


async def test_a_counter_that_counts_something_else() -> None:
    """A counter that does not rise with a success decides nothing."""
    async with talking(counts) as port:
        report = await verified(f"http://127.0.0.1:{port}", "replay-*", count="/list#$.n")
    assert set(told(report, Verdict.INCONCLUSIVE).values()) == {
        "The request succeeded, and the counter changed by 0: it does not count these effects."
    }


async def test_a_counter_with_a_secret() -> None:
    """What is in the query of a counter is not told."""
    async with talking(counts) as port:
        with pytest.raises(ConfigurationError, match="GET /404 is answered with 404") as failed:
            await verified(f"http://127.0.0.1:{port}", count="/404?token=hunter2#$.n")
    assert "hunter2" not in str(failed.value)


def test_no_such_file(tmp_path: Path) -> None:
    """A database that is not there is an error, and is not made."""
    missing = tmp_path / "shop.db"
    with pytest.raises(ConfigurationError, match="there is no file"):
        asyncio.run(verified("http://127.0.0.1:1", count=f"sqlite:///{missing}#SELECT 1"))
    assert not missing.exists()
