"""A COMMIT without a reply: it is looked up, and never acked on a guess."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from semel.errors import CommitUnknown, StoreUnavailable
from semel.inbox import Duplicate, Ran
from semel.stores.transaction import AsyncTransaction, Transaction
from tests.inbox.consumers import USUAL, consumer, parcels


@contextmanager
def replies_lost(monkeypatch: pytest.MonkeyPatch, *, happened: bool) -> Iterator[None]:
    """The next COMMIT is carried out, or rolled back, and its reply is lost."""
    left = [1]
    sync, loop = Transaction.perform, AsyncTransaction.perform

    def is_it(command: Any) -> bool:
        return type(command).__name__ == "CommitAlone" and bool(left) and bool(left.pop())

    def perform(self: Transaction, command: Any) -> Any:
        if not is_it(command):
            return sync(self, command)
        sync(self, command) if happened else self._unit.rollback()
        raise CommitUnknown("the reply to COMMIT was lost")

    async def aperform(self: AsyncTransaction, command: Any) -> Any:
        if not is_it(command):
            return await loop(self, command)
        await (loop(self, command) if happened else self._unit.rollback())
        raise CommitUnknown("the reply to COMMIT was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "perform", perform)
        patched.setattr(AsyncTransaction, "perform", aperform)
        yield
    assert not left


@pytest.mark.parametrize("kind", [*USUAL, "engine psycopg", "async engine asyncpg"])
def test_it_happened(kind: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt is there, with this run's mark: the handler ran, and its result is returned."""
    with consumer(kind, url) as billing:
        with replies_lost(monkeypatch, happened=True):
            assert billing.receive("m-1") == Ran("shipped m-1")
        assert billing.receive("m-1") == Duplicate()
    assert parcels(url) == ["m-1"]


@pytest.mark.parametrize("kind", [*USUAL, "engine psycopg", "async engine asyncpg"])
def test_it_did_not(kind: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no receipt, so nothing was written: it is raised, and the next delivery runs the handler."""
    with consumer(kind, url) as billing:
        with replies_lost(monkeypatch, happened=False), pytest.raises(StoreUnavailable, match="rolled back"):
            billing.receive("m-1")
        assert parcels(url) == []
        assert billing.receive("m-1") == Ran("shipped m-1")
    assert parcels(url) == ["m-1"]
