"""Checks of a retry after the first has ended: one effect, one answer. Nothing here happens at the same time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from semel.verify.checks.base import (
    DRAFT,
    HTTP,
    STRIPE,
    Experiment,
    given,
    is_refusal,
    is_replay_of,
    judge_retry,
    said,
)
from semel.verify.lab import Early, Lab, Runs, Watch
from semel.verify.message import Answer, Request
from semel.verify.model import Check, Undecided
from semel.verify.telling import Step
from semel.verify.variants import LARGE_BYTES, padded, reordered, with_unicode

#: Headers that belong to the result of the operation. A client needs them from a replay as much as from the first.
RESULT_HEADERS = (
    *("content-type", "location", "etag", "last-modified", "link", "content-language", "content-location"),
    *("content-encoding", "content-disposition", "cache-control"),
)
REPLAYS = 4
#: Two dates with whole seconds are different after the first of these. Servers keep a date for some time, and a busy
#: one longer: so a replay with the date of the first is asked for again.
DATE_SECONDS = (1.1, 2.5, 4.0)

ONE_EFFECT = Check(
    "replay-one-effect",
    f"The same request with the same key takes effect once ({DRAFT}, 2.6)",
    "A client that lost the answer sends the request again. If it takes effect again, a customer pays twice.",
)
STATUS = Check(
    "replay-status",
    f"A retry gets the status of the first answer ({DRAFT}, 2.6; {STRIPE})",
    "A client decides by the status. Another one on the retry makes it believe that something else has happened.",
)
BODY = Check(
    "replay-body",
    f"A retry gets the body of the first answer, byte for byte ({DRAFT}, 2.6; {STRIPE})",
    "The body holds what the client needs: an id, an amount. One that is stored as something else comes back changed.",
)
HEADERS = Check(
    "replay-headers",
    f"A retry gets the headers that belong to the result, such as Content-Type and Location ({HTTP}, 8, 10.2.2)",
    "A client that gets no Location does not find what it has created, and without a Content-Type it can't read it.",
)
FRAMING = Check(
    "replay-framing",
    f"A replay is a message of its own, with the length that it has ({HTTP}, 8.6; RFC 9112, 6)",
    "A stored length or transfer coding that does not fit the body breaks the connection, for the next request too.",
)
MARKER = Check(
    "replay-marker",
    f"A replay says Idempotent-Replayed: true ({STRIPE}; not in the IETF draft)",
    "A client that sees the mark knows that nothing has run, and that asking again will not change the answer.",
)
UNMARKED = Check(
    "first-unmarked",
    f"The first answer is not marked as a replay ({STRIPE})",
    "A client that believes that it got an old answer looks for an operation that was never there.",
)
COOKIES = Check(
    "replay-no-cookies",
    f"A replay sets no cookie of the first answer ({HTTP}, 10.2; Semel)",
    "A stored cookie hands one session to whatever sends the retry.",
)
MANY = Check(
    "replay-many",
    f"The stored answer does not change, however often it is asked for ({DRAFT}, 2.6)",
    "A client may retry many times. An API that forgets the key after the first retry runs the operation again.",
)
OTHER_CLIENT = Check(
    "retry-other-headers",
    f"Headers such as User-Agent, traceparent and Date are not part of the request that is compared ({DRAFT}, 2.4)",
    "A retry comes from another process, with another trace. It is still the same request.",
)
HEADER_CASE = Check(
    "header-name-case",
    f"The name of the header is not case-sensitive ({HTTP}, 5.1)",
    "Clients and proxies write it in lower case or in capitals. A guard that is not found protects nothing.",
)
CHUNKED = Check(
    "retry-chunked",
    "The same body in chunks is the same request (RFC 9112, 7.1)",
    "A proxy between client and server may change the framing of a body from one try to the next.",
)
EXPECT = Check(
    "retry-expect-continue",
    f"A request that waits for 100 Continue is answered and guarded as any other ({HTTP}, 10.1.1)",
    "curl sends larger bodies in this way.",
)
REORDERED = Check(
    "json-order",
    f"The same JSON in another order is replayed or refused, and never runs again ({DRAFT}, 2.4)",
    "A client that builds its body anew for the retry may write the members in another order.",
)
LARGE = Check(
    "large-body",
    f"A body of {LARGE_BYTES // 1024} KiB is guarded as a small one ({DRAFT}, 2.6)",
    "A guard that gives up on large requests gives up on the largest orders.",
)
UNICODE = Check(
    "unicode-body",
    f"A body with characters of several bytes is guarded and its answer replayed ({DRAFT}, 2.6)",
    "Names are not ASCII. A store that cuts or changes them changes the answer.",
)
LATER = Check(
    "replay-later",
    f"The stored answer is still there at the end, after everything else that was sent ({DRAFT}, 2.6)",
    "A store that drops keys after seconds, or when others come, has none left when a client comes back after a break.",
)
DATE = Check(
    "replay-date",
    f"The Date of a replay is the time of the replay ({HTTP}, 6.6.1)",
    "Date says when the message was made. A stored one makes caches and clocks wrong.",
)


async def _replay(lab: Lab) -> None:
    request, watch = lab.keyed(lab.new_key()), await lab.watch()
    first = await lab.first(request)
    again = await lab.answered(request)
    lab.early = Early(request, first, again, time.monotonic())
    try:
        runs = await lab.runs(watch, [first, again], 1)
    except Undecided as undecided:
        lab.doubt = str(undecided)
        _judge_answer(lab, first, again)
        raise
    _judge_effect(lab, again, runs)
    _judge_answer(lab, first, again)
    answers = [await lab.answered(request) for _ in range(REPLAYS - 1)]
    runs = await lab.runs(watch, [first, again, *answers], 1)
    differing = [each for each in answers if not is_replay_of(again, each)]
    is_fine = runs.count == 1 and not differing
    bad = f"Of {REPLAYS} retries, {len(differing)} got another answer than the first retry; {runs.how}."
    lab.judge(MANY, ok=is_fine, good=f"{REPLAYS} retries got one answer; {runs.how}.", bad=bad)


def _judge_effect(lab: Lab, again: Answer, runs: Runs) -> None:
    if runs.count == 0:
        lab.failed(ONE_EFFECT, f"The first request succeeded and had no effect: {runs.how}.")
    elif runs.count > 1:
        lab.failed(ONE_EFFECT, f"The same request with the same key ran again: {runs.how}.")
    elif not (again.is_success or lab.has_counter):
        lab.undecided(ONE_EFFECT, f"The retry is answered with {again.status}, which names no operation.")
    else:
        lab.passed(ONE_EFFECT, f"One effect: {runs.how}.")


def _judge_answer(lab: Lab, first: Answer, again: Answer) -> None:
    differ = f"The first answer has {first.status}, the retry {again.status}."
    lab.judge(STATUS, ok=first.status == again.status, good=f"Both have {first.status}.", bad=differ)
    lengths = f"The first body has {len(first.body)} bytes, that of the retry {len(again.body)}, and they differ."
    lab.judge(BODY, ok=first.body == again.body, good=f"Both have the same {len(first.body)} bytes.", bad=lengths)
    lost = [name for name in RESULT_HEADERS if first.all(name) and first.all(name) != again.all(name)]
    kept = [name for name in RESULT_HEADERS if first.all(name)]
    bad = "; ".join(f"{name} was {_spelled(first, name)} and is {_spelled(again, name)}" for name in lost)
    lab.judge(HEADERS, ok=not lost, good=f"Repeated: {', '.join(kept) or 'none were there'}.", bad=f"{bad}.")
    stale = again.header("content-length") is not None and again.header("transfer-encoding") is not None
    lab.judge(
        FRAMING,
        ok=not stale and not (again.status in {204, 205} and again.body),
        good="The replay has a length that fits.",
        bad="The replay has both Content-Length and Transfer-Encoding, or a body where there is none.",
    )
    _judge_marks(lab, first, again)
    cookies = set(first.all("set-cookie")) & set(again.all("set-cookie"))
    good = "The replay repeats no cookie." if first.all("set-cookie") else "No cookie is set, first or later."
    if not first.all("set-cookie") and not again.all("set-cookie"):
        lab.skipped(COOKIES, "The answer sets no cookie.")
    else:
        lab.judge(COOKIES, ok=not cookies, good=good, bad="The replay sets the cookie of the first answer.")


def _judge_marks(lab: Lab, first: Answer, again: Answer) -> None:
    lab.judge(
        UNMARKED,
        ok=not first.is_marked,
        good="The first answer has no mark.",
        bad="The first answer says Idempotent-Replayed, and nothing was there to be replayed.",
    )
    if again.is_marked:
        lab.passed(MARKER, "The replay says Idempotent-Replayed: true.")
    elif lab.profile.marks_replays:
        lab.failed(MARKER, "The replay has no Idempotent-Replayed: true.")
    else:
        lab.passed(MARKER, "The replay has no mark; the IETF draft asks for none.")


async def _spellings(lab: Lab) -> None:
    key, watch = lab.new_key(), await lab.watch()
    request = lab.keyed(key)
    first = await lab.first(request)
    headers = {
        "User-Agent": "semel-verify/retry",
        "X-Request-Id": lab.new_key(),
        "traceparent": f"00-{lab.new_key().replace('-', '')}-00f067aa0ba902b7-01",
        "Accept-Language": "la",
    }
    again = await lab.answered(request.having(*headers.items()))
    await judge_retry(lab, OTHER_CLIENT, watch, (first, again), "A retry with other headers")
    name = lab.settings.key_header.name
    for spelled in (name.lower(), name.upper()):
        shouted = request.lacking(name).having((spelled, lab.spelled(key)))
        again = await lab.answered(shouted)
        if not is_replay_of(first, again):
            break
    await judge_retry(lab, HEADER_CASE, watch, (first, again), f"A retry with the header {spelled}")


async def _chunked(lab: Lab) -> None:
    if not await _is_taken(lab, CHUNKED, replace(lab.request, is_chunked=True), "A body in chunks"):
        return
    request, watch = lab.keyed(lab.new_key()), await lab.watch()
    first = await lab.first(request)
    again = await lab.answered(replace(request, is_chunked=True))
    await judge_retry(lab, CHUNKED, watch, (first, again), "A retry in chunks")


async def _expect(lab: Lab) -> None:
    if not await _is_taken(lab, EXPECT, replace(lab.request, expects=True), "A request with Expect"):
        return
    request, watch = replace(lab.keyed(lab.new_key()), expects=True), await lab.watch()
    first = await lab.first(request)
    again = await lab.answered(replace(request, expects=False))
    await judge_retry(lab, EXPECT, watch, (first, again), "A retry without Expect")


async def _is_taken(lab: Lab, check: Check, request: Request, what: str) -> bool:
    """Whether the server takes such a request at all. One that takes it only without a key has failed."""
    keyed = await lab.send(lab.keyed(lab.new_key(), request))
    if isinstance(keyed, Answer) and keyed.is_success:
        return True
    plain = await lab.send(request)
    if isinstance(plain, Answer) and plain.is_success:
        lab.failed(check, f"{what} works without a key, and with one it gets {said(keyed)}.")
    else:
        lab.skipped(check, f"{what} is not taken: {said(keyed)}.")
    return False


async def _reordered(lab: Lab) -> None:
    other = given(reordered(lab.request))
    key, watch = lab.new_key(), await lab.watch()
    first = await lab.first(lab.keyed(key))
    again = await lab.answered(lab.keyed(key, other))
    runs = await lab.runs(watch, [first, again], 1)
    if runs.count > 1:
        lab.failed(REORDERED, f"The same JSON in another order ran again: {runs.how}.")
    elif is_replay_of(first, again):
        lab.passed(REORDERED, f"It gets the stored answer; {runs.how}.")
    elif is_refusal(again):
        lab.passed(REORDERED, f"It is refused with {again.status}, as the draft allows; {runs.how}.")
    else:
        lab.failed(REORDERED, f"It is answered with {again.status}, neither a replay nor a refusal.")


async def _large(lab: Lab) -> None:
    large = given(padded(lab.request))
    await _twice(lab, LARGE, large, "A large body")


async def _unicode(lab: Lab) -> None:
    for each in with_unicode(lab.request):
        await _twice(lab, UNICODE, each, "A body with characters of several bytes")
        return


async def _twice(lab: Lab, check: Check, request: Request, what: str) -> None:
    request, watch = lab.keyed(lab.new_key(), request), await lab.watch()
    first = await lab.answered(request)
    again = await lab.answered(request)
    if is_refusal(first) and is_refusal(again) and first.status == again.status:
        if lab.has_counter and (runs := await lab.runs(watch, [], 0)).count:
            lab.failed(check, f"{what} is refused with {first.status}, and took effect: {runs.how}.")
        else:
            lab.passed(check, f"{what} is refused with {first.status}, both times.")
    elif first.is_success:
        await judge_retry(lab, check, watch, (first, again), f"{what}, sent again,")
    else:
        lab.failed(check, f"{what} is answered with {first.status}, then with {again.status}.")


async def _later(lab: Lab) -> None:
    is_from_before = lab.early is not None
    if lab.early is None:
        request = lab.keyed(lab.new_key())
        lab.early = Early(request, await lab.first(request), await lab.answered(request), time.monotonic())
    early, watch, since = lab.early, await lab.watch(), lab.early.at
    if is_from_before:
        lab.record(Step((early.request,) * 2, (early.first, early.retry)))
    for pause in DATE_SECONDS:
        await asyncio.sleep(max(early.at + pause - time.monotonic(), 0))
        passed, since = time.monotonic() - since, time.monotonic()
        lab.record(Step((), (), note=f"{passed:.1f} s later", pause=passed))
        again = await lab.answered(early.request)
        if again.header("date") != early.first.header("date"):
            break
    await _judge_later(lab, early, watch, again)
    dates = early.first.header("date"), again.header("date")
    if not all(dates):
        raise Undecided("An answer has no Date.")
    lab.judge(
        DATE,
        ok=dates[0] != dates[1],
        good=f"The first has {dates[0]}, the replay {dates[1]}.",
        bad=f"The replay has the Date of the first answer, {dates[0]}, {DATE_SECONDS[-1]:g} s later.",
    )


async def _judge_later(lab: Lab, early: Early, watch: Watch, again: Answer) -> None:
    """Judge a retry that comes long after the first one, by the answer to that. What ran again has no Date to judge."""
    expected = 0 if lab.has_counter else 1
    when = f"{time.monotonic() - early.at:.1f} s after the first retry"
    try:
        runs = await lab.runs(watch, [early.retry, again], expected)
    except Undecided as undecided:
        lab.undecided(LATER, str(undecided))
        return
    if runs.count > expected:
        lab.failed(LATER, f"A retry {when} ran the operation again: {runs.how}.")
        raise Undecided("The retry is no replay.")
    ok, bad = is_replay_of(early.retry, again), f"A retry {when} gets another answer, {again.status}."
    lab.judge(LATER, ok=ok, good=f"A retry {when} gets the same answer; {runs.how}.", bad=bad)


def _spelled(answer: Answer, name: str) -> str:
    return " and ".join(map(repr, answer.all(name))) or "missing"


def _no_json(lab: Lab) -> str | None:
    return None if reordered(lab.request) else "The body is not JSON."


def _not_padded(lab: Lab) -> str | None:
    return None if padded(lab.request) else "The body is not a JSON object."


def _no_text(lab: Lab) -> str | None:
    return None if any(with_unicode(lab.request)) else "The body has no text in JSON."


def _no_body(lab: Lab) -> str | None:
    return None if lab.request.body else "The request has no body."


EXPERIMENTS = (
    Experiment(
        _replay,
        (ONE_EFFECT, STATUS, BODY, HEADERS, FRAMING, UNMARKED, MARKER, COOKIES, MANY),
        creates=1,
        sends=1 + REPLAYS,
    ),
    Experiment(_spellings, (OTHER_CLIENT, HEADER_CASE), creates=1, sends=4),
    Experiment(_chunked, (CHUNKED,), creates=2, sends=4, reason_against=_no_body),
    Experiment(_expect, (EXPECT,), creates=2, sends=4, reason_against=_no_body),
    Experiment(_reordered, (REORDERED,), creates=1, sends=2, reason_against=_no_json),
    Experiment(_large, (LARGE,), creates=1, sends=2, reason_against=_not_padded),
    Experiment(_unicode, (UNICODE,), creates=1, sends=2, reason_against=_no_text),
)
#: A date has whole seconds, and a store may forget, so this one comes at the end, when time has passed by itself.
LAST = (Experiment(_later, (LATER, DATE), creates=1, sends=2 + len(DATE_SECONDS)),)
