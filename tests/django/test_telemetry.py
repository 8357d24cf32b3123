"""Requests to Django, as telemetry and the console have them."""

import asyncio
from typing import Any

import pytest
from django.http import JsonResponse
from django.test.utils import setup_test_environment, teardown_test_environment
from django.urls import path

from semel.core.commands import ReadCounts
from semel.django import conf, idempotent
from semel.stores.django import AsyncDjangoStore, DjangoStore
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


@pytest.mark.parametrize("view", [order, aorder], ids=["sync", "async"])
def test_counts(sqlite: str, view: Any) -> None:
    """How requests end is added to the store's counts, in either colour; and in a test run it is not."""
    with project.serving([path("orders/<int:number>", view)], MIDDLEWARE=[OURS], SEMEL={"SCOPE": everybody}):
        assert Visitor(ASGI).post("/orders/3").status_code == 200
        store = conf.async_store()
        assert isinstance(store, AsyncDjangoStore)
        asyncio.run(store.close())
        conf.store().close()
        added = {outcome: number for _, outcome, number in conf.store().perform(ReadCounts(60)).counts}
    assert added.keys() >= {"ran", "added"}
    setup_test_environment()
    try:
        tried = DjangoStore()
        tried.ended["fenced"] += 1  # No other test's store, which may add to this database meanwhile, has counted it.
        tried.close()
        assert "fenced" not in {outcome for _, outcome, _ in tried.perform(ReadCounts(60)).counts}
    finally:
        teardown_test_environment()
