"""Real servers, killed between the ORM's write and the answer, in atomic mode: the payment is there once, or not."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.django.entry import amounts
from tests.web import serving
from tests.web.harness import HANG_SECONDS, wait_until
from tests.web.serving import Backstage, Server, code, seen

HELD = '{"hold": true}'

GUNICORN = ("--bind", "127.0.0.1:{port}", "--threads", "4")
KINDS = {
    "plain": ("gunicorn", "tests.django.killable:plain", *GUNICORN),
    "rest": ("gunicorn", "tests.django.killable:rest", *GUNICORN),
    "middleware": ("gunicorn", "tests.django.killable:middleware", *GUNICORN),
    "async": ("uvicorn", "tests.django.killable:asynchronous", "--port", "{port}", "--lifespan", "off"),
}


@pytest.fixture
def backstage(database: str, tmp_path: Path) -> Iterator[Backstage]:
    """What the servers of one test share."""
    opened = Backstage(tmp_path, database, mode="atomic")
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_killed_between_the_write_and_the_answer(
    backstage: Backstage, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed after the ORM has written leaves nothing; a retry at another pays once, and is replayed."""
    monkeypatch.setitem(serving.COMMANDS, kind, KINDS[kind])
    doomed, heir = backstage.serve(kind), backstage.serve(kind)
    lost = doomed.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    os.kill(backstage.effects[0].pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        lost.result(HANG_SECONDS)
    assert amounts() == []
    backstage.let_go()
    done = decided(heir)
    assert seen(done) == (201, False)
    again = heir.pay(body=HELD)
    assert (seen(again), again.content) == ((201, True), done.content)
    assert amounts() == [5]


def decided(server: Server) -> httpx.Response:
    """Ask until the database has noticed that its client is gone."""
    responses: list[httpx.Response] = []

    def is_so() -> bool:
        responses.append(server.pay(body=HELD))
        return responses[-1].status_code != 409 or code(responses[-1]) != "idempotency-key-in-progress"

    wait_until(is_so)
    return responses[-1]
