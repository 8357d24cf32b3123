"""An ASGI app's answer in report mode: it passes as it is, and its status and end are seen. Nothing is held back."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from semel.asgi.protocol import ASGIApp, ASGIScope, ASGISend, Message, Receive
from semel.core.record import Hold
from semel.flows.reply import Reply
from semel.guard.body import Body
from semel.guard.running import Running
from semel.stores.leases import AsyncLeases
from semel.stores.step import Step


class Watch:
    """The app's ``send``, beside a flow that has a task of its own: the app's task stays the server's.

    The flow says when the app may begin, and is told when it has answered. A route may begin one after the app has
    begun, and before it has answered.
    """

    _flow: asyncio.Task[Reply] | None = None
    _hold: Hold | None = None
    #: The flow waits for the app's answer.
    _is_waiting = False
    _reached: Step[None]
    _answered: Step[int | None]

    def __init__(self, send: ASGISend, leases: AsyncLeases) -> None:
        """Pass everything on to *send*; keep the flow's lease by *leases*."""
        self._send = send
        self._leases = leases
        self._status: int | None = None

    def begin(self, flow: Running[Reply]) -> None:
        """Run *flow*, up to the point where the app is to answer."""
        loop = asyncio.get_running_loop()
        self._reached, self._answered = Step(loop=loop), Step(loop=loop)
        self._flow = loop.create_task(_awaited(flow))
        self._flow.add_done_callback(self._ended)

    async def is_reached(self) -> None:
        """Wait until the app may answer."""
        try:
            await self._reached
        except asyncio.CancelledError:
            self.give_up()
            raise

    def reached(self, hold: Hold | None, lease: timedelta | None) -> Step[int | None]:
        """Let the app answer; return what is settled with its status when it has. *lease* is kept meanwhile."""
        if hold is not None and lease is not None:
            self._hold = hold
            self._leases.add(hold, lease)
        self._is_waiting = True
        self._reached.settle(None)
        return self._answered

    async def run(self, app: ASGIApp, scope: ASGIScope, receive: Receive) -> None:
        """Let *app* answer, in this very task, as if it were not watched."""
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
        """Let the flow end, once."""
        flow, self._flow = self._flow, None
        if flow is not None:
            self._answered.settle(self._status)
            await asyncio.wait([flow])

    def give_up(self) -> None:
        """Leave the flow where it is: its lease ends it."""
        flow, self._flow = self._flow, None
        if flow is not None and self._is_waiting:
            if self._hold is not None:
                self._leases.discard(self._hold)
            self._answered.abandon()
        elif flow is not None:
            flow.cancel()

    def _ended(self, flow: asyncio.Task[Reply]) -> None:
        if self._hold is not None:
            self._leases.discard(self._hold)
        if not flow.cancelled():
            flow.exception()  # Seen: the client went away before it had sent the whole request, as the app will see.
        self._reached.settle(None)


async def _awaited(flow: Running[Reply]) -> Reply:
    return await flow


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
