"""Waiting in real servers: for a request of another process, for one that is killed, and until the client hangs up."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.web.harness import HANG_SECONDS, wait_until
from tests.web.serving import Backstage, Server, code, seen

HELD = '{"hold": true}'
LEASE_MS = 1500

Stage = Callable[..., Backstage]

OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("hypercorn", "granian ASGI")]


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """Set a stage on one of the durable stores."""
    opened: list[Backstage] = []

    def set_stage(store: str, *, lease_ms: int = 30_000, mode: str = "guard", in_progress: str = "wait") -> Backstage:
        url: str = request.getfixturevalue("sqlite_url" if store == "sqlite" else "migrated_postgres_url")
        opened.append(Backstage(tmp_path, url, lease_ms, mode=mode, in_progress=in_progress))
        return opened[-1]

    yield set_stage
    for backstage in opened:
        backstage.close()


@pytest.mark.parametrize(
    "kind, store, mode",
    [
        ("uvicorn", "postgres", "guard"),
        ("uvicorn", "postgres", "atomic"),
        pytest.param("hypercorn", "sqlite", "guard", marks=pytest.mark.slow),
        pytest.param("granian ASGI", "postgres", "guard", marks=pytest.mark.slow),
        ("gunicorn gthread", "postgres", "guard"),
        pytest.param("gunicorn gthread", "postgres", "atomic", marks=pytest.mark.slow),
    ],
)
def test_waiting_for_another_process(stage: Stage, kind: str, store: str, mode: str) -> None:
    """A duplicate that comes in at another process waits there, and gets the first one's answer."""
    backstage = stage(store, mode=mode)
    one, other = backstage.serve(kind), backstage.serve(kind)
    first = one.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    again = [other.start_paying() for _ in range(2)]
    wait_until(lambda: other.waiting == 2)
    assert other.pay(body="{}").status_code == 422
    backstage.let_go()
    answer = first.result(HANG_SECONDS)
    assert seen(answer) == (201, False)
    for each in again:
        assert (seen(each.result(HANG_SECONDS)), each.result().content) == ((201, True), answer.content)
    assert (other.waiting, len(backstage.effects)) == (0, 1)


def test_waiting_in_two_workers_of_one_server(stage: Stage) -> None:
    """Whichever worker of a server a duplicate comes to, it gets the answer that another worker made."""
    backstage = stage("postgres")
    server = backstage.serve("uvicorn, 2 workers")
    first = server.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    again = [server.start_paying() for _ in range(8)]
    backstage.let_go()
    answer = first.result(HANG_SECONDS)
    assert [seen(each.result(HANG_SECONDS)) for each in again] == [(201, True)] * 8
    assert {each.result().content for each in again} == {answer.content}
    assert len(backstage.effects) == 1


@pytest.mark.parametrize("kind", ["uvicorn", "gunicorn gthread"])
def test_waiting_for_a_process_that_is_killed(stage: Stage, kind: str) -> None:
    """When the worker that runs it is killed, one who waits takes over after its lease, and others wait on."""
    backstage = stage("postgres", lease_ms=LEASE_MS)
    doomed, heir = backstage.serve(kind), backstage.serve(kind)
    lost = doomed.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    waiting = [heir.start_paying() for _ in range(2)]
    wait_until(lambda: heir.waiting == 2)
    os.kill(backstage.effects[0].pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        lost.result(HANG_SECONDS)
    answers = sorted((each.result(HANG_SECONDS) for each in waiting), key=seen)
    assert [seen(each) for each in answers] == [(201, False), (201, True)]
    assert [each.json()["attempt"] for each in answers] == [2, 2]
    assert [effect.attempt for effect in backstage.effects] == [1, 2]


class Caller:
    """A client that may hang up."""

    def __init__(self, server: Server, *lines: str) -> None:
        address = urlsplit(server.url)
        assert address.hostname is not None
        assert address.port is not None
        self._socket = socket.create_connection((address.hostname, address.port), timeout=HANG_SECONDS)
        head = ("POST /pay HTTP/1.1", f"Host: {address.netloc}", "Content-Type: application/json", *lines)
        key = ("Idempotency-Key: key-1", f"Content-Length: {len(HELD)}")
        self._socket.sendall("\r\n".join((*head, *key, "", HELD)).encode())

    def hang_up(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("kind", ["uvicorn", *OTHERS])
def test_a_client_that_hangs_up(stage: Stage, kind: str) -> None:
    """A client that hangs up while it is kept waiting frees its place; others wait on, and get their answer."""
    backstage = stage("sqlite")
    server = backstage.serve(kind)
    first = server.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    callers = [Caller(server) for _ in range(10)]
    wait_until(lambda: server.waiting == 10)
    stays = server.start_paying()
    wait_until(lambda: server.waiting == 11)
    for caller in callers:
        caller.hang_up()
    wait_until(lambda: server.waiting == 1)
    backstage.let_go()
    assert [seen(each.result(HANG_SECONDS)) for each in (first, stays)] == [(201, False), (201, True)]
    assert len(backstage.effects) == 1
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("kind", ["uvicorn", *OTHERS])
def test_who_waited_is_heard_and_answered_as_before(stage: Stage, kind: str) -> None:
    """A connection on which a request waited is as good as new: what comes next on it is served."""
    backstage = stage("sqlite")
    server = backstage.serve(kind)
    with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as client:
        headers = {"Idempotency-Key": "key-1", "Content-Type": "application/json"}
        first = server.start_paying()
        wait_until(lambda: len(backstage.effects) == 1)
        waits = backstage.threads.submit(client.post, "/pay", content=HELD, headers=headers)
        wait_until(lambda: server.waiting == 1)
        backstage.let_go()
        assert seen(waits.result(HANG_SECONDS)) == (201, True)
        first.result(HANG_SECONDS)
        headers["Idempotency-Key"] = "key-2"
        assert [seen(client.post("/pay", content=HELD, headers=headers)) for _ in range(2)] == [
            (201, False),
            (201, True),
        ]
    assert "Traceback" not in server.log.read_text()


def test_threads_are_left_for_others(stage: Stage) -> None:
    """In a server of threads four may wait unless the policy says otherwise, and the other threads serve."""
    backstage = stage("sqlite")
    server = backstage.serve("gunicorn, 8 threads")
    first = server.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    waiting = [server.start_paying() for _ in range(4)]
    wait_until(lambda: server.waiting == 4)
    turned_away = server.pay(body=HELD)
    assert (turned_away.status_code, code(turned_away)) == (409, "idempotency-key-in-progress")
    assert seen(server.pay("key-2")) == (201, False)
    backstage.let_go()
    assert [seen(each.result(HANG_SECONDS)) for each in (first, *waiting)] == [(201, False), *[(201, True)] * 4]


def test_a_server_that_is_told_to_stop_ends_those_who_wait_with_an_answer(stage: Stage) -> None:
    """A server that is told to stop finishes what it has begun, and those who wait for that get its answer."""
    backstage = stage("postgres")
    server = backstage.serve("uvicorn")
    first = server.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    again = server.start_paying()
    wait_until(lambda: server.waiting == 1)
    server.process.terminate()
    backstage.let_go()
    assert [seen(each.result(HANG_SECONDS)) for each in (first, again)] == [(201, False), (201, True)]
    assert server.process.wait(HANG_SECONDS) in {0, -signal.SIGTERM}
