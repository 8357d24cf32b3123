"""What to do about records that no worker works on: a few pure decisions. Reading and writing is in ``flows/``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import field
from datetime import timedelta

from semel.core.record import Stuck
from semel.core.value import value
from semel.errors import StoreError, StoreUnavailable

#: Records per statement of the reaper: a few milliseconds of work, and no long transaction.
MAX_BATCH = 1000
#: Most clients retry within this time, and it is better if they finish their operation themselves.
FIRST_PAUSE = timedelta(seconds=10)
#: 10 s becomes 640 s and stays there: when the obstacle is gone, the next try comes within eleven minutes.
MAX_DOUBLINGS = 6
#: With the pauses above, about twenty minutes of tries; after that an operator has to look.
MAX_ATTEMPTS = 8


_DIED = 'its worker died, and on_crash is "refuse"'


@value
class Free:
    """Free the key for the next request or worker."""


@value
class Hand:
    """Leave it to the completer, which is running and has the stored request."""


@value
class ParkIt:
    """Park it for an operator to resolve."""

    #: Why, for the audit trail.
    reason: str = field(default="", compare=False)


@value
class Run:
    """Finish it now, without its client."""


def sweeping(stuck: Stuck, *, has_completer: bool) -> Free | Hand | ParkIt:
    """Decide what the sweeper does. *has_completer*: whether a completer finishes operations with a stored request."""
    if _may_not_run_again(stuck):
        return ParkIt(_DIED)
    return Hand() if has_completer and stuck.has_request else Free()


def finishing(stuck: Stuck, max_attempts: int = MAX_ATTEMPTS) -> Run | ParkIt:
    """Decide what the completer does about an operation that is due: after its last try it gives up.

    A client that retries meanwhile may still finish its operation itself, however often it tries.
    """
    if _may_not_run_again(stuck):
        return ParkIt(_DIED)
    return ParkIt(f"not ended in {stuck.tries} tries") if stuck.tries >= max_attempts else Run()


def is_due(stuck: Stuck) -> bool:
    """Whether *stuck* is due: its pause is over."""
    return stuck.silent_for >= pause_of(stuck)


def pause_of(stuck: Stuck) -> timedelta:
    """Return how long it must have been idle before the completer runs it: twice as long after each of its tries.

    Databases have the same rule, in ``find_stuck``.
    """
    if not stuck.is_accepted:
        return pause_after(stuck.tries)
    # Only the completer runs it, so it is begun at once, and taken over at once from a worker that died. Only after a
    # try that ended without success there is a pause.
    return pause_after(stuck.tries - 1) if stuck.tries and stuck.is_unheld else timedelta(0)


def pause_after(tries: int) -> timedelta:
    """Return how long the lease has to be over before the completer's next try, after so many *tries*."""
    return FIRST_PAUSE * (1 << min(tries, MAX_DOUBLINGS))


def in_turn(stuck: Iterable[Stuck], limit: int) -> tuple[Stuck, ...]:
    """Return at most *limit* of them: the longest silent of every scope, then the second of every scope, and so on.

    A tenant with a thousand operations must not delay another tenant's one. In SQL: ``find_stuck``.
    """
    by_silence = sorted(stuck, key=lambda each: each.silent_for, reverse=True)
    turns: Counter[str] = Counter()
    placed = []
    for each in by_silence:
        turns[each.hold.scope] += 1
        placed.append((turns[each.hold.scope], each))
    placed.sort(key=lambda place: place[0])
    return tuple(each for _, each in placed[:limit])


def next_batch(size: int, outcome: StoreError | None, largest: int = MAX_BATCH) -> int | None:
    """Return the next batch size of the reaper after a batch of *size*; None means to stop this round.

    A statement that hit a time-out may have been too large, so a smaller one is tried. If the store can't be reached,
    or refused it for another reason, a smaller one would fail, too.
    """
    if outcome is None:
        # It grows more slowly than it shrinks: finding out that a batch is too large takes a whole time-out.
        return min(size + max(size // 4, 1), largest)
    can_shrink = isinstance(outcome, StoreUnavailable) and outcome.was_sent and size > 1
    return size // 2 if can_shrink else None


def _may_not_run_again(stuck: Stuck) -> bool:
    # With steps it is known what was done, so the rest can be run, whatever the policy says about crashes.
    is_known = stuck.is_accepted and (stuck.tries == 0 or stuck.is_unheld)  # It was not begun, or ended cleanly.
    return stuck.on_crash == "refuse" and not stuck.steps and not is_known
