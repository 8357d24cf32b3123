"""One guarded call of a function, sync and async. The order of steps is in ``flows/guard``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from semel.core.handler import Ending
from semel.core.outcome import Door
from semel.errors import ConfigurationError, Refusal
from semel.flows.reply import PassOn, Reply
from semel.functions.results import Outcome, Results
from semel.guard.measuring import measured
from semel.guard.ports import AsyncCallPorts, AsyncGuard, Guard, ThreadPorts
from semel.operation import Operation, enter
from semel.telemetry.logs import logger

#: A flow with all its arguments except the ports.
FunctionFlow = Callable[[Any], Coroutine[Any, Any, Reply]]


class _Named:
    """What metrics call a function."""

    _name: str
    door: ClassVar[Door] = "function"

    def endpoint(self) -> str:
        """Return its name."""
        return self._name


class FunctionCall(_Named, ThreadPorts):
    """One call of a plain function."""

    def __init__(self, guard: Guard, results: Results, call: Callable[[], Any]) -> None:
        """Guard one *call*."""
        super().__init__(guard)
        self._call = call
        self._name = results.name
        self._outcome = Outcome(results)

    def run(self, flow: FunctionFlow) -> Any:
        """Call the function, or return what an earlier call returned."""
        try:
            reply = self.conduct(measured(flow))
        except Refusal as refusal:
            raise self._outcome.refused(refusal) from self._outcome.error
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            with enter(self.unrecorded(reply.unrecorded)):
                return self._call()
        return self._outcome.of(reply)

    def handle(self, operation: Operation, limit: int) -> Ending:
        """Call the function."""
        self._outcome.has_run = True
        try:
            result = self._call()
            if inspect.iscoroutine(result):
                # Nothing has run yet, so it is safe to raise.
                result.close()
                _refuse_coroutine(self._name)
        except Exception as error:  # noqa: BLE001 - it is the flow's to judge
            return self._outcome.raised(error, operation)
        return self._outcome.returned(result, operation, limit)


class AsyncFunctionCall(_Named, AsyncCallPorts):
    """One call of an async function. It goes on to its end even if its caller is cancelled."""

    def __init__(self, guard: AsyncGuard, results: Results, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Guard one *call*."""
        super().__init__(guard)
        self._call = call
        self._name = results.name
        self._outcome = Outcome(results)
        self._caller_has_gone = False

    async def run(self, flow: FunctionFlow) -> Any:
        """Call the function, or return what an earlier call returned."""
        try:
            reply = await self.conduct(measured(flow))
        except Refusal as refusal:
            raise self._outcome.refused(refusal) from self._outcome.error
        except asyncio.CancelledError:
            self._caller_has_gone = True
            raise
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            with enter(self.unrecorded(reply.unrecorded)):
                return await self._call()
        return self._outcome.of(reply)

    async def handle(self, operation: Operation, limit: int) -> Ending:
        """Call the function."""
        self._outcome.has_run = True
        try:
            result = await self._call()
        except Exception as error:  # noqa: BLE001 - it is the flow's to judge
            if self._caller_has_gone:
                logger.exception("%s failed after its caller was cancelled.", self._name)
            return self._outcome.raised(error, operation)
        return self._outcome.returned(result, operation, limit)


def _refuse_coroutine(name: str) -> None:
    raise ConfigurationError(f"{name} returned a coroutine. Guard the `async def` itself: it can't be awaited here.")
