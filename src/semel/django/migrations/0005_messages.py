"""The tables of the outbox, the inbox and the endpoints of webhooks."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from semel.django.operations import ApplySQL


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Applies ``0005_pre_messages.sql``."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("semel", "0004_lean")]
    operations: ClassVar[list[object]] = [ApplySQL("0005_pre_messages")]
