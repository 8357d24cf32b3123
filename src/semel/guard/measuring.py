"""Measures guarded calls, where a telemetry sink wants to know. Without one, it is only counted how they end.

``measured(flow)`` is put around the flow of a request: it stands between the flow and its ports, reads the clock around
those that take time, and tells the sinks how the request ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from semel.core.commands import Claim, Complete
from semel.core.events import (
    Event,
    Fenced,
    Happening,
    LostLease,
    MessageEnded,
    NotKept,
    NotStored,
    RequestEnded,
    Stretch,
    WaitBegan,
    WaitEnded,
)
from semel.core.handler import Ending, RunHandler
from semel.core.inbox import Busy, Duplicate, Parked, Ran
from semel.core.key import SHORT_LENGTH, digest_of
from semel.core.outcome import Door, Ended, ended_by
from semel.core.record import Found
from semel.errors import MessageDiffers
from semel.flows.reply import Reply
from semel.guard.endpoints import ENDPOINTS, OTHER
from semel.telemetry.stream import are_keys_wanted, count, current_trace, sinks

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

#: What is told of while the handler's answer is stored says more than what the client gets.
_TOLD: dict[type[Event], Ended] = {
    Fenced: "fenced",
    LostLease: "lease_lost",
    NotKept: "not_kept",
    NotStored: "not_stored",
}
_VERDICTS: dict[type, Any] = {Ran: "ran", Duplicate: "duplicate", Busy: "busy", Parked: "parked"}

_clock = time.perf_counter
_logger = logging.getLogger("semel")


class MeasuredPorts(Protocol):
    """What the ports of a guarded call add for this."""

    @property
    def door(self) -> Door:
        """The entry point."""

    def endpoint(self) -> str | None:
        """Return the template of the route, where it is known; never what the client sent."""


def measured(flow: F) -> F:
    """Return *flow*, which guards a call, so that its end is counted, and told to the sinks if there are any."""
    return partial(_request if sinks() else _counted, flow)  # type: ignore[return-value]  # it takes and returns the same


def measured_delivery(flow: F, consumer: str) -> F:
    """The same for a delivery to an inbox."""
    return partial(_delivery, consumer, flow) if sinks() else flow  # type: ignore[return-value]  # as above


async def _counted(flow: Callable[..., Coroutine[Any, Any, Reply]], ports: Any, /, *args: Any, **kwargs: Any) -> Reply:
    try:
        reply = await flow(ports, *args, **kwargs)
    except GeneratorExit:
        raise
    except BaseException as error:
        _note(ports, "interrupted" if isinstance(error, asyncio.CancelledError) else ended_by(error))
        raise
    try:  # as _note does, without the call
        ports.guard.store.ended[reply.outcome] += 1
    except AttributeError:
        return reply
    return reply


def _note(ports: Any, outcome: Ended) -> None:
    """Count it for the console; a service adds it to the store."""
    guard = getattr(ports, "guard", None)
    if guard is not None:  # a test's own ports have none
        guard.store.ended[outcome] += 1


async def _request(flow: Callable[..., Coroutine[Any, Any, Reply]], ports: Any, /, *args: Any, **kwargs: Any) -> Reply:
    meter = _Meter(ports)
    try:
        reply = await flow(meter, *args, **kwargs)
    except GeneratorExit:
        raise  # The flow was thrown away, and its process is as good as dead.
    except BaseException as error:
        meter.end("interrupted" if isinstance(error, asyncio.CancelledError) else ended_by(error))
        raise
    meter.end(reply.outcome)
    return reply


async def _delivery(consumer: str, flow: Callable[..., Coroutine[Any, Any, Any]], ports: Any, /, *args: Any) -> Any:
    try:
        verdict = await flow(ports, *args)
    except GeneratorExit:
        raise
    except BaseException as error:
        count(MessageEnded(consumer, "reused" if isinstance(error, MessageDiffers) else "failed"))
        raise
    count(MessageEnded(consumer, _VERDICTS[type(verdict)]))
    return verdict


class _Meter:
    """Ports with a clock. What takes no time of its own is passed on."""

    __slots__ = (
        "_attempt",
        "_began",
        "_claim",
        "_found",
        "_handler",
        "_key",
        "_ports",
        "_store",
        "_told",
        "_trace",
        "_waited",
    )

    def __init__(self, ports: Any) -> None:
        self._ports = ports
        self._key: str | None = None
        self._attempt: int | None = None
        self._claim: Stretch | None = None
        self._handler: Stretch | None = None
        self._store: Stretch | None = None
        self._told: Ended | None = None
        self._waited = False
        self._trace = current_trace()
        self._found: str | None = None
        self._began = _clock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ports, name)

    # These two are of every request, and are found faster than by ``__getattr__``.
    def principal(self) -> Awaitable[object]:
        return self._ports.principal()  # type: ignore[no-any-return]  # it is what stands behind us

    def read_body(self, limit: int) -> Awaitable[Any]:
        return self._ports.read_body(limit)  # type: ignore[no-any-return]  # as above

    def tell(self, happening: Happening) -> None:
        self._told = _TOLD.get(type(happening), self._told)
        self._ports.tell(happening)

    async def claim(self, claim: Any) -> Any:
        self._key = claim.key
        if self._trace is not None:
            claim = self._traced(claim)
        began = _clock()
        try:
            got = await self._ports.claim(claim)
        finally:
            self._claim = self._more(self._claim, began)
        if type(got) is Found:
            self._came_upon(got)
        return got

    async def take_over(self, command: Any) -> Any:
        if self._trace is not None:
            command = replace(command, claim=self._traced(command.claim))
        began = _clock()
        try:
            return await self._ports.take_over(command)
        finally:
            self._claim = self._more(self._claim, began)

    async def begin(self, command: Any) -> Any:
        self._key = command.claim.key
        began = _clock()
        try:
            got = await self._ports.begin(command)
        finally:
            self._claim = self._more(self._claim, began)
        if type(got) is Found:
            self._came_upon(got)
        return got

    async def run_handler(self, run: RunHandler) -> Ending:
        self._attempt = run.hold.attempt
        began = _clock()
        try:
            return await self._ports.run_handler(run)  # type: ignore[no-any-return]  # as above
        finally:
            self._handler = Stretch(began - self._began, _clock() - began)

    def ask(self, command: Any) -> Awaitable[Any]:
        return self._complete(command) if type(command) is Complete else self._ports.ask(command)

    async def _complete(self, command: Complete) -> Any:
        began = _clock()
        try:
            return await self._ports.ask(command)
        finally:
            self._store = self._more(self._store, began)

    async def finish(self, command: Any) -> Any:
        if self._trace is not None:
            command = replace(command, claim=self._traced(command.claim))
        began = _clock()
        try:
            return await self._ports.finish(command)
        finally:
            self._store = self._more(self._store, began)

    async def wait(self, wish: Any) -> Any:
        self._waited = True
        count(WaitBegan())
        try:
            got = await self._ports.wait(wish)
        finally:
            count(WaitEnded())
        if type(got) is Found:
            self._came_upon(got)
        return got

    def _traced(self, claim: Claim) -> Claim:
        """Return *claim* with the trace of this request, which is stored with the record."""
        return replace(claim, traceparent=self._trace)

    def _came_upon(self, found: Found) -> None:
        """Note which trace ran, or runs, this operation. An expired one was another operation."""
        self._found = None if found.is_expired else found.traceparent

    def _more(self, before: Stretch | None, began: float) -> Stretch:
        """Return what took until now since *began*, with what was *before* it: a claim may be asked for twice."""
        took = _clock() - began
        if before is None:
            return Stretch(began - self._began, took)
        return Stretch(before.after, before.seconds + took)

    def end(self, outcome: Ended) -> None:
        """Tell the sinks how the request ended. Whatever goes wrong here is no reason for the request to fail."""
        seconds = _clock() - self._began
        if self._told is not None:
            outcome = self._told
        elif self._waited and outcome == "replayed":
            outcome = "waited"
        ports, key = self._ports, self._key
        _note(ports, outcome)
        try:
            endpoint = ENDPOINTS.name(ports.endpoint())
        except Exception:  # what a framework has of its route is the framework's
            _logger.exception("The endpoint of a request is not known.")
            endpoint = OTHER
        count(
            RequestEnded(
                outcome,
                endpoint,
                ports.door,
                digest_of(key)[:SHORT_LENGTH] if key is not None and are_keys_wanted() else None,
                self._attempt,
                seconds,
                self._claim,
                self._handler,
                self._store,
                self._trace,
                self._found,
            )
        )
