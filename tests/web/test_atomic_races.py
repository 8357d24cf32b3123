"""Retries of one operation in atomic mode that come at once, or in the very moment of its commit: each gets the answer,
and the handler runs once.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import psycopg
import pytest

from semel import stores
from tests.web.harness import HANG_SECONDS, Response
from tests.web.lenders import CROWD, GIVEN, POSTGRES, SQLITE, TABLE, Api, Gates, api

ROUNDS = 3
RIGHT, WRONG = b"5", b"6"


def make_tables(url: str) -> str:
    store = stores.store(url)
    store.migrate()
    store.close()
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(urlsplit(url).path.removeprefix("/"))) as connection:
            connection.execute(TABLE)
    else:
        with psycopg.connect(url) as connection:
            connection.execute(TABLE)
    return url


@pytest.fixture(params=POSTGRES + SQLITE)
def anywhere(request: pytest.FixtureRequest) -> Iterator[Api]:
    """The endpoint on every kind of connection."""
    fixture = "sqlite_url" if request.param in SQLITE else "postgres_url"
    with api(request.param, make_tables(request.getfixturevalue(fixture))) as made:
        yield made


@pytest.fixture
def gates(postgres_url: str) -> Iterator[Gates]:
    """Gates in a PostgreSQL database with all tables."""
    make_tables(postgres_url)
    made = Gates(postgres_url)
    yield made
    made.close()


@pytest.fixture(params=POSTGRES)
def gated(request: pytest.FixtureRequest, postgres_url: str, gates: Gates) -> Iterator[Api]:
    """The endpoint on every kind of connection to PostgreSQL, behind the gates."""
    with api(request.param, postgres_url) as made:
        yield made


def is_the_answer(response: Response) -> bool:
    return response.is_replay and (response.status, response.body) == (201, b"paid 1")


def test_replays_at_once_are_all_answered(anywhere: Api) -> None:
    """Twenty retries of a finished operation at the same time get its answer, every one, round after round."""
    assert anywhere.send().status == 201
    for _ in range(ROUNDS):
        responses = anywhere.send_all(*[RIGHT] * CROWD)
        assert [each.status for each in responses if not is_the_answer(each)] == []
    assert anywhere.runs == 1


def test_mistaken_retries_are_not_in_the_way(anywhere: Api) -> None:
    """A retry with another body is refused with 422, and one with the right body beside it gets the answer."""
    assert anywhere.send().status == 201
    for _ in range(ROUNDS):
        responses = anywhere.send_all(*[RIGHT, WRONG] * (CROWD // 2))
        assert [each.status for each in responses[::2] if not is_the_answer(each)] == []
        assert {each.status for each in responses[1::2]} == {422}
    assert anywhere.runs == 1


@pytest.mark.parametrize("other", [RIGHT, WRONG], ids=["right", "mistaken"])
def test_a_finished_operation_is_answered_whichever_has_the_lock(gated: Api, gates: Gates, other: bytes) -> None:
    """While one retry has the key's lock, a second gets the answer, and a mistaken one its 422."""
    assert gated.send().status == 201
    with gates.closed(Gates.WITH_THE_LOCK) as one_has_the_lock:
        first = gated.start(body=other)
        one_has_the_lock()
        assert is_the_answer(gated.send(body=RIGHT))
        assert gated.send(body=WRONG).status == 422
    assert first.result(HANG_SECONDS).status == (201 if other == RIGHT else 422)
    assert gated.runs == 1


def overtake(endpoint: Api, gates: Gates) -> Response:
    """Let a retry look for the record before the first commits, and get the lock after it; return its answer."""
    may_end, runs = threading.Event(), threading.Event()

    def wait() -> None:
        runs.set()
        assert may_end.wait(HANG_SECONDS)

    endpoint.then = wait
    first = endpoint.start()
    assert runs.wait(HANG_SECONDS)
    with gates.closed(Gates.BEFORE_THE_LOCK) as one_waits:
        retry = endpoint.start()
        one_waits()
        may_end.set()
        assert first.result(HANG_SECONDS).status == 201
    return retry.result(HANG_SECONDS)


def test_a_retry_in_the_moment_of_the_commit_runs_nothing(gated: Api, gates: Gates, postgres_url: str) -> None:
    """A retry that began before the first one's commit, and gets the lock after it, is answered from the record."""
    assert is_the_answer(overtake(gated, gates))
    assert gated.runs == 1
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM payments").fetchall() == [(1,)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("kind", GIVEN)
def test_so_it_is_where_a_transaction_has_one_snapshot(kind: str, level: str, postgres_url: str, gates: Gates) -> None:
    """The same under REPEATABLE READ and SERIALIZABLE, where no second look could see the record."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = '{level}'".encode())
    with api(kind, postgres_url) as endpoint:
        assert is_the_answer(overtake(endpoint, gates))
        assert endpoint.runs == 1
        endpoint.then = lambda: None
        assert endpoint.send("key-2").status == 201
        assert endpoint.send("key-2").is_replay
        assert endpoint.runs == 2
