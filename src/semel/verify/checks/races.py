"""Checks of requests with one key at the same moment: each has a connection of its own, with the last byte held back.
Retries that come later are not here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from semel.verify.checks.base import DRAFT, Experiment, is_refusal, is_replay_of, is_server_error, said
from semel.verify.checks.refusals import fault_of
from semel.verify.lab import BUSY, TOO_MANY, Lab
from semel.verify.message import Answer, NoAnswer, Outcome, Request
from semel.verify.model import Check, Undecided

RACERS = (2, 8, 32)
#: How often a duplicate is sent until one meets the first while it runs.
ROUNDS = 3
DUPLICATES = 3
#: The same for another body, with pairs of the two: each time sooner after the first.
TRIES = 6
PAIRS = 4
UNAVAILABLE = 503
TWO = 2
#: Two answers that are read one after the other are no further apart than this, on a busy machine.
MARGIN_SECONDS = 0.02

_TOO_FEW = "The server does not take that many requests at once"

RACES = tuple(
    Check(
        f"race-{racers}",
        f"Of {racers} equal requests at the same moment, exactly one takes effect ({DRAFT}, 2.6)",
        "A double click, or a proxy that retries too early, sends two at once. Looking first and claiming later lets "
        "both run.",
    )
    for racers in RACERS
)
NO_ERROR = Check(
    "race-no-server-error",
    f"The losers of a race get 409 or the winner's answer, never a server error ({DRAFT}, 2.7)",
    "A unique constraint that answers 500 tells the client that its payment failed, when it has not.",
)
WINNER = Check(
    "race-one-answer",
    f"After a race, a retry gets the answer of the one that ran ({DRAFT}, 2.6)",
    "If the loser's answer is stored over the winner's, the client is told of an operation that never was.",
)
STATUS = Check(
    "busy-status",
    f"A duplicate of a request that still runs gets 409, or waits for the answer ({DRAFT}, 2.7)",
    "Any other answer makes the client give up, or start a second operation.",
)
RETRY_AFTER = Check(
    "busy-retry-after",
    "A 409 for a request in progress says when to come back: Retry-After (RFC 9110, 10.2.3; strict only)",
    "Without it every client guesses, and many guess: at once.",
)
EXPLAINED = Check(
    "busy-explained",
    f"The 409 can be told from a conflict of the business by its body ({DRAFT}, 2.7; RFC 9457)",
    "A client must know whether to send the same request again, or never.",
)
NOT_KEPT = Check(
    "busy-not-kept",
    f"The 409 is not stored: later the same request gets the first answer ({DRAFT}, 2.6)",
    "A stored 409 hides the result of an operation that has taken place.",
)
IN_FLIGHT = Check(
    "other-body-in-flight",
    f"A key that is in use by another request is refused as such while that one runs, before 409 ({DRAFT}, 2.7)",
    "409 says: wait, and send it again. This request can never succeed, however long the client waits.",
)


async def _race(check: Check, racers: int, lab: Lab) -> None:
    request, watch = lab.keyed(lab.new_key()), await lab.watch()
    outcomes = await lab.race([request] * racers)
    successes = [each for each in outcomes if isinstance(each, Answer) and each.is_success]
    silent = [each for each in outcomes if isinstance(each, NoAnswer)]
    runs = await lab.runs(watch, outcomes, 1)
    lost = f" {len(silent)} got no answer ({silent[0].reason})." if silent else ""
    if runs.count > 1:
        lab.failed(check, f"{racers} at once took effect {runs.count} times: {runs.how}.{lost}")
    elif silent:
        lab.undecided(check, f"{len(silent)} of {racers} got no answer: {silent[0].reason}.")
    elif runs.count == 0 and not successes:
        lab.undecided(check, f"None of {racers} ran: {_statuses(outcomes)}.")
    elif not successes:
        lab.failed(check, f"It took effect, and none of {racers} was told so: {_statuses(outcomes)}.")
    elif runs.count == 0:
        lab.failed(check, f"{len(successes)} of {racers} were told of a success, and there is no effect: {runs.how}.")
    elif sum(not _is_limited(each) for each in outcomes) < TWO:
        lab.undecided(check, f"{_TOO_FEW}: {_statuses(outcomes)}.")  # One that ran alone was in no race.
    else:
        lab.passed(check, f"{racers} at once: {_statuses(outcomes)}; {runs.how}.")
    if racers == RACERS[-1]:
        await _judge_losers(lab, request, outcomes)


async def _judge_losers(lab: Lab, request: Request, outcomes: Sequence[Outcome]) -> None:
    errors = [each for each in outcomes if is_server_error(each)]
    if sum(not _is_limited(each) for each in outcomes) < TWO:
        lab.undecided(NO_ERROR, f"{_TOO_FEW}: {_statuses(outcomes)}.")
    elif not errors:
        lab.passed(NO_ERROR, f"No server error among {_statuses(outcomes)}.")
    elif all(map(_is_limited, errors)):
        lab.undecided(NO_ERROR, "The server says that it is overloaded (503 with Retry-After).")
    else:
        lab.failed(NO_ERROR, f"Server errors among {_statuses(outcomes)}.")
    winners = [each for each in outcomes if isinstance(each, Answer) and each.is_success]
    if not winners:
        lab.undecided(WINNER, "No request of the race succeeded.")
        return
    again = await lab.finished(request, lab.settings.patience)
    strays = [each for each in winners if not is_replay_of(each, again)]
    lab.judge(
        WINNER,
        ok=not strays,
        good=f"The retry gets {said(again)}, as the winner did.",
        bad=f"The retry gets {said(again)}, and {len(strays)} of {len(winners)} successes were another answer.",
    )


async def _busy(lab: Lab) -> None:
    for _ in range(ROUNDS):
        request = lab.keyed(lab.new_key())
        outcomes = await lab.race([request] * (1 + DUPLICATES), _delays(lab))
        _must_not_be_limited(outcomes)
        refusals = [each for each in outcomes if isinstance(each, Answer) and not each.is_success]
        if refusals:
            break
    else:
        _judge_waiting(lab, outcomes)
        return
    busy = [each for each in refusals if each.status == BUSY]
    lab.judge(
        STATUS,
        ok=len(busy) == len(refusals),
        good="A duplicate gets 409 while the first runs.",
        bad=f"A duplicate of a running request gets {_statuses(refusals)}, not 409.",
    )
    if not busy:
        raise Undecided(f"No duplicate got 409: {_statuses(refusals)}.")
    hints = [each.header("retry-after") for each in busy]
    if all(hints):
        lab.passed(RETRY_AFTER, f"The 409 says Retry-After: {hints[0]}.")
    elif lab.settings.is_strict:
        lab.failed(RETRY_AFTER, "The 409 has no Retry-After.")
    else:
        lab.passed(RETRY_AFTER, "The 409 has no Retry-After; the draft asks for none. With --strict that fails.")
    fault = fault_of(lab.profile, busy[0], is_strict=lab.settings.is_strict)
    lab.judge(EXPLAINED, ok=fault is None, good="The 409 has a body that says what it is.", bad=fault or "")
    again = await lab.finished(request, lab.settings.patience)
    done = isinstance(again, Answer) and again.is_success
    lab.judge(NOT_KEPT, ok=done, good=f"The retry gets {said(again)}.", bad=f"The retry still gets {said(again)}.")


def _judge_waiting(lab: Lab, outcomes: Sequence[Outcome]) -> None:
    """All duplicates succeeded: they waited, or came too late, or all ran. Only the last is wrong."""
    if any(isinstance(each, NoAnswer) for each in outcomes):
        raise Undecided(f"A duplicate got no answer: {_statuses(outcomes)}.")
    answers = [each for each in outcomes if isinstance(each, Answer)]
    if all(is_replay_of(answers[0], each) for each in answers):
        lab.passed(STATUS, "Every duplicate gets the first answer, at once or after a wait.")
    else:
        lab.failed(STATUS, "Duplicates of a running request are told of different successes.")
    for check in (RETRY_AFTER, EXPLAINED, NOT_KEPT):
        lab.skipped(check, "No duplicate was told 409.")


async def _in_flight(lab: Lab) -> None:
    other = await lab.other()
    for number in range(TRIES):
        key = lab.new_key()
        # By turns: a request that is refused as busy shows that the first still ran when those before it came.
        requests = [lab.keyed(key), lab.keyed(key, other)] * PAIRS
        delays = _delays(lab, len(requests) - 1, 0.5**number)
        outcomes = await lab.race(requests, delays)
        _must_not_be_limited(outcomes)
        winners = {each.body for each, got in zip(requests, outcomes, strict=True) if _has_won(got)}
        if not winners:
            continue
        same = [got for each, got in zip(requests, outcomes, strict=True) if each.body in winners]
        strangers = [got for each, got in zip(requests, outcomes, strict=True) if each.body not in winners]
        if len(winners) > 1:
            lab.failed(IN_FLIGHT, "Two different requests under one key were both answered with a success.")
            return
        if any(_is(each, BUSY) for each in strangers):
            bad = f"Another body under a key in use gets 409 (wait), not {lab.profile.mismatch} (never)."
            lab.failed(IN_FLIGHT, bad)
            return
        ends = [delay + got.seconds for delay, got in zip(delays, outcomes, strict=True) if isinstance(got, Answer)]
        # Where duplicates wait, none is refused as busy; then a refusal that came before the first answer shows it.
        is_early = len(ends) == len(outcomes) and min(ends) + MARGIN_SECONDS < _end_of_first_success(outcomes, ends)
        if (any(_is(each, BUSY) for each in same) or is_early) and all(map(is_refusal, strangers)):
            lab.passed(IN_FLIGHT, f"While the first runs, another body gets {_statuses(strangers)}.")
            return
    raise Undecided("No request met another one that still ran. A slower request would show it.")


def _end_of_first_success(outcomes: Sequence[Outcome], ends: Sequence[float]) -> float:
    return min(end for got, end in zip(outcomes, ends, strict=True) if _has_won(got))


def _must_not_be_limited(outcomes: Sequence[Outcome]) -> None:
    if any(map(_is_limited, outcomes)):
        raise Undecided(f"{_TOO_FEW}: {_statuses(outcomes)}.")


def _is_limited(outcome: Outcome) -> bool:
    """Whether it was turned away because there were too many."""
    return isinstance(outcome, Answer) and (
        outcome.status == TOO_MANY or (outcome.status == UNAVAILABLE and outcome.header("retry-after") is not None)
    )


def _has_won(outcome: Outcome) -> bool:
    return isinstance(outcome, Answer) and outcome.is_success


def _is(outcome: Outcome, status: int) -> bool:
    return isinstance(outcome, Answer) and outcome.status == status


def _delays(lab: Lab, duplicates: int = DUPLICATES, part: float = 1.0) -> list[float]:
    """Let the first begin, and send the others while it runs: all of them in the first half of the time it takes."""
    start = part * min(lab.latency / 4, 1.0)
    return [0.0, *(start + start * number / duplicates for number in range(duplicates))]


def _statuses(outcomes: Sequence[Outcome]) -> str:
    told = [said(each) for each in outcomes]
    return ", ".join(f"{told.count(each)} × {each}" for each in dict.fromkeys(told))


def _runner(check: Check, racers: int) -> Callable[[Lab], Awaitable[None]]:
    return partial(_race, check, racers)


EXPERIMENTS = (
    *(
        Experiment(
            _runner(check, racers),
            (check, *((NO_ERROR, WINNER) if racers == RACERS[-1] else ())),
            creates=1,
            sends=racers + 1,
        )
        for check, racers in zip(RACES, RACERS, strict=True)
    ),
    Experiment(_busy, (STATUS, RETRY_AFTER, EXPLAINED, NOT_KEPT), creates=ROUNDS, sends=ROUNDS * (1 + DUPLICATES) + 1),
    Experiment(_in_flight, (IN_FLIGHT,), creates=TRIES, sends=2 * PAIRS * TRIES),
)
