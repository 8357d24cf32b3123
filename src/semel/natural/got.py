"""The result: a row, new or stored. Nothing here reads or writes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Got(Generic[R]):
    """The row under a key, as the database has it."""

    row: R
    is_new: bool
    #: The given columns in which a stored row differs, in the order in which they were given.
    differs: tuple[str, ...] = ()
