"""Endpoints of webhooks in Django's own database, through its own connection."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.urls import path

from semel.core.webhook import new_secret, read_secret, signatures
from semel.errors import EndpointUnknown
from semel.inbox import AsyncInbox, Inbox
from semel.stores.django import AsyncDjangoStore, DjangoStore
from semel.webhooks import Endpoints, WebhookEvent
from semel.webhooks.django import webhook
from tests.django import project
from tests.django.shop.models import Payment

SECRET = new_secret(b"s" * 32)


def test_endpoints(database: str) -> None:
    """An endpoint is added, listed, turned off and removed on the connection that Django has."""
    endpoints = Endpoints(DjangoStore())
    endpoints.add("acme", "https://acme.example/hooks?a=%20", secrets=["env:A", "file:/run/b"])
    assert endpoints.disable("acme", "100% wrong").reason == "100% wrong"
    (listed,) = endpoints.list()
    assert (listed.url, listed.secrets) == ("https://acme.example/hooks?a=%20", ("env:A", "file:/run/b"))
    assert not listed.is_on
    endpoints.remove("acme")
    with pytest.raises(EndpointUnknown):
        endpoints.enable("acme")


def _paid(_connection: Any, event: WebhookEvent) -> None:
    Payment.objects.create(amount=5, account=event.id)


async def _paid_async(_connection: Any, event: WebhookEvent) -> None:
    await Payment.objects.acreate(amount=5, account=event.id)


RECEIVERS: dict[str, Callable[[], Any]] = {
    "threads": lambda: webhook(Inbox(DjangoStore(), consumer="billing"), secrets=[SECRET])(_paid),
    "loops": lambda: webhook(AsyncInbox(AsyncDjangoStore(), consumer="billing"), secrets=[SECRET])(_paid_async),
}


@pytest.mark.parametrize("kind", RECEIVERS)
def test_received_under_atomic_requests(database: str, kind: str) -> None:
    """In a project with ATOMIC_REQUESTS the inbox's transaction takes the place of Django's: there is one, not two."""
    entry = {**project.settings_of(database), "ATOMIC_REQUESTS": True}
    at = int(time.time())
    sent = {"webhook-id": "m-1", "webhook-timestamp": str(at)}
    sent["webhook-signature"] = signatures([read_secret(SECRET)], "m-1", at, b"{}")
    with project.databases(default=entry), project.serving([path("hooks", RECEIVERS[kind]())]):
        answers = [Client().post("/hooks", b"{}", content_type="application/json", headers=sent) for _ in range(2)]
        assert [each.json() for each in answers] == [{"outcome": "ran"}, {"outcome": "duplicate"}]
        assert Payment.objects.count() == 1
