"""The proxy as an ASGI app: what checks a request, the guard, and what forwards. The guard is ``semel.asgi``'s own.

A forwarded request ends in one of three ways. It was answered; or nothing was sent, and the key is freed; or the
upstream was lost after it was sent, and the outcome is unknown: the operation is parked, and is not sent again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cache, lru_cache
from http import HTTPStatus
from typing import Any

import aiohttp

from semel.asgi import IdempotencyMiddleware
from semel.asgi.protocol import OPERATION, ASGIApp, ASGIScope, ASGISend, Message, Receive, send_answer
from semel.core.decision import RETRY_AFTER_SECONDS
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.replay import may_be_endless
from semel.errors import (
    BodyIncomplete,
    IdentityRefused,
    Refusal,
    RequestAmbiguous,
    ShuttingDown,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from semel.operation import Operation
from semel.proxy.answers import UPSTREAMS, Cors, Leaving
from semel.proxy.headers import NO_EFFECT, Framing, HeaderRules, Peer, incoming, is_replay, says_no_effect
from semel.proxy.health import Health
from semel.proxy.link import Link
from semel.proxy.scope import Peers
from semel.proxy.upstream import Upstream
from semel.telemetry.logs import logger

#: Where the forwarder finds how long the body of a request is; and whether its target ends with a ``?``, of which a
#: server says nothing.
FRAMING = "semel.proxy.framing"
EMPTY_QUERY = "semel.proxy.empty_query"

#: What a gateway says that has lost a server of its own: it is not known what that server has done.
_GATEWAY_LOST = frozenset({502, 504})
#: Seconds between two looks at whether clients are still there, and the upstream too silent. Most requests have ended
#: before the first.
_LOOK_EVERY = 1.0
_HTTP_DISCONNECT = "http.disconnect"

#: How many addresses that are not trusted are told of.
_MAX_STRANGERS = 100

#: Of WebSockets: RFC 6455.
_GOING_AWAY = 1001
_UPSTREAM_ERROR = 1014


class Proxy:
    """Everything that a request passes, from the server on."""

    def __init__(
        self,
        guard: IdempotencyMiddleware,
        forwarder: Forwarder,
        rules: HeaderRules,
        peers: Peers,
        health: Health,
        *,
        cors: Cors | None = None,
    ) -> None:
        self.guard = guard
        self.health = health
        self._forwarder = forwarder
        self._rules = rules
        self._peers = peers
        self._cors = cors
        self._policy = forwarder.policy
        self._strangers: set[str | None] = set()
        self._peer = lru_cache(maxsize=1024)(self._peer_at)

    def drain(self) -> None:
        """Take on no guarded request any more, and say so to who asks whether this proxy is ready."""
        self.guard.drain()

    def give_up(self) -> None:
        """Wait no longer for the upstream: this process is about to end."""
        self._forwarder.give_up()

    async def __call__(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Serve one connection of the server's."""
        kind = scope["type"]
        if kind == "lifespan":
            await self.guard(scope, receive, send)
            return
        if kind == "http":
            send = Leaving(send, scope["headers"], self._cors)
            answer = await self.health.answer(scope)
            if answer is not None:
                await send_answer(send, answer, is_ours=True)
                return
        client = scope.get("client")
        peer = self._peer(client[0] if client else None, scope["scheme"])
        try:
            # Before anything is stored: who has sent it is known now, and not when it is run later.
            scope[FRAMING], scope["headers"] = self._rules.received(scope["headers"], peer, scope["http_version"])
            if not target_of(scope).startswith("/"):
                raise RequestAmbiguous("The target of a request is a path.")
        except Refusal as refusal:
            self._tell(peer, refusal)
            await self._refuse(scope, receive, send, refusal)
            return
        try:
            await self.guard(scope, receive, send)
        except asyncio.CancelledError:
            # By the server, as the last thing it does. What was forwarded is given up by then.
            if isinstance(send, Leaving) and not send.has_begun:
                await self._refuse(scope, receive, send, ShuttingDown(retry_after=RETRY_AFTER_SECONDS))

    def _peer_at(self, address: str | None, scheme: str) -> Peer:
        return Peer(address, self._peers.trusts(address), _SCHEMES[scheme])

    def _tell(self, peer: Peer, refusal: Refusal) -> None:
        """Say once of an address that it is not trusted: that may be a mistake in what is set."""
        is_stranger = isinstance(refusal, IdentityRefused) and not peer.is_trusted and peer.address is not None
        if is_stranger and peer.address not in self._strangers and len(self._strangers) < _MAX_STRANGERS:
            self._strangers.add(peer.address)
            logger.warning("%s names users and is not trusted: it is refused. If it may, give --trusted.", peer.address)

    async def _refuse(self, scope: ASGIScope, receive: Receive, send: ASGISend, refusal: Refusal) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": _GOING_AWAY})
            return
        answer = refused(refusal, self._policy)
        # What follows on this connection could be part of what was misread.
        framed = [*answer.headers, (b"content-length", b"%d" % len(answer.body or b"")), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": answer.status, "headers": framed})
        await send({"type": "http.response.body", "body": answer.body})


#: That of the request, or that by which a WebSocket began.
_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


def target_of(scope: ASGIScope) -> str:
    """Return path and query as they were sent, byte for byte."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return (raw + b"?" + query if query or EMPTY_QUERY in scope else raw).decode("latin-1")


class Forwarder:
    """The ASGI app that forwards. It is inside of the guard, or has a request that is not guarded."""

    def __init__(
        self,
        upstream: Upstream,
        rules: HeaderRules,
        policy: Policy,
        timeout: timedelta,
        no_effect: Collection[int] = (),
    ) -> None:
        """Forward to *upstream*, and wait for *timeout* without hearing from it.

        By a status of *no_effect* it says that it has done nothing.
        """
        self._upstream = upstream
        self._rules = rules
        self.policy = policy
        self._timeout = timeout.total_seconds()
        self._no_effect = no_effect
        self._under_way: set[Exchange] = set()
        #: One for all of them: a timer for each would cost more than what it sees.
        self._timer: asyncio.TimerHandle | None = None

    def give_up(self) -> None:
        """Wait no longer for answers: their upstream is as good as lost."""
        for each in list(self._under_way):
            each.give_up()

    async def __call__(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Forward one request, or one WebSocket."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await self._bridge(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _live(self, receive: Receive, send: ASGISend) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._upstream.open()
            else:
                if self._timer is not None:
                    self._timer.cancel()
                await self._upstream.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _forward(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        operation: Operation | None = scope.get(OPERATION)
        exchange = Exchange(self._upstream, receive, send, self._timeout)
        # A stored request, which a worker of this process runs, was checked when it came.
        framing = scope.get(FRAMING) or Framing(_length(scope["headers"]))
        attempt = None if operation is None else operation.attempt
        headers = self._rules.outgoing(scope["headers"], attempt=attempt)
        self._under_way.add(exchange)
        if self._timer is None:
            self._look_later()
        try:
            try:
                await exchange.run(scope["method"], target_of(scope), headers, framing, self._judge(operation))
            finally:
                self._under_way.discard(exchange)
        except (UpstreamUnreachable, UpstreamLost, BodyIncomplete) as refusal:
            await self._failed(send, exchange, operation, refusal)

    def _look_later(self) -> None:
        every = min(_LOOK_EVERY, self._timeout)
        self._timer = asyncio.get_running_loop().call_later(every, self._look)

    def _look(self) -> None:
        self._timer = None
        for each in list(self._under_way):
            each.look()
        if self._under_way:
            self._look_later()

    def _judge(self, operation: Operation | None) -> _Judge | None:
        return None if operation is None else _Judge(operation, self.policy, self._no_effect)

    async def _failed(self, send: ASGISend, exchange: Exchange, operation: Operation | None, refusal: Refusal) -> None:
        """Answer for what was not answered; or end half-way, so that the client sees that something is missing."""
        # Of the error its kind alone: its words may quote the address of a request, with what is in its query.
        logger.warning("Upstream: %s (%s)", refusal.slug, type(refusal.__cause__ or refusal).__name__)
        if operation is None:
            if not exchange.has_begun:
                await send_answer(send, refused(refusal, self.policy), is_ours=True)
        elif operation.story.is_over:
            return  # Its answer is a stream, which has begun and is known not to be kept.
        elif isinstance(refusal, UpstreamLost) and self.policy.on_crash == "refuse":
            await operation.park("upstream")
            raise refusal
        else:
            # Nothing of it was sent; or it may be sent again, since the policy says so.
            operation.is_freed = True
            operation.no_effect()
            await send_answer(send, refused(refusal, self.policy), is_ours=True)

    async def _bridge(self, scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
        """Pass the messages of a WebSocket on, in both directions, until one side closes it."""
        await receive()  # websocket.connect
        headers = [pair for pair in self._rules.outgoing(scope["headers"]) if not pair[0].startswith(b"sec-websocket-")]
        try:
            socket = await self._upstream.connect(target_of(scope), headers, scope.get("subprotocols", ()))
        except aiohttp.WSServerHandshakeError as error:
            await _deny(scope, send, error.status)
            return
        except UpstreamUnreachable:
            await _deny(scope, send, HTTPStatus.BAD_GATEWAY)
            return
        async with socket:
            await send({"type": "websocket.accept", "subprotocol": socket.protocol})
            upward = asyncio.create_task(_upward(receive, socket))
            try:
                with suppress(OSError):  # Of a client that has gone.
                    await _downward(socket, send, upward)
            finally:
                upward.cancel()
                await asyncio.gather(upward, return_exceptions=True)


class _Judge:
    """What the beginning of an answer says of a guarded operation."""

    def __init__(self, operation: Operation, policy: Policy, no_effect: Collection[int]) -> None:
        self._operation = operation
        self._policy = policy
        self._no_effect = no_effect

    def __call__(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Look at an answer before it is kept."""
        if is_replay(headers):
            # The upstream keeps this key by itself, so it is not kept here: its rules apply, and a retry is its own.
            self._operation.is_freed = True
        elif says_no_effect(headers) or status in self._no_effect:
            self._operation.no_effect()
        elif status in _GATEWAY_LOST and (self._policy.server_errors, self._policy.on_crash) == ("auto", "refuse"):
            raise UpstreamLost from RuntimeError(f"it answered {status}")
        elif status == HTTPStatus.SERVICE_UNAVAILABLE and self._policy.server_errors == "auto":
            _tell_of_kept_503()


@cache
def _tell_of_kept_503() -> None:
    """Say once that a 503 is kept: it may be meant as "later", or have come after half of the work."""
    logger.warning(
        "The upstream answered 503 to a request with a key: it is stored, and every retry gets it. If the upstream has "
        "done nothing then, have it send %s: true, or set no_effect = [503] under [proxy].",
        NO_EFFECT.decode(),
    )


class Exchange:
    """One request to the upstream, and its answer, as they stream."""

    def __init__(self, upstream: Upstream, receive: Receive, send: ASGISend, timeout: float) -> None:
        """Take the body by *receive*, and give the answer by *send*."""
        self._upstream = upstream
        self._receive = receive
        self._send = send
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._ear: asyncio.Task[None] | None = None
        self._has_body = True
        #: The client's turn: it is to send more of its body, and the server sees to how long that takes.
        self._is_asking = False
        self._is_gone = self._is_given_up = self._is_stopped = False
        #: An answer has begun.
        self.has_begun = False

    async def run(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], framing: Framing, judge: _Judge | None
    ) -> None:
        """Forward the request, and its answer, unless its client goes away."""
        self._heard = self._loop.time()
        response: Link | None = None
        try:
            async with asyncio.timeout(None) as self._clock:
                body = await self._body(headers, framing)
                self._wind()
                response = await self._upstream.send(method, target, headers, body, is_guarded=judge is not None)
                await self._answer(response, method, judge)
        except TimeoutError:
            if self._is_given_up:
                raise UpstreamLost from None
            if not self._is_gone:
                raise UpstreamTimeout from None
        except (UpstreamLost, BodyIncomplete):
            if not self._is_gone:
                raise
        finally:
            if self._ear is not None:
                self._ear.cancel()
            if response is not None:
                self._upstream.finish(response)

    def give_up(self) -> None:
        """Wait no longer, unless the answer has come and is on its way to the client, or to the store."""
        if self._heard != math.inf:
            self._is_given_up = True
            self._stop()

    async def _body(self, headers: list[tuple[bytes, bytes]], framing: Framing) -> bytes | AsyncIterator[bytes] | None:
        """Return the body: all of it where it is there already, else a stream."""
        if framing.is_empty:
            self._has_body = False
            return None
        message = await self._receive()
        first = self._part(message)
        if not message.get("more_body", False):
            self._has_body = False
            if framing.length is not None and len(first) != framing.length:
                raise BodyIncomplete
            return first
        if framing.length is not None:
            headers.append((b"content-length", b"%d" % framing.length))
        return self._stream(first, framing)

    async def _stream(self, first: bytes, framing: Framing) -> AsyncIterator[bytes]:
        size = len(first)
        if first:
            yield first
        more = True
        while more:
            self._is_asking = True
            message = await self._receive()
            self._is_asking = False
            self._wind()
            part, more = self._part(message), message.get("more_body", False)
            size += len(part)
            if part:
                yield part
        self._has_body = False
        if framing.length is not None and size != framing.length:
            # What is missing would be taken from the next request on the connection.
            raise BodyIncomplete

    def _part(self, message: Message) -> bytes:
        if message["type"] == _HTTP_DISCONNECT:
            self._is_gone = True
            raise BodyIncomplete
        part: bytes = message.get("body", b"")
        return part

    async def _answer(self, response: Link, method: str, judge: _Judge | None) -> None:
        headers = incoming(response.status, response.headers)
        if judge is not None:
            judge(response.status, response.headers)
        if may_be_endless(headers):
            self._timeout = math.inf  # Silence is no fault of a stream.
        self._wind()
        left = _length(headers) if method != "HEAD" else None
        self.has_begun = judge is None
        await self._send({"type": "http.response.start", "status": response.status, "headers": [*headers, UPSTREAMS]})
        while chunk := await response.more():
            if left is not None:
                left -= len(chunk)
            self._heard = math.inf  # The client may take its time, and so may the store.
            # The last of it is said to be the last, or a client would get it in two pieces.
            await self._send({"type": "http.response.body", "body": chunk, "more_body": left != 0})
            if left == 0:
                return
            self._wind()
            if self._ear is None:
                self._watch()
        self._heard = math.inf
        await self._send({"type": "http.response.body", "body": b""})

    def _wind(self) -> None:
        """Begin to wait anew: something was heard."""
        self._heard = self._loop.time()

    def look(self) -> None:
        """See whether the upstream has been silent for too long, or the client has gone meanwhile."""
        if not self._is_asking and self._heard + self._timeout <= self._loop.time():
            self._stop()
        else:
            self._watch()

    def _stop(self) -> None:
        """End the exchange where it is."""
        if not self._is_stopped:
            self._is_stopped = True
            self._clock.reschedule(self._loop.time())

    def _watch(self) -> None:
        """Notice if the client goes away. Not before its body is read: that is asked for by the same call."""
        if self._ear is None and not self._has_body:
            self._ear = self._loop.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != _HTTP_DISCONNECT:
            pass
        self._is_gone = True
        self._stop()


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    return next((int(each) for name, each in headers if name == b"content-length" and each.isdigit()), None)


async def _deny(scope: ASGIScope, send: ASGISend, status: int) -> None:
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    await send({"type": "websocket.http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "websocket.http.response.body", "body": b""})


async def _upward(receive: Receive, socket: aiohttp.ClientWebSocketResponse) -> None:
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            await socket.close(code=_closing(message.get("code")))
            return
        if message.get("text") is not None:
            await socket.send_str(message["text"])
        else:
            await socket.send_bytes(message["bytes"])


async def _downward(socket: aiohttp.ClientWebSocketResponse, send: ASGISend, upward: asyncio.Task[Any]) -> None:
    async for message in socket:
        if message.type is aiohttp.WSMsgType.TEXT:
            await send({"type": "websocket.send", "text": message.data})
        elif message.type is aiohttp.WSMsgType.BINARY:
            await send({"type": "websocket.send", "bytes": message.data})
    if not upward.done():
        await send({"type": "websocket.close", "code": _closing(socket.close_code)})


def _closing(code: int | None) -> int:
    """Return *code* as it may be sent: some are only seen, never sent."""
    return code if code is not None and code not in {1005, 1006, 1015} else _UPSTREAM_ERROR if code == 1006 else 1000  # noqa: PLR2004 - RFC 6455


__all__ = ["ASGIApp", "Exchange", "Forwarder", "Proxy"]
