"""One run of an ASGI app, in a task of its own, and its answer: held back until it is stored, or let through.

The server's task may be cancelled when the client hangs up; a handler that is half-way may not. What becomes of the
answer is decided by a flow, which waits for the ending in the server's task (``ports.py``).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Message, Receive, lowered, reached_handler, send_answer
from semel.core.handler import Ending, Lost, RunHandler
from semel.core.message import Answer, Headers
from semel.errors import InProgress, NoEffect, StoreError
from semel.flows.reply import Reply, Reraise, Send
from semel.guard.body import Body, flows_at_once
from semel.guard.endings import answered, raised, streaming
from semel.operation import Operation, begin
from semel.stores.step import Step

#: The apps of servers that have gone. A loop holds its tasks weakly, so they are held here.
_detached: set[asyncio.Task[None]] = set()

_GONE = "The client has gone."


class _Gone(OSError):
    """There is no client to send to."""


class AppRun:
    """What the app does and answers. It is the app's ``send``: the last message of the answer is its ending.

    Until it is told to hold the answer back, it lets everything through.
    """

    _task: asyncio.Task[None]
    #: Settled when the app has returned, with what the server is to know.
    done: Step[None]
    #: What it holds the answer back for.
    operation: Operation | None = None
    _run: RunHandler
    #: Settled when the answer is whole, or known not to be kept, or when there will be none.
    _ending: Step[Ending]

    def __init__(self, send: ASGISend, on_killed: Callable[[], Awaitable[None]]) -> None:
        """Send what leaves by *send*; call *on_killed* where the app's task is killed in the middle."""
        self._send = send
        self._on_killed = on_killed
        self._held: list[Message] = []
        self._size = 0
        self._status = 0
        self._headers: Headers = ()
        self._answer: Answer | None = None
        self._waiters: list[asyncio.Future[None]] = []
        #: The ending is known.
        self.has_ended = False
        #: The answer has left, or never will.
        self._has_left = False
        #: What the app's own ``send`` raises then.
        self._failure: Exception | None = None
        #: No task serves the connection any more.
        self._is_detached = False
        #: Another answer was sent in place of the app's.
        self._is_overruled = False
        #: An error goes on to the server, behind an answer of ours: what is made of it on the way is not sent.
        self._is_reraised = False
        #: Why the server could not send the answer.
        self._undelivered: OSError | None = None
        #: The answer goes straight to the client.
        self.is_flowing = True
        #: An answer has begun, of the app's or of ours.
        self.has_begun = False
        #: When an answer that is still not whole is sent as it comes; and what sees to that, beside the app.
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: That time is over, and what was held back is sent beside the app, which may be long in sending more.
        self._is_beside = False

    def start(self, app: ASGIApp, scope: ASGIScope, receive: Receive, body: Body) -> None:
        """Run *app* in a task of its own, and close the request's *body* behind it."""
        self._scope = scope
        loop = asyncio.get_running_loop()
        self.done = Step(loop=loop)
        self._task = loop.create_task(self._run_app(app, receive, body))

    def hold_back(self, operation: Operation, run: RunHandler) -> Step[Ending]:
        """Keep the answer from now on, and return what is settled with the ending. The app has not begun to answer."""
        self.operation, self._run = operation, run
        self.is_flowing = False
        self._ending = Step(loop=asyncio.get_running_loop())
        return self._ending

    def judge_by(self, limit: int) -> None:
        """Keep at most *limit* bytes of the answer, from now on."""
        run = self._run
        self._run = RunHandler(run.hold, run.lease, limit, run.progress, run.request, run.max_response_time)

    async def overrule(self, answer: Answer) -> None:
        """Send *answer*, and nothing that the app may answer afterwards."""
        self.is_flowing = False
        self.has_ended = self._is_overruled = True
        try:
            await self._send_answer(answer, is_ours=True)
        finally:
            self._let_go()

    def detach(self) -> None:
        """Say that no task serves the connection any more.

        A stream ends, for it has no listener. All else goes on: a retry will be given the answer, and will do nothing.
        """
        self._is_detached = True
        if self.is_flowing:
            self._task.cancel()
        else:
            _detached.add(self._task)
            self._task.add_done_callback(_detached.discard)

    def kill(self) -> None:
        """End the app where it is: what runs the flow was killed."""
        self._task.cancel()

    def lose(self) -> None:
        """Stop: another worker has the operation."""
        if self.operation is not None and not self.has_ended:
            self.operation.story.is_lost = True
            self._task.cancel()

    async def give(self, reply: Reply) -> None:
        """Let the client have *reply*, which is what became of the app's ending."""
        try:
            if isinstance(reply, Send):
                is_the_apps = reply.answer is self._answer
                self._is_overruled = not is_the_apps
                await self._send_answer(reply.answer, is_ours=not is_the_apps)
            elif isinstance(reply, Reraise):
                # The answer first, so that this client and its retries see the same. Then the error goes on to what
                # reports errors: it looks whether a response has begun, and doesn't begin another.
                if reply.answer is not None:
                    self._is_reraised = True
                    await self._send_answer(reply.answer, is_ours=True)
                raise reply.error  # noqa: TRY301 - as below
            else:
                await self._let_through()
        except Exception as error:  # noqa: BLE001 - the app is told, and so is its server
            self._failure = error
            if self._is_beside:
                self._task.cancel()
        finally:
            self._let_go()

    async def is_sent(self) -> None:
        """Wait until the answer has left or never will."""
        if not self._has_left:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    async def __call__(self, message: Message) -> None:
        """Take one message of the app's."""
        if self.has_ended:
            await self.is_sent()  # What was held back leaves first.
        if self.is_flowing:
            self.has_begun = self.has_begun or message["type"] == "http.response.start"
            await self._send(message)
            return
        if self.operation is None or self._is_reraised:
            return  # Another answer has been given.
        if self.has_ended:
            # As a server's own send does (ASGI 2.4): an endless stream must learn that it has no listener.
            raise _Gone(_GONE)
        ending = self._taken(self.operation, message)
        if ending is not None:
            await self._end(self.operation, ending)
            await self.is_sent()
            if self._failure is not None:
                raise self._failure

    def _taken(self, operation: Operation, message: Message) -> Ending | None:
        """Keep *message*; return how the app ended, if it is known now."""
        kind = message["type"]
        if kind == "http.response.start":
            # Copied, here and below: what is sent is the app's again, and its headers may be ones that are read once.
            self._held.append({**message, "headers": list(message.get("headers", ()))})
            self._status, self._headers = message["status"], lowered(self._held[-1]["headers"])
            if flows_at_once(self._headers, operation, self._run.max_response_time):
                return streaming(self._status, self._headers, operation)
            if self._run.max_response_time is not None and b"content-length" not in dict(self._headers):
                self._is_late(operation)  # A stream, most likely: its time begins now.
        elif kind == "http.response.body":
            self._held.append({**message})
            self._size += len(message.get("body", b""))
            if not message.get("more_body", False) and self._size <= self._run.limit:
                # What an app does after its answer (background tasks) comes after this: the answer is stored and sent.
                return self._judged(operation)
            if self._size > self._run.limit or self._is_late(operation):
                return streaming(self._status, self._headers, operation)
        # Interim answers and server extensions are about this connection, and none of them is kept.
        return None

    def _is_late(self, operation: Operation) -> bool:
        """Whether an answer of which more is to come has been held back for too long."""
        if self._run.max_response_time is None:
            return False
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._run.max_response_time.total_seconds()
            if self._run.lease is not None:
                # Its next part may be long in coming. Not in atomic mode: the app may be using the very connection
                # that would be committed on, so the time is looked at when the app sends something.
                self._timer = loop.call_at(self._deadline, self._let_flow, operation)
        return loop.time() >= self._deadline and not operation.story.is_used

    def _let_flow(self, operation: Operation) -> None:
        """Have what was held back sent, beside the app: the time is over."""
        # What takes steps while it answers may take more of them: it is not done, and can't be said to be.
        if not self.has_ended and not operation.story.is_used:
            self.has_ended = self._is_beside = True
            self._ending.settle(streaming(self._status, self._headers, operation))

    async def _end(self, operation: Operation, ending: Ending) -> None:
        """Say how the app ended, to the flow that waits for it."""
        self.has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if operation.story.running is not None:
            await operation.tie_up()
        self._ending.settle(ending)

    async def _run_app(self, app: ASGIApp, receive: Receive, body: Body) -> None:
        if self.operation is not None:
            begin(self.operation)
        try:
            await self._run_to_its_end(app, receive)
        except Exception as error:  # noqa: BLE001 - it goes on to the server
            # That a client has gone is no error, and its server knows: it has gone itself.
            is_known = self._is_detached and (isinstance(error, _Gone) or isinstance(error.__context__, _Gone))
            self.done.settle(None if is_known else error)
        except BaseException:
            if self._failure is None:
                self.done.abandon()
                if self.operation is not None and not self.has_ended:
                    self._ending.abandon()
                    await self._on_killed()
                raise
            # It was not the server who cancelled this task, and it is told why: unless it has gone itself.
            self._task.uncancel()
            self.done.settle(None if self._is_detached else self._failure)
        else:
            self.done.settle(self._undelivered)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            # Each would hold the other until the garbage collector comes.
            del self._on_killed
            body.close()

    async def _run_to_its_end(self, app: ASGIApp, receive: Receive) -> None:
        try:
            await app(self._scope, receive, self)
        except asyncio.CancelledError:
            if self.operation is None or self.has_ended or not self.operation.story.is_lost:
                raise
            # It was not the server who cancelled this task, and an answer is still to be sent.
            self._task.uncancel()
            await self._end(self.operation, Lost())
        except Exception as error:
            if self.operation is None or self.has_ended:
                if self._is_overruled:
                    return
                if self.operation is not None:
                    await self.is_sent()
                raise
            await self._end(self.operation, raised(error, self.operation))
        if self.operation is None:
            return
        if not self.has_ended:
            unanswered = RuntimeError("The app returned without completing its response.")
            await self._end(self.operation, raised(unanswered, self.operation))
        await self.is_sent()
        if self._failure is not None:
            raise self._failure

    async def _let_through(self) -> None:
        """Send what was held back, and all that follows as it comes."""
        if self._is_detached:
            raise _Gone(_GONE)
        self.is_flowing = True
        for message in self._held:
            await self._send(message)
        self._held = []

    async def _send_answer(self, answer: Answer, *, is_ours: bool) -> None:
        if self._is_detached:
            return
        try:
            await send_answer(self._send, answer, is_ours=is_ours)
        except OSError as error:
            # The client has gone, and the answer is stored: that is for the server to know. The app has answered, and
            # what it does afterwards (a background task) will not be done by a retry.
            self._undelivered = error

    def _let_go(self) -> None:
        self._has_left = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _judged(self, operation: Operation) -> Ending:
        parts = [message.get("body", b"") for message in self._held[1:]]
        answer = self._answer = Answer(self._status, self._headers, parts[0] if len(parts) == 1 else b"".join(parts))
        error = sys.exc_info()[1]
        is_ours = isinstance(error, NoEffect | StoreError | InProgress) or operation.story.is_used
        if isinstance(error, Exception) and is_ours and answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            # The framework answers for it as for any error it doesn't know, and is about to raise it on.
            return raised(error, operation)
        is_reached = reached_handler(self._scope, answer.status, error)
        return answered(answer, operation, reached_handler=is_reached, no_effect=isinstance(error, NoEffect))


class Taken:
    """The app's ``receive``: the body that was read already, then nothing until the answer has left.

    A client that hangs up does not end a guarded request, so the app is not told of it: it would stop half-way.
    """

    __slots__ = ("_chunks", "_receive", "_run")

    def __init__(self, body: Body, receive: Receive, run: AppRun) -> None:
        """Give *body* out again, then what the server has once the answer of *run* flows."""
        self._chunks = body.chunks()
        self._receive = receive
        self._run = run

    async def __call__(self) -> Message:
        """Give the app its next message."""
        for chunk, more in self._chunks:
            return {"type": "http.request", "body": chunk, "more_body": more}
        await self._run.is_sent()
        if self._run.is_flowing:
            return await self._receive()
        return {"type": "http.disconnect"}
