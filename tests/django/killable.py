"""A Django project for real servers that are killed: it pays by the ORM, says so in a file, and may wait for another.

The environment says where (see ``tests/web/apps.py``). Each app serves one kind of view at /pay, in atomic mode.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.test import override_settings

from tests.django import project

project.set_up()
URL = os.environ["SEMEL_TEST_STORE"]
_database = project.databases(default=URL)
_database.__enter__()
override_settings(
    ROOT_URLCONF=__name__,
    MIDDLEWARE=["semel.django.IdempotencyMiddleware"],
    SEMEL={"SCOPE": lambda _: "everybody", "POLICY": {"mode": "atomic"}, "PATHS": "/middleware/*"},
).enable()

# Only now may anything of Django's models be imported.
from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.core.handlers.wsgi import WSGIHandler  # noqa: E402
from django.http import HttpResponse, JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402

import semel  # noqa: E402
from semel.django import idempotent  # noqa: E402
from semel.django.rest import IdempotentMixin  # noqa: E402
from tests.django.shop.models import Payment  # noqa: E402

POLL_SECONDS = 0.02
EFFECTS = Path(os.environ["SEMEL_TEST_EFFECTS"])
GO = EFFECTS.with_suffix(".go")


def tell() -> None:
    """Say that the payment is written, and not yet committed."""
    operation = semel.current()
    file = os.open(EFFECTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{os.getpid()} {operation.key} {operation.attempt}\n".encode())
    finally:
        os.close(file)


def must_wait(body: bytes) -> bool:
    return "hold" in json.loads(body) and not GO.exists()


def pay(request: Any) -> Any:
    payment = Payment.objects.create(amount=5, account="a")
    tell()
    while must_wait(request.body):
        time.sleep(POLL_SECONDS)
    return JsonResponse({"payment": payment.pk}, status=201)


@idempotent
async def apay(request: Any) -> Any:
    payment = await Payment.objects.acreate(amount=5, account="a")
    tell()
    while must_wait(request.body):  # noqa: ASYNC110 - a file is the only event that another process can make
        await asyncio.sleep(POLL_SECONDS)
    return JsonResponse({"payment": payment.pk}, status=201)


class Payments(IdempotentMixin, APIView):  # type: ignore[misc]  # REST framework has no types
    authentication_classes = ()
    permission_classes = ()

    def post(self, request: Any) -> Response:
        return Response(json.loads(pay(request).content), 201)


def health(_request: Any) -> HttpResponse:
    return HttpResponse("fine", status=201)


urlpatterns = [
    path("plain/pay", idempotent(pay)),
    path("async/pay", apay),
    path("rest/pay", Payments.as_view()),
    path("middleware/pay", pay),
    *(path(f"{kind}/health", health) for kind in ("plain", "async", "rest", "middleware")),
]


def _below(kind: str) -> Callable[..., Any]:
    handler = WSGIHandler()

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        return handler(environ | {"PATH_INFO": f"/{kind}{environ['PATH_INFO']}"}, start_response)

    return app


plain, rest, middleware = _below("plain"), _below("rest"), _below("middleware")
_asgi = ASGIHandler()


async def asynchronous(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await _asgi(scope | {"path": f"/async{scope['path']}"}, receive, send)
