"""What the handlers of these tests write."""

from django.db import models


class Payment(models.Model):  # type: ignore[misc]  # Django has no types
    amount = models.IntegerField()
    account = models.CharField(max_length=100)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.amount} of {self.account}"
