"""What the annotation of a function says of its result."""

from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from enum import Enum, StrEnum
from functools import wraps
from typing import Annotated, Any, Literal, NewType, NoReturn, Protocol, TypedDict, TypeVar

import pytest

from semel.core.result_type import unwritable

Currency = NewType("Currency", str)
Amount = NewType("Amount", Decimal)
T = TypeVar("T")


class Colour(Enum):
    RED = 1


class Word(StrEnum):
    RED = "red"


class Tree(TypedDict):
    name: str
    children: "list[Tree]"


class Bill(TypedDict):
    total: Decimal


class Named(Protocol):
    name: str


def returning(kind: Any) -> Any:
    def function() -> None: ...

    function.__annotations__ = {"return": kind}
    return function


@pytest.mark.parametrize(
    "kind",
    [
        *(None, int, str, float, bool, Any, object, list, dict, T, Currency, Word, Tree, Named, NoReturn, Mapping),
        *(dict[str, int], dict[Currency, list[int]], dict[Literal["a"], int], dict[Any, Any], dict[Word, int]),
        *(Sequence[int], int | None, Literal["a", 1], Awaitable[dict[str, Any]], Annotated[str, "x"], "not_defined"),
    ],
)
def test_what_comes_back_as_it_was(kind: Any) -> None:
    """What JSON can hold is taken, and so is what the annotation does not tell."""
    assert unwritable(returning(kind)) is None


@pytest.mark.parametrize(
    "kind, name",
    [
        *((Decimal, "Decimal"), (Amount, "Decimal"), (list[datetime], "datetime"), (Decimal | None, "Decimal")),
        *((dict[str, Decimal], "Decimal"), (Bill, "Decimal"), (Annotated[Decimal, "x"], "Decimal"), (Colour, "Colour")),
        *((bytes, "bytes"), (set[int], "set[int]"), (Awaitable[Decimal], "Decimal"), (tuple[Decimal, ...], "Decimal")),
    ],
)
def test_what_json_can_not_hold(kind: Any, name: str) -> None:
    """A type that JSON has no form for is found, however deep it stands."""
    assert unwritable(returning(kind)) == name


def test_a_wrapped_function_tells_nothing() -> None:
    """A wrapper may return something else than the annotation that it has taken over says."""

    @wraps(returning(Decimal))
    def written() -> str:
        return "1.10"

    assert unwritable(written) is None


def test_another_annotation_that_is_not_known() -> None:
    """What a parameter's annotation names may be imported for type checkers only: that of the result is read alone."""
    function = returning("Decimal")
    function.__annotations__ = {"order": "not_defined", "return": "Decimal"}
    assert unwritable(function) == "Decimal"


class Unknown(TypedDict):
    price: "NotImported"  # type: ignore[name-defined]  # noqa: F821 - as under TYPE_CHECKING


def test_a_member_that_is_not_known() -> None:
    """Where a member's type can't be looked up, nothing is known of the result before the run."""
    assert unwritable(returning(Unknown)) is None
