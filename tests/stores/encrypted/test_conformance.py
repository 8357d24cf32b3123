"""An encrypting store passes the suite that every store passes: what it stores comes back byte for byte."""

import base64
import os
from collections.abc import Iterator

import pytest

from semel import stores
from semel.stores.encrypted import Encrypted
from semel.testing.conformance import Candidate, StoreConformance
from tests.kit import servers
from tests.stores.shared.test_conformance import postgres_candidate, sqlite_candidate

SECRETS = "SEMEL_CONFORMANCE_SECRETS"


@pytest.fixture(scope="class", autouse=True)
def secrets() -> Iterator[str]:
    os.environ[SECRETS] = base64.b64encode(bytes(range(32))).decode()
    yield f"env:{SECRETS}"
    del os.environ[SECRETS]


class TestOverSQLite(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, secrets: str, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
        file = tmp_path_factory.mktemp("encrypted") / "semel.db"
        return sqlite_candidate(file, lambda durable: stores.store(Encrypted(durable, secrets)))


class TestAsyncOverPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, secrets: str, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, lambda durable: stores.async_store(Encrypted(durable, secrets)))
