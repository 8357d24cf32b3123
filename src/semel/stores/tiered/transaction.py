"""Transactions of the durable store's, with an eye on the answers that are begun and finished in them. A key whose
answer is kept is found without any transaction being opened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from semel.core.commands import Begin, Claim, Command, Commit, Finish, Undo
from semel.core.record import Found
from semel.errors import NoConnection
from semel.stores.tiered.answers import Answers
from semel.stores.tiered.entry import Entry
from semel.stores.tiered.expiry import now
from semel.stores.transaction import AsyncTransaction, Transaction

T = TypeVar("T")

Share = Callable[[Entry | None], None]


class TieredTransaction(Transaction):
    """One transaction, from ``Begin`` or ``Open`` to its end."""

    def __init__(
        self,
        lend: Callable[[], Transaction],
        look_up: Callable[[Claim], Found | None],
        answers: Answers,
        share: Share,
    ) -> None:
        """Nothing is begun yet. *lend* gives a transaction, *look_up* what is kept; *share* lets others have it."""
        self._lend = lend
        self._look_up = look_up
        self._answers = answers
        self._share = share
        self._lent: Transaction | None = None
        self._begun_at = 0.0

    @property
    def connection(self) -> Any:
        """The open connection."""
        if self._lent is None:
            raise NoConnection
        return self._lent.connection

    def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        if isinstance(command, Begin):
            kept: Any = self._look_up(command.claim)
            if kept is not None:
                return kept  # type: ignore[no-any-return]  # by the command's own type
        if self._lent is None:
            if isinstance(command, Undo):
                return None  # type: ignore[return-value]  # as above
            self._lent = self._lend()
        asked_at = now()
        try:
            got = self._lent.perform(command)
        except BaseException:
            _note_lost(command, self._answers)
            raise
        self._begun_at = _begun_at(command, self._begun_at, asked_at)
        self._share(_noted(command, got, self._answers, self._begun_at))
        return got


class AsyncTieredTransaction(AsyncTransaction):
    """The same, for an event loop."""

    def __init__(
        self,
        lend: Callable[[], AsyncTransaction],
        look_up: Callable[[Claim], Awaitable[Found | None]],
        answers: Answers,
        share: Share,
    ) -> None:
        """Nothing is begun yet."""
        self._lend = lend
        self._look_up = look_up
        self._answers = answers
        self._share = share
        self._lent: AsyncTransaction | None = None
        self._begun_at = 0.0

    @property
    def connection(self) -> Any:
        """The open connection."""
        if self._lent is None:
            raise NoConnection
        return self._lent.connection

    async def perform(self, command: Command[T]) -> T:
        """Carry out one command."""
        if isinstance(command, Begin):
            kept: Any = await self._look_up(command.claim)
            if kept is not None:
                return kept  # type: ignore[no-any-return]  # by the command's own type
        if self._lent is None:
            if isinstance(command, Undo):
                return None  # type: ignore[return-value]  # as above
            self._lent = self._lend()
        asked_at = now()
        try:
            got = await self._lent.perform(command)
        except BaseException:
            _note_lost(command, self._answers)
            raise
        self._begun_at = _begun_at(command, self._begun_at, asked_at)
        self._share(_noted(command, got, self._answers, self._begun_at))
        return got


def _begun_at(command: Command[Any], before: float, asked_at: float) -> float:
    """Return when the transaction was asked for: *before* this command, if it is one that goes on in it."""
    return before if isinstance(command, Finish | Commit | Undo) else asked_at


def _noted(command: Command[Any], got: Any, answers: Answers, begun_at: float) -> Entry | None:
    """Note what came of *command*; return the answer where there is one."""
    if isinstance(command, Begin) and isinstance(got, Found):
        return answers.found(command.claim, got, begun_at)
    if isinstance(command, Finish):
        return answers.finished(command, got, begun_at)
    if isinstance(command, Commit):
        answers.saved(command, got)
    return None


def _note_lost(command: Command[Any], answers: Answers) -> None:
    if isinstance(command, Commit):
        answers.saved(command, None)
