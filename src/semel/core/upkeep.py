"""What to do about records that nobody works on: a few small decisions. What is read and written is in ``flows/``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import field
from datetime import timedelta

from semel.core.record import Stuck
from semel.core.value import value
from semel.errors import StoreError, StoreUnavailable

#: Records that one statement of the reaper's touches: few milliseconds of work, and no long transaction.
MAX_BATCH = 1000
#: Most clients come back by themselves within this time, and are the better ones to finish their operation.
FIRST_PAUSE = timedelta(seconds=10)
#: 10 s becomes 640 s and stays there: whatever was in the way, its end is noticed within eleven minutes.
MAX_DOUBLINGS = 6
#: With the pauses above, about twenty minutes of trying; then a person is better than another try.
MAX_ATTEMPTS = 8


_DIED = 'its worker died, and on_crash is "refuse"'


@value
class Free:
    """Let whoever comes next have the key."""


@value
class Hand:
    """Leave it to the completer, which is running and has the request."""


@value
class ParkIt:
    """Stop it, and let an operator say what it did."""

    #: Why, for people who read the audit trail.
    reason: str = field(default="", compare=False)


@value
class Run:
    """Finish it now, without its client."""


def sweeping(stuck: Stuck, *, has_completer: bool) -> Free | Hand | ParkIt:
    """Decide what the sweeper does. *has_completer*: whether somebody finishes operations whose request was kept."""
    if _may_not_run_again(stuck):
        return ParkIt(_DIED)
    return Hand() if has_completer and stuck.has_request else Free()


def finishing(stuck: Stuck, max_attempts: int = MAX_ATTEMPTS) -> Run | ParkIt:
    """Decide what the completer does about an operation whose time has come: after its last try it gives up.

    A client that comes back meanwhile is not kept from finishing its operation by itself, however often it tries.
    """
    if _may_not_run_again(stuck):
        return ParkIt(_DIED)
    return ParkIt(f"not ended in {stuck.tries} tries") if stuck.tries >= max_attempts else Run()


def is_due(stuck: Stuck) -> bool:
    """Whether the time of *stuck* has come."""
    return stuck.silent_for >= pause_of(stuck)


def pause_of(stuck: Stuck) -> timedelta:
    """Return how long nobody may have worked on it before the completer does: twice as long after each try of its own.

    Databases say the same in their own words, in ``find_stuck``.
    """
    if not stuck.is_accepted:
        return pause_after(stuck.tries)
    # Nobody else will do it. It is begun at once, and taken over at once from a worker that died; only one that ended
    # in vain has to wait.
    return pause_after(stuck.tries - 1) if stuck.tries and stuck.is_nobodys else timedelta(0)


def pause_after(tries: int) -> timedelta:
    """Return how long the lease has to be over before the completer, after so many *tries*, makes the next."""
    return FIRST_PAUSE * (1 << min(tries, MAX_DOUBLINGS))


def in_turn(stuck: Iterable[Stuck], limit: int) -> tuple[Stuck, ...]:
    """Return at most *limit* of them: the longest silent of every scope, then the second of every scope, and so on.

    A tenant with a thousand operations must not keep another's one waiting. Databases say the same in ``find_stuck``.
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
    """Return how many records the reaper tries next after a batch of *size*; None is to give up for this time.

    A statement that was cut short may have been too large, and a smaller one will do. Where none could be sent, or the
    store has another objection, a smaller one would fare no better.
    """
    if outcome is None:
        # Slower than it shrank: to learn that a batch is too large takes a whole time-out.
        return min(size + max(size // 4, 1), largest)
    can_shrink = isinstance(outcome, StoreUnavailable) and outcome.was_sent and size > 1
    return size // 2 if can_shrink else None


def _may_not_run_again(stuck: Stuck) -> bool:
    # With steps it is known what was done, whatever the policy says of crashes, and the rest can be done.
    is_known = stuck.is_accepted and (stuck.tries == 0 or stuck.is_nobodys)  # It was not begun, or ended in order.
    return stuck.on_crash == "refuse" and not stuck.steps and not is_known
