"""Instant take-over seen from outside: real servers, real clients, and a worker that dies or loses its lock."""

import os
import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from semel import stores
from tests.stores.colours import wait_until
from tests.web.harness import HANG_SECONDS
from tests.web.serving import Backstage, Server, code, seen

KINDS = ("uvicorn", "gunicorn gthread", "gunicorn --preload")
HELD = '{"hold": true}'
LEASE = timedelta(seconds=120)


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def backstage(postgres_url: str, tmp_path: Path) -> Iterator[Backstage]:
    store = stores.store(postgres_url)
    store.migrate()
    store.close()
    made = Backstage(tmp_path, f"{postgres_url}?takeover=instant", int(LEASE / timedelta(milliseconds=1)))
    yield made
    made.close()


def pay_until(server: Server, is_so: Callable[[httpx.Response], bool]) -> httpx.Response:
    responses: list[httpx.Response] = []

    def is_over() -> bool:
        responses.append(server.pay(body=HELD))
        return is_so(responses[-1])

    wait_until(is_over)
    return responses[-1]


def is_decided(response: httpx.Response) -> bool:
    return response.status_code != 409 or code(response) != "idempotency-key-in-progress"


def happened(url: str, event: str) -> datetime:
    with psycopg.connect(url) as connection:
        ((at,),) = connection.execute("SELECT at FROM semel_audit WHERE event = %s", [event]).fetchall()
    assert isinstance(at, datetime)
    return at


def created(url: str) -> datetime:
    with psycopg.connect(url) as connection:
        ((at,),) = connection.execute("SELECT created_at FROM semel_keys").fetchall()
    assert isinstance(at, datetime)
    return at


def holders(operator: psycopg.Connection[Any]) -> list[int]:
    """The server's processes that hold the locks of those who live."""
    found = operator.execute("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'")
    return [pid for (pid,) in found]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_worker_is_taken_over_before_its_lease_is_over(
    backstage: Backstage, postgres_url: str, kind: str
) -> None:
    """A retry runs as attempt 2 as soon as a worker is killed in mid-handler, by the database's clock long before its
    lease would have been over; the answer is kept.
    """
    doomed, heir = backstage.serve(kind), backstage.serve(kind)
    lost = doomed.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    assert code(heir.pay(body=HELD)) == "idempotency-key-in-progress"
    os.kill(backstage.effects[0].pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        lost.result(HANG_SECONDS)
    taken = pay_until(heir, is_decided)

    assert (seen(taken), taken.json()["attempt"]) == ((201, False), 2)
    assert happened(postgres_url, "taken over") < created(postgres_url) + LEASE
    again = heir.pay(body=HELD)
    assert (seen(again), again.content) == ((201, True), taken.content)


@pytest.mark.parametrize("kind", KINDS)
def test_worker_whose_lock_was_cut_loses_its_operation(backstage: Backstage, postgres_url: str, kind: str) -> None:
    """When the connection that holds its lock is cut, a handler is stopped (a thread's ends in vain), its client is
    told to come back, and a retry runs at once, in the same process or another.
    """
    server = backstage.serve(kind)
    paying = server.start_paying()
    wait_until(lambda: len(backstage.effects) == 1)
    with psycopg.connect(postgres_url, autocommit=True) as operator:
        (holder,) = holders(operator)
        operator.execute("SELECT pg_terminate_backend(%s)", [holder])
        if kind != "uvicorn":
            # Once a new lock is held, the loss of the old one was told.
            wait_until(lambda: holders(operator) not in ([], [holder]))
            backstage.let_go()
    fenced = paying.result(HANG_SECONDS)
    assert (fenced.status_code, code(fenced)) == (409, "idempotency-key-in-progress")

    taken = pay_until(server, is_decided)
    assert (seen(taken), taken.json()["attempt"]) == ((201, False), 2)
    assert [effect.attempt for effect in backstage.effects] == [1, 2]
    new = server.pay(key="key-2")
    assert seen(new) == (201, False)
