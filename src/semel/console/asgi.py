"""The console as an ASGI app, to be run by itself or mounted below a path. The pages are made in threads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from semel.console.access import Auth, Token, User, check_user
from semel.console.http import MAX_BODY, Request, Response, login_failed, placed, too_long, with_slash
from semel.console.site import Site
from semel.console.threads import AllBusy, Threads

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Console:
    """The console of one store. Nothing is shown until *auth* says who may see it."""

    def __init__(self, store: Any, *, auth: Auth = None, path: str = "") -> None:
        """Show *store*: a URL, or a store for threads. *auth* is a ``Token``, or a function (or a coroutine function)
        of the ASGI scope that returns a ``User`` or None. *path* is where it is served, if that is below a path and
        no framework has said so.
        """
        self.site = Site(store, auth)
        self._threads = Threads()
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; or begin and end with the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            response = await self._respond(scope, receive)
            if response is not None:
                await _send(send, response)
        else:
            await send({"type": "websocket.close", "code": 1000})

    def close(self) -> None:
        """Close the store, unless it was given."""
        self._threads.close()
        self.site.close()

    async def _respond(self, scope: Scope, receive: Receive) -> Response | None:
        """Return the answer; None: the client is gone, and nothing was done."""
        try:
            body = await _read(receive)
        except _Gone:
            return None
        if body is None:
            return too_long()
        path, base = placed(scope["path"], scope.get("root_path", "") + "/" + self._path)
        query = scope.get("query_string", b"").decode("latin-1")
        if base and path == "/" and not scope["path"].endswith("/"):
            return with_slash(base, query)
        if path.startswith("/static/"):
            return self.site.respond(Request(scope["method"], path, base))
        return await self._page(scope, path, base, query, body)

    async def _page(self, scope: Scope, path: str, base: str, query: str, body: bytes) -> Response:
        try:
            user = await self._user(scope)
        except Exception as error:  # noqa: BLE001 - it is the application's function
            return login_failed(error)
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            known = name.decode("latin-1").lower()
            headers[known] = f"{headers[known]}; {text}" if known == "cookie" and known in headers else text
        request = Request(
            scope["method"],
            path,
            base,
            query,
            headers,
            body,
            is_secure=scope.get("scheme") == "https",
            user=user,
        )
        try:
            return await self._threads.run(lambda: self.site.respond(request))
        except (AllBusy, TimeoutError) as error:
            return self.site.unanswered(request, error)

    async def _user(self, scope: Scope) -> User | None:
        auth = self.site.auth
        if auth is None or isinstance(auth, Token):
            return None
        found = auth(scope)
        return check_user(await found if inspect.isawaitable(found) else found)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await asyncio.to_thread(self.close)
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})


class _Gone(Exception):
    """The client is gone, and its form may have been cut off."""


async def _read(receive: Receive) -> bytes | None:
    """Return the body; None: it is too long. Raises ``_Gone`` for one that has no end."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        body += bytes(message.get("body", b""))
        if len(body) > MAX_BODY:
            return None
        if not message.get("more_body"):
            return body


async def _send(send: Send, response: Response) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
