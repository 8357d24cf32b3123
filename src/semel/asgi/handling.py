"""One handler's run in an ASGI app, and its answer: held back until it is stored, or let through when it can't be kept.

It has a task of its own. Whoever serves the connection may be cancelled when the client hangs up; a handler that is
half-way may not.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Protocol

from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Message, Receive, lowered, reached_handler, send_answer
from semel.core.commands import Ending, Flow, Lost, RunHandler, Undo
from semel.core.message import Answer, Headers
from semel.core.value import value
from semel.door import Body, answered, flows_at_once, raised, streaming
from semel.drivers import AsyncPerform, aresume
from semel.errors import InProgress, NoEffect, StoreError
from semel.exchange import AsyncGuard
from semel.flows.reply import Reply, Reraise, Send
from semel.operation import Operation, begin
from semel.stores.step import Step

#: Handlers whose server has gone. A loop holds its tasks weakly, so somebody must hold them.
_deserted: set[asyncio.Task[None]] = set()


@value
class Job:
    """What is guarded: an operation, and the flow that waits for its ending."""

    flow: Flow[Reply]
    command: RunHandler
    operation: Operation


class Handling:
    """What the app does and answers. It is the app's ``send``: the last message of the answer ends the flow.

    Without a job it lets everything through. A route that asks to be guarded gives it one, before it has answered.
    """

    _task: asyncio.Task[None]
    job: Job | None = None

    def __init__(self, perform: AsyncPerform, guard: AsyncGuard) -> None:
        """Carry out by *perform* what a flow asks for."""
        self._perform = perform
        self._guard = guard
        self._held: list[Message] = []
        self._size = 0
        self._status = 0
        self._headers: Headers = ()
        self._answer: Answer | None = None
        self._waiters: list[asyncio.Future[None]] = []
        #: The flow is at its end, or on its way there.
        self.is_concluded = False
        #: The answer has left, or never will.
        self._has_left = False
        #: Nobody serves the connection any more.
        self._is_deserted = False
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
        self._switch: asyncio.Task[None] | None = None
        #: Why it could not be sent then.
        self._failure: Exception | None = None

    def start(self, app: ASGIApp, scope: ASGIScope, incoming: Incoming, send: ASGISend) -> Step[None]:
        """Run *app*; the step is done when it has returned."""
        self._scope = scope
        self._send = send
        loop = asyncio.get_running_loop()
        done: Step[None] = Step(loop=loop)
        self._task = loop.create_task(self._run(app, incoming, done))
        return done

    def hold_back(self, job: Job) -> None:
        """Keep the answer until it is stored. The app has not begun one."""
        self.job = job
        self.is_flowing = False
        if job.command.lease is not None:
            self._guard.keeper.add(job.command.hold, job.command.lease, self._lose)

    async def overrule(self, answer: Answer) -> None:
        """Send *answer*, whatever the app may answer afterwards."""
        self.is_flowing = False
        self.is_concluded = self._is_overruled = True
        await self._send_answer(answer, is_ours=True)
        self._let_go()

    def desert(self) -> None:
        """Say that nobody serves the connection any more.

        A stream ends, for it has no listener. All else goes on: a retry will be given the answer, and will do nothing.
        """
        self._is_deserted = True
        if self.is_flowing:
            self._task.cancel()
        else:
            _deserted.add(self._task)
            self._task.add_done_callback(_deserted.discard)

    def _lose(self) -> None:
        """Stop: another worker has the operation."""
        if self.job is not None and not self.is_concluded:
            self.job.operation.story.is_lost = True
            self._task.cancel()

    async def __call__(self, message: Message) -> None:
        """Take one message of the app's."""
        if self._switch is not None:
            await self.is_sent()  # What was held back leaves first.
        if self.is_flowing:
            self.has_begun = self.has_begun or message["type"] == "http.response.start"
            await self._send(message)
            return
        if self.job is None or self._is_reraised:
            return  # Another answer has been given.
        if self.is_concluded:
            # As a server's own send does (ASGI 2.4): an endless stream must learn that it has no listener.
            raise OSError("The client has gone.")
        await self._take(self.job, message)

    async def _take(self, job: Job, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            # Copied, here and below: what is sent is the app's again, and its headers may be ones that are read once.
            self._held.append({**message, "headers": list(message.get("headers", ()))})
            self._status, self._headers = message["status"], lowered(self._held[-1]["headers"])
            if flows_at_once(self._headers, job.operation, job.command.max_response_time):
                await self._conclude(job, streaming(self._status, self._headers, job.operation))
            elif not any(name == b"content-length" for name, _ in self._headers):
                self._is_late(job)  # A stream, most likely: its time begins now.
        elif kind == "http.response.body":
            self._held.append({**message})
            self._size += len(message.get("body", b""))
            if not message.get("more_body", False) and self._size <= job.command.limit:
                # What an app does after its answer (background tasks) comes after this: the answer is stored and sent.
                await self._conclude(job, self._judged(job))
            elif self._size > job.command.limit or self._is_late(job):
                await self._conclude(job, streaming(self._status, self._headers, job.operation))
        # Interim answers and server extensions are about this connection, and none of them is kept.

    def _is_late(self, job: Job) -> bool:
        """Whether an answer of which more is to come has been held back for too long."""
        if job.command.max_response_time is None:
            return False
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + job.command.max_response_time.total_seconds()
            if job.command.lease is not None:
                # Its next part may be long in coming. Not in atomic mode: the app may be using the very connection
                # that would be committed on, so the time is looked at when the app sends something.
                self._timer = loop.call_at(self._deadline, self._let_flow, job)
        return loop.time() >= self._deadline and not job.operation.story.is_used

    def _let_flow(self, job: Job) -> None:
        """Send what was held back, beside the app: the time is over."""
        # What takes steps while it answers may take more of them: it is not done, and can't be said to be.
        if not self.is_concluded and not job.operation.story.is_used:
            self.is_concluded = True  # Now, and not when the task begins: the app may end in between.
            self._switch = asyncio.get_running_loop().create_task(self._let_flow_beside(job))

    async def _let_flow_beside(self, job: Job) -> None:
        try:
            await self._conclude(job, streaming(self._status, self._headers, job.operation))
        except Exception as error:  # noqa: BLE001 - it goes on to the server, out of the app
            self._failure = error
            self._task.cancel()

    async def is_sent(self) -> None:
        """Wait until the answer has left or never will."""
        if not self._has_left:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    async def _has_switched(self) -> None:
        """Wait for what is being sent beside the app, where that is so."""
        if self._switch is not None:
            await self.is_sent()

    async def _run(self, app: ASGIApp, incoming: Incoming, done: Step[None]) -> None:
        if self.job is not None:
            begin(self.job.operation)
        try:
            await self._handle(app, incoming.to(self))
        except Exception as error:  # noqa: BLE001 - it goes on to the server
            done.settle(error)
        except BaseException:
            if self._failure is None:
                done.abandon()
                await self._give_up()
                raise
            # It was not the server who cancelled this task, and it is told why: unless it has gone itself.
            self._task.uncancel()
            done.settle(None if self._is_deserted else self._failure)
        else:
            done.settle(self._undelivered)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            incoming.body.close()

    async def _give_up(self) -> None:
        """What the handler did is not known, and its lease decides: renewed, it would never run out."""
        if self.job is not None:
            if self.job.command.lease is None:
                await self._perform(Undo())
            self._guard.let_go(self.job.command.hold)

    async def _handle(self, app: ASGIApp, receive: Receive) -> None:
        try:
            await app(self._scope, receive, self)
        except asyncio.CancelledError:
            if self.job is None or self.is_concluded or not self.job.operation.story.is_lost:
                raise
            # It was not the server who cancelled this task, and an answer is still to be sent from it.
            self._task.uncancel()
            await self._conclude(self.job, Lost())
        except Exception as error:
            if self.job is not None and not self.is_concluded:
                await self._conclude(self.job, raised(error, self.job.operation))
            elif not self._is_overruled:
                await self._has_switched()
                raise
        await self._has_switched()
        if self.job is not None and not self.is_concluded:
            unanswered = RuntimeError("The app returned without completing its response.")
            await self._conclude(self.job, raised(unanswered, self.job.operation))

    async def _conclude(self, job: Job, ending: Ending) -> None:
        """End the flow: the answer is stored, and then it leaves."""
        self.is_concluded = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            try:
                if job.operation.loose_ends:
                    await job.operation.tie_up()
                reply = await aresume(job.flow, ending, self._perform)
            finally:
                self._guard.let_go(job.command.hold)
            await self._give(reply)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._has_left = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _give(self, reply: Reply) -> None:
        if isinstance(reply, Send):
            is_the_apps = reply.answer is self._answer
            self._is_overruled = not is_the_apps
            await self._send_answer(reply.answer, is_ours=not is_the_apps)
        elif isinstance(reply, Reraise):
            # The answer first, so that this client and its retries see the same. Then the error goes on to whoever
            # reports errors: they look whether a response has begun, and don't begin another.
            if reply.answer is not None:
                self._is_reraised = True
                await self._send_answer(reply.answer, is_ours=True)
            raise reply.error
        elif self._is_deserted:
            raise OSError("The client has gone.")
        else:
            self.is_flowing = True
            for message in self._held:
                await self._send(message)
            self._held = []

    async def _send_answer(self, answer: Answer, *, is_ours: bool) -> None:
        if self._is_deserted:
            return
        try:
            await send_answer(self._send, answer, is_ours=is_ours)
        except OSError as error:
            # The client has gone, and the answer is stored: that is for the server to know. The app has answered, and
            # what it does afterwards (a background task) will not be done by a retry.
            self._undelivered = error

    def _judged(self, job: Job) -> Ending:
        parts = [message.get("body", b"") for message in self._held[1:]]
        answer = self._answer = Answer(self._status, self._headers, parts[0] if len(parts) == 1 else b"".join(parts))
        error = sys.exc_info()[1]
        is_ours = isinstance(error, NoEffect | StoreError | InProgress) or job.operation.story.is_used
        if isinstance(error, Exception) and is_ours and answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            # The framework answers for it as for any error it doesn't know, and is about to raise it on.
            return raised(error, job.operation)
        is_reached = reached_handler(self._scope, answer.status, error)
        return answered(answer, job.operation, reached_handler=is_reached, no_effect=isinstance(error, NoEffect))


class Incoming(Protocol):
    """A request's body, and how the app is given it."""

    @property
    def body(self) -> Body:
        """What has been read of it."""

    def to(self, handling: Handling) -> Receive:
        """Return the app's ``receive``."""


@value
class Taken:
    """A request whose body was read already, before its app was run."""

    body: Body
    receive: Receive

    def to(self, handling: Handling) -> Receive:
        """Return the app's ``receive``."""
        return Replayed(self, handling)


class Replayed:
    """The app's ``receive``: the body that was read already, then nothing until the answer has left.

    A client that hangs up does not end a guarded request, so the app is not told of it: it would stop half-way.
    """

    __slots__ = ("_chunks", "_handling", "_receive")

    def __init__(self, taken: Taken, handling: Handling) -> None:
        """Give the body out again, then what the server has once the answer flows."""
        self._chunks = taken.body.chunks()
        self._handling = handling
        self._receive = taken.receive

    async def __call__(self) -> Message:
        """Give the app its next message."""
        for chunk, more in self._chunks:
            return {"type": "http.request", "body": chunk, "more_body": more}
        await self._handling.is_sent()
        if self._handling.is_flowing:
            return await self._receive()
        return {"type": "http.disconnect"}
