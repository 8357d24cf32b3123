"""What a function's annotation says of its result: it is stored as JSON, and comes back as it was."""

import subprocess
import sys
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntFlag, StrEnum
from typing import Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel, Field

from semel.core.commands import Look
from semel.errors import ConfigurationError, NotReplayable, ResultNotJSON
from semel.functions import idempotent
from semel.stores import Store
from semel.stores.memory import MemoryStore

Amount = NewType("Amount", Decimal)
T = TypeVar("T")


class Colour(Enum):
    RED = 1


class Word(StrEnum):
    RED = "red"


class Rights(IntFlag):
    READ = 1
    WRITE = 2


class Odd(Enum):
    HALF = 0.5


class Pair(NamedTuple):
    one: int
    other: Decimal


class Bill(TypedDict):
    total: Decimal
    paid_at: NotRequired[datetime]


class Said(TypedDict):
    ok: bool
    more: NotRequired[list["Said"]]


class Page(TypedDict, Generic[T]):
    items: list[T]


@dataclass(frozen=True)
class Item:
    name: str
    price: Decimal


@dataclass
class Receipt:
    id: UUID
    items: list[Item]
    paid: date | None = None
    parts: "list[Receipt]" = field(default_factory=list)


@dataclass
class Counted:
    """Its own counting would be lost."""

    total: int
    count: int = field(init=False, default=0)


@dataclass
class Given:
    """What it was made with is not in its fields."""

    total: int
    rate: InitVar[int]


@dataclass
class Doubled:
    total: int

    def __post_init__(self) -> None:
        self.total *= 2


class Model(BaseModel):
    at: date
    price: Decimal = Field(alias="unitPrice")
    bills: list[tuple[int, Decimal]] = []


class Secretive(BaseModel):
    name: str
    code: str = Field(default="", exclude=True)


ID = uuid4()
NOON = datetime(2026, 11, 19, 12, 0, 0, 5, tzinfo=timezone(timedelta(hours=9)))
RECEIPT = Receipt(ID, [Item("tea", Decimal("1.10"))], date(2026, 11, 19), [Receipt(ID, [])])


def returning(kind: Any, result: Any, runs: list[int] | None = None) -> Any:
    def function(number: int) -> Any:
        (runs if runs is not None else []).append(number)
        return result

    function.__annotations__["return"] = kind
    return function


@pytest.mark.parametrize(
    "kind, result",
    [
        *((Decimal, Decimal("1.10")), (Amount, Decimal("-0")), (date, date(2026, 11, 19)), (UUID, ID)),
        *(
            (datetime, NOON),
            (datetime, NOON.replace(tzinfo=None)),
            (time, time(1, 2, tzinfo=UTC)),
            (Colour, Colour.RED),
        ),
        *((Word, Word.RED), (Rights, Rights.READ | Rights.WRITE), (Decimal | None, None), (Decimal | None, Decimal(1))),
        *((list[Decimal], [Decimal(1)]), (tuple[int, str], (1, "a")), (tuple[Decimal, ...], (Decimal(1),) * 3)),
        *((tuple, (1, 2)), (tuple[()], ()), (dict[str, list[UUID]], {"a b": [ID]}), (list[dict[str, Any]], [{"a": 1}])),
        *((Bill, {"total": Decimal(1)}), (Bill, {"total": Decimal(1), "paid_at": NOON}), (Item, RECEIPT.items[0])),
        *((Receipt, RECEIPT), (list[Receipt] | None, [RECEIPT]), (Literal["a", "b"], "a"), (int | str, 1)),
        *(
            (Model, Model(at=NOON.date(), unitPrice=Decimal("1.10"), bills=[(1, Decimal(2))])),
            (dict[str, Decimal], None),
        ),
        *((list[Decimal] | None, None), (T, [1]), (object, {"a": None}), (Sequence[int], [1]), (None, None)),
        *((Said | Page[int], {"ok": True}), (Iterable[Said], [{"ok": True, "more": []}]), (Page[Said], {"items": []})),
    ],
)
def test_what_comes_back_as_it_was(keys: Store, kind: Any, result: Any) -> None:
    """The first caller and a later one get what the function has returned, of the type that its annotation says."""
    runs: list[int] = []
    guarded = idempotent(key="number", store=keys, name=f"of {kind}")(returning(kind, result, runs))
    for got in (guarded(1), guarded(1)):
        assert (got, type(got), repr(got)) == (result, type(result), repr(result))
    assert runs == [1]


@pytest.mark.parametrize("result", ["red", Word.RED])
def test_text_of_an_enum(memory: MemoryStore, result: str) -> None:
    """The text that an enum is equal to, as a field of a model has it, comes back as the enum that is annotated."""
    guarded = idempotent(key="number", store=memory, name="of")(returning(list[Word], [result]))
    for got in (guarded(1), guarded(1)):
        assert (got, type(got[0])) == ([Word.RED], Word)


def test_what_is_stored(memory: MemoryStore) -> None:
    """What is stored is plain JSON, for operators and other programs."""
    idempotent(key="number", store=memory, scope="acme", name="of")(returning(Receipt, Receipt(UUID(int=1), [])))(1)
    record = memory.perform(Look("acme\tCALL of", "1"))
    assert record is not None
    assert record.answer is not None
    expected = b'{"id":"00000000-0000-0000-0000-000000000001","items":[],"paid":null,"parts":[]}'
    assert record.answer.body == expected


def test_amount_that_an_operator_has_stored(memory: MemoryStore) -> None:
    """A number in JSON, as an operator writes it, is read as the Decimal of its digits."""

    def old(number: int) -> Any:
        return 19.99

    guard = idempotent(key="number", store=memory, name="pay")
    assert guard(old)(1) == 19.99
    assert guard(returning(Decimal, None))(1) == Decimal("19.99")


def test_a_class_that_has_changed(memory: MemoryStore) -> None:
    """A later version of a class reads what was stored: a new field has its default, an old one is left out."""

    @dataclass
    class Before:
        total: Decimal
        note: str

    @dataclass
    class After:
        total: Decimal
        currency: str = "EUR"

    guard = idempotent(key="number", store=memory, name="pay")
    guard(returning(Before, Before(Decimal(1), "x")))(1)
    assert guard(returning(After, None))(1) == After(Decimal(1))
    with pytest.raises(ConfigurationError, match=r"stored result of pay .* annotated .* codec="):
        guard(returning(UUID, None))(1)


def test_a_number_that_is_read_as_decimal(memory: MemoryStore) -> None:
    """A number of JSON, from older code or from an operator, is the Decimal of its digits, and not of its bits."""
    guard = idempotent(key="number", store=memory, name="pay")
    guard(returning(float, 1.1))(1)
    assert guard(returning(Decimal, None))(1) == Decimal("1.1")
    guard(returning(int, 7))(2)
    assert guard(returning(Decimal, None))(2) == Decimal(7)


@pytest.mark.parametrize(
    "kind, result, words",
    [
        (list[Item], [Item("tea", 1.1)], "result[0].price is a float, and is annotated as Decimal"),  # type: ignore[arg-type]  # the mistake
        (Item, Item("tea", None), "result.price is a NoneType, and is annotated as Decimal"),  # type: ignore[arg-type]  # as above
        (Item, Item({"tea"}, Decimal(1)), "result.name is a set"),  # type: ignore[arg-type]  # as above
        (Receipt, {"id": ID}, "result is a dict, and is annotated as Receipt"),
        (tuple[int, int], (1, 2, 3), "result is a tuple, and is annotated as tuple"),
        (Doubled, Doubled(1), "it does not come back from JSON as it was"),
        (Secretive, Secretive(name="a", code="b"), "result is a Secretive, which does not come back"),
    ],
)
def test_what_is_not_as_it_was_annotated(memory: MemoryStore, kind: Any, result: Any, words: str) -> None:
    """A result that is not what its annotation says is an error that says where, and not what it was."""
    guarded = idempotent(key="number", store=memory, name="of")(returning(kind, result))
    with pytest.raises(ResultNotJSON) as refused:
        guarded(1)
    assert f": {words}" in str(refused.value)
    with pytest.raises(NotReplayable):
        guarded(1)


@pytest.mark.parametrize(
    "kind, name",
    [
        *((dict[int, str], "dict[int, str]"), (Mapping[Literal[1], str], "Literal[1], str"), (Pair, "Pair")),
        *((list[bytes], "bytes"), (set[int], "set[int]"), (timedelta, "timedelta"), (Awaitable[Decimal], "Awaitable")),
        *((Decimal | str, "decimal.Decimal | str"), (Sequence[Decimal], "Sequence[decimal.Decimal]"), (Odd, "Odd")),
        *(
            (Counted, "Counted"),
            (Given, "Given"),
            (Item | Receipt, "Item | "),
            (dict[str, Pair], "Pair"),
            (Enum, "Enum"),
        ),
        *((BaseModel, "BaseModel"), (StrEnum | None, "StrEnum")),
    ],
)
def test_what_does_not_come_back(memory: MemoryStore, kind: Any, name: str) -> None:
    """A type that would come back as another one is refused before the run."""
    with pytest.raises(ConfigurationError) as refused:
        idempotent(key="number", store=memory, name="of")(returning(kind, None))
    assert "of is annotated to return " in str(refused.value)
    assert name in str(refused.value)


def test_pydantic_is_not_imported() -> None:
    """Functions are guarded without pydantic."""
    program = "import sys, semel.functions; print('pydantic' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
