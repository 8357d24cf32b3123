"""Semel's fixtures for pytest: a store that is new for each test, and its clock. Without them it does nothing.

It stands beside the package and not in it, so that pytest, which loads it at every start, imports nothing of Semel's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from semel.testing import Clock

_HELP = "the store of the fixture semel_store: sqlite (a new file for each test), or a postgresql:// or redis:// URL"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take ``--semel-store``, or ``semel_store`` from the configuration file."""
    parser.getgroup("semel").addoption("--semel-store", metavar="URL", help=_HELP)
    parser.addini("semel_store", _HELP, default="sqlite")


@pytest.fixture
def semel_store_url(pytestconfig: pytest.Config) -> str:
    """Where the store is, before it is made new; override it to choose in code."""
    chosen: str = pytestconfig.getoption("--semel-store") or pytestconfig.getini("semel_store")
    return chosen


@pytest.fixture
def semel_store(semel_store_url: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a store with no record in it, for this test alone: give it wherever a store is asked for."""
    from semel.testing.fresh import fresh_store  # noqa: PLC0415 - nothing is imported for tests that don't ask

    with fresh_store(semel_store_url, tmp_path) as url:
        yield url


@pytest.fixture
def semel_clock(semel_store: str) -> Clock:
    """The clock of that store: ``semel_clock.advance(timedelta(hours=25))``."""
    from semel.testing import Clock  # noqa: PLC0415 - as above

    return Clock(semel_store)
