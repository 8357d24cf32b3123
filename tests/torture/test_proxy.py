"""The proxy that loses statements and replies: what is lost is lost, and all else goes through."""

import asyncio
import time
from collections.abc import Callable

import asyncpg
import psycopg
import pytest

from torture.proxy import Cut, Lost, Proxy, is_commit


class Once:
    """Cuts once, at the first statement that is wanted."""

    def __init__(self, cut: Cut, wanted: Callable[[str], bool] = is_commit) -> None:
        self.lost: list[Lost] = []
        self._cut: Cut | None = cut
        self._wanted = wanted

    def choose(self, sql: str, marks: tuple[str, ...]) -> Cut | None:
        if not self._wanted(sql):
            return None
        cut, self._cut = self._cut, None
        return cut


def rows(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT key FROM paid")]


@pytest.fixture
def url(postgres_url: str) -> str:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE paid (key text)")
    return postgres_url


def pay_by_psycopg(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO paid VALUES (%s)", ["pay-1"])


def pay_by_asyncpg(url: str) -> None:
    async def pay() -> None:
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                await connection.execute("INSERT INTO paid VALUES ($1)", "pay-1")
        finally:
            await connection.close()

    asyncio.run(pay())


PAYING = pytest.mark.parametrize("pay", [pay_by_psycopg, pay_by_asyncpg])
LOST = (psycopg.OperationalError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError)


@PAYING
def test_passes_on(url: str, pay: Callable[[str], None]) -> None:
    """A proxy that is told to lose nothing loses nothing."""
    with Proxy(url, lambda _sql, _marks: None, lambda _lost: None) as proxy:
        pay(proxy.address(url))
    assert rows(url) == ["pay-1"]


@PAYING
@pytest.mark.parametrize("cut", [Cut.AFTER, Cut.LATE])
def test_reply_is_lost(url: str, pay: Callable[[str], None], cut: Cut) -> None:
    """A COMMIT whose reply is lost is carried out, and its client sees an error; the next connection works."""
    once = Once(cut)
    with Proxy(url, once.choose, once.lost.append) as proxy:
        with pytest.raises(LOST):
            pay(proxy.address(url))
        pay(proxy.address(url))
        assert once.lost == [Lost("COMMIT" if pay is pay_by_psycopg else "COMMIT;", cut, ("pay-1",))]
        while not proxy.confirmed:  # The test's own time limit ends it.
            time.sleep(0.01)
    assert rows(url) == ["pay-1", "pay-1"]


@PAYING
def test_commit_is_lost(url: str, pay: Callable[[str], None]) -> None:
    """A COMMIT that is lost before it reaches the server undoes the transaction."""
    once = Once(Cut.BEFORE)
    with Proxy(url, once.choose, once.lost.append) as proxy, pytest.raises(LOST):
        pay(proxy.address(url))
    assert [lost.cut for lost in once.lost] == [Cut.BEFORE]
    assert rows(url) == []


@PAYING
def test_prepared_statement(url: str, pay: Callable[[str], None]) -> None:
    """A statement that is prepared and executed by name is known by its text, and its reply can be lost as well."""
    once = Once(Cut.AFTER, lambda sql: sql.startswith("INSERT"))
    with Proxy(url, once.choose, once.lost.append) as proxy, pytest.raises(LOST):
        pay(proxy.address(url))
    assert [lost.marks for lost in once.lost] == [("pay-1",)]
    assert rows(url) == []  # It was carried out, and never committed.
