"""What an experiment is, and the judgement that many of them share: a retry of a finished operation. No check is
declared here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from semel.verify.lab import Lab, Watch
from semel.verify.message import CLIENT_ERROR, SERVER_ERROR, Answer, NoAnswer, Outcome
from semel.verify.model import Check, Undecided

DRAFT = "IETF draft Idempotency-Key"
SF = "RFC 9651"
HTTP = "RFC 9110"
STRIPE = "Stripe, Idempotent requests"

T = TypeVar("T")


def _always(_: Lab) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Experiment:
    """Requests that are sent for some checks, and how much they may create."""

    run: Callable[[Lab], Awaitable[None]]
    checks: tuple[Check, ...]
    #: How many operations take effect at most, where keys are honoured; and where they are not.
    creates: int
    sends: int
    #: Says why it does not apply; None: it does.
    reason_against: Callable[[Lab], str | None] = _always


def said(outcome: Outcome) -> str:
    """Say what *outcome* is, in a sentence."""
    return f"no answer ({outcome.reason})" if isinstance(outcome, NoAnswer) else str(outcome.status)


def is_refusal(outcome: Outcome) -> bool:
    """Whether it is the client's fault, as the answer says."""
    return isinstance(outcome, Answer) and outcome.status in CLIENT_ERROR


def is_server_error(outcome: Outcome) -> bool:
    """Whether it is the server's fault."""
    return isinstance(outcome, Answer) and outcome.status in SERVER_ERROR


def is_replay_of(first: Answer, again: Outcome) -> bool:
    """Whether *again* has the status and the body of *first*."""
    return isinstance(again, Answer) and (again.status, again.body) == (first.status, first.body)


async def judge_retry(lab: Lab, check: Check, watch: Watch, answers: tuple[Answer, Answer], what: str) -> None:
    """Judge the answer to a retry, which must be the stored one. *what* says which retry it was."""
    first, again = answers
    runs = await lab.runs(watch, [first, again], 1)
    if runs.count > 1:
        lab.failed(check, f"{what} ran the operation again: {runs.how}.")
    elif not again.is_success:
        lab.failed(check, f"{what} is answered with {again.status} instead of the stored {first.status}.")
    elif not is_replay_of(first, again):
        lab.failed(check, f"{what} gets another answer than the first, {again.status}.")
    else:
        lab.passed(check, f"{what} gets the first answer; {runs.how}.")


async def judge_refusal(lab: Lab, check: Check, watch: Watch, answer: Answer, what: str) -> None:
    """Judge *answer*, which must be a refusal that has no effect."""
    if is_server_error(answer):
        lab.failed(check, f"{what} is answered with {answer.status}: that is the client's mistake, not the server's.")
    elif not is_refusal(answer):
        lab.failed(check, f"{what} is answered with {answer.status}; it must be refused (400).")
    elif lab.has_counter and (runs := await lab.runs(watch, [], 0)).count:
        lab.failed(check, f"{what} is refused with {answer.status}, and took effect all the same: {runs.how}.")
    else:
        lab.passed(check, f"{what} is refused with {answer.status}.")


def control(answer: Answer, what: str) -> None:
    """Go on only if *answer*, to a request under a new key, is a success."""
    if not answer.is_success:
        raise Undecided(f"{what} is answered with {answer.status} under a new key, so nothing can be seen by it.")


def given(what: T | None) -> T:
    """Return what an experiment needs. It is not run without."""
    if what is None:
        raise Undecided("Something that this needs was not given.")
    return what
