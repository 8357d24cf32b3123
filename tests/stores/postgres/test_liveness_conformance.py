"""With instant take-over a PostgreSQL store passes the suite that every store passes: whoever lives is left alone."""

from collections.abc import Iterator

import pytest

from semel import stores
from semel.testing.conformance import Candidate, StoreConformance
from tests.kit import servers
from tests.stores.shared.test_conformance import postgres_candidate


@pytest.mark.slow  # The store of shared/test_conformance.py with one more lock.
class TestAsyncInstantPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, lambda url: stores.async_store(f"{url}?takeover=instant"))
