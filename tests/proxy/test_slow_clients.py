"""What clients get that are slow, silent, or very many; and what the others get meanwhile."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from semel.proxy.protocol import MAX_PIPELINED
from tests.proxy.kit import BOB, HANG, KEY, Client, Origin, Seen, World, created, proxied, request
from tests.proxy.test_processes import Held
from tests.proxy.test_streams import MEGABYTE, Reader, Writer

HEAD = b"POST /pay HTTP/1.1\r\nHost: shop\r\nX-User: bob\r\n"
#: Seconds that a client may take. Nothing here depends on how long they are.
SOON = 0.2


async def is_closed(client: Client) -> None:
    """Wait for the end of a connection on which nothing was answered."""
    async with asyncio.timeout(HANG):
        with suppress(ConnectionResetError):
            assert await client.reader.read() == b""


async def one_is_closed(world: World) -> None:
    """Wait for as long as a client may take."""
    async with world.connected() as silent:
        await is_closed(silent)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HEAD,
        b"\r\n",
        HEAD + b"Content-Length: 9\r\n\r\n{",
        HEAD + b"Idempotency-Key: a\r\nContent-Length: 9\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=["nothing", "half a head", "an empty line", "half a body", "half a guarded body", "some chunks"],
)
async def test_a_client_that_falls_silent(tmp_path: Path, sent: bytes) -> None:
    """A client that does not go on with its request is waited for only so long; the next request is served."""
    async with proxied(tmp_path, client_timeout=SOON) as world:
        async with world.connected() as client:
            client.writer.write(sent)
            await is_closed(client)
        assert (await world.pay()).status == 201
        assert len(await world.records()) == 1


async def test_a_head_that_comes_byte_by_byte(tmp_path: Path) -> None:
    """The time is for the whole head: a byte now and then does not hold a connection."""
    async with proxied(tmp_path, client_timeout=SOON) as world, world.connected() as client, asyncio.timeout(HANG):
        client.writer.write(HEAD + b"X-More: ")
        end = asyncio.create_task(is_closed(client))
        while not end.done():
            client.writer.write(b"a")
            await asyncio.wait({end}, timeout=SOON / 20)
        await end


async def test_who_is_not_waited_for(tmp_path: Path, sockets: str) -> None:
    """A client that waits for its answer, or listens to a stream or a WebSocket, may be silent for long."""
    origin, more = Held(), asyncio.Event()

    async def events(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await more.wait()
        writer.write(b"data: 2\n\n")

    async with (
        proxied(tmp_path, origin, client_timeout=SOON) as world,
        proxied(tmp_path, Origin(events), client_timeout=SOON) as streaming,
        proxied(tmp_path, upstream=sockets, client_timeout=SOON) as socketed,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{socketed.port}/", headers={"X-User": "bob"}) as websocket,
        streaming.connected() as client,  # Last: it is waited for from here on.
        asyncio.timeout(HANG),
    ):
        waiting = [asyncio.create_task(world.pay()), asyncio.create_task(world.send(BOB))]
        client.writer.write(request(BOB, method="GET", body=b""))
        await client.reader.readuntil(b"data: 1\n\n")
        await websocket.receive_str()
        await asyncio.gather(*map(one_is_closed, (world, streaming, socketed)))
        origin.go.set()
        more.set()
        await websocket.send_str("abc")
        assert [each.status for each in await asyncio.gather(*waiting)] == [201, 201]
        assert await client.reader.readuntil(b"data: 2\n\n")
        assert await websocket.receive_str() == "cba"


def much(size: int) -> Origin:
    async def answer(seen: Seen, reader: Reader, writer: Writer) -> None:
        if seen.method == "GET":
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode() + bytes(size))
        else:
            await created(seen, reader, writer)

    return Origin(answer)


async def test_clients_that_take_nothing(tmp_path: Path) -> None:
    """Clients that ask for much and do not read it keep no guarded request out, and others only for a time."""
    async with (
        proxied(tmp_path, much(16 * MEGABYTE), connections=2, connect_timeout=5, client_timeout=0.5) as world,
        world.connected() as greedy,
    ):
        greedy.writer.write(request(BOB, method="GET", body=b""))
        while not world.origin.seen:  # noqa: ASYNC110 - the upstream has no event
            await asyncio.sleep(0)
        assert (await world.pay()).status == 201
        assert (await world.send(BOB)).status == 201
    assert len(world.origin.seen) == 3


async def test_a_client_that_sends_little(tmp_path: Path) -> None:
    """A client that takes its time with a body is not taken for an upstream that is silent."""

    async def answer(seen: Seen, reader: Reader, writer: Writer) -> None:
        if seen.target == "/silent":
            await reader.read()
        else:
            await created(seen, reader, writer)

    async with proxied(tmp_path, Origin(answer), timeout=SOON) as world, world.connected() as client:
        client.writer.write(HEAD + b"Content-Length: 2\r\n\r\n{")
        for _ in range(2):
            assert (await world.send(BOB, target="/silent")).status == 504
        client.writer.write(b"}")
        assert (await client.got()).status == 201


@pytest.mark.slow
async def test_a_client_that_takes_little(tmp_path: Path) -> None:
    """A client that takes its answer slowly gets all of it, however long that takes."""
    size = 8 * MEGABYTE
    async with proxied(tmp_path, much(size), client_timeout=1) as world:
        # What the kernel keeps for a client that reads slowly is taken, too; here that is little.
        taker = socket.socket()
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        taker.connect(("127.0.0.1", world.port))
        reader, writer = await asyncio.open_connection(sock=taker, limit=1024)
        writer.write(request(BOB, method="GET", body=b""))
        await reader.readuntil(b"\r\n\r\n")
        left = size
        for _ in range(20):
            left -= len(await reader.readexactly(16_384))
            await asyncio.sleep(0.2)
        assert len(await reader.readexactly(left)) == left
        writer.close()


async def test_too_many_connections(tmp_path: Path) -> None:
    """Past the limit, the connection that waits for its client for longest is closed, and a new one is served."""
    async with proxied(tmp_path, client_connections=3) as world:
        idle = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(3)]
        for number in range(3):
            idle.append(await asyncio.open_connection("127.0.0.1", world.port))
            await is_closed(Client(*idle[number]))
        assert (await world.send(BOB)).status == 201
        for _, writer in idle:
            writer.close()


async def test_too_many_requests_at_once(tmp_path: Path) -> None:
    """Where all connections have a request, none of them is closed for a new one."""
    origin = Held()
    async with proxied(tmp_path, origin, client_connections=2) as world, asyncio.timeout(HANG):
        busy = [asyncio.create_task(world.send(BOB)) for _ in range(2)]
        while len(origin.seen) < 2:  # noqa: ASYNC110 - the upstream has one event
            await asyncio.sleep(0)
        await one_is_closed(world)
        origin.go.set()
        assert [(await each).status for each in busy] == [201, 201]


async def test_too_many_pipelined(tmp_path: Path) -> None:
    """Of requests that are sent before the first is answered, only so many wait; what is behind them is not read."""
    origin = Held()
    async with proxied(tmp_path, origin) as world, world.connected() as client, asyncio.timeout(HANG):
        client.writer.write(request(KEY, BOB) + request(method="GET", body=b"") * 500)
        await origin.arrived.wait()
        origin.go.set()
        got = (await client.reader.read()).count(b"HTTP/1.1 201")
    assert got == len(origin.seen) == MAX_PIPELINED + 1
