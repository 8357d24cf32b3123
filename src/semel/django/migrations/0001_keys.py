"""The table of keys. Django does not manage it, so the migration state has only the model's name and permissions."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

from semel.django.operations import ApplySQL


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Applies ``0001_pre_keys.sql``."""

    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar[list[object]] = [
        ApplySQL("0001_pre_keys"),
        migrations.CreateModel(
            name="Record",
            fields=[
                ("scope", models.TextField()),
                ("key", models.TextField(primary_key=True, serialize=False)),
            ],
            options={
                "managed": False,
                "db_table": "semel_keys",
                "default_permissions": ("view",),
                "permissions": (("view_record_contents", "Can see the answers, requests and steps of records"),),
                "verbose_name": "idempotency key",
                "ordering": ("-created_at",),
            },
        ),
    ]
