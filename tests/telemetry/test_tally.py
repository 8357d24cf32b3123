"""What report mode has seen, counted and logged."""

import logging
import threading

import pytest

from semel.core.events import PersonalKey, Reported, ReportFailed
from semel.errors import StoreUnavailable
from semel.telemetry.tally import MAX_ROUTES, OTHER_ROUTES, REST_SECONDS, TELL_AGAIN_SECONDS, Tally

FAILED = ReportFailed("abc", "store", "no route")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.__dict__["semel_event"]) for record in caplog.records]


def test_counts() -> None:
    """Requests are counted by endpoint and outcome; a snapshot does not change afterwards, and can't be changed."""
    tally = Tally()
    for outcome in ("new", "new", "replay"):
        tally.tell(Reported("abc", outcome, "POST /orders"))
    tally.tell(Reported(None, "missing", "POST /payments"))
    seen = tally.snapshot()
    tally.tell(Reported("abc", "new", "POST /orders"))
    assert seen.total == {"new": 2, "replay": 1, "missing": 1}
    assert seen.routes == {"POST /orders": {"new": 2, "replay": 1}, "POST /payments": {"missing": 1}}
    assert tally.snapshot().total["new"] == 3
    with pytest.raises(TypeError):
        seen.total["new"] = 7  # type: ignore[index]  # on purpose
    assert str(seen).splitlines() == [
        "POST /orders    new                 2",
        "POST /orders    replay              1",
        "POST /payments  missing             1",
    ]
    assert str(Tally().snapshot()) == ""


def test_endpoints_are_bounded() -> None:
    """Clients that think of new paths fill no memory: from some number on they are counted together."""
    tally = Tally()
    for number in range(MAX_ROUTES + 3):
        tally.tell(Reported(None, "keyless", f"POST /{number}"))
    tally.tell(Reported(None, "keyless", "POST /0"))
    routes = tally.snapshot().routes
    assert len(routes) == MAX_ROUTES + 1
    assert routes[OTHER_ROUTES] == {"keyless": 3}
    assert routes["POST /0"] == {"keyless": 2}


def test_threads() -> None:
    """No count is lost between threads."""
    tally = Tally()

    def count() -> None:
        for _ in range(1000):
            tally.tell(Reported(None, "new", "POST /"))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.snapshot().total == {"new": 4000}


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    """What enforcing would have changed is logged, with its key's digest only; what it would not, for debugging."""
    caplog.set_level(logging.DEBUG, "semel")
    tally = Tally()
    for outcome in ("new", "keyless", "replay", "mismatch"):
        tally.tell(Reported("abc", outcome, "POST /orders/alice", "POST /orders/{id}"))
    tally.tell(PersonalKey("abc"))
    levels = [record.levelname for record in caplog.records]
    assert levels == ["DEBUG", "DEBUG", "INFO", "INFO", "WARNING"]
    replay = caplog.records[2].__dict__
    fields = {name: replay[f"semel_{name}"] for name in ("event", "key", "outcome", "endpoint")}
    assert fields == {"event": "Reported", "key": "abc", "outcome": "replay", "endpoint": "POST /orders/{id}"}
    assert "alice" not in caplog.text
    assert list(tally.snapshot().routes) == ["POST /orders/{id}"]


def test_failures_are_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """A store that is down fills no log: one line a minute, and one for what is the application's."""
    clock = Clock()
    tally = Tally(clock)
    for _ in range(3):
        tally.tell(FAILED)
        tally.tell(ReportFailed("abc", "application", "KeyError"))
    assert events(caplog) == [("ERROR", "ReportFailed")] * 2
    clock.now += TELL_AGAIN_SECONDS
    tally.tell(FAILED)
    assert len(caplog.records) == 3


def test_failed_store_rests() -> None:
    """A store that failed is not asked again for a moment: report mode must not make every request wait for it."""
    clock = Clock()
    tally = Tally(clock)
    tally.check_store()
    tally.tell(ReportFailed("abc", "application", "KeyError"))
    tally.check_store()
    tally.tell(FAILED)
    with pytest.raises(StoreUnavailable, match="a moment ago"):
        tally.check_store()
    clock.now += REST_SECONDS - 1
    tally.tell(FAILED)  # That it was not asked does not make the rest longer.
    clock.now += 1
    tally.check_store()
