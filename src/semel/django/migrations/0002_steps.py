"""Steps, stored requests, the parked state, and the audit trail."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

from semel.django.operations import ApplySQL


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Applies ``0002_pre_steps.sql``."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("semel", "0001_keys")]
    operations: ClassVar[list[object]] = [
        ApplySQL("0002_pre_steps"),
        migrations.CreateModel(
            name="AuditLine",
            fields=[("id", models.BigIntegerField(primary_key=True, serialize=False))],
            options={"managed": False, "db_table": "semel_audit", "default_permissions": (), "ordering": ("id",)},
        ),
    ]
