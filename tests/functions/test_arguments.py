"""How arguments are written down, to compare a retry with."""

from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntFlag, StrEnum
from itertools import combinations
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from semel.functions.arguments import CantBeWritten, form_of, written


class Colour(Enum):
    RED = 1


class Word(StrEnum):
    RED = "red"


@dataclass
class Order:
    id: int
    lines: list[Any]


@dataclass
class Parcel:
    id: int
    lines: list[Any]


class Other:
    """Another module's, as its names say."""

    Colour = Enum("Colour", ["RED"], module="elsewhere", qualname="Colour")
    Parcel = type("Parcel", (Parcel,), {"__module__": "elsewhere", "__qualname__": "Parcel"})


class Right(IntFlag):
    READ = 1


class Point(NamedTuple):
    x: int
    y: int


class Size(NamedTuple):
    x: int
    y: int


class Money(Decimal):
    """More than its base, which the base's own form does not tell."""

    currency = "EUR"


class Lines(list[Any]):
    """A list with more to it."""


class Words(str):
    """Text with more to it."""

    __slots__ = ("more",)


@dataclass
class Batch(list[Any]):
    id: int


class Express(Order):
    """A dataclass's subclass that is none, with an attribute that is no field."""

    def __init__(self) -> None:
        super().__init__(1, [])
        self.by = "noon"


class Pin(Point):
    """A named tuple with an attribute."""

    def __init__(self, *_: int) -> None:
        self.colour = "red"


DAY = date(2026, 11, 16)
UUID_1 = UUID(int=1)

#: No two of them are one to a function.
DIFFERENT: list[Any] = [
    *(None, True, False, 0, 1, 1.5, "", "1", "red", b"1", b"", [], [1], [[1]], {}, {"1": 1}, {1: 1}, {"a": None}),
    *(Decimal("1.0"), Decimal("1.00"), UUID_1, str(UUID_1), Colour.RED, Word.RED, Path("/a"), "/a", frozenset({1})),
    *(DAY, DAY.isoformat(), datetime(2026, 11, 16, tzinfo=UTC), time(1), timedelta(days=1), timedelta(1, 1)),
    *(Order(1, []), Order(1, [DAY]), Parcel(1, []), {"id": 1, "lines": []}, {"$date": "2026-11-16"}, {"$dict": []}),
    *(Other.Colour.RED, Other.Parcel(1, []), Point(1, 2), Size(1, 2), [1, 2], Right(6), Right(2), Right.READ),
    *(datetime(2026, 10, 25, 2, 30), datetime(2026, 10, 25, 2, 30, fold=1), time(2, 30), time(2, 30, fold=1)),  # noqa: DTZ001 - the hour of no zone
    *(time(2, 30, tzinfo=ZoneInfo(zone)) for zone in ("UTC", "Europe/Berlin", "America/New_York")),
    *(PureWindowsPath("/a"), PureWindowsPath("a")),
    *({(1, 2): 3}, {"$Order": {"id": 1, "lines": []}}),
]


def test_what_differs_is_written_differently() -> None:
    """Two values that a function can tell apart are never written alike."""
    for one, other in combinations(DIFFERENT, 2):
        assert written(form_of(one)) != written(form_of(other)), (one, other)


@pytest.mark.parametrize(
    "one, other",
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        ({1, 2, 3}, frozenset({3, 2, 1})),
        ({1: "a", "b": 2}, {"b": 2, 1: "a"}),
        (Order(1, [DAY]), Order(1, [DAY])),
        ({"a": 1}, MappingProxyType({"a": 1})),
    ],
)
def test_what_is_equal_is_written_alike(one: object, other: object) -> None:
    """The order of members does not count, nor what kind of list it is."""
    assert written(form_of(one)) == written(form_of(other))


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "value",
    [
        *(object(), [object()], {"a": object()}, float("nan"), ENDLESS, Order, len),
        *(Money("10"), Lines(), Words("a"), Batch(1), OrderedDict(a=1), [Words("a")], Express(), Pin(1, 2)),
    ],
)
def test_what_can_not_be_written(value: object) -> None:
    """What has no form of its own is refused, not guessed at: a subclass may hold more than its base."""
    with pytest.raises(CantBeWritten):
        form_of(value)
