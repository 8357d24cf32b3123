"""What PostgreSQL reads for a request, by its own counters, does not depend on how many records there are or were."""

from __future__ import annotations

from typing import Any

import pytest

from semel.stores import async_store, store
from semel.testing.conformance.handles import handle
from tests.reading import CROWD, LENT, OWN, excessive_reads

both_colours = pytest.mark.parametrize("open_store", [store, async_store], ids=["sync", "async"])
whether_analysed = pytest.mark.parametrize("analyse", [False, True], ids=["never analysed", "analysed"])


@whether_analysed
@both_colours
def test_reads_do_not_grow_with_the_table(postgres_url: str, open_store: Any, analyse: bool) -> None:
    """Whatever a request asks for, it reads a few index entries: also where thousands are dead, and none is removed;
    and where the statement was planned when the table was nearly empty.
    """
    store(postgres_url).migrate()
    journeys = (*OWN, *CROWD)

    assert not excessive_reads(
        postgres_url, lambda: handle(open_store(postgres_url)), journeys, start=1, analyse=analyse
    )


@whether_analysed
@both_colours
def test_reads_in_transactions_do_not_grow(postgres_url: str, open_store: Any, analyse: bool) -> None:
    """Atomic mode and phases read as little, in sessions that have none of our settings."""
    store(postgres_url).migrate()

    assert not excessive_reads(postgres_url, lambda: handle(open_store(postgres_url)), LENT, start=500, analyse=analyse)


@pytest.mark.slow
@both_colours
def test_reads_do_not_grow_behind_a_pooler(postgres_url: str, pgbouncer_url: str, open_store: Any) -> None:
    """The same through PgBouncer, where no session is ours. There each statement is planned anew, and one for many keys
    reads a table of a few pages whole, since that is less than to look eight keys up; never one of thousands of rows.
    """
    store(postgres_url).migrate()
    journeys = (*OWN, *CROWD, *LENT)

    assert not excessive_reads(
        postgres_url, lambda: handle(open_store(pgbouncer_url)), journeys, start=3000, analyse=True
    )
