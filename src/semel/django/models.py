"""Semel's tables as read-only models: only the store writes them. Django neither makes nor changes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import models

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

STATES = [(each, each) for each in ("pending", "processing", "unknown", "complete", "failed")]


class Moment(models.DateTimeField):  # type: ignore[misc]  # Django has no types
    """A time by the database's own clock: ``timestamptz`` on PostgreSQL, milliseconds since 1970 on SQLite."""

    def get_internal_type(self) -> str:
        """Keep Django from converting it as its own kind of time."""
        return "Moment"

    def from_db_value(self, value: Any, _expression: object, _connection: object) -> datetime | None:
        """Read what the database has."""
        if isinstance(value, int):
            time = _EPOCH + value * _MILLISECOND
            return time if settings.USE_TZ else time.astimezone().replace(tzinfo=None)
        read: datetime | None = value
        return read

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:  # noqa: FBT001, FBT002 - Django's own signature
        """Write a time to compare with."""
        value = value if prepared else self.get_prep_value(value)
        if isinstance(value, datetime) and connection.vendor == "sqlite":
            return (value.astimezone(UTC) - _EPOCH) // _MILLISECOND
        return value


class Record(models.Model):  # type: ignore[misc]  # as above
    """One idempotency key that was used within its retention."""

    scope = models.TextField()
    # Unique together with the scope only. Django wants one column as primary key; queries for a record name both.
    key = models.TextField(primary_key=True)
    state = models.CharField(max_length=10, choices=STATES)
    attempt = models.IntegerField()
    token = models.BinaryField()
    fingerprint = models.BinaryField()
    recovery_point = models.TextField(null=True)  # noqa: DJ001 - NULL is none
    status = models.SmallIntegerField(null=True)
    headers = models.TextField(null=True)  # noqa: DJ001 - as above
    body = models.BinaryField(null=True)
    created_at = Moment("created")
    lease_expires_at = Moment("lease expires", null=True)
    completed_at = Moment("completed", null=True)
    expires_at = Moment("expires")
    steps = models.TextField(null=True)  # noqa: DJ001 - as above
    on_crash = models.CharField(max_length=10)
    after_retention = models.CharField(max_length=10)
    request = models.TextField(null=True)  # noqa: DJ001 - as above
    request_body = models.BinaryField(null=True)
    tries = models.IntegerField()
    accepted = models.BooleanField()
    milestone = models.TextField(null=True)  # noqa: DJ001 - as above

    class Meta:
        """Made by ``0001_pre_keys.sql``."""

        managed = False
        db_table = "semel_keys"
        default_permissions = ("view",)
        permissions = (("view_record_contents", "Can see the answers, requests and steps of records"),)
        verbose_name = "idempotency key"
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return f"{self.key} of {self.scope}"


class AuditLine(models.Model):  # type: ignore[misc]  # as above
    """One line of the audit trail: which process or operator did what to which key."""

    id = models.BigIntegerField(primary_key=True)
    at = Moment()
    scope = models.TextField()
    key = models.TextField()
    attempt = models.IntegerField()
    event = models.TextField()
    actor = models.TextField()
    detail = models.TextField(null=True)  # noqa: DJ001 - as above

    class Meta:
        """Made by ``0002_pre_steps.sql``."""

        managed = False
        db_table = "semel_audit"
        default_permissions = ()
        ordering = ("id",)

    def __str__(self) -> str:
        return f"{self.event} by {self.actor}"
