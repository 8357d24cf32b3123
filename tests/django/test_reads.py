"""What PostgreSQL reads for a request on Django's own connection, by its own counters."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

from semel.testing.conformance.handles import Handle, handle
from tests.django import project
from tests.django.requests import ThreadedStore
from tests.reading import LENT, OWN, excessive_reads


@pytest.mark.parametrize("analyse", [False, True], ids=["never analysed", "analysed"])
@pytest.mark.parametrize("options", [{}, {"prepare_threshold": 0}], ids=["unprepared", "prepared"])
def test_reads_do_not_grow_with_the_table(django_postgres_url: str, options: dict[str, Any], analyse: bool) -> None:
    """In sessions that are Django's, with none of our settings, a request reads a few index entries all the same."""

    def open_store() -> Handle:
        connections["default"].ensure_connection()  # Of this thread, so that it is not opened each time.
        made = handle(ThreadedStore("default"))
        made.close = connections["default"].close  # type: ignore[method-assign]  # It hands in its counts.
        return made

    with project.databases(default=project.settings_of(django_postgres_url, **options)):
        assert not excessive_reads(django_postgres_url, open_store, (*OWN, *LENT), start=500, analyse=analyse)
