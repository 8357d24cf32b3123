"""Handlers that block their event loop, in real processes: what else their process has in flight stays its own."""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import pytest

from semel import stores
from semel.core.commands import Browse
from tests.web.harness import HANG_SECONDS, wait_until
from tests.web.serving import NO_CERTIFICATES, Backstage, Server, seen

LEASE = timedelta(milliseconds=800)
HELD = '{"hold": true}'
BLOCKING = '{"block": true}'

Stage = Callable[..., Backstage]


@pytest.fixture(params=["sqlite", "postgres", "redis", "tiered"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """Servers on one store, with a short lease."""
    opened: list[Backstage] = []
    fixture = {"sqlite": "sqlite_url", "redis": "redis_url"}.get(request.param, "migrated_postgres_url")
    url: str = request.getfixturevalue(fixture)
    cache: str = request.getfixturevalue("redis_url") if request.param == "tiered" else ""

    def set_stage(in_progress: str = "conflict") -> Backstage:
        opened.append(
            Backstage(tmp_path, url, int(LEASE / timedelta(milliseconds=1)), cache=cache, in_progress=in_progress)
        )
        return opened[-1]

    yield set_stage
    for backstage in opened:
        backstage.close()


def start_blocking(backstage: Backstage, server: Server) -> None:
    """Ask for what blocks the server's event loop, and wait until it does."""

    def ask() -> httpx.Response:
        return httpx.get(f"{server.url}/block", timeout=HANG_SECONDS, verify=NO_CERTIFICATES)

    backstage.threads.submit(ask)
    wait_until(backstage.is_blocked)


class Records:
    """What the store says of the one operation of a test."""

    def __init__(self, backstage: Backstage) -> None:
        self._backstage = backstage
        self._store = stores.store(backstage.store)

    def wait_for_two_leases(self) -> None:
        """Wait until the lease that the operation has now is over twice: it was renewed, or another worker has come."""
        begun = self._ends()
        wait_until(lambda: len(self._backstage.effects) > 1 or self._ends() > begun + 2 * LEASE)
        self._store.close()

    def _ends(self) -> datetime:
        [record] = self._store.perform(Browse(9))
        assert record.lease_expires_at is not None
        return record.lease_expires_at


def retry_until(server: Server, body: str, status: int) -> httpx.Response:
    answers: list[httpx.Response] = []

    def is_so() -> bool:
        answers.append(server.pay(body=body))
        return answers[-1].status_code == status

    wait_until(is_so)
    return answers[-1]


def test_a_blocked_loop_keeps_the_keys_of_its_process(stage: Stage) -> None:
    """A handler that blocks its event loop for longer than a lease costs no other operation of its process its key."""
    backstage = stage()
    first, second = backstage.serve("uvicorn"), backstage.serve("uvicorn")
    answer = first.start_paying(body=HELD)
    wait_until(lambda: len(backstage.effects) == 1)
    start_blocking(backstage, first)
    retries = backstage.threads.submit(retry_until, second, HELD, 201)
    Records(backstage).wait_for_two_leases()
    assert not retries.done()
    backstage.let_go()
    assert seen(answer.result(HANG_SECONDS)) == (201, False)
    assert seen(retries.result(HANG_SECONDS)) == (201, True)
    assert len(backstage.effects) == 1


def test_accepted_work_that_blocks_its_loop_is_run_once(stage: Stage) -> None:
    """Of two processes with workers, one runs an accepted operation that blocks its event loop, and runs it once."""
    backstage = stage(in_progress="accept")
    servers = [backstage.serve("uvicorn") for _ in range(2)]
    accepted = servers[0].pay(body=BLOCKING)
    assert accepted.status_code == 202
    wait_until(backstage.is_blocked)
    Records(backstage).wait_for_two_leases()
    assert len(backstage.effects) == 1
    backstage.let_go()
    final = retry_until(servers[0], BLOCKING, 201)
    assert final.json()["attempt"] == 1
    assert [effect.attempt for effect in backstage.effects] == [1]


def test_a_loop_that_is_dead_for_good_loses_its_keys(tmp_path: Path, sqlite_url: str) -> None:
    """An event loop that never comes back is taken for dead, and what it had in flight is taken over."""
    backstage = Backstage(tmp_path, sqlite_url, int(LEASE / timedelta(milliseconds=1)), loop_silence_ms=1000)
    try:
        first, second = backstage.serve("uvicorn"), backstage.serve("uvicorn")
        first.start_paying(body=HELD)
        wait_until(lambda: len(backstage.effects) == 1)
        start_blocking(backstage, first)
        taken = retry_until(second, HELD, 201)
        assert (seen(taken), taken.json()["attempt"]) == ((201, False), 2)
        assert [effect.attempt for effect in backstage.effects] == [1, 2]
    finally:
        backstage.close()


@pytest.mark.slow
def test_a_handler_that_gives_no_greenlet_a_turn(stage: Stage) -> None:
    """Under gevent, too, a handler that yields to nothing for longer than its lease keeps its key."""
    backstage = stage()
    first, second = backstage.serve("gunicorn gevent"), backstage.serve("gunicorn gthread")
    answer = first.start_paying(body=BLOCKING)
    wait_until(backstage.is_blocked)
    retries = backstage.threads.submit(retry_until, second, BLOCKING, 201)
    Records(backstage).wait_for_two_leases()
    assert len(backstage.effects) == 1
    backstage.let_go()
    assert seen(answer.result()) == (201, False)
    assert seen(retries.result()) == (201, True)
    assert len(backstage.effects) == 1
