"""What is true with every driver, on PostgreSQL and on SQLite."""

import asyncio

import pytest

from semel.errors import ConfigurationError, SemelError
from semel.natural import RowDiffers
from tests.natural.conftest import Opener

RIVALS = 20


async def test_new_then_stored(open_entry: Opener) -> None:
    """The first call inserts, and says so; the second brings the same row, whole, and says that it was there."""
    entry = await open_entry()
    first = await entry.order(total=500)
    again = await entry.order(total=500)
    assert (first.is_new, again.is_new) == (True, False)
    assert first.row == again.row == {"id": 1, "merchant": 7, "number": "A-17", "total": 500, "status": "new"}
    assert (first.differs, again.differs) == ((), ())


async def test_another_key(open_entry: Opener) -> None:
    """Another value in any column of the key is another row."""
    entry = await open_entry()
    got = [await entry.order(7, "A-17"), await entry.order(7, "A-18"), await entry.order(8, "A-17")]
    assert [each.is_new for each in got] == [True, True, True]
    assert len({each.row["id"] for each in got}) == 3


async def test_another_amount_is_loud(open_entry: Opener) -> None:
    """Other content under the same key is refused, with the stored row at hand; nothing is written or broken."""
    entry = await open_entry()
    await entry.order(total=500)
    with pytest.raises(RowDiffers, match=r"^orders: .* \(merchant, number\) differs .* in total\. ") as refused:
        await entry.order(total=600)
    assert refused.value.got is not None
    assert refused.value.got.row["total"] == 500
    assert refused.value.status == 422
    assert (await entry.order(total=500)).row["total"] == 500
    await entry.commit()


async def test_what_may_differ(open_entry: Opener) -> None:
    """Columns outside of `same` may differ, and are named; those in it may not."""
    entry = await open_entry()
    await entry.order(total=500, status="paid")
    got = await entry.order(total=500, status="new", same=("total",))
    assert (got.is_new, got.differs, got.row["status"]) == (False, ("status",), "paid")
    assert (await entry.order(total=600, status="new", same=())).differs == ("total", "status")
    with pytest.raises(RowDiffers, match="in total"):
        await entry.order(total=600, status="new", same="total")


async def test_null_is_a_value_too(open_entry: Opener) -> None:
    """Outside of the key, None is the same as NULL and differs from everything else."""
    entry = await open_entry()
    await entry.order(total=None)
    assert (await entry.order(total=None)).differs == ()
    assert (await entry.order(total=0, same=())).differs == ("total",)
    await entry.order(8, total=0)
    assert (await entry.order(8, total=None, same=())).differs == ("total",)


async def test_joins_the_transaction(open_entry: Opener) -> None:
    """Nothing is committed: a rollback takes the row with it, and a commit keeps it."""
    entry = await open_entry()
    assert (await entry.order()).is_new
    await entry.rollback()
    assert (await entry.order()).is_new
    await entry.commit()
    other = await open_entry()
    assert not (await other.order()).is_new


async def test_one_creator(open_entry: Opener) -> None:
    """Of twenty at once, each in a transaction of its own, one inserts and all get its row."""
    entries = [await open_entry() for _ in range(RIVALS)]

    async def click(amount: int) -> tuple[bool, int]:
        got = await entries[amount].order(total=amount, same=())
        await entries[amount].commit()
        return got.is_new, got.row["id"]

    got = await asyncio.gather(*map(click, range(RIVALS)))
    assert sum(is_new for is_new, _ in got) == 1
    assert len({row for _, row in got}) == 1


async def test_no_constraint(open_entry: Opener) -> None:
    """Columns that no unique constraint is on are refused, and it is said what to create."""
    entry = await open_entry()
    with pytest.raises(
        ConfigurationError, match=r"no unique constraint is on exactly \(number\)\. Create one: .*UNIQUE"
    ):
        await entry.ask(entry.orders, {"merchant": 7, "number": "A-17"}, unique="number")


async def test_another_constraint(open_entry: Opener) -> None:
    """A conflict with another constraint than the named one stays the driver's own error."""
    entry = await open_entry()
    await entry.run("CREATE UNIQUE INDEX one_status ON orders (status)")
    await entry.order(7, status="unique")
    with pytest.raises(Exception, match=r"(?i)unique") as raised:
        await entry.order(8, status="unique")
    assert not isinstance(raised.value, SemelError)


async def test_unknown_column(open_entry: Opener) -> None:
    """A column that is not there is named."""
    entry = await open_entry()
    with pytest.raises(ConfigurationError, match="totl"):
        await entry.order(totl=500)


class TestPartialIndex:
    """A unique index with a predicate: `where=` says which."""

    @pytest.fixture(autouse=True)
    async def index(self, open_entry: Opener) -> None:
        entry = await open_entry()
        await entry.run("CREATE UNIQUE INDEX one_open ON orders (number) WHERE status = 'open'")
        await entry.commit()

    async def test_only_what_the_predicate_holds_for(self, open_entry: Opener) -> None:
        """Rows that the index has count, and others do not."""
        entry = await open_entry()
        for merchant, status in ((1, "closed"), (2, "open")):
            await entry.order(merchant, status=status)
        values = {"merchant": 3, "number": "A-17", "status": "open"}
        got = await entry.ask(entry.orders, values, unique="number", where="status = 'open'", same=())
        assert (got.is_new, got.row["merchant"], got.differs) == (False, 2, ("merchant",))

    async def test_without_where(self, open_entry: Opener) -> None:
        """Without its predicate the index is not found."""
        entry = await open_entry()
        with pytest.raises(ConfigurationError, match="partial index needs where="):
            await entry.ask(entry.orders, {"merchant": 1, "number": "A-17"}, unique="number")

    async def test_other_predicate(self, open_entry: Opener) -> None:
        """A predicate that no index has is refused."""
        entry = await open_entry()
        with pytest.raises(ConfigurationError, match="predicate that where= implies"):
            await entry.ask(entry.orders, {"merchant": 1, "number": "A"}, unique="number", where="status = 'closed'")

    async def test_row_outside(self, open_entry: Opener) -> None:
        """A row that the index would not have is refused: every retry would insert it again."""
        entry = await open_entry()
        values = {"merchant": 1, "number": "A-17", "status": "closed"}
        with pytest.raises(ConfigurationError, match=r"where= is false .* Roll back"):
            await entry.ask(entry.orders, values, unique="number", where="status = 'open'")
