"""Every scenario, through every entry point that Django has, on PostgreSQL and SQLite."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from tests.databases import Databases
from tests.django import project, worlds
from tests.web.harness import Api
from tests.web.scenarios import SCENARIOS, Scenario

ENTRIES: dict[str, Any] = {
    "decorator": worlds.DjangoWorld,
    "async": worlds.AsyncDjangoWorld,
    "rest": worlds.DrfWorld,
    "middleware": worlds.MiddlewareWorld,
    "async middleware": worlds.AsyncMiddlewareWorld,
}
#: The entry points differ in what is Django's; the databases, in what is the store's. Not every pair is worth its time.
WORLDS = (
    *("decorator-postgres", "decorator-sqlite", "async-postgres", "async-sqlite", "rest-postgres", "rest-sqlite"),
    *("middleware-sqlite", "async middleware-postgres"),
)
SKIPPED = {
    "d3 repeated headers come back as often, and in order": "A response of Django's has one line for each name.",
}


@pytest.fixture(scope="module")
def shared_postgres(django_databases: Databases) -> Iterator[str]:
    """A database for scenarios, which keep to a tenant of their own."""
    with django_databases.lend() as url:
        yield url


@pytest.fixture(scope="module", params=WORLDS)
def world(
    request: pytest.FixtureRequest, migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One entry point on one database."""
    entry, store = request.param.rsplit("-", 1)
    if store == "postgres":
        url: str = request.getfixturevalue("shared_postgres")
    else:
        file = tmp_path_factory.mktemp("scenarios") / "django.db"
        shutil.copy(migrated_sqlite, file)
        url = f"sqlite:///{file}"
    with project.databases(default=url), override_settings(SEMEL={"SCOPE": worlds.brought_scope}):
        opened = ENTRIES[entry]()
        yield opened
        opened.close()


@pytest.mark.parametrize("scenario", [pytest.param(each, id=each.name) for each in SCENARIOS])
def test_scenario(world: Any, scenario: Scenario) -> None:
    """What a client sees does not depend on the entry point, nor on the store."""
    if scenario.name in SKIPPED:
        pytest.skip(SKIPPED[scenario.name])
    scenario.check(Api(world, scenario.policy))
