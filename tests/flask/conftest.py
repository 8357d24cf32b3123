"""The decorator's entry point on every durable store, open for the whole session; and small apps of a test's own."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import flask
import pytest

import semel
from semel import stores
from semel.flask import Semel
from tests.databases import Databases
from tests.flask.world import FlaskWorld


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskWorld]:
    """The entry point on one store."""
    if request.param == "sqlite":
        opened = FlaskWorld(stores.store(f"sqlite:///{tmp_path_factory.mktemp('flask') / 'semel.db'}"))
        yield opened
        opened.close()
        return
    databases: Databases = request.getfixturevalue("postgres_databases")
    with databases.lend() as url:
        opened = FlaskWorld(stores.store(url))
        opened.store.migrate()
        yield opened
        opened.close()


Install = Callable[..., flask.Flask]


@pytest.fixture
def install() -> Iterator[Install]:
    """Make an app with Semel in it, on a store in memory unless told otherwise."""
    apps: list[flask.Flask] = []

    def make(app: flask.Flask | None = None, **settings: Any) -> flask.Flask:
        app = app or flask.Flask(f"app-{uuid4().hex}")
        app.secret_key = "secret"
        Semel(app, **{"store": "memory://", "scope": semel.SINGLE_TENANT, **settings})
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.extensions["semel"].close()


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url
