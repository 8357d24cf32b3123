"""Worlds for the scenarios, on the server that the other tests use too."""

import pytest

from tests.kit import servers
from torture.scenario import Worlds


@pytest.fixture(scope="session")
def worlds(postgres_server: servers.PostgresServer) -> Worlds:
    return Worlds(postgres_server)
