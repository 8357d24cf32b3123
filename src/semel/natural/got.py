"""What comes of it: a row, new or stored; or one of two refusals. Nothing here reads or writes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from semel.errors import RequestRefused, SemelError

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Got(Generic[R]):
    """The row under a key, as the database has it."""

    row: R
    is_new: bool
    #: The given columns in which a stored row says something else, in the order in which they were given.
    differs: tuple[str, ...] = ()


class RowDiffers(RequestRefused):
    """A row is stored under this key, and it is not the one that was given now. Nothing was written."""

    slug: ClassVar[str] = "natural-key-reused"
    title: ClassVar[str] = "Natural key reused"
    status: ClassVar[int] = 422
    stripe_type: ClassVar[str] = "idempotency_error"
    stripe_status: ClassVar[int | None] = 400

    def __init__(self, message: str | None = None, *, got: Got[Any] | None = None) -> None:
        """Bring the stored row along: *got* has it, and where it differs."""
        super().__init__(message)
        self.got = got

    @property
    def detail(self) -> str:
        """What the client is told: nothing of tables and columns, which are for the log."""
        return "This was sent before with other content, and that is what is stored. Nothing was changed."


class RowNotSeen(SemelError):
    """The database neither inserts this row nor shows the one that is in its way."""
