"""Report mode on a store that hangs: requests are answered as if it were not there."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flask
import pytest

import semel
from semel import Policy
from semel.asgi import IdempotencyMiddleware as AsgiMiddleware
from semel.core.commands import Command
from semel.flask import Semel, idempotent
from semel.guard import lookups
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.step import Step
from semel.telemetry import tally
from semel.telemetry.tally import Tally
from semel.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.web.harness import HANG_SECONDS, Request, Shop, call_asgi, call_wsgi, plain, starlette, wait_until

#: As it is before a test changes it.
PATIENCE_SECONDS = lookups.PATIENCE_SECONDS
REPORT = Policy.ietf(enforcement="report")
#: Requests at once, more than there may be look-ups that are late.
CROWD = 40


class Tide:
    """Which commands the store does not answer, until it does."""

    def __init__(self) -> None:
        self.holds_up: tuple[str, ...] = ()
        self.waiting = 0
        self._is_over = threading.Event()
        self._mutex = threading.Lock()

    def is_against(self, command: Command[Any]) -> bool:
        return type(command).__name__ in self.holds_up

    def wait(self) -> None:
        with self._mutex:
            self.waiting += 1
        try:
            assert self._is_over.wait(HANG_SECONDS)
        finally:
            with self._mutex:
                self.waiting -= 1

    def turn(self) -> None:
        self.holds_up = ()
        self._is_over.set()


class HangingStore(MemoryStore):
    def __init__(self, tide: Tide) -> None:
        super().__init__()
        self._tide = tide

    def perform(self, command: Command[Any]) -> Any:
        if self._tide.is_against(command):
            self._tide.wait()
        return super().perform(command)


class AsyncHangingStore(AsyncMemoryStore):
    def __init__(self, tide: Tide) -> None:
        super().__init__()
        self._tide = tide

    def perform(self, command: Command[Any]) -> Step[Any]:
        if not self._tide.is_against(command):
            return super().perform(command)
        step: Step[Any] = Step(loop=asyncio.get_running_loop())

        async def answer() -> None:
            await asyncio.to_thread(self._tide.wait)
            step.settle(await super(AsyncHangingStore, self).perform(command))

        step.answering = asyncio.ensure_future(answer())  # type: ignore[attr-defined]  # or nothing would hold it
        return step


class App:
    """An app in report mode, on a loop of its own where it needs one."""

    tally: Tally

    def __init__(self, entry: str, tide: Tide) -> None:
        self.shop = Shop()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(CROWD))  # to hang in
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._send: Callable[[Request], int]
        if entry == "asgi":
            app = AsgiMiddleware(
                starlette(self.shop), store=AsyncHangingStore(tide), scope=semel.SINGLE_TENANT, policy=REPORT
            )
            self.tally = app.tally
            self._send = lambda request: (
                asyncio.run_coroutine_threadsafe(call_asgi(app, request), self._loop).result(HANG_SECONDS).status
            )
        elif entry == "wsgi":
            within = WsgiMiddleware(
                plain(self.shop), store=HangingStore(tide), scope=semel.SINGLE_TENANT, policy=REPORT
            )
            self.tally = within.tally
            self._send = lambda request: call_wsgi(within, request).status
        else:
            site = flask.Flask("shop")
            Semel(site, store=HangingStore(tide), scope=semel.SINGLE_TENANT, policy=REPORT)
            self.tally = site.extensions["semel"].tally

            @site.post("/pay")
            @idempotent
            def pay() -> Any:
                reply = self.shop("POST", "/pay", b"")
                return reply.body, reply.status

            self._send = lambda request: (
                (
                    site.test_client().post("/pay", headers={name: value.decode() for name, value in request.lines})
                ).status_code
            )

    def pay(self, key: str) -> int:
        return self._send(Request(lines=(("Idempotency-Key", key.encode()),)))

    def close(self) -> None:
        async def leave() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(leave(), self._loop).result(HANG_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_SECONDS)
        self._loop.close()

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.tally.snapshot().total)


@pytest.fixture(autouse=True)
def impatient(patient_reports: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report mode waits as it does for users."""
    monkeypatch.setattr(lookups, "PATIENCE_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def tide() -> Iterator[Tide]:
    tide = Tide()
    yield tide
    tide.turn()


@pytest.fixture(params=["asgi", "wsgi", "flask"])
def app(request: pytest.FixtureRequest, tide: Tide) -> Iterator[App]:
    app = App(request.param, tide)
    yield app
    tide.turn()
    app.close()


@pytest.mark.parametrize("command", ["Claim", "Complete"])
def test_a_hanging_store_holds_up_no_answer(app: App, tide: Tide, command: str) -> None:
    """A request is answered though the store does not answer at all."""
    tide.holds_up = (command,)
    assert app.pay("key-1") == 201
    assert len(app.shop.runs) == 1
    wait_until(lambda: tide.waiting == 1)


def test_a_hanging_store_is_counted_as_failed(app: App, tide: Tide) -> None:
    """Requests with a look-up that hangs count as failed; once the store has answered, it is asked again at once."""
    tide.holds_up = ("Claim",)
    for number in range(3):
        assert app.pay(f"key-{number}") == 201
    assert app.counts == {"failed": 3}
    wait_until(lambda: tide.waiting == 1)
    tide.turn()
    wait_until(lambda: app.pay("key-9") == 201 and app.counts.get("replay", 0) > 0)


def test_look_ups_that_hang_do_not_pile_up(app: App, tide: Tide, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a store hangs, and however often it is tried again, few look-ups are left behind."""
    tide.holds_up = ("Claim",)
    monkeypatch.setattr(tally, "REST_SECONDS", 0.0)
    for number in range(lookups.MAX_LATE + 5):
        assert app.pay(f"key-{number}") == 201
    assert tide.waiting <= lookups.MAX_LATE
    assert app.counts == {"failed": lookups.MAX_LATE + 5}


def test_a_crowd_is_judged(app: App, tide: Tide, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests come at once, all are judged by a store that answers in time."""
    monkeypatch.setattr(lookups, "PATIENCE_SECONDS", HANG_SECONDS)
    tide.holds_up = ("Claim",)
    with ThreadPoolExecutor(CROWD) as clients:
        answers = [clients.submit(app.pay, f"key-{number}") for number in range(CROWD)]
        wait_until(lambda: tide.waiting == CROWD or bool(app.counts))
        tide.turn()
        assert {each.result(HANG_SECONDS) for each in answers} == {201}
    assert app.counts == {"new": CROWD}
