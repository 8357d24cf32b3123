"""The order of events: start, storm with kills, settle, ask once more, judge. Each of them has a time limit."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from semel.cli.demo.api import STORE_VARIABLE
from semel.cli.demo.child import Child, Port
from semel.cli.demo.referee import Referee, Verdict
from semel.cli.demo.show import Phase, Show, Stage
from semel.cli.demo.storm import Storm
from semel.cli.schema import migrated

WORKERS = 2

#: Seconds between one worker's start and the next kill. A start takes half a second, so one dies about every second.
KILL_SECONDS = (0.2, 0.8)
TICK_SECONDS = 0.2

#: A killed worker's payments wait for its lease (2 s) and for the retry after that.
SETTLE_SECONDS = 5.0
ASK_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    seconds: float
    #: Decides what each customer does, and which worker is killed when. The rest depends on the machine.
    seed: str
    #: None is a temporary SQLite file.
    store: str | None
    is_protected: bool


def run(plan: Plan, show: Show) -> Verdict:
    """Run the demo from beginning to end, and return the referee's verdict."""
    with tempfile.TemporaryDirectory(prefix="semel-demo-", ignore_cleanup_errors=True) as folder:
        return asyncio.run(_Demo(plan, show, Path(folder)).run())


class _Demo:
    """One run."""

    def __init__(self, plan: Plan, show: Show, folder: Path) -> None:
        self._plan = plan
        self._show = show
        self._chance = random.Random(f"{plan.seed}/kills")  # noqa: S311 - kills have no enemy
        charges = folder / "charges.jsonl"
        self._referee = Referee(charges)
        self._stage = Stage(self._referee, plan.seconds, plan.seed, plan.is_protected, workers=[False] * WORKERS)
        provider, self._port = Port(), Port()
        arguments = [str(charges), plan.seed]
        self._provider = Child("semel.cli.demo.provider", provider, arguments, {}, folder / "provider.log")
        variables = {STORE_VARIABLE: ""}
        if plan.is_protected:
            variables[STORE_VARIABLE] = plan.store or f"sqlite:///{folder / 'semel.db'}"
            migrated(variables[STORE_VARIABLE])
        self._workers = [
            Child("semel.cli.demo.api", self._port, [provider.url], variables, folder / f"api-{number}.log")
            for number in range(WORKERS)
        ]
        self._over = asyncio.Event()
        self._interrupted = asyncio.Event()

    async def run(self) -> Verdict:
        """Run it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        async with AsyncExitStack() as stack:
            for child in (self._provider, *self._workers):
                stack.push_async_callback(child.end)
            await asyncio.gather(self._provider.start(), *map(self._start, range(WORKERS)))
            self._show.introduce(self._stage, self._port.number, f"mine-{uuid4().hex[:4]}")
            self._stage.began_at = time.monotonic()
            with self._show.watching(self._stage):
                async with self._ticking():
                    await self._weather()
        # All processes have ended: the log is complete.
        self._referee.read_log()
        verdict = self._referee.verdict()
        self._show.summarise(self._stage, verdict)
        return verdict

    async def _weather(self) -> None:
        referee = self._referee
        storm = Storm(f"{self._port.url}/payments", self._plan.seed, referee.expect, referee.hear)
        asyncio.get_running_loop().call_later(self._plan.seconds, self._over.set)
        customers = asyncio.create_task(storm.blow(self._over))
        try:
            await self._kill_now_and_then()
            self._stage.phase = Phase.SETTLING
            await self._within(SETTLE_SECONDS, customers)
            if self._plan.is_protected:
                # Without protection every question is one more charge, which would falsify the figures of the storm.
                self._stage.phase = Phase.ASKING
                await self._within(ASK_SECONDS, asyncio.create_task(storm.ask_again()))
                self._stage.asked_again = storm.asked_again
        finally:
            customers.cancel()
            await asyncio.gather(customers, return_exceptions=True)
            await storm.close()

    async def _kill_now_and_then(self) -> None:
        while not await self._is_over_within(self._chance.uniform(*KILL_SECONDS)):
            number = self._stage.kills % WORKERS
            await self._workers[number].kill()
            self._stage.kills += 1
            self._stage.workers[number] = False
            await self._start(number)

    async def _start(self, number: int) -> None:
        await self._workers[number].start()
        self._stage.workers[number] = True

    async def _is_over_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._over.wait()
        except TimeoutError:
            return False

    async def _within(self, seconds: float, task: asyncio.Task[None]) -> None:
        """Let *task* go on for at most that long, or until Ctrl-C."""
        impatience = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait([task, impatience], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        impatience.cancel()
        if task.done():
            task.result()
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _interrupt(self) -> None:
        self._over.set()
        self._interrupted.set()

    @asynccontextmanager
    async def _ticking(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            task.cancel()

    async def _tick(self) -> None:
        while True:
            self._referee.read_log()
            self._show.tick(self._stage)
            await asyncio.sleep(TICK_SECONDS)
