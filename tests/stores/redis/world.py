"""What the tests of the Redis store share: making every record older, as the conformance suite asks."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

from semel import stores
from semel.core.commands import Command
from semel.testing import Clock
from semel.testing.conformance import handle
from tests.kit import servers


def ageing(url: str) -> Callable[[timedelta], None]:
    """Return what makes all that is stored on this server older."""
    return Clock(url).advance


def cluster_url(nodes: Sequence[servers.RedisServer]) -> str:
    """Return the address of a Cluster, by one of its nodes: the others are found."""
    return f"redis+cluster://127.0.0.1:{nodes[0].port}"


class Asking:
    """One store of either colour, asked in one way."""

    def __init__(self, url: str, colour: str) -> None:
        self._store = handle(stores.store(url) if colour == "threads" else stores.async_store(url))

    def __call__(self, command: Command[Any]) -> Any:
        return self._store.perform(command)

    def all(self, commands: Sequence[Command[Any]]) -> list[Any]:
        return self._store.perform_all(commands)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()
