"""A visitor of the project under test: Django's own test client, in either colour, that knows of idempotency keys."""

import json
from typing import Any

from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.http import JsonResponse
from django.test import AsyncClient, Client

from semel.core.commands import Browse
from semel.core.record import Record
from semel.django import conf
from tests.django.shop.models import Payment

WSGI, ASGI = "wsgi", "asgi"


class Visitor:
    """Somebody who sends requests through Django's WSGI or ASGI handler."""

    def __init__(self, under: str = WSGI, **options: Any) -> None:
        kind: Any = Client if under == WSGI else AsyncClient
        self.client = kind(raise_request_exception=False, **options)
        self._is_async = under == ASGI

    def post(self, path: str = "/pay", *, key: str | None = "key-1", **request: Any) -> Any:
        """Send a request; take the whole answer."""
        headers = request.pop("headers", {}) | ({} if key is None else {"Idempotency-Key": key})
        if not request:
            request = {"data": {"amount": 5}, "content_type": "application/json"}
        send = async_to_sync(self.client.post) if self._is_async else self.client.post
        return send(path, headers=headers, **request)

    def log_in(self, name: str = "jane") -> Any:
        """Log in, as a user who is made where there is none."""
        user, _ = User.objects.get_or_create(username=name)
        self.client.force_login(user)
        return user


def is_replay(response: Any) -> bool:
    return bool(response.headers.get("Idempotent-Replayed") == "true")


def code(response: Any) -> str:
    """The code of a problem of ours."""
    assert response["Content-Type"] == "application/problem+json", (response.status_code, response.content)
    return str(json.loads(response.content)["code"])


def assert_kept(first: Any, again: Any) -> None:
    assert (is_replay(first), is_replay(again)) == (False, True)
    assert (first.status_code, first.content) == (again.status_code, again.content)


def records() -> list[Record]:
    found = conf.store().perform(Browse(limit=100))
    return list(found)


def amounts(using: str = "default") -> list[int]:
    """What was paid, in order."""
    return list(Payment.objects.using(using).order_by("pk").values_list("amount", flat=True))


def everybody(_request: Any) -> str:
    return "everybody"


def paid(payment: Any) -> Any:
    return JsonResponse({"payment": payment.pk, "amount": payment.amount}, status=201)


def pay(request: Any) -> Any:
    """A plain view that writes by the ORM, and knows of nothing."""
    return paid(Payment.objects.create(amount=json.loads(request.body)["amount"], account="a"))


async def apay(request: Any) -> Any:
    """The same in the other colour."""
    return paid(await Payment.objects.acreate(amount=json.loads(request.body)["amount"], account="a"))
