"""The databases that the proxy's tests share with those of the other entry points, and an upstream with WebSockets."""

import aiohttp
import pytest
from aiohttp import web

from tests.web.conftest import shared_postgres_url

__all__ = ["shared_postgres_url"]


async def upstream_of_sockets(request: web.Request) -> web.StreamResponse:
    if request.path == "/refused":
        return web.Response(status=401)
    socket = web.WebSocketResponse(protocols=("chat",))
    await socket.prepare(request)
    await socket.send_str(request.headers["X-User"] + request.headers["Via"] + request.path_qs)
    async for message in socket:
        if message.type is aiohttp.WSMsgType.TEXT and message.data == "bye":
            await socket.close(code=4001)
        elif message.type is aiohttp.WSMsgType.TEXT:
            await socket.send_str(message.data[::-1])
        else:
            await socket.send_bytes(message.data[::-1])
    return socket


@pytest.fixture
async def sockets() -> object:
    """An upstream that speaks WebSocket."""
    app = web.Application()
    app.router.add_get("/{any:.*}", upstream_of_sockets)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
