"""Tests of a REST framework view, by Django's own test runner: `python drf_tests.py`."""

import sys
from datetime import timedelta
from itertools import count

import django
from django.conf import settings

settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}},
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "rest_framework", "semel.django"],
    REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": []},
    ROOT_URLCONF=__name__,
    SEMEL={"SCOPE": "semel.SINGLE_TENANT", "POLICY": {"mode": "atomic"}},
)
django.setup()

from django.contrib.auth.models import Group  # noqa: E402 - a project has its settings in another file
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import TestCase, TransactionTestCase  # noqa: E402
from django.test.runner import DiscoverRunner  # noqa: E402
from django.urls import path  # noqa: E402
from rest_framework.decorators import api_view  # noqa: E402
from rest_framework.response import Response  # noqa: E402

from semel.django import idempotent  # noqa: E402
from semel.testing import Clock, Request, crash_everywhere  # noqa: E402


@api_view(["POST"])
@idempotent
def make_group(request):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - Django has no types
    return Response({"id": Group.objects.create(name=request.data["name"]).pk}, 201)


urlpatterns = [path("groups", make_group)]
application, numbers = get_wsgi_application(), count()


class TimeTests(TestCase):  # type: ignore[misc]
    def test_a_key_is_new_after_a_day(self) -> None:
        for hours, is_replayed in (0, False), (23, True), (2, False):
            Clock(connection).advance(timedelta(hours=hours))
            answer = self.client.post("/groups", {"name": "clerks"}, headers={"Idempotency-Key": "k"})
            self.assertEqual("Idempotent-Replayed" in answer.headers, is_replayed)
            Group.objects.all().delete()


class CrashTests(TransactionTestCase):  # type: ignore[misc]  # a TestCase is in a transaction, which no crash can end
    def test_a_crash_anywhere(self) -> None:
        make = lambda: Request("POST", "/groups", json={"name": f"group {next(numbers)}"})  # noqa: E731 - names are unique
        crash_everywhere(application, make, clock=Clock(connection), effects=Group.objects.count).assert_once()


if __name__ == "__main__":
    sys.exit(bool(DiscoverRunner().run_tests([__name__])))
