"""Runs the experiments one after the other, and makes a report. What each sends and judges is in ``checks``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from semel.errors import ConfigurationError
from semel.verify.checks import EXPERIMENTS
from semel.verify.checks.base import DRAFT, Experiment
from semel.verify.counting import Counter, CountFailed
from semel.verify.lab import DETERMINISTIC, Lab
from semel.verify.message import Answer
from semel.verify.model import Check, Report, Undecided

TWO = 2

WORKS = Check(
    "request-works",
    "The request succeeds with a new key",
    "A request that is refused shows nothing about retries.",
)
NEW_KEY = Check(
    "new-key-runs",
    f"The same body with another key is another operation ({DRAFT}, 2.2)",
    "Two equal orders are two orders. A body is not a key.",
)
LATE = Check(
    "no-late-effects",
    "Every effect is counted by the check that has sent for it, and none comes when nothing is sent",
    "An effect that comes late may be a second one, which no check has seen, or another check was blamed for.",
)
CHECKS = (WORKS, NEW_KEY, *(check for each in EXPERIMENTS for check in each.checks), LATE)

#: Called with the number of experiments done, of how many, and the name of the next check.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be run, and what it may create."""

    experiments: tuple[Experiment, ...]
    creates: int
    sends: int


def chosen(only: Iterable[str], skip: Iterable[str]) -> frozenset[Check]:
    """Return the checks by their names, which may be patterns such as ``replay-*``."""
    wanted, unwanted = list(only) or ["*"], list(skip)
    for pattern in (*wanted, *unwanted):
        if not any(fnmatchcase(each.name, pattern) for each in CHECKS):
            raise ConfigurationError(f"There is no check {pattern!r}. semel verify --list names them all.")
    return frozenset(
        each
        for each in CHECKS
        if any(fnmatchcase(each.name, pattern) for pattern in wanted)
        and not any(fnmatchcase(each.name, pattern) for pattern in unwanted)
    )


def plan(lab: Lab, checks: frozenset[Check]) -> Plan:
    """Say what is to be run for *checks*."""
    wanted = tuple(each for each in EXPERIMENTS if checks.intersection(each.checks))
    for each in wanted:
        if reason := each.reason_against(lab):
            for check in each.checks:
                lab.skipped(check, reason)
    run = tuple(each for each in wanted if each.reason_against(lab) is None)
    # Two to learn what the API does, and one for another body; and a retry of the second.
    return Plan(run, TWO + 1 + sum(each.creates for each in run), TWO + TWO + sum(each.sends for each in run))


async def verify(
    lab: Lab, plan: Plan, checks: frozenset[Check], counter: Counter | None, progress: Progress = lambda *_: None
) -> Report:
    """Carry out the *plan*, and report on *checks*."""
    if counter is not None:
        try:
            await counter.read()
        except CountFailed as failed:
            raise ConfigurationError(f"--count {counter.name} can't be read: {failed}.") from None
    progress(0, len(plan.experiments), WORKS.name)
    reason = await _learn(lab)
    for number, experiment in enumerate(plan.experiments):
        progress(number, len(plan.experiments), experiment.checks[0].name)
        lab.begin()
        try:
            if reason is not None:
                raise Undecided(reason)  # noqa: TRY301 - the same ending as that of any experiment
            await experiment.run(lab)
        except Undecided as undecided:
            for check in experiment.checks:
                if not lab.has(check):
                    lab.undecided(check, str(undecided))
    progress(len(plan.experiments), len(plan.experiments), LATE.name)
    await _reconcile(lab, reason)
    progress(len(plan.experiments), len(plan.experiments), "")
    # An effect that belongs to no check is told in any case.
    checks = checks | {LATE} if lab.strays else checks
    order = {check: number for number, check in enumerate(CHECKS)}
    return Report(
        url=lab.url,
        profile=lab.profile.name,
        evidence=lab.evidence,
        findings=tuple(
            sorted((each for each in lab.findings if each.check in checks), key=lambda each: order[each.check])
        ),
        not_run=tuple(
            sorted((each for each in lab.not_run if each.check in checks), key=lambda each: order[each.check])
        ),
    )


async def _reconcile(lab: Lab, reason: str | None) -> None:
    lab.begin()
    try:
        if not lab.has_counter:
            lab.skipped(LATE, "There is no counter. Give --count.")
            return
        if reason is not None:
            raise Undecided(reason)  # noqa: TRY301 - the same ending as that of an experiment
        await lab.reconcile()
    except Undecided as undecided:
        lab.undecided(LATE, str(undecided))
        return
    if lab.strays:
        changes = ", ".join(f"{each:+}" for each in lab.strays)
        lab.undecided(
            LATE,
            f"The counter changed while nothing was sent: {changes}. There is other traffic, or effects come late, and "
            "then they may have been missed, or counted to another check. Give a longer --settle, such as 2s.",
        )
    else:
        lab.passed(LATE, "The counter stayed as it was whenever nothing was sent.")


async def _learn(lab: Lab) -> str | None:
    """Find out what a success looks like, and what tells two operations apart. Return why nothing can be decided."""
    lab.begin()
    try:
        await lab.must_be_still()
        before = await lab.watch()
        first = _succeeded(lab, await lab.answered(lab.keyed(lab.new_key())))
        lab.latency = first.seconds
        rise = await lab.learn_rise(before)
        between = await lab.watch()
        again = lab.keyed(lab.new_key())
        second = await lab.answered(again)
        if not second.is_success:
            lab.passed(WORKS, f"It is answered with {first.status}.")
            lab.failed(NEW_KEY, f"The same body with another key is answered with {second.status}.")
            return f"The same body with another key is answered with {second.status}."
        lab.latency = min(first.seconds, second.seconds)
        lab.compare(first, second)
        if lab.has_counter:
            _look_at_rise(lab, rise, await lab.learn_rise(between))
            since = lab.heard_at
            await lab.send(again)
            await lab.learn_lag(since)
        elif lab.is_same(first, second) is None:
            lab.undecided(NEW_KEY, DETERMINISTIC)
        else:
            lab.passed(NEW_KEY, f"Two operations: {lab.evidence}.")
    except Undecided as undecided:
        lab.undecided(WORKS, str(undecided))
        if not lab.has(NEW_KEY):
            lab.undecided(NEW_KEY, str(undecided))
        return str(undecided)
    lab.passed(WORKS, f"It is answered with {first.status}, after {lab.latency * 1000:.0f} ms.")
    return None


def _look_at_rise(lab: Lab, rise: int, second: int) -> None:
    if rise <= 0:
        raise Undecided(f"The request succeeded, and the counter changed by {rise}: it does not count these effects.")
    lab.rise = rise
    if second == 0:
        lab.failed(NEW_KEY, "The same body with another key is answered, and the counter did not rise.")
    elif second != rise:
        raise Undecided(f"One request changed the counter by {rise}, the next by {second}: there is other traffic.")
    else:
        lab.passed(NEW_KEY, f"Two operations: the counter rose by {rise} each time.")


def _succeeded(lab: Lab, answer: Answer) -> Answer:
    if answer.is_success:
        return answer
    raise Undecided(_refusal(answer.status, answer.header("location"), lab.quoted(answer)))


def _refusal(status: int, location: str | None, words: str) -> str:
    hint = {
        401: "Give credentials with --header.",
        403: "Give credentials that may do this with --header.",
        404: "Is the path right?",
        405: "Is the method right?",
        415: "Is the Content-Type right?",
        422: "Is the body valid?",
        400: "Is the body valid, and is the key's header the right one (--key-header)?",
    }.get(status, "")
    if location and status in range(300, 400):
        hint = f"It redirects to {location}: give that URL."
    if words:
        # What it says itself is better than a guess.
        hint = f'It says: "{words}". {"" if hint.startswith("Is ") else hint}'
    return f"The request with a new key is answered with {status}, so retries of it show nothing. {hint}".strip()
