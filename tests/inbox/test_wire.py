"""What a delivery sends to PostgreSQL, and a connection that is cut at COMMIT."""

from collections.abc import Iterator

import pytest

from semel.errors import StoreUnavailable
from semel.inbox import Duplicate, Ran
from tests.inbox.consumers import POSTGRES_KINDS, consumer, parcels, receipts
from torture.proxy import Cut, Lost, Proxy, is_commit


class Wire:
    """What was sent; the next COMMIT is cut, if that is asked for."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.cut: Cut | None = None
        self.lost: list[Lost] = []

    def choose(self, sql: str, _marks: tuple[str, ...]) -> Cut | None:
        self.sent.append(sql)
        if is_commit(sql) and self.cut is not None:
            cut, self.cut = self.cut, None
            return cut
        return None

    def ours(self) -> list[str]:
        """What was sent since the last look, but for what asyncpg's pool resets by."""
        sent, self.sent = self.sent, []
        return [sql for sql in sent if "pg_advisory_unlock_all" not in sql]


@pytest.fixture
def wire(url: str) -> Iterator[tuple[Wire, str]]:
    heard = Wire()
    with Proxy(url, heard.choose, heard.lost.append) as proxy:
        yield heard, proxy.address(url)


@pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
def test_round_trips(kind: str, wire: tuple[Wire, str]) -> None:
    """A first delivery: BEGIN, two looks, the handler, the receipt, COMMIT. A redelivery: BEGIN, one look, ROLLBACK."""
    heard, address = wire
    with consumer(kind, address) as billing:
        for number in range(8):  # After some, psycopg prepares a statement, which is a round trip of its own.
            billing.receive(f"warm-{number}")
        heard.ours()
        assert billing.receive("m-1") == Ran("shipped m-1")
        begin, look, again, handler, receipt, commit = heard.ours()
        assert "BEGIN" in begin
        assert look == again
        assert "pg_try_advisory_xact_lock" in look
        assert handler == "INSERT INTO parcels VALUES ('m-1')"
        assert receipt.startswith("INSERT INTO semel_inbox")
        assert is_commit(commit)
        assert billing.receive("m-1") == Duplicate()
        begin, look, *ended = heard.ours()
        assert ("BEGIN" in begin, "semel_inbox" in look) == (True, True)
        # After a ROLLBACK psycopg forgets what it has prepared, and says so.
        assert ended == ["ROLLBACK", *(["DEALLOCATE ALL"] if kind == "psycopg" else [])]


@pytest.mark.parametrize("cut", Cut)
@pytest.mark.parametrize("kind", POSTGRES_KINDS)
def test_cut_at_commit(kind: str, wire: tuple[Wire, str], url: str, cut: Cut) -> None:
    """The connection is cut before, at or after COMMIT: the outcome is looked up, and a redelivery makes it one."""
    heard, address = wire
    with consumer(kind, address) as billing:
        billing.receive("warm")
        heard.cut = cut
        try:
            verdict = billing.receive("m-1")
        except StoreUnavailable:
            verdict = None
        assert heard.lost
        is_there = receipts(url).get("m-1") == ("done", 0)
        assert (verdict == Ran("shipped m-1")) is is_there
        assert ("m-1" in parcels(url)) is is_there
        assert billing.receive("m-1") == (Duplicate() if is_there else Ran("shipped m-1"))
    assert parcels(url) == ["m-1", "warm"]
