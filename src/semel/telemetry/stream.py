"""The stream of events: who is told, the log always, and the sinks that the application asked for. What an event is,
``core/events.py`` says.

A sink is any function of one event::

    import semel.telemetry
    from semel.telemetry.prometheus import Prometheus

    semel.telemetry.use(Prometheus())

Where there is no sink, no time is measured and no event is made of an ordinary request.

A sink that knows the current trace has a method ``traceparent()``, which returns it as W3C writes it, or None. It is
stored with the record of an operation, so that a replay can tell which trace ran it.
"""

from __future__ import annotations

import os
import threading
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from semel.core.events import Event, Happening, Measure
from semel.core.trace import is_trace
from semel.errors import ConfigurationError
from semel.telemetry.logs import log, logger


class Sink(Protocol):
    """Something that is told of every event, in whatever thread that happens. It must not wait."""

    def __call__(self, event: Event, /) -> None:
        """Take note of *event*."""


class StartsAfresh(Protocol):
    """What has a lock."""

    def start_afresh(self) -> None:
        """Have a new one."""


S = TypeVar("S", bound=Sink)

#: All of this process. It is replaced as a whole, so it may be read without a lock.
_sinks: tuple[Sink, ...] = ()
_wants_keys = False
#: What the sinks know the current trace by.
_tracers: tuple[Callable[[], Any], ...] = ()
_lock = threading.Lock()
#: Those that have raised: each is logged once, since every request would raise it again.
_broken: set[int] = set()
_locked: WeakSet[StartsAfresh] = WeakSet()


def use(sink: S) -> S:
    """Tell *sink* of every event in this process from now on, beside the log; return it."""
    given: object = sink  # what an application gave
    if isinstance(given, type) or not callable(given):
        raise ConfigurationError(f"A sink is called with each event, such as Prometheus(), and {sink!r} is not one.")
    with _lock:
        if all(each is not sink for each in _sinks):
            _set((*_sinks, sink))
    return sink


def drop(sink: Sink) -> None:
    """Tell *sink* no more."""
    with _lock:
        _set(tuple(each for each in _sinks if each is not sink))
        _broken.discard(id(sink))


def _set(used: tuple[Sink, ...]) -> None:
    global _sinks, _tracers, _wants_keys  # noqa: PLW0603 - there is one stream of events in a process
    _wants_keys = any(getattr(each, "wants_keys", True) for each in used)
    _tracers = tuple(tracer for each in used if (tracer := getattr(each, "traceparent", None)) is not None)
    _sinks = used


def sinks() -> tuple[Sink, ...]:
    """Return the sinks in use. The log is not among them."""
    return _sinks


def are_keys_wanted() -> bool:
    """Whether a sink wants to know of each request which key it had: as a digest, which takes a microsecond.

    One that does not says so: it has ``wants_keys = False``.
    """
    return _wants_keys


def current_trace() -> str | None:
    """Return the trace that this code is part of, where a sink knows it. Whatever a sink does instead is survived."""
    for tracer in _tracers:
        try:
            given = tracer()
            if given is not None and is_trace(given):
                return given  # type: ignore[no-any-return]  # it is a text, then
        except Exception:  # noqa: BLE001 - a trace is no reason for a request to fail
            if id(tracer) not in _broken:
                _broken.add(id(tracer))
                logger.exception("A telemetry sink can't tell the current trace, and is asked all the same: %r", tracer)
    return None


def tell(happening: Happening) -> None:
    """Log *happening*, and tell every sink."""
    log(happening)
    if _sinks:
        count(happening)


def count(event: Happening | Measure) -> None:
    """Tell every sink of *event*. Whatever a sink raises changes nothing else."""
    for sink in _sinks:
        try:
            sink(event)
        except (Exception, SystemExit, CancelledError):  # noqa: BLE001 - it must hide no event and end no request
            if id(sink) not in _broken:
                _broken.add(id(sink))
                logger.exception("A telemetry sink has failed, and is told of events all the same: %r", sink)


def start_afresh_in_children(each: StartsAfresh) -> None:
    """Let *each* have a new lock in every child that is forked from now on: the thread that had it may not be there."""
    _locked.add(each)


def _after_fork() -> None:
    for each in tuple(_locked):
        each.start_afresh()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)
