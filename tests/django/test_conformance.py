"""The store in Django's database, in both colours and on both databases, passes the suite that any store must pass."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import django
import pytest
from django.db import connections

from semel.stores.base import AsyncStore, Store
from semel.testing.clock import Clock
from semel.testing.conformance import Candidate, StoreConformance
from tests.databases import Databases
from tests.django import project
from tests.django.requests import ConcurrentStore, ThreadedStore
from tests.stores.shared.test_conformance import ALL

Open = Callable[[str], Store | AsyncStore]

#: The layout, in one text.
PARTITIONED = (files("semel.stores.postgres") / "partitioned.sql").read_text()
#: Each request has a thread of its own, and with it a connection: here they come from Django's own pool.
POOL = {"pool": {"min_size": 2, "max_size": 16}} if django.VERSION >= (5, 1) else {}


@contextmanager
def postgres_candidate(lent: Databases, open_store: Open, **options: Any) -> Iterator[Candidate]:
    with lent.lend() as url, project.databases(default=project.settings_of(url, **options)):
        connections["default"].ensure_connection()  # For the thread of the tests, so that it is not opened each time.
        yield Candidate(open=lambda: open_store("default"), age=Clock(connections["default"]).advance)


@contextmanager
def sqlite_candidate(path: Path, template: Path, open_store: Open) -> Iterator[Candidate]:
    shutil.copy(template, path)
    with project.databases(default=f"sqlite:///{path}"):
        yield Candidate(open=lambda: open_store("default"), age=Clock(connections["default"]).advance)


@pytest.mark.slow  # The store of TestSQLite, with statements of the store in test_postgres.py.
class TestPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, django_databases: Databases) -> Iterator[Candidate]:
        with postgres_candidate(django_databases, ThreadedStore) as made:
            yield made


@pytest.mark.slow  # The store of TestPostgres in a thread.
class TestAsyncPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, django_databases: Databases) -> Iterator[Candidate]:
        with postgres_candidate(django_databases, ConcurrentStore, **POOL) as made:
            yield made


@pytest.mark.slow  # The statements of TestPostgres, with a trigger.
class TestPartitionedPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, django_databases: Databases) -> Iterator[Candidate]:
        with postgres_candidate(django_databases, ThreadedStore) as made:
            with connections["default"].cursor() as cursor:
                cursor.execute(PARTITIONED)
                cursor.execute(ALL)
            yield made


class TestSQLite(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path) -> Iterator[Candidate]:
        with sqlite_candidate(tmp_path_factory.mktemp("sqlite") / "a.db", migrated_sqlite, ThreadedStore) as made:
            yield made


@pytest.mark.slow  # The store of TestSQLite in a thread: it takes three times as long.
class TestAsyncSQLite(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path) -> Iterator[Candidate]:
        with sqlite_candidate(tmp_path_factory.mktemp("sqlite") / "a.db", migrated_sqlite, ConcurrentStore) as made:
            yield made
