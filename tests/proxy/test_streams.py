"""Unguarded traffic through the proxy, as it streams: large, slow, endless, broken off, and in both directions."""

import asyncio
import socket
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest

from tests.proxy.kit import BOB, HANG, KEY, Origin, Seen, created, proxied, request

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
MEGABYTE = 1024 * 1024


class Swallowing(Origin):
    """An upstream that reads bodies and forgets them."""

    size = 0

    async def serve(self, reader: Reader, writer: Writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        wanted = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while self.size < wanted:
            self.size += len(await reader.read(MEGABYTE))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


async def test_upload_of_any_size(tmp_path: Path) -> None:
    """A large upload passes at constant memory."""
    size, origin = 64 * MEGABYTE, Swallowing()
    async with proxied(tmp_path, origin) as world, world.connected() as client:
        client.writer.write(f"PUT / HTTP/1.1\r\nHost: shop\r\nContent-Length: {size}\r\n\r\n".encode())
        part = bytes(MEGABYTE)
        tracemalloc.start()
        for _ in range(size // MEGABYTE):
            client.writer.write(part)
            await client.writer.drain()
        assert (await client.got()).body == b"ok"
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert origin.size == size
    assert peak < 16 * MEGABYTE


async def test_download_of_any_size(tmp_path: Path) -> None:
    """A large answer passes at constant memory, as fast as its client takes it."""
    size = 64 * MEGABYTE

    async def much(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
        for _ in range(size // MEGABYTE):
            writer.write(bytes(MEGABYTE))
            await writer.drain()

    async with proxied(tmp_path, Origin(much)) as world, world.connected() as client:
        client.writer.write(request(BOB, method="GET", body=b""))
        await client.reader.readuntil(b"\r\n\r\n")
        tracemalloc.start()
        left = size
        while left:
            left -= len(await client.reader.read(MEGABYTE))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 * MEGABYTE


async def test_slow_client(tmp_path: Path) -> None:
    """A client that takes its time is not taken for a silent upstream."""
    size = 16 * MEGABYTE

    async def much(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode() + bytes(size))

    async with proxied(tmp_path, Origin(much), timeout=0.5) as world, world.connected() as client:
        client.writer.write(request(BOB, method="GET", body=b""))
        await client.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1.2)  # Longer than the upstream may be silent.
        assert len(await client.reader.readexactly(size)) == size


async def test_chunks_in_both_directions(tmp_path: Path) -> None:
    """A body of unknown length passes as it comes, and the answer may begin before it has ended."""

    class Echo(Origin):
        async def serve(self, reader: Reader, writer: Writer) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head.lower()
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                part = await reader.readexactly(size)
                await reader.readexactly(2)
                writer.write(b"%x\r\n%s\r\n" % (size, part))
            await reader.readexactly(2)
            writer.write(b"0\r\n\r\n")

    async with proxied(tmp_path, Echo()) as world, world.connected() as client, asyncio.timeout(HANG):
        client.writer.write(b"POST / HTTP/1.1\r\nHost: shop\r\nTransfer-Encoding: chunked\r\n\r\n")
        head = b""
        for word in (b"one", b"three", b"seven"):
            client.writer.write(b"%x\r\n%s\r\n" % (len(word), word))
            head = head or await client.reader.readuntil(b"\r\n\r\n")
            assert await client.reader.readuntil(word + b"\r\n")
        client.writer.write(b"0\r\n\r\n")
        assert (await client.reader.readuntil(b"0\r\n\r\n")) == b"0\r\n\r\n"


async def test_continue(tmp_path: Path) -> None:
    """A client that waits for 100 gets it, from the proxy; the upstream is not asked."""
    async with proxied(tmp_path) as world, world.connected() as client:
        client.writer.write(request(KEY, BOB, "Expect: 100-continue")[:-2])
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        client.writer.write(b"{}")
        assert (await client.got()).status == 201
    assert world.origin.seen[0].values("expect") == []


@pytest.mark.parametrize("lines", [[], [BOB, KEY]], ids=["passed on", "guarded"])
async def test_a_client_of_http_1_0(tmp_path: Path, lines: list[str]) -> None:
    """A client of HTTP/1.0 gets no chunks and no interim answer, which it does not know: an answer without a length
    ends with the connection.
    """

    async def chunked(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n5\r\nthree\r\n0\r\n\r\n")

    head = ["POST /pay HTTP/1.0", "Content-Length: 2", "Expect: 100-continue", *lines, "", "{}"]
    async with proxied(tmp_path, Origin(chunked)) as world:
        for _ in range(2):
            async with world.connected() as client, asyncio.timeout(HANG):
                client.writer.write("\r\n".join(head).encode())
                said, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
                assert said.startswith(b"HTTP/1.1 200")
                assert b"transfer-encoding" not in said
                assert b"connection: close" in said
                assert body == b"onethree"
    assert len(world.origin.seen) == (1 if lines else 2)


async def test_events(tmp_path: Path) -> None:
    """An event stream is passed on event by event, may be silent for long, and ends when its client goes."""
    has_ended = asyncio.Event()
    more = asyncio.Event()

    async def events(_seen: Seen, reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await more.wait()
        writer.write(b"data: 2\n\n")
        await reader.read()
        has_ended.set()

    async with proxied(tmp_path, Origin(events), timeout=0.1) as world:
        async with world.connected() as client, asyncio.timeout(HANG):
            client.writer.write(request(BOB, method="GET", body=b""))
            await client.reader.readuntil(b"data: 1\n\n")
            await asyncio.sleep(0.3)  # Longer than an upstream may be silent otherwise.
            more.set()
            await client.reader.readuntil(b"data: 2\n\n")
        async with asyncio.timeout(HANG):
            await has_ended.wait()


async def test_guarded_events(tmp_path: Path) -> None:
    """A guarded request that is answered with a stream gets the stream, once; a retry is told that it is done."""

    async def events(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await writer.drain()
        writer.close()

    async with proxied(tmp_path, Origin(events)) as world:
        got = await world.pay()
        assert got.body == b"data: 1\n\n"
        assert (await world.pay()).code == "response-not-replayable"
    assert len(world.origin.seen) == 1


async def test_upload_that_breaks_off(tmp_path: Path) -> None:
    """If a client goes away in its body, the upstream sees that the body is not whole."""
    seen: list[bytes] = []
    has_come, has_ended = asyncio.Event(), asyncio.Event()

    class Reading(Origin):
        async def serve(self, reader: Reader, writer: Writer) -> None:
            data = b""
            while part := await reader.read(MEGABYTE):
                data += part
                if b"hello" in data:
                    has_come.set()
            seen.append(data)
            has_ended.set()
            writer.close()

    async with proxied(tmp_path, Reading()) as world, asyncio.timeout(HANG):
        for framing in (b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", b"Content-Length: 50\r\n\r\nhello"):
            has_come.clear()
            has_ended.clear()
            async with world.connected() as client:
                client.writer.write(b"POST / HTTP/1.1\r\nHost: shop\r\n" + framing)
                await has_come.wait()
            await has_ended.wait()
    assert all(each.endswith((b"5\r\nhello\r\n", b"hello")) for each in seen)


async def test_answer_that_breaks_off(tmp_path: Path) -> None:
    """If the upstream breaks off in its answer, the client sees that the answer is not whole."""

    async def half(seen: Seen, _reader: Reader, writer: Writer) -> None:
        is_chunked = seen.target == "/chunked"
        writer.write(b"HTTP/1.1 200 OK\r\n")
        writer.write(
            b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n" if is_chunked else b"Content-Length: 9\r\n\r\nhalf"
        )
        await writer.drain()
        writer.close()

    async with proxied(tmp_path, Origin(half)) as world, asyncio.timeout(HANG):
        for target in ("/chunked", "/length"):
            async with world.connected() as client:
                client.writer.write(request(BOB, method="GET", target=target, body=b""))
                got = await client.reader.read()
            assert b"half" in got
            assert not got.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_body_of_an_ignored_upgrade(tmp_path: Path, framing: str) -> None:
    """A request to upgrade to what is not known here does not leave its body to the next request, nor lose it."""
    smuggled = request("X-User: eve", method="DELETE", body=b"")
    lines = [BOB, "Connection: Upgrade", "Upgrade: h2c"]
    if framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
    else:
        lines.append(f"Content-Length: {len(smuggled)}")
    head = "\r\n".join(["POST / HTTP/1.1", "Host: h", *lines, "", ""]).encode()
    async with proxied(tmp_path) as world, asyncio.timeout(HANG):
        async with world.connected() as client:
            client.writer.write(head)
            await client.writer.drain()
            client.writer.write(smuggled)
            got = await client.got()
        await world.send(BOB, target="/next")
    assert got.status == (400 if framing == "chunked" else 201)
    whole = [(each.method, each.target, each.body) for each in world.origin.seen]
    assert whole == [*([] if framing == "chunked" else [("POST", "/", smuggled)]), ("POST", "/next", b"{}")]


async def test_websocket(tmp_path: Path, sockets: str) -> None:
    """A WebSocket passes both ways, with its protocol, its headers and its end."""
    async with proxied(tmp_path, upstream=sockets) as world, aiohttp.ClientSession() as session, asyncio.timeout(HANG):
        url = f"http://127.0.0.1:{world.port}"
        async with session.ws_connect(f"{url}/a?b", protocols=("chat",), headers={"X-User": "bob"}) as socket:
            assert socket.protocol == "chat"
            assert await socket.receive_str() == "bob1.1 semel/a?b"
            await socket.send_str("abc")
            assert await socket.receive_str() == "cba"
            await socket.send_bytes(bytes(range(256)) * 1000)
            assert await socket.receive_bytes() == bytes(range(256))[::-1] * 1000
            await socket.send_str("bye")
            await socket.receive()
            assert socket.close_code == 4001
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{url}/refused")
        assert refused.value.status == 401
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(url, headers=[("X-User", "bob"), ("X-User", "eve")])


async def test_pool(tmp_path: Path) -> None:
    """Connections to the upstream are used again, and there are no more than were allowed."""
    async with proxied(tmp_path, Origin(created), connections=2) as world, asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(world.send(BOB))
    assert len(world.origin.seen) == 20
    assert world.origin.connections <= 2


class Named(Origin):
    """An upstream that is known by a name with two addresses. The first is silent."""

    @property
    def url(self) -> str:
        return f"http://shop.example:{self.port}"

    async def resolved(self, *_: object, **__: object) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, self.port))
            for host in ("127.0.0.2", "127.0.0.1")
        ]


async def test_an_address_that_is_silent(tmp_path: Path) -> None:
    """Of a name with several addresses, one that does not answer is not waited for: the next is tried as well."""
    origin, loop = Named(), asyncio.get_running_loop()
    async with proxied(tmp_path, origin, connect_timeout=2) as world:
        with (
            socket.socket() as silent,
            socket.socket() as waiting,
            mock.patch.object(loop, "getaddrinfo", origin.resolved),
        ):
            silent.bind(("127.0.0.2", origin.port))
            silent.listen(0)
            waiting.connect(("127.0.0.2", origin.port))  # The queue is full, and what comes now is not answered.
            assert (await world.pay()).status == 201
            assert (await world.send(method="GET", target="/readyz", body=b"")).status == 200
