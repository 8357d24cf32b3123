"""A column for the trace of the attempt that ran the handler."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from semel.django.operations import ApplySQL


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Applies ``0006_pre_trace.sql``."""

    atomic = False
    dependencies: ClassVar[list[tuple[str, str]]] = [("semel", "0005_messages")]
    operations: ClassVar[list[object]] = [ApplySQL("0006_pre_trace")]
