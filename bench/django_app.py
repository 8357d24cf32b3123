"""The same handler as a Django view that writes one row through the ORM: bare, guarded, and in atomic mode."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import unquote, urlsplit

import django
from django.conf import settings
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse

from bench.app import TABLE
from bench.cases import Work
from semel import SINGLE_TENANT, Policy


def app(database: str, work: Work, *, is_guarded: bool) -> Any:
    """Build the WSGI app. Its table, and Semel's where it is guarded, are made first."""
    _configure(database, work)
    from django.db import connection, models  # noqa: PLC0415 - none of Django's models before its settings
    from django.urls import path  # noqa: PLC0415 - the same

    class Order(models.Model):  # type: ignore[misc]  # Django ships no types
        amount = models.BigIntegerField()
        currency = models.TextField()

        class Meta:
            app_label = "bench"
            db_table = "orders"
            managed = False

        def __str__(self) -> str:
            return f"{self.amount} {self.currency}"

    ran = 0

    def create(request: HttpRequest) -> JsonResponse:
        nonlocal ran
        order = json.loads(request.body)
        ran += 1
        row = Order.objects.create(amount=order["amount"], currency=order["currency"])
        return JsonResponse({"id": f"order_{row.pk}", **order, "state": "open"}, status=201)

    def facts(_: HttpRequest) -> JsonResponse:
        return JsonResponse({"ran": ran, "cpu_seconds": time.process_time()})

    view = create
    if is_guarded:
        from semel.django import idempotent  # noqa: PLC0415 - it is not there for the bare view

        view = idempotent(create)
        call_command("migrate", verbosity=0)
    settings.ROOT_URLCONF = (path("orders", view), path("facts", facts))
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    connection.close()
    return get_wsgi_application()


def _configure(database: str, work: Work) -> None:
    parts = urlsplit(database)
    query = dict(pair.split("=", 1) for pair in parts.query.split("&") if pair)
    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts.path.removeprefix("/"),
                "USER": parts.username or "",
                "PASSWORD": parts.password or "",
                "HOST": unquote(query.get("host") or parts.hostname or ""),
                "PORT": str(parts.port or query.get("port") or ""),
                "CONN_MAX_AGE": None,
                "OPTIONS": {"prepare_threshold": 2},
            }
        },
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        INSTALLED_APPS=["semel.django"],
        MIDDLEWARE=["django.middleware.common.CommonMiddleware"],  # it says how long an answer is
        SECRET_KEY="for the bench only",  # noqa: S106 - as it says
        SEMEL={"SCOPE": SINGLE_TENANT, "POLICY": Policy.ietf(mode="atomic" if work == "atomic" else "guard")},
        USE_TZ=True,
    )
    django.setup()
