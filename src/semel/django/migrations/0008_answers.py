"""A column that says where a large answer is, and the functions of the partitioned layout."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from semel.django.operations import ApplySQL


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Applies ``0008_pre_answers.sql``."""

    atomic = False
    dependencies: ClassVar[list[tuple[str, str]]] = [("semel", "0007_counts")]
    operations: ClassVar[list[object]] = [ApplySQL("0008_pre_answers")]
