"""Checks of the owner of a key: two principals with one key never meet, and a replay needs the same permission as the
first request. How an API knows its users is not known here.
"""

from __future__ import annotations

from semel.verify.checks.base import DRAFT, Experiment, is_replay_of, judge_retry
from semel.verify.lab import Lab
from semel.verify.model import Check, Undecided

FORBIDDEN = frozenset({401, 403, 404})
TWO = 2

OTHER_USER = Check(
    "other-principal",
    f"The same key of another principal is another operation ({DRAFT}, 5)",
    "Keys are chosen by clients. If two customers choose the same, one must not be answered with the other's payment.",
)
OTHER_BODY = Check(
    "other-principal-other-body",
    f"A principal is not told that another has used the same key ({DRAFT}, 5)",
    "A refusal such as 409 or 422 for another's key locks a customer out, and tells what others do.",
)
OWN = Check(
    "own-answer",
    f"After another principal has used the same key, the first still gets its own answer ({DRAFT}, 5)",
    "The record of one customer must not be written over by another's.",
)
UNKNOWN = Check(
    "no-replay-without-credentials",
    f"A stored answer is given only to a request that may have it ({DRAFT}, 5)",
    "A guard in front of the login hands out answers to whatever knows a key.",
)


async def _principals(lab: Lab) -> None:
    key = lab.new_key()
    request = lab.keyed(key)
    fresh = await lab.answered(lab.keyed(lab.new_key()).having(*lab.settings.other))
    if not fresh.is_success:
        raise Undecided(f"The second principal is answered with {fresh.status} under a new key.")
    watch = await lab.watch()
    first = await lab.first(request)
    other = await lab.answered(request.having(*lab.settings.other))
    if not other.is_success:
        lab.failed(OTHER_USER, f"A key that another principal has used is answered with {other.status}.")
    else:
        runs = await lab.runs(watch, [first, other], TWO)
        bad = f"The second principal got an answer and no operation of its own: {runs.how}."
        lab.judge(OTHER_USER, ok=runs.count == TWO, good=f"Two operations: {runs.how}.", bad=bad)
    after = await lab.watch()
    again = await lab.answered(request)
    if after.before is None:
        await judge_retry(lab, OWN, after, (first, again), "The first principal's retry")
        return
    runs = await lab.runs(after, [], 0)
    ok = is_replay_of(first, again) and runs.count == 0
    bad = f"The first principal's retry gets another answer, {again.status}; {runs.how}."
    lab.judge(OWN, ok=ok, good="The first principal's retry gets its own answer.", bad=bad)


async def _other_body(lab: Lab) -> None:
    other, key = await lab.other(), lab.new_key()
    await lab.first(lab.keyed(key))
    answer = await lab.answered(lab.keyed(key, other).having(*lab.settings.other))
    fresh = await lab.answered(lab.keyed(lab.new_key(), other).having(*lab.settings.other))
    if not fresh.is_success:
        raise Undecided(f"The second principal is answered with {fresh.status} under a new key.")
    bad = f"The second principal is answered with {answer.status}, because another has used its key."
    lab.judge(OTHER_BODY, ok=answer.is_success, good=f"It is served: {answer.status}.", bad=bad)


async def _no_credentials_sent(lab: Lab) -> None:
    names, key = _credentials(lab), lab.new_key()
    request = lab.keyed(key)
    bare = lab.keyed(lab.new_key()).lacking(*names)
    fresh = await lab.answered(bare)
    if fresh.is_success and not lab.settings.other:
        lab.skipped(UNKNOWN, f"The API serves requests without {', '.join(names)}.")
        return
    first = await lab.first(request)
    answer = await lab.answered(request.lacking(*names))
    if answer.status in FORBIDDEN or (answer.status == fresh.status and not answer.is_success):
        lab.passed(UNKNOWN, f"Without {', '.join(names)} it is answered with {answer.status}.")
    elif answer.is_marked or (is_replay_of(first, answer) and lab.is_same(first, answer) is True):
        lab.failed(UNKNOWN, f"Without {', '.join(names)} a retry gets the stored answer, {answer.status}.")
    elif is_replay_of(first, answer):
        raise Undecided("The answer without credentials is the same, and answers do not vary.")
    else:
        lab.passed(
            UNKNOWN, f"Without {', '.join(names)} it is answered with {answer.status}, and not with that answer."
        )


def _credentials(lab: Lab) -> list[str]:
    given = {name.lower() for name, _ in lab.settings.other}
    return [name for name, _ in lab.request.headers if name.lower() in given or lab.is_secret(name)]


def _no_second(lab: Lab) -> str | None:
    return None if lab.settings.other else "There is no second principal. Give --other-header."


def _no_second_body(lab: Lab) -> str | None:
    return _no_second(lab) or (None if lab.request.body else "The request has no body.")


def _no_credentials(lab: Lab) -> str | None:
    return None if _credentials(lab) else "The request has no credentials."


EXPERIMENTS = (
    Experiment(_principals, (OTHER_USER, OWN), creates=3, sends=4, reason_against=_no_second),
    Experiment(_other_body, (OTHER_BODY,), creates=3, sends=3, reason_against=_no_second_body),
    Experiment(_no_credentials_sent, (UNKNOWN,), creates=3, sends=3, reason_against=_no_credentials),
)
