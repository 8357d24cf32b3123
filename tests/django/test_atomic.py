"""Django's transactions and the guard's: atomic mode, ATOMIC_REQUESTS, several databases, on_commit, TestCase."""

import asyncio
import json
import unittest
from collections.abc import Iterator
from contextlib import suppress
from functools import wraps
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.handlers.asgi import ASGIHandler
from django.db import IntegrityError, connection, transaction
from django.http import Http404, HttpResponse
from django.test import TestCase
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

import semel
from semel import NoEffect, Policy
from semel.core.policy import Mode
from semel.core.state import State
from semel.django import idempotent
from semel.errors import ConfigurationError
from tests.django import project
from tests.django.entry import ASGI, WSGI, Visitor, amounts, apay, assert_kept, code, everybody, pay, records
from tests.django.shop.models import Payment
from tests.web.harness import Request, call_asgi

ATOMIC = Policy.ietf(mode="atomic")
OURS = "semel.django.IdempotencyMiddleware"
EVERYBODY = {"SEMEL": {"SCOPE": everybody}}


def serving(*views: Any, **settings: Any) -> Any:
    patterns = [path(f"pay{number + 1 if number else ''}", view) for number, view in enumerate(views)]
    return project.serving(patterns, **(EVERYBODY | settings))


def then(do: Any) -> tuple[Any, Any]:
    """Return a plain and an async view that pay, and then *do* something."""

    def plain(request: Any) -> HttpResponse:
        pay(request)
        return do()

    async def asynchronous(request: Any) -> HttpResponse:
        await apay(request)
        return do()

    return plain, asynchronous


def raising(error: Exception) -> Any:
    def do() -> HttpResponse:
        raise error

    return do


@pytest.fixture(params=[WSGI, ASGI])
def under(request: pytest.FixtureRequest) -> str:
    """Either kind of server."""
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> int:
    """Either kind of view."""
    return ["sync", "async"].index(request.param)


def test_the_write_and_the_record_are_one_transaction(database: str, under: str, colour: int) -> None:
    """In atomic mode the ORM writes in the record's own transaction, and a view has nothing to do for it."""
    seen: list[tuple[bool, bool]] = []

    def look() -> HttpResponse:
        seen.append((connection.in_atomic_block, semel.current().connection.alias == "default"))
        return HttpResponse("ok")

    def plain(request: Any) -> HttpResponse:
        pay(request)
        return look()

    async def asynchronous(request: Any) -> HttpResponse:
        await apay(request)
        return await sync_to_async(look)()

    with serving(idempotent(policy=ATOMIC)([plain, asynchronous][colour])):
        assert_kept(*(Visitor(under).post() for _ in range(2)))
    assert seen == [(True, True)]
    assert amounts() == [5]
    assert [each.state for each in records()] == [State.COMPLETE]


def test_a_message_is_in_the_same_transaction(database: str, under: str, colour: int) -> None:
    """What a view publishes commits with its payment and its answer, and is rolled back with them; inside of a block
    of the view's own, too.
    """
    statuses = [500, 201]

    def plain(request: Any) -> HttpResponse:
        with transaction.atomic():
            pay(request)
            semel.current().publish("payment.made", {"amount": 5})
        return HttpResponse(status=statuses.pop(0))

    async def asynchronous(request: Any) -> HttpResponse:
        await apay(request)
        await semel.current().publish("payment.made", {"amount": 5})
        return HttpResponse(status=statuses.pop(0))

    with serving(idempotent(policy=ATOMIC)([plain, asynchronous][colour])):
        assert [Visitor(under).post().status_code for _ in range(3)] == [500, 201, 201]
    with connection.cursor() as cursor:
        cursor.execute("SELECT type FROM semel_outbox")
        assert cursor.fetchall() == [("payment.made",)]
    assert amounts() == [5]


def test_a_server_error_takes_everything_back(database: str, under: str, colour: int) -> None:
    """In atomic mode what a view wrote before a server error is rolled back, and the key is free."""
    errors: dict[int, Any] = {
        500: raising(RuntimeError("oops")),
        503: raising(NoEffect("closed")),
        502: lambda: HttpResponse("oops", status=502),
    }
    for status, do in errors.items():
        with serving(idempotent(policy=ATOMIC)(then(do)[colour])):
            assert Visitor(under).post().status_code == status
            assert (amounts(), records()) == ([], [])


def test_what_is_raised_takes_the_writes_back_and_is_kept(database: str, under: str, colour: int) -> None:
    """In atomic mode a 404 that is raised is kept without what the view wrote; one that is returned, with it."""
    raised = idempotent(policy=ATOMIC)(then(raising(Http404()))[colour])
    returned = idempotent(policy=ATOMIC)(then(lambda: HttpResponse("none", status=404))[colour])
    with serving(raised, returned):
        assert_kept(*(Visitor(under).post() for _ in range(2)))
        assert amounts() == []
        assert_kept(*(Visitor(under).post("/pay2", key="key-2") for _ in range(2)))
        assert amounts() == [5]


@pytest.mark.parametrize("entry", ["decorator", "middleware"])
def test_a_failed_statement_that_the_view_has_caught(database: str, under: str, colour: int, entry: str) -> None:
    """What a statement that failed inside the transaction takes with it is never answered for as if it were there."""

    def twice() -> None:
        User.objects.create(username="jane")
        with suppress(IntegrityError):
            User.objects.create(username="jane")

    def plain(_request: Any) -> HttpResponse:
        twice()
        return HttpResponse("done", status=201)

    async def asynchronous(_request: Any) -> HttpResponse:
        await sync_to_async(twice)()
        return HttpResponse("done", status=201)

    view: Any = (plain, asynchronous)[colour]
    guarded, middleware = (idempotent(policy=ATOMIC)(view), []) if entry == "decorator" else (view, [OURS])
    with serving(guarded, MIDDLEWARE=middleware, SEMEL={"SCOPE": everybody, "POLICY": ATOMIC}):
        assert Visitor(under).post().status_code == 500
        assert (records(), User.objects.count()) == ([], 0)


def test_a_view_that_rolls_back_by_itself(database: str, under: str) -> None:
    """A savepoint of the view's own, and set_rollback, mean what they always mean: the answer is kept."""

    def in_a_savepoint(request: Any) -> HttpResponse:
        User.objects.create(username="jane")
        with suppress(IntegrityError), transaction.atomic():
            User.objects.create(username="jane")
        return pay(request)

    def on_purpose(request: Any) -> HttpResponse:
        response = pay(request)
        transaction.set_rollback(True)
        return response

    with serving(*(idempotent(policy=ATOMIC)(each) for each in (in_a_savepoint, on_purpose))):
        visitor = Visitor(under)
        assert_kept(visitor.post(), visitor.post())
        assert_kept(visitor.post("/pay2", key="key-2"), visitor.post("/pay2", key="key-2"))
    assert amounts() == [5]


def test_on_commit_runs_once_and_after_the_commit(database: str, under: str) -> None:
    """transaction.on_commit runs when the payment and its record are there, and not for a replay."""
    states: list[State] = []

    def plain(request: Any) -> HttpResponse:
        transaction.on_commit(lambda: states.extend(each.state for each in records()))
        return pay(request)

    with serving(idempotent(policy=ATOMIC)(plain)):
        assert_kept(*(Visitor(under).post() for _ in range(2)))
    assert states == [State.COMPLETE]


def test_a_database_of_its_own(postgres: str, django_sqlite_url: str, under: str, colour: int) -> None:
    """The records are in the database that SEMEL names; what the view writes there is in their transaction."""

    def plain(_request: Any) -> HttpResponse:
        Payment.objects.using("other").create(amount=5, account="a")
        raise Http404

    async def asynchronous(_request: Any) -> HttpResponse:
        await Payment.objects.using("other").acreate(amount=5, account="a")
        raise Http404

    with (
        project.databases(default=postgres, other=django_sqlite_url),
        serving(
            idempotent(policy=ATOMIC)([plain, asynchronous][colour]),
            idempotent(policy=ATOMIC)(pay),
            SEMEL={"SCOPE": everybody, "DATABASE": "other"},
        ),
    ):
        assert_kept(*(Visitor(under).post() for _ in range(2)))
        assert_kept(*(Visitor(under).post("/pay2", key="key-2") for _ in range(2)))
        assert (amounts("other"), amounts()) == ([], [5])
        assert len(records()) == 2


def test_on_commit_runs_at_most_once(database: str, under: str) -> None:
    """What on_commit was to do, and did not, is done by no retry: the commit has been, and a retry is a replay."""
    sent: list[str] = []

    @idempotent(policy=ATOMIC)
    def view(request: Any) -> HttpResponse:
        def send() -> None:
            sent.append("tried")
            raise OSError("The mail server is gone.")

        transaction.on_commit(send)
        return pay(request)

    with serving(view):
        Visitor(under).post()
        again = Visitor(under).post()
    assert (again.status_code, amounts(), sent) == (201, [5], ["tried"])


# ATOMIC_REQUESTS


@pytest.fixture
def atomic_requests(database: str) -> Iterator[None]:
    """ATOMIC_REQUESTS on the one database."""
    with project.databases(default={**project.settings_of(database), "ATOMIC_REQUESTS": True}):
        yield


@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC])
def test_atomic_requests_go_inside(atomic_requests: None, under: str, policy: Policy) -> None:
    """Under ATOMIC_REQUESTS a guarded view is in its transaction as ever, and the record is not lost with it."""

    @idempotent(policy=policy)
    def guarded(request: Any) -> HttpResponse:
        assert connection.in_atomic_block
        return pay(request)

    @idempotent(policy=policy)
    def missing(request: Any) -> HttpResponse:
        pay(request)
        raise Http404

    with serving(guarded, missing):
        assert_kept(*(Visitor(under).post() for _ in range(2)))
        assert_kept(*(Visitor(under).post("/pay2", key="key-2") for _ in range(2)))
    assert amounts() == [5]


def test_atomic_requests_of_what_is_not_guarded(atomic_requests: None) -> None:
    """A method that is not guarded has its transaction all the same, unless the view has opted out of it."""
    seen: list[bool] = []

    def look(_request: Any) -> HttpResponse:
        seen.append(connection.in_atomic_block)
        return HttpResponse("ok")

    @method_decorator(idempotent, name="dispatch")
    class Looking(View):  # type: ignore[misc]  # Django has no types
        def put(self, request: Any) -> HttpResponse:
            return look(request)

    class OptedOut(Looking):
        """Another class, whose dispatch is its own."""

    method_decorator(transaction.non_atomic_requests, name="dispatch")(OptedOut)
    views = [
        idempotent(look),
        Looking.as_view(),
        idempotent(transaction.non_atomic_requests(look)),
        transaction.non_atomic_requests(idempotent(look)),
        OptedOut.as_view(),
    ]
    with serving(*views):
        for number in ("", "2", "3", "4", "5"):
            assert Visitor().client.put(f"/pay{number}").status_code == 200
    assert seen == [True, True, False, False, False]


@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC])
def test_a_decorator_that_loses_the_mark(atomic_requests: None, policy: Policy) -> None:
    """Where Django puts its transaction around the guard after all, that is an error which says what to do."""
    guarded = idempotent(policy=policy)(pay)

    def careless(request: Any) -> Any:
        return guarded(request)

    @wraps(guarded)
    def careful(request: Any) -> Any:
        return guarded(request)

    with serving(careless, careful):
        visitor = Visitor()
        visitor.client.raise_request_exception = True
        with pytest.raises(ConfigurationError, match="non_atomic_requests"):
            visitor.post()
        assert visitor.post("/pay2").status_code == 201
    assert amounts() == [5]


def test_atomic_requests_and_async_views(atomic_requests: None) -> None:
    """An async view can't be under ATOMIC_REQUESTS, guarded or not: nothing is kept. One that has opted out is in the
    guard's own.
    """

    class Payments(View):  # type: ignore[misc]  # Django has no types
        async def post(self, request: Any) -> HttpResponse:
            return await apay(request)

    async def own(request: Any) -> HttpResponse:
        return await apay(request)

    class OptedOut(Payments):
        """Another class, whose dispatch is its own."""

        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            return super(Payments, self).dispatch(*args, **kwargs)

    def around(view: Any) -> Any:
        @wraps(view)
        async def passed_on(request: Any) -> HttpResponse:
            response: HttpResponse = await view(request)
            return response

        return passed_on

    opted_out = transaction.non_atomic_requests(own)
    method_decorator(idempotent(policy=ATOMIC), name="dispatch")(Payments)
    method_decorator(idempotent(policy=ATOMIC), name="dispatch")(OptedOut)
    method_decorator(transaction.non_atomic_requests, name="dispatch")(OptedOut)
    views = [
        idempotent(apay),
        Payments.as_view(),
        idempotent(policy=ATOMIC)(transaction.non_atomic_requests(opted_out)),
        transaction.non_atomic_requests(around(idempotent(policy=ATOMIC)(apay))),
        OptedOut.as_view(),
    ]
    with serving(*views):
        visitor = Visitor()
        visitor.client.raise_request_exception = True
        for each in ("/pay", "/pay2"):
            with pytest.raises(RuntimeError, match="You cannot use ATOMIC_REQUESTS with async views"):
                visitor.post(each, key=each)
        assert records() == []
        for each in ("/pay3", "/pay4", "/pay5"):
            assert_kept(*(visitor.post(each, key=each) for _ in range(2)))
    assert amounts() == [5, 5, 5]


def test_steps_under_atomic_requests(atomic_requests: None, under: str) -> None:
    """Steps commit one by one, so ATOMIC_REQUESTS around them is an error that says how to opt out, and runs none."""
    made: list[int] = []

    def steps(_request: Any) -> HttpResponse:
        operation = semel.current()
        number = operation.phase("paid", lambda _: Payment.objects.create(amount=7, account="a").pk)
        made.append(operation.effect("told", lambda number, *, idempotency_key: number, number))
        return HttpResponse(str(number), status=201)

    @wraps(steps)
    def own(request: Any) -> HttpResponse:
        return steps(request)

    with serving(idempotent(steps), transaction.non_atomic_requests(idempotent(own))):
        visitor = Visitor(under)
        visitor.client.raise_request_exception = True
        with pytest.raises(ConfigurationError, match="non_atomic_requests"):
            visitor.post()
        assert (amounts(), made) == ([], [])
        assert_kept(*(visitor.post("/pay2", key="key-2") for _ in range(2)))
        assert (amounts(), len(made)) == ([7], 1)


# A user's own tests


@pytest.mark.parametrize("mode", ["guard", "atomic"])
def test_a_test_case_of_the_users(database: str, mode: Mode) -> None:
    """Guarded views work inside django.test.TestCase: retries are replays, and all is rolled back afterwards."""
    policy = Policy.ietf(mode=mode)

    class PaymentTests(TestCase):  # type: ignore[misc]  # Django has no types
        databases = {"default"}  # noqa: RUF012 - as Django has it

        def test_a_retry(self) -> None:
            first, again = (Visitor().post() for _ in range(2))
            assert_kept(first, again)
            assert amounts() == [5]
            assert code(Visitor().post(data={}, content_type="application/json")) == "idempotency-key-reused"

        def test_a_missing_one(self) -> None:
            assert_kept(*(Visitor().post("/pay2") for _ in range(2)))

        def test_hooks(self) -> None:
            with self.captureOnCommitCallbacks(execute=True):
                first = Visitor().post("/pay3")
            assert (json.loads(first.content)["amount"], hooks) == (5, [1])

    hooks: list[int] = []

    @idempotent(policy=policy)
    def with_hook(request: Any) -> HttpResponse:
        transaction.on_commit(lambda: hooks.append(1))
        return pay(request)

    missing = idempotent(policy=policy)(then(raising(Http404()))[0])
    with serving(idempotent(policy=policy)(pay), missing, with_hook):
        outcome = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(PaymentTests).run(outcome)
    assert (outcome.testsRun, outcome.errors, outcome.failures) == (3, [], [])
    assert (amounts(), records()) == ([], [])


# Many at once


@pytest.mark.parametrize("entry", ["decorator", "middleware"])
@pytest.mark.parametrize("mode", ["guard", "atomic"])
def test_many_at_once_on_one_loop(database: str, entry: str, mode: Mode, colour: int) -> None:
    """Of many requests at once on one event loop, one runs for each key; the others get 409, or its answer."""
    policy = Policy.ietf(mode=mode)
    view = [pay, apay][colour]

    async def ask(handler: Any, key: str) -> Any:
        lines = (("Idempotency-Key", key.encode()), ("Content-Type", b"application/json"))
        return await call_asgi(handler, Request("POST", "/pay", lines, b'{"amount": 5}'))

    async def ask_all() -> list[Any]:
        handler = ASGIHandler()
        return await asyncio.gather(*(ask(handler, f"key-{number % 3}") for number in range(12)))

    guarded, middleware = (idempotent(policy=policy)(view), []) if entry == "decorator" else (view, [OURS])
    with serving(guarded, MIDDLEWARE=middleware, SEMEL={"SCOPE": everybody, "POLICY": policy}):
        answers = asyncio.run(ask_all())
        assert {answer.status for answer in answers} <= {201, 409}
        assert len({answer.body for answer in answers if answer.status == 201}) == 3
        assert amounts() == [5, 5, 5]
