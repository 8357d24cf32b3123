"""Every planted mistake is found by the check that is named for it, and a correct API has none."""

import asyncio
import re
import subprocess
from collections.abc import Iterator

import pytest

from semel.verify.message import Request
from semel.verify.model import Verdict
from semel.verify.runner import CHECKS
from tests.verify.asking import ACCOUNT, bounds, told, verdicts, verified
from tests.verify.planted import Planted, served


def failing(bug: str) -> Request:
    """A request that the handler takes, and answers with 500."""
    headers = (ACCOUNT, ("Content-Type", "application/json"))
    return Request("POST", f"/{bug}/payments", headers, b'{"amount": 666}')


FOUND_BY = {
    "no-lock": "race-8",
    "look-then-claim": "race-2",
    "500-on-race": "race-no-server-error",
    "no-fingerprint": "other-body-refused",
    "fingerprint-when-finished": "other-body-in-flight",
    "fingerprint-of-the-beginning": "large-body-end",
    "numbers-are-doubles": "large-number",
    "two-keys-are-none": "two-keys",
    "malformed-is-none": "malformed-key",
    "longest-is-none": "longest-key",
    "long-is-none": "long-key-not-cut",
    "very-long-is-none": "very-long-key",
    "query-ignored": "other-query",
    "path-ignored": "other-path",
    "method-ignored": "other-method",
    "user-agent-counts": "retry-other-headers",
    "mismatch-is-409": "other-body-status",
    "mismatch-forgets-first": "other-body-keeps-first",
    "lower-cased-key": "key-case",
    "key-cut": "long-key-not-cut",
    "key-cut-short": "key-end",
    "empty-key-shared": "empty-key",
    "malformed-is-500": "malformed-key",
    "missing-key-shared": "missing-key-not-shared",
    "body-is-the-key": "new-key-runs",
    "json-only-replay": "replay-body",
    "replay-is-200": "replay-status",
    "headers-lost": "replay-headers",
    "cookies-replayed": "replay-no-cookies",
    "date-replayed": "replay-date",
    "forgets-after-a-replay": "replay-many",
    "forgets-in-a-second": "replay-later",
    "patch-ignored": "patch-guarded",
    "large-unguarded": "large-body",
    "chunked-unguarded": "retry-chunked",
    "scope-ignored": "other-principal",
    "guard-before-login": "no-replay-without-credentials",
    "busy-is-425": "busy-status",
    "busy-without-body": "busy-explained",
    "mismatch-with-a-wrong-problem": "other-body-explained",
    "busy-kept": "busy-not-kept",
    "claims-before-body": "half-a-request",
    "gives-up-with-the-client": "client-hangs-up",
}

#: Found where the letter of the standards is asked for, and no failure elsewhere.
STRICTLY = {
    "opaque-keys": "quoted-is-bare",
    "two-keys-joined": "two-keys",
    "empty-key-passes": "empty-key",
    "no-retry-after": "busy-retry-after",
    "mismatch-without-problem": "other-body-explained",
}
#: Verifications at once: more would disturb each other's races.
AT_ONCE = 4
#: Found in the profile of Stripe only.
IN_STRIPES_FORM = [("key-burnt-by-invalid", "invalid-frees-key"), ("errors-not-kept", "error-replayed")]


@pytest.fixture(scope="module")
def planted() -> Planted:
    return Planted()


@pytest.fixture(scope="module")
def url(planted: Planted) -> Iterator[str]:
    with served(planted, dates=False) as found:
        yield found


async def test_planted(url: str) -> None:
    """Every mistake is found by the check that is named for it."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def found(bug: str) -> dict[str, str]:
        async with turns:
            return verdicts(await verified(f"{url}/{bug}", FOUND_BY[bug]))

    seen = await asyncio.gather(*map(found, FOUND_BY))
    assert dict(zip(FOUND_BY, seen, strict=True)) == {bug: {check: "fail"} for bug, check in FOUND_BY.items()}


@pytest.mark.parametrize("bug", STRICTLY)
async def test_the_letter_of_the_standard(url: str, bug: str) -> None:
    """What the standards only recommend, or leave open, fails where their letter is asked for, and passes elsewhere."""
    assert verdicts(await verified(f"{url}/{bug}", STRICTLY[bug], is_strict=True)) == {STRICTLY[bug]: "fail"}
    assert verdicts(await verified(f"{url}/{bug}", STRICTLY[bug])) == {STRICTLY[bug]: "pass"}


def ran(line: str) -> list[str]:
    """Return the programs that a line for a shell runs, in order; none is run."""
    script = f"curl() {{ echo curl; }}; sleep() {{ echo sleep; }}; {line}"
    return subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True, text=True).stdout.split()


async def test_a_late_retry_can_be_repeated(url: str) -> None:
    """The line for a shell of a retry that came late begins with the operation that it repeats, and waits as long."""
    report = await verified(f"{url}/forgets-in-a-second", "replay-status", "replay-later")
    (late,) = (each for each in report.findings if each.check.name == "replay-later")
    assert late.verdict is Verdict.FAIL
    assert ran(late.curl)[:4] == ["curl", "curl", "sleep", "curl"]
    assert re.search(r"^2\. \[.* s later\]$", late.sent, re.MULTILINE)


@pytest.mark.parametrize("bug, check", IN_STRIPES_FORM)
async def test_planted_into_stripes_form(url: str, bug: str, check: str) -> None:
    """What Stripe demands, and the IETF draft leaves open, is a failure in the profile of Stripe only."""
    assert verdicts(await verified(f"{url}/{bug}", check, profile="stripe", failing=failing(bug))) == {check: "fail"}


async def test_correct(url: str, planted: Planted) -> None:
    """A correct API fails no check, all that apply to it are decided, and no more is created than was said."""
    report = await verified(f"{url}/correct", failing=failing("correct"), is_strict=True)
    assert told(report, Verdict.FAIL) == {}
    assert told(report, Verdict.INCONCLUSIVE) == {}
    assert len(report.findings) > 60
    names = {each.check.name for each in report.findings} | {each.check.name for each in report.not_run}
    assert names == {each.name for each in CHECKS}
    assert len(planted.shops["correct"].payments) <= bounds[-1][0]


async def test_nothing_is_replaced_unasked(url: str) -> None:
    """PUT and PATCH may replace what is there, so they are sent only where that is allowed."""
    report = await verified(f"{url}/correct", "other-method", "other-body-refused", "patch-*", may_replace=False)
    assert {each.check.name for each in report.not_run} == {"other-method", "patch-guarded"}
    assert not [each for each in report.findings if "PUT" in each.sent or "PATCH" in each.sent]


async def test_a_request_that_is_refused(url: str) -> None:
    """Where the request is refused, the report says what the API says."""
    plain = Request("POST", "/payments", (("Content-Type", "application/json"),), b"{}")
    report = await verified(f"{url}/correct-too", "request-works", count=None, request=plain)
    assert 'It says: "login"' in told(report, Verdict.INCONCLUSIVE)["request-works"]


async def test_keys_ignored(url: str, planted: Planted) -> None:
    """An API that ignores keys fails most checks, and what it creates is within the bound that was said for that."""
    report = await verified(f"{url}/keys-ignored", skip=["replay-date"])
    assert len(told(report, Verdict.FAIL)) > 25
    assert len(planted.shops["keys-ignored"].payments) <= bounds[-1][1]


async def test_correct_without_a_counter(url: str) -> None:
    """Without a counter, what answers name is compared; the report says so, and no check fails."""
    report = await verified(f"{url}/correct-too", count=None, skip=["replay-date"])
    assert told(report, Verdict.FAIL) == {}
    assert set(told(report, Verdict.INCONCLUSIVE)) == {"client-hangs-up"}
    assert report.evidence.startswith("no counter: Location is compared")


async def test_limits(url: str) -> None:
    """A server that refuses what comes too fast is not accused of anything by that. Where it lets one in at a time,
    there was no race, and it does not pass for that either: a mistake of its lock could not be seen.
    """
    report = await verified(f"{url}/few-at-once", "race-*", "busy-*", "other-body-in-flight")
    undecided = {each.name for each in CHECKS if each.name.startswith(("race-", "busy-"))} - {"race-one-answer"}
    assert told(report, Verdict.FAIL) == {}
    assert set(told(report, Verdict.INCONCLUSIVE)) == {*undecided, "other-body-in-flight"}


async def test_deterministic(url: str) -> None:
    """A handler with the same answer to every operation proves nothing without a counter, and that is said."""
    report = await verified(f"{url}/deterministic", "replay-*", "race-*", count=None, skip=["replay-date"])
    assert set(verdicts(report).values()) == {"inconclusive"}
    assert all("varies" in each.reason for each in report.findings)
    counted = await verified(f"{url}/deterministic", "replay-*", "race-*", skip=["replay-date"])
    assert set(verdicts(counted).values()) == {"pass"}


#: What a server with effects that come late is asked; and what is found where it has another mistake, too.
LATELY = ("replay-one-effect", "key-case", "race-2", "no-late-effects")
LATE = {
    "late-effects": set(),
    "late-no-lock": {"race-2"},
    "late-retries": {"replay-one-effect"},
}


async def test_late_effects(url: str) -> None:
    """Effects that the counter shows after the answer are waited for: a correct API fails nothing, a doubled effect is
    found, and it is found by the check that has sent for it.
    """
    reports = await asyncio.gather(*(verified(f"{url}/{bug}", *LATELY, settle=0.05) for bug in LATE))
    for (bug, wrong), report in zip(LATE.items(), reports, strict=True):
        seen = verdicts(report)
        assert {name for name, each in seen.items() if each == "fail"} == wrong, (bug, told(report, Verdict.FAIL))
        assert set(seen.values()) <= {"pass", "fail"}, (bug, told(report, Verdict.INCONCLUSIVE))


async def test_effects_that_come_when_nothing_is_sent(url: str) -> None:
    """An effect that no check has counted is told at the end, whichever checks were asked for."""
    report = await verified(f"{url}/late-after-replays", "replay-many", settle=0.05)
    assert verdicts(report) == {"replay-many": "pass", "no-late-effects": "inconclusive"}
    assert "+1" in told(report, Verdict.INCONCLUSIVE)["no-late-effects"]
    assert report.verdict is Verdict.INCONCLUSIVE
