"""An ASGI app's answer: held back until it is stored, or let through as it comes when it can't be kept."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from http import HTTPStatus

from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Message, Receive, lowered, reached_handler
from semel.core.commands import Answered, Raised, Streaming
from semel.core.message import Answer, Headers
from semel.core.replay import is_endless
from semel.door import Body, raised
from semel.errors import NoEffect
from semel.operation import Operation, begin
from semel.stores.step import Step

Answering = Answered | Streaming | Raised


class Response:
    """What the app answers. It is the app's ``send``."""

    _task: asyncio.Task[None]

    def __init__(self, operation: Operation, scope: ASGIScope, send: ASGISend, limit: int) -> None:
        """Hold up to *limit* bytes, the app running as *operation*."""
        loop = asyncio.get_running_loop()
        self._operation = operation
        self._scope = scope
        self._send = send
        self._limit = limit
        self._held: list[Message] = []
        self._size = 0
        self._status = 0
        self._headers: Headers = ()
        self._ended_as: Answering | None = None
        self._is_flowing = False
        #: Resolved when the answer has left, or never will: then what the app does after answering may begin.
        self._left: asyncio.Future[None] = loop.create_future()
        #: What came of the handler.
        self.ending = Step[Answering](loop=loop)
        self.answer: Answer | None = None

    def start(self, app: ASGIApp, receive: Receive) -> None:
        """Run *app* in a task of its own: whoever waits for the answer may be cancelled, and the handler not."""
        self._task = asyncio.get_running_loop().create_task(self._run(app, receive))

    async def __call__(self, message: Message) -> None:
        """Take one message of the app's."""
        if self._is_flowing:
            await self._send(message)
            return
        if self._left.done():
            # As a server's own send does (ASGI 2.4): an endless stream must learn that it has no listener.
            raise OSError("The client has gone.")
        kind = message["type"]
        if kind == "http.response.start":
            self._held.append(message)
            self._status, self._headers = message["status"], lowered(message.get("headers", ()))
            if is_endless(self._headers):
                await self._end(Streaming(self._status, self._headers))
        elif kind == "http.response.body":
            self._held.append(message)
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                await self._end(Streaming(self._status, self._headers))
            elif not message.get("more_body", False):
                await self._end(self._judged())
        # Interim answers and server extensions are about this connection, and none of them is kept.

    @property
    def is_flowing(self) -> bool:
        """Whether the answer goes straight to the client."""
        return self._is_flowing

    async def gone(self) -> None:
        """Wait until the answer has left or never will."""
        if not self._left.done():
            await asyncio.wait([self._left])

    async def flow_on(self) -> None:
        """Let the answer through as it comes: its tombstone is stored."""
        self._is_flowing = True
        for message in self._held:
            await self._send(message)
        self._held = []
        await self._app_end()

    async def has_been_sent(self, answer: Answer) -> None:
        """Let the app go on to what it does after answering; if another answer was sent instead, end it."""
        if answer is not self.answer and not isinstance(self._ended_as, Answered):
            self._task.cancel()
        await self._app_end()

    def release(self) -> None:
        """Hold the app back no longer."""
        if not self._left.done():
            self._left.set_result(None)

    def when_app_ends(self, call: Callable[[], None]) -> None:
        """Call *call* when the app has returned."""
        if self._task.done():
            call()
        else:
            self._task.add_done_callback(lambda _: call())

    async def _run(self, app: ASGIApp, receive: Receive) -> None:
        begin(self._operation)
        try:
            await app(self._scope, receive, self)
        except Exception as error:
            if self._ended_as is not None:
                raise
            self._settle(raised(error, self._operation))
        except BaseException:
            # The loop is ending: what the handler did is not known, and its lease decides.
            self.ending.abandon()
            raise
        else:
            if self._ended_as is None:
                unanswered = RuntimeError("The app returned without completing its response.")
                self._settle(raised(unanswered, self._operation))

    async def _end(self, ending: Answering) -> None:
        self._settle(ending)
        # What an app does after its answer (background tasks) comes after the answer, not before it is stored.
        await self._left

    def _settle(self, ending: Answering) -> None:
        self._ended_as = ending
        self.ending.settle(ending)

    def _judged(self) -> Answered | Raised:
        held = self._held
        body = held[1].get("body", b"") if len(held) == 2 else b"".join(each.get("body", b"") for each in held[1:])  # noqa: PLR2004 - a start and a body, as nearly always
        answer = self.answer = Answer(self._status, self._headers, bytes(body))
        error = sys.exc_info()[1]
        if isinstance(error, NoEffect) and answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            # The framework answers for it as for any error it doesn't know, and is about to raise it on.
            return raised(error, self._operation)
        no_effect = isinstance(error, NoEffect) or self._operation.has_no_effect
        return Answered(answer, reached_handler(self._scope, answer.status, error), no_effect)

    async def _app_end(self) -> None:
        self.release()
        try:
            await self._task
        except asyncio.CancelledError:
            if not self._task.cancelled():
                raise


class Replayed:
    """The app's ``receive``: the body that was read already, then nothing until the answer has left.

    A client that hangs up does not end a guarded request, so the app is not told of it: it would stop half-way.
    """

    __slots__ = ("_chunks", "_receive", "_response")

    def __init__(self, body: Body, response: Response, receive: Receive) -> None:
        """Give *body* out again, then what *receive* has once the answer flows."""
        self._chunks = body.chunks()
        self._response = response
        self._receive = receive

    async def __call__(self) -> Message:
        """Give the app its next message."""
        for chunk, more in self._chunks:
            return {"type": "http.request", "body": chunk, "more_body": more}
        await self._response.gone()
        if self._response.is_flowing:
            return await self._receive()
        return {"type": "http.disconnect"}
