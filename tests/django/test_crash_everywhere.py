"""Crashes at every step and a clock that is moved, in a Django project: both colours, WSGI and ASGI, both databases."""

import json
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.db import connection
from django.http import JsonResponse
from django.test import TestCase
from django.urls import path

import semel
from semel import Policy
from semel.core.policy import Mode
from semel.django import idempotent
from semel.testing import Clock, CrashReport, Request, acrash_everywhere, crash_everywhere
from tests.django import project
from tests.django.entry import Visitor, amounts, apay, assert_kept, everybody, is_replay, pay
from tests.django.shop.models import Payment

PAY = Request("POST", "/pay", json={"amount": 5})


def serving(view: Any) -> Any:
    return project.serving([path("pay", view)], SEMEL={"SCOPE": everybody})


def walked(view: Any) -> CrashReport:
    with serving(view):
        return crash_everywhere(WSGIHandler(), PAY, clock=Clock(connection), effects=Payment.objects.count)


@pytest.mark.usefixtures("database")
def test_an_atomic_view_pays_once() -> None:
    """A plain view in atomic mode pays once, wherever its process dies."""
    report = walked(idempotent(policy=Policy.ietf(mode="atomic"))(pay))
    report.assert_once()
    assert [point.name for point in report.points][-4:] == [
        "before running the handler",
        "after running the handler",
        "before committing the transaction with the answer",
        "after committing the transaction with the answer",
    ]


@pytest.mark.usefixtures("database")
def test_a_guarded_view_pays_twice() -> None:
    """The same view under the guard alone is run again after a crash: the report says where it pays twice."""
    assert walked(idempotent(pay)).wrong() == [
        "after running the handler: effects 2 instead of 1: done more than once",
        "before storing the answer: effects 2 instead of 1: done more than once",
    ]


@pytest.mark.usefixtures("database")
def test_a_view_with_phases_pays_once() -> None:
    """Its phases are committed once; what it returns is the same."""

    def create(_connection: Any, amount: int) -> int:
        return int(Payment.objects.create(amount=amount, account="a").pk)

    @idempotent
    def view(request: Any) -> JsonResponse:
        number = semel.current().phase("paid", create, json.loads(request.body)["amount"])
        return JsonResponse({"payment": number}, status=201)

    report = walked(view)
    report.assert_once()
    assert len(report.points) == 16


@pytest.mark.parametrize("mode", ["guard", "atomic"])
async def test_an_async_view_under_asgi(postgres: str, mode: Mode) -> None:
    """An async view under ASGI is walked on the running loop, and the clock is awaited."""
    with serving(idempotent(policy=Policy.ietf(mode=mode))(apay)):
        report = await acrash_everywhere(
            ASGIHandler(), PAY, clock=Clock(connection), effects=sync_to_async(Payment.objects.count)
        )
    twice = [line for line in report.wrong() if "done more than once" in line]
    assert report.wrong() == twice
    assert bool(twice) == (mode == "guard")
    assert len(report.points) > 8


@pytest.mark.usefixtures("database")
def test_the_clock_in_a_test_case() -> None:
    """Inside django.test.TestCase time passes in the transaction of the test, and no record of it stays."""

    class Users(TestCase):  # type: ignore[misc]  # Django has no types
        def test(self) -> None:
            clock, visitor = Clock(connection), Visitor()
            first = visitor.post()
            clock.advance(timedelta(hours=23))
            assert_kept(first, visitor.post())
            clock.advance(timedelta(hours=2))
            assert not is_replay(visitor.post())
            assert amounts() == [5, 5]

    with serving(idempotent(pay)):
        Users("test").debug()
    assert amounts() == []
