"""Models of Django's with a natural key. Nothing is migrated: a test makes the tables that it asks for."""

import uuid
from typing import Any

from tests.django import project

project.set_up()

from django.db import models  # noqa: E402 - it must be set up first
from django.db.models import Q, UniqueConstraint  # noqa: E402 - the same
from django.db.models.functions import Now  # noqa: E402 - the same


class Merchant(models.Model):  # type: ignore[misc]  # Django ships no types.
    name = models.CharField(max_length=20)

    class Meta:
        app_label = "natural"

    def __str__(self) -> str:
        return str(self.name)


class Order(models.Model):  # type: ignore[misc]  # The same.
    merchant = models.ForeignKey(Merchant, on_delete=models.CASCADE)
    number = models.CharField(max_length=20, db_column="order_number")
    total = models.DecimalField(max_digits=10, decimal_places=2, null=True)
    lines = models.JSONField(default=dict)
    receipt = models.UUIDField(default=uuid.uuid4)
    secret = models.BinaryField(default=b"")
    status = models.CharField(max_length=20, default="new")
    place = models.CharField(max_length=20, db_default="here")
    made_at = models.DateTimeField(auto_now_add=True)
    noted_at = models.DateTimeField(db_default=Now())
    shout = models.GeneratedField(
        expression=models.functions.Upper("status"), output_field=models.CharField(max_length=20), db_persist=True
    )

    class Meta:
        app_label = "natural"
        constraints = (
            UniqueConstraint(fields=["merchant", "number"], name="one_number"),
            UniqueConstraint(fields=["number"], condition=Q(status="100% open's"), name="one_open"),
        )

    def __str__(self) -> str:
        return str(self.number)

    def save(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("save() is not called")


class BigOrder(Order):
    size = models.IntegerField()

    class Meta:
        app_label = "natural"


class SeenOrder(Order):
    class Meta:
        app_label = "natural"
        proxy = True
