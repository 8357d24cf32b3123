"""Django in one file: a payment and the record of its key commit together, or not at all."""

import json

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import models
from django.http import HttpRequest, JsonResponse
from django.urls import path

from semel.django import idempotent

settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["semel.django"],
    ROOT_URLCONF=__name__,
    SEMEL={"POLICY": {"mode": "atomic", "required": True}},
)
django.setup()


class Payment(models.Model):  # type: ignore[misc]  # noqa: DJ008 - Django has no types; and it is shown nowhere
    amount = models.IntegerField()
    account = models.CharField(max_length=100)

    class Meta:
        app_label = "shop"


def user_of(request: HttpRequest) -> str | None:
    """With Django's own login, leave the scope out: it is `request.user` then."""
    account: str | None = request.headers.get("X-Account")
    return account


@idempotent(scope=user_of)
def pay(request: HttpRequest) -> JsonResponse:
    amount = json.loads(request.body)["amount"]
    payment = Payment.objects.create(amount=amount, account=request.headers["X-Account"])
    return JsonResponse({"payment": payment.pk, "amount": amount}, status=201)


urlpatterns = [path("payments", pay)]
application = get_wsgi_application()
