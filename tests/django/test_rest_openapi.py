"""What drf-spectacular says of guarded operations, compared with a file that people can read.

To write the file anew: ``SEMEL_WRITE_GOLDEN=1 pytest tests/django/test_rest_openapi.py``, and look at what has changed.
"""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.urls import include, path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import api_view
from rest_framework.generics import CreateAPIView
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.viewsets import ModelViewSet

from semel import Policy
from semel.django import idempotent
from semel.django.rest import IdempotentMixin
from semel.django.spectacular import AutoSchema
from tests.django import project
from tests.django.shop.models import Payment

generator: Any = SchemaGenerator
GOLDEN = Path(__file__).with_name("openapi.json")


class PaymentSerializer(serializers.ModelSerializer):  # type: ignore[misc]  # REST framework has no types
    class Meta:
        model = Payment
        fields = ("id", "amount", "account")


class Payments(IdempotentMixin, ModelViewSet):  # type: ignore[misc]  # REST framework has no types
    """Payments."""

    schema = AutoSchema()
    queryset = Payment.objects.order_by("pk")
    serializer_class = PaymentSerializer
    idempotency_policy = Policy.ietf(required=True, retention=timedelta(days=3))
    idempotency_actions = ("create",)


class Charges(IdempotentMixin, CreateAPIView):  # type: ignore[misc]  # REST framework has no types
    """Charge a card, in Stripe's manner."""

    schema = AutoSchema()
    serializer_class = PaymentSerializer
    idempotency_policy = Policy.stripe()


class Refunds(CreateAPIView):  # type: ignore[misc]  # REST framework has no types
    """Not guarded."""

    schema = AutoSchema()
    serializer_class = PaymentSerializer


@extend_schema(request=PaymentSerializer, responses={201: PaymentSerializer})
@api_view(["POST"])  # type: ignore[untyped-decorator]  # REST framework has no types
@idempotent
def transfer(request: Any) -> Response:
    """Transfer an amount."""
    return Response(request.data, 201)


transfer.cls.schema = AutoSchema()  # What DEFAULT_SCHEMA_CLASS does in a project.


def described() -> dict[str, Any]:
    router = SimpleRouter()
    router.register("payments", Payments)
    urls = [
        path("", include(router.urls)),
        path("charges", Charges.as_view()),
        path("refunds", Refunds.as_view()),
        path("transfers", transfer),
    ]
    # Django remembers the range of an integer of the first database that it was asked on.
    vars(Payment._meta.get_field("amount")).pop("validators", None)
    with project.serving(urls, SEMEL={"POLICY": {"header": ("Idempotency-Key", "X-Request-Key")}}):
        schema = generator(patterns=urls).get_schema(public=True)
    as_sent: dict[str, Any] = json.loads(json.dumps(schema))
    return as_sent


def test_the_whole_document() -> None:
    """The document is this one, to the letter."""
    found = json.dumps(described(), indent=2) + "\n"
    if os.environ.get("SEMEL_WRITE_GOLDEN"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


def test_only_guarded_operations_say_so() -> None:
    """What is guarded is told of: the actions that are named, by the policy that each has."""
    told = {
        (url, method): operation["x-idempotency"]["flavour"]
        for url, methods in described()["paths"].items()
        for method, operation in methods.items()
        if "x-idempotency" in operation
    }
    assert told == {
        ("/payments/", "post"): "ietf-07",
        ("/charges", "post"): "stripe",
        ("/transfers", "post"): "ietf-07",
    }


def test_what_an_operation_says() -> None:
    """The header to send, refusals in their own media type beside the view's answers, and which may be replays."""
    schema = described()
    operation = schema["paths"]["/payments/"]["post"]
    (header,) = [each for each in operation["parameters"] if each["in"] == "header"]
    assert (header["name"], header["required"]) == ("Idempotency-Key", True)
    answers = operation["responses"]
    assert list(answers["409"]["content"]) == ["application/problem+json"]
    assert "Retry-After" in answers["409"]["headers"]
    assert "Idempotent-Replayed" in answers["201"]["headers"]
    assert "application/json" in answers["201"]["content"]
    assert "IdempotencyProblem" in schema["components"]["schemas"]
    assert "IdempotencyError" in schema["components"]["schemas"]
