"""A service is written once: its name, its interval and its flow serve threads and event loops alike."""

import asyncio
import queue
from datetime import timedelta

from semel.core.commands import FindStuck
from semel.flows.ports import Ports
from semel.flows.upkeep import SweepReport
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.work import AsyncBacklog, AsyncWorkers, Backlog, Plan, StoreService, Workers
from semel.work.service import S_co, facts_of

HANG_SECONDS = 60


class Looker(StoreService[S_co, SweepReport]):
    """A service that looks what is stuck, and frees nothing."""

    name = "looker"

    def __init__(self, store: S_co) -> None:
        super().__init__(store, timedelta(milliseconds=1))
        self.runs: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def flow(self, ports: Ports) -> SweepReport:
        found = await ports.ask(FindStuck(1))
        self.runs.put(len(found))
        return SweepReport(left=len(found))


def test_one_service_in_a_thread() -> None:
    """With a store for threads, a run returns its report, and workers in threads run it."""
    looker = Looker(MemoryStore())
    assert looker.run_once() == SweepReport()
    looker.runs.get()
    workers = Workers([looker])
    workers.start()
    assert [looker.runs.get(timeout=HANG_SECONDS) for _ in range(3)] == [0] * 3
    workers.stop()


async def test_the_same_on_a_loop() -> None:
    """With a store for an event loop, a run is awaited, and workers on the loop run it."""
    looker = Looker(AsyncMemoryStore())
    assert await looker.run_once() == SweepReport()
    workers = AsyncWorkers([looker])
    workers.start()
    for _ in range(3):
        assert await asyncio.to_thread(looker.runs.get, timeout=HANG_SECONDS) == 0
    await workers.stop()


def test_the_plan() -> None:
    """Sweeper and reaper run beside every store; with an application, so many completers run too."""
    store, on_loop = MemoryStore(), AsyncMemoryStore()
    assert [each.name for each in Plan().services(store)] == ["sweeper", "reaper"]
    with_app = Plan(concurrency=2).services(store, lambda _: None, Backlog())
    assert [each.name for each in with_app] == ["sweeper", "reaper", "completer", "completer"]
    assert len(Plan(concurrency=1).services(on_loop, lambda _: None, AsyncBacklog())) == 3


def test_a_report_for_machines() -> None:
    """A report can be read by a program: its fields, with the error as text."""
    assert facts_of(SweepReport(freed=2)) == {"freed": 2, "parked": 0, "left": 0, "error": None}
