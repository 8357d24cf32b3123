"""An ASGI app's answer in report mode: it passes as it is, and its status and end are seen. Nothing is held back."""

from __future__ import annotations

from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Message, Receive
from semel.core.commands import Flow, RunUnguarded
from semel.core.value import value
from semel.door import Body
from semel.drivers import AsyncPerform, aresume
from semel.flows.reply import Reply
from semel.stores.keeper import AsyncKeeper


@value
class Job:
    """What waits for the end of an answer."""

    flow: Flow[Reply]
    command: RunUnguarded


class Watch:
    """The app's ``send``. Without a job it watches for nobody; a route may give it one, before it has answered."""

    def __init__(self, send: ASGISend, perform: AsyncPerform, keeper: AsyncKeeper) -> None:
        """Pass everything on to *send*; carry out by *perform* what a flow asks for."""
        self._send = send
        self._perform = perform
        self._keeper = keeper
        self._job: Job | None = None
        self._status: int | None = None

    def begin(self, job: Job) -> None:
        """End the flow of *job* when the answer has left."""
        self._job = job
        hold, lease = job.command.hold, job.command.lease
        if hold is not None and lease is not None:
            self._keeper.add(hold, lease)

    async def run(self, app: ASGIApp, scope: ASGIScope, receive: Receive) -> None:
        """Let *app* answer, in this very task, as if nobody watched."""
        try:
            await app(scope, receive, self)
        except Exception:
            await self.conclude()
            raise
        except BaseException:
            self.give_up()
            raise
        await self.conclude()

    async def __call__(self, message: Message) -> None:
        """Pass on one message of the app's."""
        kind = message["type"]
        if kind == "http.response.start":
            self._status = message["status"]
        await self._send(message)
        if kind == "http.response.body" and not message.get("more_body", False):
            # What an app does after its answer (background tasks) is no part of it.
            await self.conclude()

    async def conclude(self) -> None:
        """End the flow, once."""
        job, self._job = self._job, None
        if job is not None:
            try:
                await aresume(job.flow, self._status, self._perform)
            finally:
                self._discard(job)

    def give_up(self) -> None:
        """Leave the flow where it is: its lease ends it."""
        job, self._job = self._job, None
        if job is not None:
            self._discard(job)

    def _discard(self, job: Job) -> None:
        if job.command.hold is not None:
            self._keeper.discard(job.command.hold)


class Rejoined:
    """The app's ``receive``: what was read of the body already, and then what the server has."""

    def __init__(self, body: Body, receive: Receive, *, is_whole: bool, is_cut: bool) -> None:
        """Say whether the body *is whole*, or *is cut*: the client hung up in the middle of it."""
        self._chunks = body.chunks() if is_whole or body.size else iter(())
        self._receive = receive
        self._is_whole = is_whole
        self._is_cut = is_cut

    async def __call__(self) -> Message:
        """Give the app its next message."""
        for chunk, more in self._chunks:
            return {"type": "http.request", "body": chunk, "more_body": more or not self._is_whole}
        if self._is_cut:
            return {"type": "http.disconnect"}
        return await self._receive()
