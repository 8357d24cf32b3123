"""Real processes, killed, frozen and cut off in mid-handler: one effect, or a clean retryable error."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from semel import stores
from tests.kit import servers
from tests.web.harness import HANG_SECONDS, wait_until
from tests.web.serving import Backstage, Server, code, seen

KINDS = ("uvicorn", "gunicorn gthread")
HELD = '{"hold": true}'
LEASE_MS = 1500

Stage = Callable[..., Backstage]
Store = servers.PostgresServer | servers.RedisServer


@pytest.fixture(params=["sqlite", "postgres"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """Set a stage on one of the durable stores."""
    opened: list[Backstage] = []

    def set_stage(on_crash: str = "rerun", mode: str = "guard") -> Backstage:
        url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "migrated_postgres_url")
        opened.append(Backstage(tmp_path, url, LEASE_MS, on_crash, mode))
        return opened[-1]

    yield set_stage
    for backstage in opened:
        backstage.close()


def pay_until(server: Server, is_over: Callable[[httpx.Response], bool], body: str = HELD) -> httpx.Response:
    responses: list[httpx.Response] = []

    def is_so() -> bool:
        responses.append(server.pay(body=body))
        return is_over(responses[-1])

    wait_until(is_so)
    return responses[-1]


def is_decided(response: httpx.Response) -> bool:
    return response.status_code != 409 or code(response) != "idempotency-key-in-progress"


def die_in_mid_handler(backstage: Backstage, kind: str) -> Server:
    """Kill a worker after its effect and before its answer; return another server on the same store."""
    doomed, heir = backstage.serve(kind), backstage.serve(kind)
    lost = doomed.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    os.kill(backstage.effects[0].pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        lost.result(HANG_SECONDS)
    return heir


@pytest.mark.parametrize("kind", KINDS)
def test_gate_4_a_killed_worker_is_taken_over(stage: Stage, kind: str) -> None:
    """A worker killed in mid-handler keeps its key until its lease ends; then a retry runs as attempt 2 and is kept."""
    backstage = stage()
    heir = die_in_mid_handler(backstage, kind)
    assert code(heir.pay(body=HELD)) == "idempotency-key-in-progress"
    # Its fingerprint outlives the worker.
    assert heir.pay(body="{}").status_code == 422
    taken = pay_until(heir, is_decided)
    assert (seen(taken), taken.json()["attempt"]) == ((201, False), 2)
    again = heir.pay(body=HELD)
    assert (seen(again), again.content) == ((201, True), taken.content)
    assert [effect.attempt for effect in backstage.effects] == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_not_run_again_where_the_policy_refuses(stage: Stage, kind: str) -> None:
    """With on_crash="refuse" a retry after a crash is told that the outcome is unknown, and the effect stays one."""
    backstage = stage(on_crash="refuse")
    heir = die_in_mid_handler(backstage, kind)
    refused = pay_until(heir, is_decided)
    assert (refused.status_code, code(refused)) == (409, "outcome-unknown")
    assert code(heir.pay(body=HELD)) == "outcome-unknown"
    assert len(backstage.effects) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_killed_in_atomic_mode_leaves_nothing_to_wait_for(stage: Stage, kind: str) -> None:
    """In atomic mode a killed worker's transaction ends with it: a retry runs at once, as if for the first time."""
    backstage = stage(mode="atomic")
    heir = die_in_mid_handler(backstage, kind)
    backstage.let_go()
    # The database may take a moment to notice that its client is gone; it has no lease to wait for.
    done = pay_until(heir, is_decided)
    assert (seen(done), done.json()["attempt"]) == ((201, False), 1)
    again = heir.pay(body=HELD)
    assert (seen(again), again.content) == ((201, True), done.content)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["guard", "atomic"])
def test_sigterm(stage: Stage, kind: str, mode: str) -> None:
    """A server that is told to stop finishes what it has begun, and its answer is there for the next server."""
    backstage = stage(mode=mode)
    leaving = backstage.serve(kind)
    paying = leaving.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    leaving.process.terminate()
    backstage.let_go()
    answer = paying.result(HANG_SECONDS)
    assert seen(answer) == (201, False)
    assert leaving.process.wait(HANG_SECONDS) in {0, -signal.SIGTERM}
    again = backstage.serve(kind).pay(body=HELD)
    assert (seen(again), again.content) == ((201, True), answer.content)
    assert len(backstage.effects) == 1


def is_frozen_without_the_lock(pid: int, heir: Server) -> bool:
    """Freeze a process, unless it happens to hold the write lock of a SQLite file: then nobody could take over."""
    os.kill(pid, signal.SIGSTOP)
    if code(heir.pay(body=HELD)) == "idempotency-key-in-progress":
        return True
    os.kill(pid, signal.SIGCONT)
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_worker_is_fenced(stage: Stage, kind: str) -> None:
    """A worker that was stopped past its lease finds it lost when it wakes: the answer that counts is its heir's."""
    backstage = stage()
    frozen, heir = backstage.serve(kind), backstage.serve(kind)
    zombie = frozen.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    pid = backstage.effects[0].pid
    try:
        wait_until(lambda: is_frozen_without_the_lock(pid, heir))
        taken = pay_until(heir, is_decided)
    finally:
        backstage.let_go()
        os.kill(pid, signal.SIGCONT)
    assert taken.json()["attempt"] == 2
    fenced = zombie.result(HANG_SECONDS)
    assert (fenced.status_code, code(fenced)) == (409, "idempotency-key-in-progress")
    for server in (frozen, heir):
        again = server.pay(body=HELD)
        assert (seen(again), again.content) == ((201, True), taken.content)
    assert [effect.attempt for effect in backstage.effects] == [1, 2]


@pytest.fixture
def database() -> Iterator[servers.PostgresServer]:
    """A PostgreSQL server that may be stopped."""
    with servers.postgres(settings={"fsync": "off"}) as server:
        store = stores.store(server.url)
        store.migrate()
        store.close()
        yield server


@pytest.fixture
def refusing(database: servers.PostgresServer, tmp_path: Path) -> Iterator[Backstage]:
    backstage = Backstage(tmp_path, database.url, LEASE_MS, "refuse")
    yield backstage
    backstage.close()


@pytest.mark.parametrize("kind", KINDS)
def test_gate_9_the_database_goes_and_comes_back(
    refusing: Backstage, database: servers.PostgresServer, kind: str
) -> None:
    """While the database is down keyed requests are 503 and nothing runs; when it is back the app works as before."""
    server = refusing.serve(kind)
    first = server.pay()
    assert seen(first) == (201, False)
    database.stop()
    down = server.pay("key-2")
    assert (down.status_code, code(down)) == (503, "store-unavailable")
    assert int(down.headers["retry-after"]) >= 1
    database.start()
    assert seen(server.pay("key-2")) == (201, False)
    again = server.pay()
    assert (seen(again), again.content) == ((201, True), first.content)
    assert [effect.key for effect in refusing.effects] == ["key-1", "key-2"]


@pytest.fixture(params=["postgres", "redis"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Backstage, Store]]:
    """A stage, and its store, which may be killed and started again, and loses nothing."""
    if request.param == "postgres":
        database = request.getfixturevalue("database")
        backstage = Backstage(tmp_path, database.url, LEASE_MS)
        yield backstage, database
        backstage.close()
        return
    with servers.redis(settings={"appendonly": "yes", "appendfsync": "always"}) as server:
        backstage = Backstage(tmp_path, server.url, LEASE_MS)
        yield backstage, server
        backstage.close()


def lose_store_in_mid_payment(backstage: Backstage, server: Server, store: Store) -> None:
    """Kill the store while a handler runs; its client is told that its answer is not stored."""
    paying = server.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    store.kill()
    backstage.let_go()
    unsure = paying.result(HANG_SECONDS)
    assert (unsure.status_code, code(unsure)) == (503, "answer-not-stored")


@pytest.mark.parametrize("kind", KINDS)
def test_gate_9_the_database_goes_in_the_middle_of_a_payment(away: tuple[Backstage, Store], kind: str) -> None:
    """A store that is lost between a payment and its record, for longer than the lease: one charge and a 503; and when
    it is back, retries get the first answer, since the worker has kept it.
    """
    backstage, store = away
    server = backstage.serve(kind)
    lose_store_in_mid_payment(backstage, server, store)
    assert server.pay(body=HELD).status_code == 503
    store.start()
    kept = pay_until(server, is_stored)
    assert (seen(kept), kept.json()["attempt"]) == ((201, True), 1)
    assert len(backstage.effects) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_ends_while_an_answer_waits(away: tuple[Backstage, Store], kind: str) -> None:
    """A server that is told to stop still stores an answer that waits, if the store is back within some seconds."""
    backstage, store = away
    leaving = backstage.serve(kind)
    lose_store_in_mid_payment(backstage, leaving, store)
    leaving.process.terminate()
    store.start()
    assert leaving.process.wait(HANG_SECONDS) in {0, -signal.SIGTERM}
    kept = pay_until(backstage.serve(kind), is_stored)
    assert (seen(kept), kept.json()["attempt"]) == ((201, True), 1)
    assert len(backstage.effects) == 1


def is_stored(response: httpx.Response) -> bool:
    return response.status_code != 503 and is_decided(response)
