"""Who is told of what happens."""

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import semel.telemetry
from semel.core.events import NotStored, TookOver, WaitBegan
from semel.errors import ConfigurationError
from semel.flows.reply import Done
from semel.guard.measuring import measured
from semel.guard.running import run
from semel.stores.memory import MemoryStore
from semel.telemetry.stream import count, tell
from tests.telemetry.conftest import Seen

HAPPENING = TookOver("0123456789ab", 2)


def test_what_happens_is_logged_and_told(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    """The log has everything out of the ordinary, whatever sinks there are; they have it, too."""
    with caplog.at_level("INFO", logger="semel"):
        tell(HAPPENING)
    assert seen == [HAPPENING]
    assert caplog.records[0].getMessage().startswith("TookOver")


@pytest.mark.parametrize("error", [RuntimeError("no room"), SystemExit(1), asyncio.CancelledError()])
def test_a_sink_that_fails_is_logged_once(
    error: BaseException, used: Callable[[Any], Any], seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    """A sink that raises breaks nothing: the next one is told, and the log says it once."""

    def broken(event: object) -> None:
        raise error

    used(broken)
    later = used(Seen())
    with caplog.at_level(logging.ERROR, logger="semel"):
        count(HAPPENING)
        count(HAPPENING)
    assert seen == later == [HAPPENING, HAPPENING]
    (record,) = caplog.records
    assert "sink has failed" in record.getMessage()


def test_a_sink_is_used_once(seen: Seen) -> None:
    """Using the same sink again tells it nothing twice."""
    semel.telemetry.use(seen)
    count(WaitBegan())
    assert seen == [WaitBegan()]


def test_what_is_no_sink_is_refused() -> None:
    """A class in the place of a sink, or anything that can't be called, is an error where it is written."""
    for wrong in (Seen, None, "prometheus"):
        with pytest.raises(ConfigurationError, match="A sink is called with each event"):
            semel.telemetry.use(wrong)  # type: ignore[type-var]


def test_nothing_is_measured_without_a_sink() -> None:
    """Without a sink it is only counted how a request ends: nothing stands between a flow and its ports."""
    seen: list[Any] = []

    async def flow(ports: Any) -> Done:
        seen.append(ports)
        return Done()

    ports = SimpleNamespace(guard=SimpleNamespace(store=MemoryStore()))
    run(measured(flow), ports)
    assert seen == [ports]
    assert ports.guard.store.ended == {"reported": 1}


def test_sinks_are_told_no_more_after_drop() -> None:
    """A sink that is dropped is told nothing."""
    sink = semel.telemetry.use(Seen())
    assert sink in semel.telemetry.sinks()
    semel.telemetry.drop(sink)
    tell(NotStored("0123456789ab", 1, "disk full"))
    assert sink == []
