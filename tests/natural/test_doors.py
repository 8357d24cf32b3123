"""What is true with every driver, on PostgreSQL and on SQLite."""

import asyncio

import pytest

from semel.errors import ConfigurationError, SemelError
from semel.natural import RowDiffers
from tests.natural.conftest import Opener

RIVALS = 20


async def test_new_then_stored(open_door: Opener) -> None:
    """The first call inserts, and says so; the second brings the same row, whole, and says that it was there."""
    door = await open_door()
    first = await door.order(total=500)
    again = await door.order(total=500)
    assert (first.is_new, again.is_new) == (True, False)
    assert first.row == again.row == {"id": 1, "merchant": 7, "number": "A-17", "total": 500, "status": "new"}
    assert (first.differs, again.differs) == ((), ())


async def test_another_key(open_door: Opener) -> None:
    """Another value in any column of the key is another row."""
    door = await open_door()
    got = [await door.order(7, "A-17"), await door.order(7, "A-18"), await door.order(8, "A-17")]
    assert [each.is_new for each in got] == [True, True, True]
    assert len({each.row["id"] for each in got}) == 3


async def test_another_amount_is_loud(open_door: Opener) -> None:
    """Other content under the same key is refused, with the stored row at hand; nothing is written or broken."""
    door = await open_door()
    await door.order(total=500)
    with pytest.raises(RowDiffers, match=r"^orders: .* \(merchant, number\) differs .* in total\. ") as refused:
        await door.order(total=600)
    assert refused.value.got is not None
    assert refused.value.got.row["total"] == 500
    assert refused.value.status == 422
    assert (await door.order(total=500)).row["total"] == 500
    await door.commit()


async def test_what_may_differ(open_door: Opener) -> None:
    """Columns outside of `same` may differ, and are named; those in it may not."""
    door = await open_door()
    await door.order(total=500, status="paid")
    got = await door.order(total=500, status="new", same=("total",))
    assert (got.is_new, got.differs, got.row["status"]) == (False, ("status",), "paid")
    assert (await door.order(total=600, status="new", same=())).differs == ("total", "status")
    with pytest.raises(RowDiffers, match="in total"):
        await door.order(total=600, status="new", same="total")


async def test_null_is_a_value_too(open_door: Opener) -> None:
    """Outside of the key, None is the same as NULL and differs from everything else."""
    door = await open_door()
    await door.order(total=None)
    assert (await door.order(total=None)).differs == ()
    assert (await door.order(total=0, same=())).differs == ("total",)
    await door.order(8, total=0)
    assert (await door.order(8, total=None, same=())).differs == ("total",)


async def test_joins_the_transaction(open_door: Opener) -> None:
    """Nothing is committed: a rollback takes the row with it, and a commit keeps it."""
    door = await open_door()
    assert (await door.order()).is_new
    await door.rollback()
    assert (await door.order()).is_new
    await door.commit()
    other = await open_door()
    assert not (await other.order()).is_new


async def test_one_creator(open_door: Opener) -> None:
    """Of twenty at once, each in a transaction of its own, one inserts and all get its row."""
    doors = [await open_door() for _ in range(RIVALS)]

    async def click(amount: int) -> tuple[bool, int]:
        got = await doors[amount].order(total=amount, same=())
        await doors[amount].commit()
        return got.is_new, got.row["id"]

    got = await asyncio.gather(*map(click, range(RIVALS)))
    assert sum(is_new for is_new, _ in got) == 1
    assert len({row for _, row in got}) == 1


async def test_no_constraint(open_door: Opener) -> None:
    """Columns that no unique constraint is on are refused, and it is said what to create."""
    door = await open_door()
    with pytest.raises(
        ConfigurationError, match=r"no unique constraint is on exactly \(number\)\. Create one: .*UNIQUE"
    ):
        await door.ask(door.orders, {"merchant": 7, "number": "A-17"}, unique="number")


async def test_another_constraint(open_door: Opener) -> None:
    """A conflict with another constraint than the named one stays the driver's own error."""
    door = await open_door()
    await door.run("CREATE UNIQUE INDEX one_status ON orders (status)")
    await door.order(7, status="unique")
    with pytest.raises(Exception, match=r"(?i)unique") as raised:
        await door.order(8, status="unique")
    assert not isinstance(raised.value, SemelError)


async def test_unknown_column(open_door: Opener) -> None:
    """A column that is not there is named."""
    door = await open_door()
    with pytest.raises(ConfigurationError, match="totl"):
        await door.order(totl=500)


class TestPartialIndex:
    """A unique index with a predicate: `where=` says which."""

    @pytest.fixture(autouse=True)
    async def index(self, open_door: Opener) -> None:
        door = await open_door()
        await door.run("CREATE UNIQUE INDEX one_open ON orders (number) WHERE status = 'open'")
        await door.commit()

    async def test_only_what_the_predicate_holds_for(self, open_door: Opener) -> None:
        """Rows that the index has count, and others do not."""
        door = await open_door()
        for merchant, status in ((1, "closed"), (2, "open")):
            await door.order(merchant, status=status)
        values = {"merchant": 3, "number": "A-17", "status": "open"}
        got = await door.ask(door.orders, values, unique="number", where="status = 'open'", same=())
        assert (got.is_new, got.row["merchant"], got.differs) == (False, 2, ("merchant",))

    async def test_without_where(self, open_door: Opener) -> None:
        """Without its predicate the index is not found."""
        door = await open_door()
        with pytest.raises(ConfigurationError, match="partial index needs where="):
            await door.ask(door.orders, {"merchant": 1, "number": "A-17"}, unique="number")

    async def test_other_predicate(self, open_door: Opener) -> None:
        """A predicate that no index has is refused."""
        door = await open_door()
        with pytest.raises(ConfigurationError, match="predicate that where= implies"):
            await door.ask(door.orders, {"merchant": 1, "number": "A"}, unique="number", where="status = 'closed'")

    async def test_row_outside(self, open_door: Opener) -> None:
        """A row that the index would not have is refused: every retry would insert it again."""
        door = await open_door()
        values = {"merchant": 1, "number": "A-17", "status": "closed"}
        with pytest.raises(ConfigurationError, match=r"where= does not hold .* Roll back"):
            await door.ask(door.orders, values, unique="number", where="status = 'open'")
