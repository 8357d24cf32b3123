"""Accepted operations, and the progress that their handlers report."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from semel.django.operations import ApplySQL


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Applies ``0003_pre_accepted.sql``."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("semel", "0002_steps")]
    operations: ClassVar[list[object]] = [ApplySQL("0003_pre_accepted")]
