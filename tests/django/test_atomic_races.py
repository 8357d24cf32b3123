"""Retries in Django's atomic mode that come at once, or in the moment of the commit; and databases that
can't be written.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from django.db import connections
from django.http import HttpResponse
from django.urls import path
from psycopg import IsolationLevel

from semel import Policy
from semel.django import idempotent
from semel.errors import StoreNotPermitted
from semel.stores.django.store import DjangoStore
from tests.django import project
from tests.django.entry import ASGI, WSGI, Visitor, amounts, code, everybody, is_replay, pay
from tests.web.harness import HANG_SECONDS
from tests.web.lenders import CROWD, Gates

ATOMIC = Policy.ietf(mode="atomic")
ROUNDS = 2
RIGHT, WRONG = 5, 6


class Shop:
    """A view that pays, and counts how often it is run."""

    def __init__(self) -> None:
        self.runs = 0
        self.then: Any = lambda: None

    def view(self, request: Any) -> HttpResponse:
        self.runs += 1
        response: HttpResponse = pay(request)
        self.then()
        return response


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    patterns = [path("pay", idempotent(policy=ATOMIC)(made.view))]
    with project.serving(patterns, SEMEL={"SCOPE": everybody}):
        yield made


@pytest.fixture(params=[WSGI, ASGI])
def under(request: pytest.FixtureRequest) -> str:
    """Either kind of server."""
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CROWD) as made:
        yield made


def send(under: str, amount: int = RIGHT, key: str = "key-1") -> Any:
    try:
        return Visitor(under).post(key=key, data={"amount": amount}, content_type="application/json")
    finally:
        connections.close_all()


def test_replays_at_once_are_all_answered(database: str, under: str, shop: Shop, threads: ThreadPoolExecutor) -> None:
    """Retries of a finished operation at the same time all get its answer, and mistaken ones beside them 422."""
    first = send(under)
    assert first.status_code == 201
    for _ in range(ROUNDS):
        started = [threads.submit(send, under, amount) for amount in [RIGHT, WRONG] * (CROWD // 2)]
        answers = [each.result(HANG_SECONDS) for each in started]
        assert [each.status_code for each in answers[::2] if not is_replay(each)] == []
        assert {each.content for each in answers[::2]} == {first.content}
        assert {each.status_code for each in answers[1::2]} == {422}
    assert shop.runs == 1


@pytest.mark.parametrize("level", [None, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_a_retry_in_the_moment_of_the_commit_runs_nothing(
    level: IsolationLevel | None, postgres: str, under: str, shop: Shop, threads: ThreadPoolExecutor
) -> None:
    """A retry that began before the first one's commit, and gets the lock after it, is answered from the record; also
    where a transaction has one snapshot to its end.
    """
    gates = Gates(postgres)
    may_end, runs = threading.Event(), threading.Event()

    def wait() -> None:
        runs.set()
        assert may_end.wait(HANG_SECONDS)

    shop.then = wait
    options = {} if level is None else {"isolation_level": level}
    with project.databases(default=project.settings_of(postgres, **options)):
        first = threads.submit(send, under)
        assert runs.wait(HANG_SECONDS)
        with gates.closed(Gates.BEFORE_THE_LOCK) as one_waits:
            retry = threads.submit(send, under)
            one_waits()
            may_end.set()
            assert first.result(HANG_SECONDS).status_code == 201
        assert is_replay(retry.result(HANG_SECONDS))
        assert shop.runs == 1
        assert amounts() == [RIGHT]
    gates.close()


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_a_database_that_takes_no_writes(kind: str, request: pytest.FixtureRequest, under: str, shop: Shop) -> None:
    """Where the database is read-only, or its file, a request gets 503 and no view runs."""
    url = request.getfixturevalue(kind)
    entry = (
        project.settings_of(url, options="-c default_transaction_read_only=on")
        if kind == "postgres"
        else {"ENGINE": "django.db.backends.sqlite3", "NAME": f"file:{url.removeprefix('sqlite:///')}?mode=ro"}
    )
    with project.databases(default=entry):
        for _ in range(3):
            answer = send(under)
            assert (answer.status_code, code(answer)) == (503, "store-unavailable")
    assert shop.runs == 0


def test_a_role_without_a_privilege(postgres: str, under: str, shop: Shop) -> None:
    """A role that may not end what it may begin is told so before a view runs, and opening names the GRANT."""
    parts = urlsplit(postgres)
    clerk = parts._replace(netloc=f"django_clerk@{parts.hostname}:{parts.port}").geturl()
    with psycopg.connect(postgres, autocommit=True) as owner:
        owner.execute("CREATE ROLE django_clerk LOGIN")
        try:
            owner.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO django_clerk")
            owner.execute("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO django_clerk")
            owner.execute("REVOKE UPDATE ON semel_keys FROM django_clerk")
            with project.databases(default=clerk):
                for _ in range(3):
                    assert send(under).status_code == 503
                with pytest.raises(StoreNotPermitted, match='GRANT UPDATE ON semel_keys TO "django_clerk"'):
                    DjangoStore().open()
                assert shop.runs == 0
                owner.execute("GRANT UPDATE ON semel_keys TO django_clerk")
                assert send(under).status_code == 201
        finally:
            owner.execute("DROP OWNED BY django_clerk")
            owner.execute("DROP ROLE django_clerk")
