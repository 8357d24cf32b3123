"""Values: compared by what they hold, and never changed."""

from dataclasses import replace

import pytest

from semel.core.value import value


@value
class Point:
    x: int
    y: int = 0


def _set_again(point: Point) -> None:
    point.x = 2  # type: ignore[misc]  # The type checker refuses it: else it would call this remark unused.


def test_values_are_what_they_hold() -> None:
    """Two values that hold the same are one key of a dictionary; another value is another."""
    assert {Point(1): "here"}[Point(1, 0)] == "here"
    assert Point(1) != Point(2)
    assert repr(Point(1)) == "Point(x=1, y=0)"


def test_a_changed_value_is_another() -> None:
    """What differs in one field is made anew; the old one stays as it was."""
    old = Point(1, 2)
    assert replace(old, y=3) == Point(1, 3)
    assert old == Point(1, 2)


def test_nothing_else_fits_in() -> None:
    """A value has its fields, and room for nothing more."""
    with pytest.raises(AttributeError):
        Point(1).z = 3  # type: ignore[attr-defined]
