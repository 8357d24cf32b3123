"""Erasing one owner's data: the walks along its records and its lines of the audit trail. What the store deletes of
each, and what it keeps, is in ``core/commands/erasing.py``.

Any number of processes may do this at once, beside requests. What was erased is erased: a run that ended early is
repeated from its beginning.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from semel.core.commands import Erase, EraseTrail, Left
from semel.core.key import digest_of
from semel.core.scope import reported
from semel.core.upkeep import MAX_BATCH, next_batch
from semel.core.value import value
from semel.errors import StoreError
from semel.flows.ports import Ports

#: How often all records are walked past: until there is nothing left to erase, but not for ever where operations end as
#: fast as they are erased.
MAX_WALKS = 10


@value
class EraseReport:
    """What came of one erasure, or would come of it."""

    #: Records that have ended: tombstones now.
    erased: int = 0
    audit_lines: int = 0
    #: Records that are as they were.
    left: tuple[Left, ...] = ()
    #: Why the run ended early, if it did.
    error: StoreError | None = None
    #: Answers that a cache in front of the store had; None: there is no such cache.
    copies: int | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        counts = f"{self.erased} operations, {self.audit_lines} audit lines deleted, {len(self.left)} left"
        counts += f", {self.copies} copies in the cache deleted" if self.copies is not None else ""
        return f"erased: {counts}" + (f"; then it ended: {self.error}" if self.error else "")

    @property
    def facts(self) -> dict[str, Any]:
        """The same for programs. Operations that are left are named by the digests of their keys."""
        return {
            "erased": self.erased,
            "audit_lines": self.audit_lines,
            "left": [{"digest": digest_of(each.key), "state": str(each.state)} for each in self.left],
            "error": str(self.error) if self.error else None,
            "copies": self.copies,
        }

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to erase."""
        return not (self.erased or self.audit_lines or self.left or self.error)


async def erase(ports: Ports, scope: str, *, is_preview: bool = False, reason: str | None = None) -> EraseReport:
    """Erase what the store has of *scope*, and of report mode's own scope for it; or only count it."""
    report = EraseReport()
    for owner in (scope, reported(scope)):
        more = await _erase_owner(ports, owner, is_preview=is_preview, reason=reason)
        report = EraseReport(
            report.erased + more.erased,
            report.audit_lines + more.audit_lines,
            report.left + more.left,
            more.error,
            _sum(report.copies, more.copies),
        )
        if more.error is not None:
            break
    return report


async def _erase_owner(ports: Ports, owner: str, *, is_preview: bool, reason: str | None) -> EraseReport:
    erased = 0
    copies: int | None = None
    left: tuple[Left, ...] = ()
    for _ in range(1 if is_preview else MAX_WALKS):
        # What the last walk has left is what is left.
        count, left, error, more = await _walk(ports, partial(Erase, owner, is_preview=is_preview, reason=reason))
        erased, copies = erased + count, _sum(copies, more)
        if error is not None:
            return EraseReport(erased, 0, left, error, copies)
        if not count:
            break
    part_of_trail = partial(EraseTrail, owner, is_preview=is_preview, reason=reason)
    lines, _, error, _ = await _walk(ports, part_of_trail)
    return EraseReport(erased, lines, left, error, copies)


def _sum(one: int | None, more: int | None) -> int | None:
    return one if more is None else (one or 0) + more


async def _walk(
    ports: Ports, part: partial[Erase] | partial[EraseTrail]
) -> tuple[int, tuple[Left, ...], StoreError | None, int | None]:
    """Ask for one part after the other. One that is too much for the store is made smaller."""
    count, size = 0, MAX_BATCH
    after: str | None = None
    left: dict[tuple[str, str], Left] = {}
    while True:
        try:
            done = await ports.ask(part(limit=size, after=after))
        except StoreError as error:
            smaller = next_batch(size, error)
            if smaller is None:
                return count, tuple(left.values()), error, None
            size = smaller
            continue
        count += done.count
        left |= {(each.scope, each.key): each for each in done.left}
        after = done.further
        if after is None:
            return count, tuple(left.values()), None, done.copies
