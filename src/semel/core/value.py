"""Values: what is made anew for every request, is compared by what it holds, and never changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

C = TypeVar("C")


@dataclass_transform(frozen_default=True)
def value(kind: type[C]) -> type[C]:
    """Make a dataclass of *kind* whose fields are set once, and which can be a key.

    The type checker sees to it that nobody sets them again. A frozen dataclass would see to it by itself, and takes up
    to six times as long to make; a request makes twenty. What an application makes and keeps, like a policy, is frozen.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
