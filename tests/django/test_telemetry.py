"""Requests to Django, as telemetry has them."""

from typing import Any

import pytest
from django.http import JsonResponse
from django.urls import path

from semel.django import idempotent
from tests.django import project
from tests.django.entry import ASGI, WSGI, Visitor, everybody
from tests.telemetry.conftest import Seen, seen, used

__all__ = ["seen", "used"]

OURS = "semel.django.IdempotencyMiddleware"


def order(_request: Any, number: int) -> JsonResponse:
    return JsonResponse({"order": number})


@idempotent
async def aorder(_request: Any, number: int) -> JsonResponse:
    return JsonResponse({"order": number})


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("view", [order, idempotent(order), aorder], ids=["middleware", "decorator", "async"])
def test_requests(sqlite: str, under: str, view: Any, seen: Seen) -> None:
    """A view is told by its route, in either colour, by the middleware or by its own guard; a replay, too."""
    routes = [path("orders/<int:number>", view)]
    with project.serving(routes, MIDDLEWARE=[OURS], SEMEL={"SCOPE": everybody}):
        for _ in range(2):
            assert Visitor(under).post("/orders/3").status_code == 200
    assert seen.outcomes == ["ran", "replayed"]
    assert {(each.endpoint, each.door) for each in seen.requests} == {("POST /orders/<int:number>", "django")}
