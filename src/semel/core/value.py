"""Values: made for every request, compared by their fields, never changed. Settings are not among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

C = TypeVar("C")


@dataclass_transform(frozen_default=True)
def value(kind: type[C]) -> type[C]:
    """Make a dataclass of *kind* with fields that are set once, and which can be a dict's key.

    The type checker makes sure that they are not set again. A frozen dataclass would check that itself, but takes up to
    six times as long to make; a request makes twenty. What an application makes and keeps, like a policy, is frozen.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
