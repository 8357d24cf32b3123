"""The console in a Django project: below a path, for Django's own users."""

from __future__ import annotations

import io
import re
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client, override_settings
from django.urls import include, path

from semel.console.django import console_urls, staff
from semel.core.commands import Look, Park, ReadTrail
from semel.core.record import Hold
from semel.stores.django import DjangoStore
from tests.django.operations import claim_on

urlpatterns = [
    path("ops/semel/", include(console_urls(auth=staff))),
    path("off/", include(console_urls())),
    path("<slug:tenant>/semel/", include(console_urls(auth=staff))),
]
HERE: dict[str, Any] = {"HTTP_SEC_FETCH_SITE": "same-origin"}
BASE = "/ops/semel"


@pytest.fixture
def store(database: str) -> DjangoStore:
    return DjangoStore()


def client_of(name: str, *permissions: str, **more: Any) -> Client:
    user = User.objects.create_user(name, password=name, **more)
    user.user_permissions.add(*Permission.objects.filter(codename__in=permissions))
    client = Client(enforce_csrf_checks=True)
    assert client.login(username=name, password=name)
    return client


def test_users(store: DjangoStore) -> None:
    """Staff with Django's permission may look, superusers may act, and others are told to log in."""
    with override_settings(ROOT_URLCONF="tests.django.test_console"):
        assert Client().get(f"{BASE}/").status_code == 401
        assert Client().get("/off/").status_code == 401
        assert client_of("guest").get(f"{BASE}/").status_code == 401
        assert client_of("nosy", is_staff=True).get(f"{BASE}/").status_code == 401
        page = client_of("staff", "view_record", is_staff=True).get(f"{BASE}/operations")
        assert page.status_code == 200
        assert "staff · read only" in page.content.decode()
        assert f'href="{BASE}/outbox"' in page.content.decode()


def test_acting(store: DjangoStore) -> None:
    """A superuser acts below the mount, under Django's own name, through the console's own check of forms."""
    hold = store.perform(claim_on("parked"))
    assert isinstance(hold, Hold)
    store.perform(Park(hold))
    with override_settings(ROOT_URLCONF="tests.django.test_console"):
        client = client_of("root", is_staff=True, is_superuser=True)
        listed = client.get(f"{BASE}/operations?state=unknown").content.decode()
        (place,) = re.findall(rf'href="({BASE}/operation/[^"]+)"', listed)
        shown = client.get(f"{place}/release").content.decode()
        fields = dict(re.findall(r'name="(form|seen)" value="([^"]+)"', shown))
        form = urlencode(fields | {"reason": "why"})
        kind = "application/x-www-form-urlencoded"
        assert client.post(f"{place}/release", form, content_type=kind).status_code == 403
        answer = client.post(f"{place}/release", form, content_type=kind, **HERE)
        assert answer.status_code == 303
        assert answer["location"].startswith(place)
        gone = client.get(answer["location"]).content.decode()
        assert "The key is free." in gone
    assert store.perform(Look(hold.scope, hold.key)) is None
    assert store.perform(ReadTrail(hold.scope, hold.key))[-1].actor == "root (console)"


def test_slashes_and_static_files(store: DjangoStore) -> None:
    """Files are served below the mount, and slashes too many are of no effect."""
    with override_settings(ROOT_URLCONF="tests.django.test_console"):
        answer = Client().get(f"{BASE}/static/console.js")
        assert answer["content-type"].startswith("text/javascript")
        client = client_of("root", is_staff=True, is_superuser=True)
        assert client.get(f"{BASE}//operations/").status_code == 200


def test_mounts_with_parameters(store: DjangoStore) -> None:
    """The path of the mount may have parameters of its own."""
    with override_settings(ROOT_URLCONF="tests.django.test_console"):
        page = client_of("root", is_staff=True, is_superuser=True).get("/acme/semel/operations")
        assert page.status_code == 200
        assert 'href="/acme/semel/outbox"' in page.content.decode()


def test_forms_that_are_cut_off(store: DjangoStore) -> None:
    """A form that is shorter than its Content-Length says is not carried out."""
    kind = "application/x-www-form-urlencoded"
    with override_settings(ROOT_URLCONF="tests.django.test_console"):
        cut_off = {"CONTENT_LENGTH": "4", "wsgi.input": io.BytesIO(b"a=b")}
        answer = Client().post(f"{BASE}/login", "a=b", content_type=kind, **HERE, **cut_off)
        assert answer.status_code == 400
