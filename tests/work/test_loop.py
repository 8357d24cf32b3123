"""Services for ever: each at its interval, whatever becomes of the others, until they are told to stop."""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from semel.errors import StoreError, StoreUnavailable
from semel.flows.relay import RelayReport
from semel.flows.upkeep import SweepReport
from semel.work import AsyncWorkers, Workers
from semel.work.loop import JITTER
from semel.work.service import Report
from semel.work.wakeup import Wakeup
from semel.work.webhooks import WebhooksReport

SOON = timedelta(milliseconds=1)
NEVER = timedelta(days=1)
#: Far longer than anything here takes.
HANG_SECONDS = 60


class Counting:
    """A service that puts each of its runs into a queue."""

    def __init__(
        self, name: str = "counter", interval: timedelta = SOON, run: Callable[[], Report] = SweepReport
    ) -> None:
        self.name = name
        self.interval = interval
        self.run = run
        self.runs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run_once(self) -> Report:
        self.runs.put(threading.current_thread().name)
        return self.run()

    def wait_for(self, runs: int) -> str:
        return [self.runs.get(timeout=HANG_SECONDS) for _ in range(runs)][-1]


class AsyncCounting:
    def __init__(self, interval: timedelta = SOON, run: Callable[[], SweepReport] = SweepReport) -> None:
        self.name = "counter"
        self.interval = interval
        self.run = run
        self.runs: asyncio.Queue[None] = asyncio.Queue()

    async def run_once(self) -> SweepReport:
        self.runs.put_nowait(None)
        return self.run()

    async def wait_for(self, runs: int) -> None:
        for _ in range(runs):
            await asyncio.wait_for(self.runs.get(), HANG_SECONDS)


def broken() -> SweepReport:
    raise RuntimeError("broken")


def test_each_at_its_interval() -> None:
    """A service runs at once, then again and again at its own interval, in a thread that bears its name."""
    often, once = Counting("often"), Counting("once", NEVER)
    workers = Workers([often, once])
    workers.start()
    assert often.wait_for(3) == "semel-often"
    once.wait_for(1)
    workers.stop()
    assert once.runs.empty()


def test_errors_stop_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A service that fails is logged with its traceback, tries again, and does not stop the others."""
    bad, good = Counting("bad", run=broken), Counting("good")
    workers = Workers([bad, good])
    with caplog.at_level(logging.ERROR, "semel"):
        workers.start()
        bad.wait_for(3)
        good.wait_for(3)
        workers.stop()
    assert "The bad failed; the next run tries again." in caplog.text
    assert "RuntimeError: broken" in caplog.text


@pytest.mark.parametrize(
    "report, level",
    [
        (SweepReport(), logging.DEBUG),
        (SweepReport(freed=1), logging.INFO),
        (RelayReport("events", sent=1), logging.INFO),
        (RelayReport("events", sent=1, dead=1), logging.WARNING),
        (SweepReport(freed=1, error=StoreUnavailable("gone")), logging.ERROR),
    ],
)
def test_reports_are_logged(report: Report, level: int, caplog: pytest.LogCaptureFixture) -> None:
    """A run is a line of the log: a quiet one if there was nothing to do, a loud one if it was cut short, or left dead
    letters.
    """
    service = Counting(interval=NEVER, run=lambda: report)
    workers = Workers([service])
    with caplog.at_level(logging.DEBUG, "semel"):
        workers.start()
        service.wait_for(1)
        workers.stop()
    (line,) = [each for each in caplog.records if each.name == "semel"]
    assert line.levelno == level
    assert str(report) in line.getMessage()


def test_an_outage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of a store that is away one service tells once, and not each of them in each of its runs."""
    reports = [SweepReport(error=StoreUnavailable("It is away."))]
    services = [Counting(name, run=lambda: reports[0]) for name in ("sweeper", "reaper", "surveyor")]
    workers = Workers(services)
    with caplog.at_level(logging.ERROR, "semel"):
        workers.start()
        for service in services:
            service.wait_for(3)
        workers.stop()
    assert len(caplog.records) == 1


def test_an_outage_is_told_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage is told each minute while it lasts; and at once in other words, after the store was back, or with what
    a run had done before it was cut short.
    """
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = partial(getattr, clock, "now")
    monkeypatch.setattr("semel.work.loop.time", clock)
    away, slow = (SweepReport(error=StoreUnavailable(words)) for words in ("It is away.", "It is slow."))
    partly = SweepReport(freed=2, error=away.error)
    script = [(0, away), (59, away), (1, away), (1, slow), (1, slow), (1, away), (1, partly), (1, SweepReport())]
    script += [(1, away), (1, away)]
    left = iter(script)

    def run() -> Report:
        seconds, report = next(left, (0, SweepReport()))
        clock.now += seconds
        return report

    service = Counting(run=run)
    workers = Workers([service])
    with caplog.at_level(logging.ERROR, "semel"):
        workers.start()
        service.wait_for(len(script) + 1)
        workers.stop()
    reports = [each.args[1] for each in caplog.records if isinstance(each.args, tuple)]
    assert reports == [away, away, slow, partly, away]


def told(caplog: pytest.LogCaptureFixture, reports: list[Report]) -> list[tuple[int, str]]:
    """Return what of these runs is told at INFO and above, by the time that the service has ended."""
    left = iter(reports)
    service = Counting(run=lambda: next(left, SweepReport()))
    workers = Workers([service])
    with caplog.at_level(logging.INFO, "semel"):
        workers.start()
        service.wait_for(len(reports) + 1)
        workers.stop()
    return [(each.levelno, each.getMessage()) for each in caplog.records if each.name == "semel"]


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """What is done within a minute of a line is told together, a minute later or at the end; nothing is left out."""
    runs = [RelayReport("events", sent=sent, retried=1) for sent in (1, 20, 300)]
    assert told(caplog, [runs[0], SweepReport(), runs[1], runs[2]]) == [
        (logging.INFO, str(RelayReport("events", sent=1, retried=1))),
        (logging.INFO, str(RelayReport("events", sent=320, retried=2))),
    ]


class Own:
    """A report of an application's own service."""

    is_idle = False
    error = None

    def __str__(self) -> str:
        return "fed the cat"


def test_a_report_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    """A service of an application's own is told, too, whatever its reports are made of."""
    assert told(caplog, [Own(), Own(), Own()]) == [(logging.INFO, "fed the cat")] * 2


def test_told_when_the_minute_is_over(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute there is another line, of a run that did nothing, too, if something was left to tell."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = partial(getattr, clock, "now")
    monkeypatch.setattr("semel.work.loop.time", clock)
    reports = iter([SweepReport(1), SweepReport(2), SweepReport()])

    def run() -> Report:
        report = next(reports, SweepReport())
        clock.now += 60 * report.is_idle
        return report

    service = Counting(run=run)
    workers = Workers([service])
    with caplog.at_level(logging.INFO, "semel"):
        workers.start()
        service.wait_for(5)
        assert [each.getMessage() for each in caplog.records] == [str(SweepReport(1)), str(SweepReport(2))]
        workers.stop()


def test_dead_letters_are_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """A run that left dead letters is a warning at once, with what was not told before; levels are not added up."""
    assert told(caplog, [WebhooksReport(4, sent=1), WebhooksReport(5, sent=2), WebhooksReport(5, sent=3, dead=1)]) == [
        (logging.INFO, str(WebhooksReport(4, sent=1))),
        (logging.WARNING, f"{WebhooksReport(5, sent=5, dead=1)}; why: semel outbox list"),
    ]


def test_stop_waits_for_the_run_under_way() -> None:
    """Stopping begins no run, ends a long wait at once, and waits for the run that is under way."""
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> SweepReport:
        begun.set()
        assert go_on.wait(HANG_SECONDS)
        return SweepReport()

    service = Counting(run=slow)
    workers = Workers([service, Counting("asleep", NEVER)])
    workers.start()
    assert begun.wait(HANG_SECONDS)
    stopper = threading.Thread(target=workers.stop)
    stopper.start()
    stopper.join(0.05)
    assert stopper.is_alive()
    go_on.set()
    stopper.join(HANG_SECONDS)
    assert not stopper.is_alive()
    assert service.wait_for(1)
    assert service.runs.empty()


def test_started_twice_and_again() -> None:
    """Starting what runs already changes nothing; what was stopped can be started again."""
    service = Counting(interval=NEVER)
    workers = Workers([service])
    workers.start()
    workers.start()
    service.wait_for(1)
    workers.stop()
    assert service.runs.empty()
    workers.stop()
    workers.start()
    service.wait_for(1)
    workers.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="There is no fork here.")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child() -> None:
    """A forked child has no workers until it starts its own, and then they run and stop there as anywhere."""
    service = Counting()
    workers = Workers([service])
    workers.start()
    service.wait_for(1)
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        status = 1
        try:
            service.runs = queue.SimpleQueue()
            has_none = not [thread for thread in threading.enumerate() if thread.name.startswith("semel-")]
            workers.stop()
            workers.start()
            service.wait_for(2)
            workers.stop()
            status = 0 if has_none else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    workers.stop()


class Impatient(Wakeup):
    """Notes how long it is to wait, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def wait(self, heard: int, seconds: float) -> None:
        self.asked.append(seconds)


def test_jitter() -> None:
    """Intervals vary a little, so that processes that were started together part."""
    service: Any = Counting(interval=timedelta(seconds=10))
    service.wakeup = Impatient()
    workers = Workers([service])
    workers.start()
    service.wait_for(101)
    workers.stop()
    seconds = service.wakeup.asked
    assert len(seconds) >= 100
    assert len(set(seconds)) > 1
    assert min(seconds) >= 10 * (1 - JITTER)
    assert max(seconds) <= 10 * (1 + JITTER)


async def test_async_each_at_its_interval() -> None:
    """On an event loop it is the same: at once, then at the interval, until it is stopped."""
    often, once = AsyncCounting(), AsyncCounting(NEVER)
    workers = AsyncWorkers([often, once])
    workers.start()
    workers.start()
    await often.wait_for(3)
    await once.wait_for(1)
    await asyncio.wait_for(workers.stop(), HANG_SECONDS)
    assert once.runs.empty()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("semel-")]


async def test_async_errors_stop_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """On an event loop, too, a service that fails is logged and tries again, and the others go on."""
    bad, good = AsyncCounting(run=broken), AsyncCounting()
    workers = AsyncWorkers([bad, good])
    with caplog.at_level(logging.ERROR, "semel"):
        workers.start()
        await bad.wait_for(3)
        await good.wait_for(3)
        await workers.stop()
    assert "RuntimeError: broken" in caplog.text


async def test_async_stop_waits_for_the_run_under_way() -> None:
    """On an event loop, too, stopping waits for the run that is under way."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    ended: list[StoreError | None] = []

    class Slow:
        name = "slow"
        interval = SOON

        async def run_once(self) -> SweepReport:
            begun.set()
            await go_on.wait()
            ended.append(None)
            return SweepReport()

    workers = AsyncWorkers([Slow()])
    workers.start()
    await begun.wait()
    stopping = asyncio.ensure_future(workers.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    go_on.set()
    await asyncio.wait_for(stopping, HANG_SECONDS)
    assert len(ended) == 1


async def test_async_started_again() -> None:
    """What was stopped can be started again, on the same loop or another."""
    service = AsyncCounting(NEVER)
    workers = AsyncWorkers([service])
    for _ in range(2):
        workers.start()
        await service.wait_for(1)
        await workers.stop()
