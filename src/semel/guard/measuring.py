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

from semel.core.commands import Complete
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
        # When each part began, and how long it took.
        self._claim: tuple[float, float] | None = None
        self._handler: tuple[float, float] | None = None
        self._store: tuple[float, float] | None = None
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
        began = _clock()
        self._key = claim.key
        try:
            return self._seen(await self._ports.claim(self._traced(claim)))
        finally:
            self._claim = _more(self._claim, began)

    async def take_over(self, command: Any) -> Any:
        began = _clock()
        if self._trace is not None:
            command = replace(command, claim=self._traced(command.claim))
        try:
            return await self._ports.take_over(command)
        finally:
            self._claim = _more(self._claim, began)

    async def begin(self, command: Any) -> Any:
        began = _clock()
        self._key = command.claim.key
        try:
            return self._seen(await self._ports.begin(command))
        finally:
            self._claim = _more(self._claim, began)

    async def run_handler(self, run: RunHandler) -> Ending:
        began = _clock()
        self._attempt = run.hold.attempt
        try:
            return await self._ports.run_handler(run)  # type: ignore[no-any-return]  # as above
        finally:
            self._handler = began, _clock() - began

    def ask(self, command: Any) -> Awaitable[Any]:
        if type(command) is Complete:
            return self._timed_store(self._ports.ask, command)
        return self._ports.ask(command)  # type: ignore[no-any-return]  # as above

    def finish(self, command: Any) -> Awaitable[Any]:
        if self._trace is not None:
            command = replace(command, claim=self._traced(command.claim))
        return self._timed_store(self._ports.finish, command)

    async def wait(self, wish: Any) -> Any:
        self._waited = True
        count(WaitBegan())
        try:
            return self._seen(await self._ports.wait(wish))
        finally:
            count(WaitEnded())

    async def _timed_store(self, port: Callable[[Any], Awaitable[Any]], command: Any) -> Any:
        began = _clock()
        try:
            return await port(command)
        finally:
            self._store = _more(self._store, began)

    def _traced(self, claim: Any) -> Any:
        """Return *claim* with the trace of this request, which is stored with the record."""
        return claim if self._trace is None else replace(claim, traceparent=self._trace)

    def _seen(self, got: Any) -> Any:
        """Note which trace ran, or runs, the operation that this request came upon."""
        if type(got) is Found:
            # An expired one was another operation.
            self._found = None if got.is_expired else got.traceparent
        return got

    def end(self, outcome: Ended) -> None:
        """Tell the sinks how the request ended. Whatever goes wrong here is no reason for the request to fail."""
        seconds = _clock() - self._began
        if self._told is not None:
            outcome = self._told
        elif self._waited and outcome == "replayed":
            outcome = "waited"
        ports, key, began = self._ports, self._key, self._began
        _note(ports, outcome)
        claim, handler, store = self._claim, self._handler, self._store
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
                None if claim is None else Stretch(claim[0] - began, claim[1]),
                None if handler is None else Stretch(handler[0] - began, handler[1]),
                None if store is None else Stretch(store[0] - began, store[1]),
                self._trace,
                self._found,
            )
        )


def _more(before: tuple[float, float] | None, began: float) -> tuple[float, float]:
    """Return what took until now since *began*, with what was *before* it: a claim may be asked for twice."""
    took = _clock() - began
    return (began, took) if before is None else (before[0], before[1] + took)
