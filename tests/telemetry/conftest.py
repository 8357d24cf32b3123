"""Sinks for a test, and no longer."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import semel.telemetry
from semel.core.events import Event, RequestEnded


class Seen(list[Event]):
    """A sink that keeps what it is told."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def requests(self) -> list[RequestEnded]:
        return [each for each in self if isinstance(each, RequestEnded)]

    @property
    def outcomes(self) -> list[str]:
        return [each.outcome for each in self.requests]


@pytest.fixture
def used() -> Iterator[Callable[[Any], Any]]:
    """What uses a sink until the test ends."""
    sinks: list[Any] = []

    def use(sink: Any) -> Any:
        sinks.append(sink)
        return semel.telemetry.use(sink)

    yield use
    for sink in sinks:
        semel.telemetry.drop(sink)


@pytest.fixture
def seen(used: Callable[[Any], Any]) -> Seen:
    """All events from now on."""
    sink: Seen = used(Seen())
    return sink
