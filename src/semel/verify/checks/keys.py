"""Checks of the key itself: how it is written, how long it may be, and what a request without one gets. What a key
protects is checked elsewhere.

Most APIs take a key as opaque text. That does no harm as long as it is the same text each time, so it fails only where
the letter of RFC 9651 is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from semel.verify.checks.base import (
    DRAFT,
    SF,
    STRIPE,
    Experiment,
    control,
    is_refusal,
    is_server_error,
    judge_refusal,
)
from semel.verify.checks.refusals import fault_of
from semel.verify.lab import UUID_LENGTH, Lab, Watch
from semel.verify.message import Answer, Request
from semel.verify.model import Check, Undecided

#: Longer than what databases usually hold in a column of text, and short enough for any server's header limit.
LONG = 300
VERY_LONG = 4000
TWO = 2
BAD_REQUEST = 400

MISSING = Check(
    "missing-key",
    f"Without a key a request runs as it would without the guard, or is refused with 400 ({DRAFT}, 2.7; {STRIPE})",
    "A client that sends no key must be told so, or served; a server error tells it nothing.",
)
MISSING_EXPLAINED = Check(
    "missing-key-explained",
    f"A 400 for a missing key says so, with a link or a problem type ({DRAFT}, 2.7)",
    "A developer who forgets the key must see what is missing.",
)
NOT_SHARED = Check(
    "missing-key-not-shared",
    f"Two requests without a key are two operations ({DRAFT}, 2.1)",
    "A guard that takes a missing key for a value such as undefined replays one client's answer to all others.",
)
EMPTY = Check(
    "empty-key",
    f"An empty key is refused, or counts as none; it is not one key for all ({SF}, 4.2; strict: refused)",
    "A client with a bug sends the same empty key with every payment: only the first would run.",
)
EMPTY_QUOTED = Check(
    "empty-quoted-key",
    f'"" is a String without a character: it is refused, or treated the same each time ({DRAFT}, 2.2; strict: refused)',
    "A client with a bug sends the same empty key with every payment: only the first would run.",
)
MALFORMED = Check(
    "malformed-key",
    f"A key that is not a whole String is refused, or is a key as it stands, not none ({SF}, 4.2.5; strict: refused)",
    "A key that was cut on its way is another key: the retry would run again.",
)
BYTES = Check(
    "non-ascii-key",
    f"A key with other bytes than printable ASCII is refused, or is a key, and not none ({SF}; strict: refused)",
    "What the server makes of such bytes differs from store to store, and so does what counts as the same key.",
)
TWICE = Check(
    "two-keys",
    f"Two keys in one request are refused, or are one key each time, and not none ({SF}, 4.2; strict: refused)",
    "One layer takes the first, another the last. Which operation is protected then is chance.",
)
CASE = Check(
    "key-case",
    f"Keys that differ in upper and lower case are two keys ({SF}, 3.3.3: a String is compared as it is)",
    "A store that folds case answers one customer's payment with another's.",
)
QUOTED = Check(
    "quoted-key",
    f"A key is accepted as a String in quotes ({DRAFT}, 2.1)",
    "It is the form of the standard.",
)
BARE = Check(
    "bare-key",
    f"A key is accepted without quotes ({STRIPE}), or refused with 400 ({DRAFT}, 2.1)",
    "It is the form that most clients send.",
)
SAME = Check(
    "quoted-is-bare",
    f'"abc" and abc are one key, or one of them is refused; else a client must not mix them ({DRAFT}, 2.1; strict)',
    "A client library that is updated between two tries changes the spelling. The retry must not run again.",
)
PARAMETERS = Check(
    "key-parameters",
    f'"abc";v=1 is "abc", or is refused; else no parameter may be added ({SF}, 3.1.2; strict)',
    "A proxy or a later version of the standard may add one. The retry must not run again.",
)
LONGEST = Check(
    "longest-key",
    f"A key of 255 characters is accepted ({STRIPE}), or refused with 400 ({DRAFT}, 5)",
    "Clients use prefixes and composed keys; a limit must be told, not met by a server error.",
)
CUT = Check(
    "long-key-not-cut",
    f"Keys that differ only after the 255th character are two keys, or refused ({DRAFT}, 2.2)",
    "A column that cuts them makes one key of two: the second payment gets the first one's answer.",
)
END = Check(
    "key-end",
    f"Keys that differ in their last character only are two keys ({DRAFT}, 2.2)",
    "A column that is too short cuts them, and all keys of a client that begin in the same way are one key.",
)
HUGE = Check(
    "very-long-key",
    f"A key of {VERY_LONG} characters is refused or works; it is no server error, and not taken for none ({DRAFT}, 5)",
    "Anything that a client can send must not break the server; and a client with a key believes that it may retry.",
)


async def _missing(lab: Lab) -> None:
    request = lab.request.lacking(lab.settings.key_header.name)
    watch = await lab.watch()
    first, again = await lab.answered(request), await lab.answered(request)
    if is_refusal(first) and is_refusal(again):
        lab.judge(
            MISSING,
            ok=first.status == BAD_REQUEST,
            good="Without a key it is refused with 400.",
            bad=f"Without a key it is refused with {first.status}, not with 400.",
        )
        fault = fault_of(lab.profile, first, is_strict=lab.settings.is_strict)
        lab.judge(MISSING_EXPLAINED, ok=fault is None, good="The refusal says what is missing.", bad=fault or "")
        lab.skipped(NOT_SHARED, "A key is required.")
        return
    lab.skipped(MISSING_EXPLAINED, "No key is required.")
    if not (first.is_success and again.is_success):
        lab.failed(MISSING, f"Without a key it is answered with {first.status}, then with {again.status}.")
        raise Undecided("Requests without a key do not succeed.")
    lab.passed(MISSING, f"Without a key it runs: {first.status}.")
    runs = await lab.runs(watch, [first, again], TWO)
    bad = f"Two requests without a key were not two operations: {runs.how}."
    lab.judge(NOT_SHARED, ok=runs.count == TWO, good=f"Two operations: {runs.how}.", bad=bad)


async def _odd(check: Check, value: str, what: str, lab: Lab) -> None:
    await _judge_odd(lab, check, lab.raw(value), what)


async def _malformed(lab: Lab) -> None:
    await _judge_odd(lab, MALFORMED, lab.raw(f'"{lab.new_key()}'), "A key without its closing quote")


async def _bytes(lab: Lab) -> None:
    value = lab.spelled(f"{lab.new_key()[:-2]}\u00e9\u00ff")
    await _judge_odd(lab, BYTES, lab.raw(value), "Such a key")


async def _twice(lab: Lab) -> None:
    name = lab.settings.key_header.name
    one, two = lab.spelled(lab.new_key()), lab.spelled(lab.new_key())
    request = lab.request.lacking(name).having((name, one), (name, two))
    await _judge_odd(lab, TWICE, request, "A request with two keys")


async def _judge_odd(lab: Lab, check: Check, request: Request, what: str) -> None:
    """Judge what becomes of a key that is none. RFC 9651 lets a server ignore it; but the client that sent it believes
    that its retry is safe, so only one without a character may be taken for none.
    """
    watch = await lab.watch()
    first, again = await lab.answered(request), await lab.answered(request)
    if is_server_error(first) or is_server_error(again):
        status = first.status if is_server_error(first) else again.status
        lab.failed(check, f"{what} is answered with {status}: that is the client's mistake, not the server's.")
    elif is_refusal(first) and is_refusal(again):
        await judge_refusal(lab, check, watch, first, what)
    elif lab.settings.is_strict:
        lab.failed(check, f"{what} is answered with {first.status}; it must be refused (400).")
    elif not (first.is_success and again.is_success):
        lab.failed(check, f"{what} is answered with {first.status}, and then with {again.status}.")
    elif (runs := await lab.runs(watch, [first, again], TWO)).count == TWO:
        if check in {EMPTY, EMPTY_QUOTED}:
            lab.passed(check, f"{what} is ignored: the request runs as one without a key. With --strict that fails.")
        else:
            lab.failed(check, f"{what} is taken for none, and the retry ran again: {runs.how}.")
    elif check is EMPTY:
        lab.failed(check, f"All empty keys are one key: {runs.how}.")
    else:
        lab.passed(check, f"{what} is taken as a key, as it stands. With --strict that fails.")


async def _case(lab: Lab) -> None:
    key, watch = lab.new_key(), await lab.watch()
    lower, upper = await lab.first(lab.keyed(key.lower())), await lab.answered(lab.keyed(key.upper()))
    if upper.status == BAD_REQUEST:
        lab.passed(CASE, "The same letters in upper case are refused with 400.")
        return
    if not upper.is_success:
        lab.failed(CASE, f"The same letters in upper case are answered with {upper.status}: they are another key.")
        return
    runs = await lab.runs(watch, [lower, upper], TWO)
    bad = f"The same letters in upper case got the answer of those in lower case: {runs.how}."
    lab.judge(CASE, ok=runs.count == TWO, good=f"Two operations: {runs.how}.", bad=bad)


async def _spellings(lab: Lab) -> None:
    """The three spellings of one key: as a String, bare, and with a parameter."""
    key = lab.new_key()
    quoted = await lab.answered(lab.raw(f'"{key}"'))
    _judge_quoted(lab, quoted)
    watch = await lab.watch()
    bare = await lab.answered(lab.raw(key))
    if bare.status == BAD_REQUEST:
        lab.judge(
            BARE,
            ok=lab.profile.is_quoted,
            good="A key without quotes is refused with 400.",
            bad="A key without quotes is refused with 400; it is the form that Stripe's clients send.",
        )
    else:
        lab.judge(BARE, ok=bare.is_success, good="It is accepted.", bad=f"It is answered with {bare.status}.")
    if not lab.profile.is_quoted:
        for check in (SAME, PARAMETERS):
            lab.skipped(check, "Stripe's keys are not Strings: the quotes are part of the key.")
        return
    if not quoted.is_success:
        raise Undecided(f"A key in quotes is answered with {quoted.status}.")
    await _judge_same(lab, SAME, watch, (quoted, bare), 'abc after "abc"')
    watch = await lab.watch()
    again = await lab.answered(lab.raw(f'"{key}";v=1'))
    await _judge_same(lab, PARAMETERS, watch, (quoted, again), '"abc";v=1 after "abc"')


def _judge_quoted(lab: Lab, quoted: Answer) -> None:
    if quoted.is_success:
        lab.passed(QUOTED, "It is accepted.")
    elif lab.profile.is_quoted or is_server_error(quoted):
        lab.failed(QUOTED, f"A key in quotes is answered with {quoted.status}.")
    else:
        lab.passed(QUOTED, f"It is refused with {quoted.status}; Stripe's keys have no quotes.")


async def _judge_same(lab: Lab, check: Check, watch: Watch, answers: tuple[Answer, Answer], what: str) -> None:
    """Judge a retry in another spelling. *watch* was taken between the two *answers*."""
    again = answers[1]
    if is_server_error(again):
        lab.failed(check, f"{what} is answered with {again.status}.")
        return
    expected = 0 if lab.has_counter else 1
    runs = await lab.runs(watch, answers, expected)
    if runs.count > expected and lab.settings.is_strict:
        lab.failed(check, f"{what} ran the operation again: {runs.how}.")
    elif runs.count > expected:
        lab.passed(check, f"{what} is another key. With --strict that fails.")
    elif is_refusal(again):
        lab.passed(check, f"{what} is refused with {again.status}: nothing runs twice.")
    else:
        lab.passed(check, f"{what} gets the stored answer; {runs.how}.")


async def _long(lab: Lab) -> None:
    start = "k" * (LONG - 1)
    watch, request = await lab.watch(), lab.keyed(start + _mark(lab))
    one, two = await lab.answered(request), await lab.answered(lab.keyed(start + _mark(lab)))
    if is_server_error(one) or is_server_error(two):
        lab.failed(CUT, f"Keys of more than {LONG} characters are answered with {one.status} and {two.status}.")
    elif is_refusal(one) and is_refusal(two):
        lab.passed(CUT, f"Keys of more than {LONG} characters are refused with {one.status}.")
    elif one.is_success and two.is_success:
        runs = await lab.runs(watch, [one, two], TWO)
        if runs.count != TWO:
            lab.failed(CUT, f"Two keys that differ after character {LONG} were one key: {runs.how}.")
        else:
            await _judge_kept(lab, CUT, request, one, "Such a key")
    else:
        lab.failed(CUT, f"The first such key is answered with {one.status}, the second with {two.status}.")


async def _judge_kept(lab: Lab, check: Check, request: Request, first: Answer, what: str) -> None:
    """Judge whether a key that was accepted guards: its retry must not run."""
    watch = await lab.watch()
    expected = 0 if lab.has_counter else 1
    runs = await lab.runs(watch, [first, await lab.answered(request)], expected)
    bad = f"{what} is taken for none: the retry ran again, {runs.how}."
    lab.judge(check, ok=runs.count == expected, good=f"{what} is accepted, and guards.", bad=bad)


def _mark(lab: Lab) -> str:
    return lab.new_key()[-12:]


async def _longest(lab: Lab) -> None:
    length = lab.settings.key_header.max_length
    key = (lab.new_key() + "k" * length)[:length]
    request = lab.keyed(key)
    answer = await lab.answered(request)
    if answer.is_success:
        await _judge_kept(lab, LONGEST, request, answer, f"A key of {length} characters")
    elif lab.profile.takes_long_keys or answer.status != BAD_REQUEST:
        lab.failed(LONGEST, f"A key of {length} characters is answered with {answer.status}.")
    else:
        lab.passed(LONGEST, f"A key of {length} characters is refused with 400; the draft leaves the limit to the API.")


async def _end(lab: Lab) -> None:
    """Two keys as long as can be, or as UUIDs where longer ones are refused."""
    longest = lab.settings.key_header.max_length
    for length in dict.fromkeys((longest, min(longest, UUID_LENGTH))):
        start = (lab.new_key() + "k" * length)[: length - 1]
        watch, one = await lab.watch(), await lab.answered(lab.keyed(f"{start}1"))
        if one.is_success:
            break
    control(one, f"A key of {length} characters")
    two = await lab.answered(lab.keyed(f"{start}2"))
    if not two.is_success:
        lab.failed(END, f"A key with another last character, of {length}, is answered with {two.status}.")
        return
    runs = await lab.runs(watch, [one, two], TWO)
    bad = f"Two keys of {length} characters that differ in the last were one key: {runs.how}."
    lab.judge(END, ok=runs.count == TWO, good=f"Two keys of {length} characters: {runs.how}.", bad=bad)


async def _huge(lab: Lab) -> None:
    request = lab.keyed(lab.new_key() + "k" * VERY_LONG)
    answer = await lab.answered(request)
    if answer.is_success:
        await _judge_kept(lab, HUGE, request, answer, f"A key of {VERY_LONG} characters")
    else:
        good, bad = f"It is answered with {answer.status}.", f"It is answered with {answer.status}, a server error."
        lab.judge(HUGE, ok=not is_server_error(answer), good=good, bad=bad)


def _not_quoted(lab: Lab) -> str | None:
    return None if lab.profile.is_quoted else "Stripe's keys are not Strings."


def _of(check: Check, value: str, what: str) -> Callable[[Lab], Awaitable[None]]:
    return partial(_odd, check, value, what)


EXPERIMENTS = (
    Experiment(_missing, (MISSING, MISSING_EXPLAINED, NOT_SHARED), creates=2, sends=2),
    Experiment(_of(EMPTY, "", "An empty key"), (EMPTY,), creates=2, sends=2),
    Experiment(_of(EMPTY_QUOTED, '""', 'The key ""'), (EMPTY_QUOTED,), creates=2, sends=2, reason_against=_not_quoted),
    Experiment(_malformed, (MALFORMED,), creates=2, sends=2, reason_against=_not_quoted),
    Experiment(_bytes, (BYTES,), creates=2, sends=2),
    Experiment(_twice, (TWICE,), creates=2, sends=2),
    Experiment(_case, (CASE,), creates=2, sends=2),
    Experiment(_spellings, (QUOTED, BARE, SAME, PARAMETERS), creates=3, sends=3),
    Experiment(_long, (CUT,), creates=2, sends=3),
    Experiment(_longest, (LONGEST,), creates=1, sends=2),
    Experiment(_end, (END,), creates=2, sends=3),
    Experiment(_huge, (HUGE,), creates=1, sends=2),
)
