"""The table of how many requests have ended how, by minute."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from semel.django.operations import ApplySQL


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Applies ``0007_pre_counts.sql``."""

    atomic = False
    dependencies: ClassVar[list[tuple[str, str]]] = [("semel", "0006_trace")]
    operations: ClassVar[list[object]] = [ApplySQL("0007_pre_counts")]
