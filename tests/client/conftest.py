"""A guarded API, and clients of every library."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.client.callers import KINDS, Caller
from tests.client.served import Serve, Served, served

Call = Callable[..., Caller]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server with a policy of its own."""
    with ExitStack() as stack:
        yield lambda **policy: stack.enter_context(served(tmp_path, **policy))


@pytest.fixture
def server(serve: Serve) -> Served:
    return serve()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def call(kind: str) -> Iterator[Call]:
    """Make a client."""
    with ExitStack() as stack:

        def made(**options: Any) -> Caller:
            caller = Caller(kind, **options)
            stack.callback(caller.close)
            return caller

        yield made
