"""Checks of a key that is used for another request: another body, query, path or method. Requests at the same moment
are not here.
"""

from __future__ import annotations

from dataclasses import replace

from semel.verify.checks.base import (
    DRAFT,
    HTTP,
    STRIPE,
    Experiment,
    control,
    given,
    is_refusal,
    is_replay_of,
    is_server_error,
    judge_retry,
    said,
)
from semel.verify.checks.refusals import fault_of
from semel.verify.lab import Lab, Watch
from semel.verify.message import Answer, Request
from semel.verify.model import Check, Undecided
from semel.verify.variants import numbered, padded, with_number, with_query

#: A script with a fixed key: how many different requests it sends.
FIXED = 5
#: 2^53: the first whole number that is one with its successor where numbers are doubles.
PAST_DOUBLES = 9_007_199_254_740_992
NO_SUCH_PATH = "/semel-verify-no-such-path"
UNGUARDED = frozenset({404, 405, 501})

REFUSED = Check(
    "other-body-refused",
    f"The same key with another body is refused, and does not run ({DRAFT}, 2.7; {STRIPE})",
    "A client with a bug uses one key for two payments. It must be told, or one of them is lost without a trace.",
)
STATUS = Check(
    "other-body-status",
    f"That refusal has the status 422 ({DRAFT}, 2.7), in Stripe's API 400",
    "To a client, 409 means wait and 422 means never. Which it is decides what it does next.",
)
EXPLAINED = Check(
    "other-body-explained",
    f"The body of that refusal says what it is ({DRAFT}, 2.7; RFC 9457; Stripe: idempotency_error)",
    "422 also means that a field is not valid. Only the body can tell the two apart.",
)
KEPT = Check(
    "other-body-keeps-first",
    f"After that refusal, the first request still gets its stored answer ({DRAFT}, 2.6)",
    "One wrong request must not make the answer to the right one unavailable.",
)
FIXED_KEY = Check(
    "fixed-key",
    f"Of {FIXED} different requests with one fixed key, one runs and the others are refused ({DRAFT}, 2.2)",
    "A script that sends all payments of a day with one key by mistake must fail at the second.",
)
END = Check(
    "large-body-end",
    f"A difference at the end of a large body counts ({DRAFT}, 2.4)",
    "A fingerprint of the first kilobytes only takes two different orders for one.",
)
NUMBER = Check(
    "large-number",
    f"Whole numbers that differ beyond 2^53 differ ({DRAFT}, 2.4; RFC 8259, 6)",
    "A fingerprint of numbers as JavaScript reads them takes two references of 17 digits for one.",
)
QUERY = Check(
    "other-query",
    f"The query is part of the request that is compared ({DRAFT}, 2.4)",
    "?to=alice and ?to=mallory are two transfers; a test run with ?dry_run=1 must not answer for the real one.",
)
PATH = Check(
    "other-path",
    f"A key that was used on one path is not replayed on another ({STRIPE})",
    "The answer to a payment is no answer to a refund.",
)
METHOD = Check(
    "other-method",
    f"A key that was used with one method is not replayed for another ({HTTP}, 9)",
    "The answer to the creation is no answer to a change or a deletion.",
)
GET = Check(
    "get-ignores-key",
    f"GET is idempotent by itself: a key changes nothing ({HTTP}, 9.2.2)",
    "A GET that is answered from the store of a POST shows what was, and not what is.",
)
HEAD = Check(
    "head-ignores-key",
    f"HEAD is idempotent by itself: a key changes nothing ({HTTP}, 9.2.2)",
    "A proxy may ask with HEAD and the same headers.",
)
PATCH = Check(
    "patch-guarded",
    f"PATCH takes a key as POST does ({DRAFT}, 1)",
    "PATCH is not idempotent: adding 5 twice adds 10.",
)


async def _other_body(lab: Lab) -> None:
    other = await lab.other()
    key, watch = lab.new_key(), await lab.watch()
    request = lab.keyed(key)
    first = await lab.first(request)
    answer = await lab.answered(lab.keyed(key, other))
    await _judge_mismatch(lab, REFUSED, watch, (first, answer), "Another body under the same key")
    if is_refusal(answer):
        bad = f"It is refused with {answer.status}, not with {lab.profile.mismatch}."
        lab.judge(STATUS, ok=answer.status == lab.profile.mismatch, good=f"It is {answer.status}.", bad=bad)
        fault = _fault(lab, answer)
        lab.judge(EXPLAINED, ok=fault is None, good="The refusal says what it is.", bad=fault or "")
    else:
        for check in (STATUS, EXPLAINED):
            lab.failed(check, f"It is not refused: {answer.status}.")
    again = await lab.answered(request)
    await judge_retry(lab, KEPT, await _since(lab, watch, answer), (first, again), "The first request, sent again,")


async def _since(lab: Lab, watch: Watch, answer: Answer) -> Watch:
    """Where the refused request ran, that is said already: count from there on, as if it were the first."""
    if is_refusal(answer) or watch.before is None:
        return watch
    now = await lab.watch()
    return Watch(None if now.before is None else now.before - lab.rise)


def _fault(lab: Lab, answer: Answer) -> str | None:
    fault = fault_of(lab.profile, answer, is_strict=lab.settings.is_strict)
    if fault is None and not lab.profile.has_problems:
        kind = answer.json()["error"]["type"]
        return None if kind == "idempotency_error" else f"The error has the type {kind!r}, not 'idempotency_error'."
    return fault


async def _judge_mismatch(lab: Lab, check: Check, watch: Watch, answers: tuple[Answer, Answer], what: str) -> None:
    first, answer = answers
    if is_server_error(answer):
        lab.failed(check, f"{what} is answered with {answer.status}, a server error.")
    elif is_refusal(answer):
        if lab.has_counter and (runs := await lab.runs(watch, [], 1)).count > 1:
            lab.failed(check, f"{what} is refused with {answer.status}, and ran all the same: {runs.how}.")
        else:
            lab.passed(check, f"{what} is refused with {answer.status}.")
    elif is_replay_of(first, answer):
        lab.failed(check, f"{what} gets the first answer, as if it had been done: {answer.status}.")
    else:
        lab.failed(check, f"{what} is accepted with {answer.status}: one key, two operations.")


async def _fixed_key(lab: Lab) -> None:
    await lab.other()
    key, watch = lab.new_key(), await lab.watch()
    first = await lab.first(lab.keyed(key))
    requests = [numbered(lab.request, number) for number in range(1, FIXED)]
    answers = [await lab.answered(lab.keyed(key, each)) for each in requests if each is not None]
    accepted = [each for each in answers if not is_refusal(each)]
    if accepted:
        lab.failed(FIXED_KEY, f"{len(accepted)} of {len(answers)} others were not refused: {accepted[0].status}.")
        return
    runs = await lab.runs(watch, [first], 1)
    bad = f"The others are refused with {answers[0].status}, and ran: {runs.how}."
    lab.judge(FIXED_KEY, ok=runs.count == 1, good=f"One ran, {len(answers)} were refused; {runs.how}.", bad=bad)


async def _large_end(lab: Lab) -> None:
    other = padded(await lab.other())
    large = padded(lab.request)
    if other is None or large is None:
        raise Undecided("The other request is not a JSON object.")
    key, watch = lab.new_key(), await lab.watch()
    first = await lab.answered(lab.keyed(key, large))
    control(first, "A large body")
    answer = await lab.answered(lab.keyed(key, other))
    await _judge_mismatch(lab, END, watch, (first, answer), "A large body with another end")


async def _number(lab: Lab) -> None:
    one, two = given(with_number(lab.request, PAST_DOUBLES)), given(with_number(lab.request, PAST_DOUBLES + 1))
    key, watch = lab.new_key(), await lab.watch()
    first = await lab.answered(lab.keyed(key, one))
    if not first.is_success:
        lab.skipped(NUMBER, f"The API takes no further member in its JSON: {first.status}.")
        return
    answer = await lab.answered(lab.keyed(key, two))
    await _judge_mismatch(lab, NUMBER, watch, (first, answer), f"{PAST_DOUBLES + 1} in place of {PAST_DOUBLES}")


async def _query(lab: Lab) -> None:
    other = with_query(lab.request)
    alone = await lab.answered(lab.keyed(lab.new_key(), other))
    if not alone.is_success:
        lab.skipped(QUERY, f"The API takes no further parameter in the query: {alone.status}.")
        return
    key, watch = lab.new_key(), await lab.watch()
    first = await lab.first(lab.keyed(key))
    answer = await lab.answered(lab.keyed(key, other))
    await _judge_mismatch(lab, QUERY, watch, (first, answer), "Another query under the same key")


async def _elsewhere(lab: Lab) -> None:
    """One finished operation, and its key on another path and with other methods."""
    key = lab.new_key()
    first = await lab.first(lab.keyed(key))
    path, mark, query = lab.request.target.partition("?")
    elsewhere = replace(lab.request, target=path.rstrip("/") + NO_SUCH_PATH + mark + query)
    _judge_elsewhere(lab, PATH, first, await lab.answered(lab.keyed(key, elsewhere)), "on another path")
    if reason := _no_put(lab):
        lab.skipped(METHOD, reason)
    else:
        method = "PUT" if lab.request.method == "POST" else "POST"
        other = await lab.answered(lab.keyed(key, replace(lab.request, method=method)))
        _judge_elsewhere(lab, METHOD, first, other, f"with {method}")
    for check, safe in ((GET, "GET"), (HEAD, "HEAD")):
        plain = Request(safe, lab.request.target, lab.request.headers).lacking("content-type")
        without, within = await lab.answered(plain), await lab.answered(lab.keyed(key, plain))
        if is_replay_of(first, within) and within.body and not is_replay_of(first, without):
            lab.failed(check, f"{safe} with the key of a finished {lab.request.method} gets its stored answer.")
        elif within.is_marked:
            lab.failed(check, f"{safe} with a key gets an answer that is marked as a replay.")
        else:
            bad = f"{safe} is answered with {without.status} without a key and with {within.status} with one."
            lab.judge(check, ok=within.status == without.status, good=f"Both are {within.status}.", bad=bad)


def _judge_elsewhere(lab: Lab, check: Check, first: Answer, answer: Answer, where: str) -> None:
    if is_replay_of(first, answer) and (first.body or answer.is_marked):
        lab.failed(check, f"The key {where} gets the stored answer of {lab.request.method} {lab.request.target}.")
    elif is_server_error(answer) and answer.status not in UNGUARDED:
        lab.failed(check, f"The key {where} is answered with {answer.status}, a server error.")
    else:
        lab.passed(check, f"The key {where} is answered with {said(answer)}.")


async def _patch(lab: Lab) -> None:
    request = lab.keyed(lab.new_key(), replace(lab.request, method="PATCH"))
    watch = await lab.watch()
    first = await lab.answered(request)
    if first.status in UNGUARDED:
        lab.skipped(PATCH, f"The path takes no PATCH ({first.status}). Give a file that begins with PATCH.")
        return
    control(first, "PATCH with the same body")
    again = await lab.answered(request)
    runs = await lab.runs(watch, [first, again], 1)
    if runs.count > 1:
        lab.failed(PATCH, f"The same PATCH with the same key ran again: {runs.how}.")
    elif runs.count == 0:
        raise Undecided(f"PATCH succeeds, and its effect is not seen: {runs.how}.")
    else:
        ok = is_replay_of(first, again)
        lab.judge(PATCH, ok=ok, good=f"The retry gets the first answer; {runs.how}.", bad=f"It gets {said(again)}.")


def _no_body(lab: Lab) -> str | None:
    return None if lab.request.body else "The request has no body."


def _not_padded(lab: Lab) -> str | None:
    return None if padded(lab.request) else "The body is not a JSON object."


def _no_members(lab: Lab) -> str | None:
    return None if with_number(lab.request, 0) else "The body is not a JSON object."


def _no_put(lab: Lab) -> str | None:
    is_safe = lab.settings.may_replace or lab.request.method != "POST"
    return None if is_safe else "PUT and PATCH may replace what is there. Say --may-replace if they may be sent."


def _no_patch(lab: Lab) -> str | None:
    if lab.request.method == "PATCH":
        return "The request is a PATCH: every check is about it."
    return _no_put(lab) if lab.profile.guards_patch else "Stripe's API takes keys with POST only."


EXPERIMENTS = (
    Experiment(_other_body, (REFUSED, STATUS, EXPLAINED, KEPT), creates=2, sends=4, reason_against=_no_body),
    Experiment(_fixed_key, (FIXED_KEY,), creates=1, sends=FIXED, reason_against=_no_body),
    Experiment(_large_end, (END,), creates=1, sends=2, reason_against=_not_padded),
    Experiment(_number, (NUMBER,), creates=1, sends=2, reason_against=_no_members),
    Experiment(_query, (QUERY,), creates=2, sends=3),
    Experiment(_elsewhere, (PATH, METHOD, GET, HEAD), creates=1, sends=3),
    Experiment(_patch, (PATCH,), creates=1, sends=2, reason_against=_no_patch),
)
