"""How requests have ended in the last hour, by minute, as series for small charts. It reads nothing.

A minute in which no process has added to the counts is missing, and not zero.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from semel.console.charts import Series
from semel.core.commands import Minutes
from semel.core.commands.counts import ADDED, COMPLETED
from semel.core.outcome import ENDED
from semel.core.value import value

MINUTES = 60
_MINUTE = timedelta(minutes=1)

#: What is drawn together: a name, what it means, and the outcomes in it. The rest is refused.
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Ran", "the handler ran", ("ran", "freed", "not_kept")),
    ("Replayed", "got the first answer again", ("replayed", "waited")),
    ("Conflict", "409: the first still runs", ("conflict",)),
    ("Accepted", "202: a worker runs it", ("accepted",)),
    ("Completed", "run by a worker: no request", (COMPLETED,)),
    ("Mismatch", "422: the key of another request", ("mismatch",)),
    ("Unknown", "409: the outcome is unknown", ("unknown",)),
    (
        "Failed",
        "the store, the lease or the server failed",
        ("store_failed", "not_stored", "fenced", "lease_lost", "error"),
    ),
    ("Not guarded", "no key, or report mode", ("passed_on", "reported")),
)
#: So many groups are shown even if nothing has ended so.
_ALWAYS = 3
_REST = ("Refused", "no key, a bad one, or for other reasons")


@value
class Rates:
    """What the overview shows of the last hour."""

    series: tuple[Series, ...]
    #: How many requests have ended how in that hour: the outcome, what it means, and the number; the most first.
    totals: tuple[tuple[str, str, int], ...]
    #: Since when there are counts. None: there are none.
    since: datetime | None
    #: How many minutes after that have none.
    missing: int

    @property
    def shown(self) -> list[Series]:
        """The first ones, and those that have any."""
        return [each for number, each in enumerate(self.series) if number < _ALWAYS or each.highest]

    @property
    def has_gap_before(self) -> bool:
        """Whether the hour began before there were counts."""
        return bool(self.series) and self.series[0].values[0] is None


def rates(read: Minutes) -> Rates:
    """Sort what was read into an hour."""
    newest = read.now.replace(second=0, microsecond=0)
    hour = [newest - ago * _MINUTE for ago in reversed(range(MINUTES))]
    groups: dict[str, str] = {outcome: name for name, _, outcomes in GROUPS for outcome in outcomes}
    counted: Counter[tuple[datetime, str]] = Counter()
    totals: Counter[str] = Counter()
    seen = set()
    for minute, outcome, number in read.counts:
        seen.add(minute)
        if outcome != ADDED and minute >= hour[0]:
            counted[minute, groups.get(outcome, _REST[0])] += number
            totals[outcome] += number
    known = [each for each in hour if each in seen]
    names = [(name, means) for name, means, _ in GROUPS]
    series = tuple(
        Series(name, tuple(counted[each, name] if each in seen else None for each in hour), means)
        for name, means in (*names[:-1], _REST, names[-1])
    )
    since = known[0] if known else None
    # The minute under way may be added to yet.
    missing = 0 if since is None else sum(each not in seen for each in hour[:-1] if each > since)
    means: dict[str, str] = {str(outcome): said for outcome, said in ENDED.items()}
    means[COMPLETED] = "a worker ran it to its end, without its client: no request"
    return Rates(
        series,
        tuple((outcome, means.get(outcome, ""), number) for outcome, number in totals.most_common()),
        since,
        missing,
    )
