"""One guarded call of an async view. ``flows/serve`` says in what order."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar, cast

from semel.core.commands import Ending, NameScope, ReadBody, RunUnguarded
from semel.core.fingerprint import Buffer
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.door import Limits, raised
from semel.exchange import AsyncExchange, AsyncGuard, Performs
from semel.flows.reply import Done, PassOn, Reply
from semel.flows.serve import serve
from semel.operation import Operation, around, enter
from semel.views.base import Taken, Translation

R = TypeVar("R")


class AsyncView(Translation[R]):
    """One request to an async view, and the view."""

    @abstractmethod
    async def whose(self) -> object:
        """As ``View.whose``."""

    @abstractmethod
    async def read_body(self, limit: int) -> Buffer | None:
        """As ``View.read_body``."""

    @abstractmethod
    async def call(self) -> R:
        """As ``View.call``."""

    async def call_unguarded(self) -> R:
        """As ``View.call_unguarded``."""
        return await self.call()

    @abstractmethod
    async def take(self, response: R, limits: Limits) -> Taken:
        """As ``View.take``."""


class AsyncViewExchange(AsyncExchange, Generic[R]):
    """One request to an async view, and its response."""

    def __init__(self, guard: AsyncGuard, policy: Policy, view: AsyncView[R]) -> None:
        """Guard one call of *view* by *policy*."""
        super().__init__(guard)
        self.is_reporting = policy.enforcement == "report"
        self._policy = policy
        self._view = view
        self._response: R | None = None
        self._has_run = False
        self._answer: Answer | None = None
        #: What the view raised where nobody guards it.
        self._error: Exception | None = None

    async def serve(self) -> R:
        """Take the request from its headers to its response."""
        notes_replays = self.guard.store.notes_replays
        flow = serve(self._view.head, self._policy, os.urandom(16), notes_replays=notes_replays, around=around())
        return await self._give(await self.conduct(flow))

    async def handle(self, operation: Operation, limit: int) -> Ending:
        """Call the view."""
        try:
            self._response = await self._view.call()
            self._has_run = True
            ending = (await self._view.take(self._response, self.limits(limit, operation))).ending(operation)
        except Exception as error:  # noqa: BLE001 - it is the flow's to judge
            return raised(error, operation)
        self._answer = getattr(ending, "answer", None)
        return ending

    def limits(self, size: int, operation: Operation) -> Limits:
        """Return how much of a response is held back: at most *size* bytes, for as long as the policy says."""
        return Limits(size, self._policy.max_held, operation)

    async def name_scope(self, _command: NameScope) -> object:
        """Ask the application whose request this is."""
        self.guard.gate.check()
        return await self._view.whose()

    async def read_body(self, command: ReadBody) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        return await self._view.read_body(command.limit)

    async def run_unguarded(self, command: RunUnguarded) -> int | None:
        """Call the view as if nobody watched."""
        if command.hold is not None and command.lease is not None:
            self.guard.keeper.add(command.hold, command.lease)
        try:
            self._response = await self._view.call_unguarded()
            self._has_run = True
        except Exception as error:  # noqa: BLE001 - it goes on when the flow has ended
            self._error = error
            return self._view.status_raised(error)
        finally:
            if command.hold is not None:
                self.guard.keeper.discard(command.hold)
        return self._view.status_of(self._response)

    async def _give(self, reply: Reply) -> R:
        if self._error is not None:
            raise self._error
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            with enter(self.unrecorded(reply.unrecorded)):
                return await self._view.call_unguarded()
        if isinstance(reply, PassOn | Done):
            return cast("R", self._response) if self._has_run else await self._view.call_unguarded()
        return self._view.response_to(reply, self._response, self._answer)

    performs: ClassVar[Performs] = {
        **AsyncExchange.performs,
        NameScope: name_scope,
        ReadBody: read_body,
        RunUnguarded: run_unguarded,
    }
