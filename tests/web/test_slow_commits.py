"""A COMMIT that takes longer than a lease, since it waits for a replica: a worker that takes over repeats nothing."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any, Literal
from wsgiref.types import StartResponse, WSGIEnvironment

import psycopg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
import semel.asgi
import semel.wsgi
from semel import Policy, stores
from tests.kit import servers
from tests.web.harness import HANG_SECONDS, Request, Response, call_asgi, call_wsgi, eventually, wait_until

KEYED = Request(target="/rides", lines=(("Idempotency-Key", b"key-1"),))
STANDBY = "synchronous_standby_names"
COMMITTING = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
#: The take-over waits for the row that the COMMIT has locked.
TAKING_OVER = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of this module's own: its settings are changed."""
    with servers.postgres(settings={"synchronous_commit": "on"}) as own:
        store = stores.store(own.url)
        store.migrate()
        store.close()
        with psycopg.connect(own.url) as connection:
            connection.execute("CREATE TABLE rides (attempt integer)")
        yield own.url


class Operator:
    """Looks at the server, and changes it."""

    def __init__(self, url: str) -> None:
        # Its own commits wait for no replica.
        self._connection = psycopg.connect(url, autocommit=True, options="-c synchronous_commit=local")

    def is_so(self, question: str) -> bool:
        row = self._connection.execute(question.encode()).fetchone()
        return row is not None and bool(row[0])

    def wait_for_replica(self, *, named: str) -> None:
        how = f"SET {STANDBY} = '{named}'" if named else f"RESET {STANDBY}"
        self._connection.execute(f"ALTER SYSTEM {how}".encode())
        self._connection.execute("SELECT pg_reload_conf()")
        wait_until(lambda: self.is_so(f"SELECT setting = '{named}' FROM pg_settings WHERE name = '{STANDBY}'"))

    @property
    def rides(self) -> list[int]:
        return [attempt for (attempt,) in self._connection.execute("SELECT attempt FROM rides").fetchall()]

    def close(self) -> None:
        self._connection.execute("TRUNCATE rides, semel_keys, semel_audit")
        self._connection.close()


class Shop:
    """A handler of a phase and an effect, behind two servers of one kind."""

    def __init__(self) -> None:
        self.phases: list[int] = []
        self.charges: list[int] = []
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.is_reached.set()
        assert self.is_open.wait(HANG_SECONDS)

    def create(self, connection: Any) -> int:
        attempt = semel.current().attempt
        self.phases.append(attempt)
        connection.execute("INSERT INTO rides VALUES (%s)", [attempt])
        self.wait()
        return attempt

    async def acreate(self, connection: Any) -> int:
        attempt = semel.current().attempt
        self.phases.append(attempt)
        await connection.execute("INSERT INTO rides VALUES ($1)", attempt)
        await asyncio.to_thread(self.wait)
        return attempt

    def charge(self, ride: int, *, idempotency_key: str) -> str:
        self.charges.append(semel.current().attempt)
        return f"ride {ride} is paid"

    async def acharge(self, ride: int, *, idempotency_key: str) -> str:
        return self.charge(ride, idempotency_key=idempotency_key)

    def serve(self, _environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        operation = semel.current()
        ride = operation.phase("ride_created", self.create)
        paid = operation.effect("charged", self.charge, ride)
        start_response("201 Created", [("Content-Type", "application/json")])
        return [json.dumps(paid).encode()]

    async def aserve(self, _request: StarletteRequest) -> JSONResponse:
        operation = semel.current()
        ride = await operation.phase("ride_created", self.acreate)
        return JSONResponse(await operation.effect("charged", self.acharge, ride), 201)


class Sites:
    """Two servers, each a thread's or a loop's."""

    def __init__(self, entry: str, url: str, shop: Shop) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._threads = ThreadPoolExecutor(4)
        settings: dict[str, Any] = {
            "store": url,
            "scope": semel.SINGLE_TENANT,
            "policy": Policy.ietf(lease=timedelta(milliseconds=300)),
        }
        self._send: list[Callable[[], Response]] = []
        self._apps: list[Any] = []
        for _ in range(2):
            if entry == "asgi":
                app = semel.asgi.IdempotencyMiddleware(
                    Starlette(routes=[Route("/rides", shop.aserve, methods=["POST"])]), **settings
                )
                self._apps.append(app)
                self._send.append(lambda app=app: self._run(call_asgi(app, KEYED)))  # type: ignore[misc]
            else:
                within = semel.wsgi.IdempotencyMiddleware(shop.serve, **settings)
                self._apps.append(within)
                self._send.append(lambda within=within: call_wsgi(within, KEYED))  # type: ignore[misc]

    def start(self, which: int) -> "Future[Response]":
        return self._threads.submit(self._send[which])

    def start_retrying(self, which: int) -> "Future[Response]":
        return self._threads.submit(eventually, self._send[which], lambda answer: answer.status == 201)

    def close(self) -> None:
        self._threads.shutdown()
        for app in self._apps:
            app.guard.leases.close()
            closing = app.store.close()
            if closing is not None:
                self._run(closing)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_SECONDS)
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(2 * HANG_SECONDS)


@pytest.mark.parametrize("entry", ["asgi", "wsgi"])
def test_a_phase_that_commits_for_longer_than_its_lease_is_run_once(server: str, entry: str) -> None:
    """While a phase's COMMIT waits for a replica, its row is locked: a worker that takes the operation over waits for
    it, and then goes on behind the phase. The phase and the effect after it are run once.
    """
    shop = Shop()
    with closing(Operator(server)) as operator, closing(Sites(entry, server, shop)) as sites:
        first = sites.start(0)
        assert shop.is_reached.wait(HANG_SECONDS)
        operator.wait_for_replica(named="nowhere")
        try:
            shop.is_open.set()
            wait_until(lambda: operator.is_so(COMMITTING))
            retries = sites.start_retrying(1)
            wait_until(lambda: operator.is_so(TAKING_OVER))
            assert (shop.phases, shop.charges) == ([1], [])
        finally:
            operator.wait_for_replica(named="")
        assert retries.result(HANG_SECONDS).json() == "ride 1 is paid"
        assert first.result(HANG_SECONDS).status in {201, 409}
        assert (shop.phases, len(shop.charges), operator.rides) == ([1], 1, [1])


@pytest.mark.parametrize("mode", ["atomic", "guard"])
async def test_a_commit_that_is_given_up_is_not_shown(
    server: str, mode: Literal["atomic", "guard"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits no longer for its COMMIT, which waits for a replica, does not cancel it: the server would
    then show it to others, and what they are told would be lost with the server. A retry is answered when the replica
    is back.
    """
    monkeypatch.setattr("semel.stores.postgres.async_store.COMMAND_SECONDS", 0.5)
    monkeypatch.setattr("semel.stores.connections.postgres.COMMIT_SECONDS", 0.5)
    runs: list[int] = []
    with closing(Operator(server)) as operator:

        async def pay(_request: StarletteRequest) -> JSONResponse:
            runs.append(semel.current().attempt)
            await asyncio.to_thread(operator.wait_for_replica, named="nowhere")
            return JSONResponse("paid", 201)

        app = semel.asgi.IdempotencyMiddleware(
            Starlette(routes=[Route("/rides", pay, methods=["POST"])]),
            store=server,
            scope=semel.SINGLE_TENANT,
            policy=Policy.ietf(mode=mode),
        )
        try:
            answers = [await call_asgi(app, KEYED) for _ in range(3)]
            assert {answer.status for answer in answers} <= {409, 503}
            assert not operator.is_so("SELECT count(*) FROM semel_keys WHERE state = 'complete'")
        finally:
            operator.wait_for_replica(named="")
        async with asyncio.timeout(HANG_SECONDS):
            while (answer := await call_asgi(app, KEYED)).status != 201:  # noqa: ASYNC110 - a client has no event
                await asyncio.sleep(0.05)
        assert (answer.json(), runs) == ("paid", [1])
        app.guard.leases.close()
        await app.store.close()
