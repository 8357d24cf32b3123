"""SEMEL_ENFORCEMENT in Django: the decorator in both colours, REST framework's mixin, and the middleware."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import HttpResponse
from django.urls import path
from rest_framework.response import Response
from rest_framework.views import APIView

import semel
from semel import Policy
from semel.django import conf, idempotent
from semel.django.rest import IdempotentMixin
from semel.errors import ConfigurationError
from semel.guard.request import switch
from tests.django import project
from tests.django.entry import ASGI, WSGI, Visitor, amounts, apay, everybody, is_replay, pay, records
from tests.django.shop.models import Payment

OURS = "semel.django.IdempotencyMiddleware"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Say in the environment what is to be done, as at the start of a process."""

    def say(value: str) -> None:
        monkeypatch.setenv("SEMEL_ENFORCEMENT", value)
        switch.cache_clear()

    yield say
    switch.cache_clear()


def create(_connection: Any, amount: int) -> int:
    return int(Payment.objects.create(amount=amount, account="a").pk)


def with_a_phase(_request: Any) -> Any:
    """A view whose operation has a step, and whose write is the step's."""
    semel.current().phase("created", create, 5)
    return pay_nothing()


async def awith_a_phase(_request: Any) -> Any:
    await semel.current().phase("created", semel.in_thread(create), 5)
    return pay_nothing()


def pay_nothing() -> Any:
    return HttpResponse(status=201)


class Rest(IdempotentMixin, APIView):  # type: ignore[misc]  # REST framework has no types
    authentication_classes = ()
    permission_classes = ()

    def post(self, request: Any) -> Response:
        with_a_phase(request)
        return Response({}, 201)


VIEWS: dict[str, tuple[str, Any, list[str]]] = {
    "decorator": (WSGI, idempotent(with_a_phase), []),
    "async": (ASGI, idempotent(awith_a_phase), []),
    "rest": (WSGI, Rest.as_view(), []),
    "middleware": (WSGI, with_a_phase, [OURS]),
    "async middleware": (ASGI, awith_a_phase, [OURS]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_off(database: str, view: str, told: Callable[[str], None]) -> None:
    """Every request runs, in the steps that it takes, and nothing is recorded."""
    told("off")
    under, function, middleware = VIEWS[view]
    with project.serving([path("pay", function)], MIDDLEWARE=middleware, SEMEL={"SCOPE": everybody}):
        answers = [Visitor(under).post() for _ in range(2)]
        assert [(each.status_code, is_replay(each)) for each in answers] == [(201, False)] * 2
        assert records() == []
    assert amounts() == [5, 5]
    with pytest.raises(LookupError):
        semel.current()


@pytest.mark.parametrize("view", [idempotent(pay), idempotent(apay)], ids=["plain", "async"])
def test_atomic_mode_stays(database: str, view: Any, told: Callable[[str], None]) -> None:
    """A guard in atomic mode is not switched off."""
    told("off")
    under = ASGI if "apay" in view.__name__ else WSGI
    settings = {"SCOPE": everybody, "POLICY": Policy.ietf(mode="atomic")}
    with project.serving([path("pay", view)], SEMEL=settings):
        assert [is_replay(Visitor(under).post()) for _ in range(2)] == [False, True]
    assert amounts() == [5]


def test_what_it_can_not_be(told: Callable[[str], None]) -> None:
    """Any other value is an error as soon as the settings are read."""
    told("on")
    with project.serving([], SEMEL={"SCOPE": everybody}), pytest.raises(ConfigurationError, match="SEMEL_ENFORCEMENT"):
        conf.settings()
