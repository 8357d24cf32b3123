"""Report mode: what is told of a request, and that its handler runs whatever that is."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from semel.core.body_hash import BodyHash
from semel.core.commands import Again, Claim, Complete, Now, Release, TakeOver, Verdict
from semel.core.events import PersonalKey, Reported, ReportFailed
from semel.core.fingerprint import Subject, fingerprint_of
from semel.core.key import Key
from semel.core.message import Answer, Head, Headers
from semel.core.outcome import Outcome
from semel.core.policy import Policy
from semel.core.record import Found, Hold
from semel.core.scope import reported
from semel.core.state import Event, State
from semel.errors import BodyIncomplete, Interrupted, ShuttingDown, StoreNotReady, StoreUnavailable
from semel.flows.guard import CLAIM_TRIES
from semel.flows.reply import Done, Reply
from semel.flows.serve import serve
from tests.kit.ports import PORTS, NameScope, ReadBody, RunUnguarded, Tell
from tests.kit.script import Line, Played, play

POLICY = Policy(enforcement="report")
NOW = datetime(2025, 1, 1, tzinfo=UTC)
TOKEN = b"t" * 16
OTHER_TOKEN = b"o" * 16
BODY = b'{"amount": 5}'
KEY = "key-1"
SHORT = Key(KEY).short()
SCOPE = reported("alice")
HOLD = Hold(SCOPE, KEY, 1, TOKEN)
HEIR = Hold(SCOPE, KEY, 2, TOKEN)
BY_TOKEN = Hold(SCOPE, KEY, 0, TOKEN)
TOMBSTONE = Answer(201, (), None)
UNREACHABLE = StoreUnavailable("no route", was_sent=True)

BEGIN: list[Line] = [(NameScope, "alice"), (ReadBody, BODY)]
TOLD: Line = (Tell, None)
RUN: list[Line] = [(RunUnguarded, 201), TOLD]


def head(key: str | None = KEY, *more: tuple[bytes, bytes]) -> Head:
    headers: Headers = () if key is None else ((b"idempotency-key", key.encode()),)
    return Head("POST", "/orders/17", b"", (*headers, *more))


def found(state: State = State.PROCESSING, *, body: bytes = BODY, token: bytes = OTHER_TOKEN, **times: bool) -> Found:
    recipe = POLICY.fingerprint
    assert recipe is not None
    answer = TOMBSTONE if state is State.COMPLETE else None
    fingerprint = recipe.of(Subject("POST", "/orders/17", b"", head().headers, body))
    is_over, is_expired = times.get("lease_is_over", False), times.get("is_expired", False)
    return Found(state, 1, token, fingerprint, answer, lease_is_over=is_over, is_expired=is_expired)


def played(script: list[Line], policy: Policy = POLICY, key: str | None = KEY) -> Played[Reply]:
    return play(serve(PORTS, head(key), policy, TOKEN), script)


def told(result: Played[Reply]) -> list[Any]:
    return [each.happening for each in result.commands if isinstance(each, Tell)]


def assert_ran(result: Played[Reply], outcome: Outcome, key: str | None = SHORT, *, hold: Hold | None = None) -> None:
    """The handler ran once, of its own accord, and one outcome was told."""
    assert result.result == Done()
    assert [each for each in told(result) if isinstance(each, Reported)] == [Reported(key, outcome, "POST /orders/*")]
    runs = [each for each in result.commands if isinstance(each, RunUnguarded)]
    assert runs == [RunUnguarded(hold, POLICY.lease if hold else None)]


def test_first_sight() -> None:
    """A new key is claimed, apart from all that is enforced, and ends with a record that keeps no answer."""
    result = played([*BEGIN, (Claim, HOLD), *RUN, (Complete, Verdict.DONE)])
    assert_ran(result, "new", hold=HOLD)
    assert result.commands[-1] == Complete(HOLD, Event.COMPLETE, TOMBSTONE)


def test_nobody_is_bothered() -> None:
    """What report mode claims leaves no request to finish, no unknown outcome to resolve and nothing past retention."""
    policy = Policy(enforcement="report", on_crash="refuse", late="refuse", store_request=True)
    result = played([*BEGIN, (Claim, HOLD), *RUN, (Complete, Verdict.DONE)], policy)
    claim = result.commands[2]
    assert isinstance(claim, Claim)
    assert (claim.scope, claim.on_crash, claim.after_retention, claim.request) == (SCOPE, "rerun", "delete", None)
    assert (claim.lease, claim.retention) == (policy.lease, policy.retention)


@pytest.mark.parametrize(
    "status, ending",
    [
        (201, Complete(HOLD, Event.COMPLETE, TOMBSTONE)),
        (422, Complete(HOLD, Event.COMPLETE, Answer(422, (), None))),
        (429, Release(HOLD)),
        (503, Complete(HOLD, Event.FAIL, Answer(503, (), None))),
        (None, Complete(HOLD, Event.FAIL, Answer(500, (), None))),
    ],
)
@pytest.mark.parametrize("verdict", [Verdict.DONE, Verdict.FENCED])
def test_endings(status: int | None, ending: Any, verdict: Verdict) -> None:
    """A key is ended or freed as the same status would have it; an exception counts as a server error."""
    result = played([*BEGIN, (Claim, HOLD), (RunUnguarded, status), TOLD, (type(ending), verdict)])
    assert result.commands[-1] == ending
    assert result.result == Done()


def test_server_errors_by_policy() -> None:
    """Where the policy frees server errors, so does its report."""
    policy = Policy(enforcement="report", server_errors="release")
    result = played([*BEGIN, (Claim, HOLD), (RunUnguarded, None), TOLD, (Release, Verdict.DONE)], policy)
    assert result.commands[-1] == Release(HOLD)


@pytest.mark.parametrize(
    "there, outcome",
    [
        (found(State.COMPLETE, lease_is_over=True), "replay"),
        (found(), "conflict"),
        (found(body=b"{}"), "mismatch"),
        (found(State.COMPLETE, body=b"{}", lease_is_over=True), "mismatch"),
        (found(State.UNKNOWN, lease_is_over=True), "unknown"),
    ],
)
def test_duplicates_run_again(there: Found, outcome: Outcome) -> None:
    """A duplicate is told of by what it would have got, and runs as it does today: nothing is written of it."""
    assert_ran(played([*BEGIN, (Claim, there), *RUN]), outcome)


def test_late_retry() -> None:
    """After retention a key is new; with late="refuse" it would have been refused."""
    there = found(State.COMPLETE, lease_is_over=True, is_expired=True)
    script: list[Line] = [*BEGIN, (Claim, there), (TakeOver, HOLD), *RUN, (Complete, Verdict.DONE)]
    assert_ran(played(script), "new", hold=HOLD)
    assert_ran(played([*BEGIN, (Claim, there), *RUN], Policy(enforcement="report", late="refuse")), "expired")


def test_after_a_crash() -> None:
    """A run that died is told of as one that would be run again, or, where the policy says so, refused."""
    there = found(lease_is_over=True)
    script: list[Line] = [*BEGIN, (Claim, there), (TakeOver, HEIR), *RUN, (Complete, Verdict.DONE)]
    assert_ran(played(script), "rerun", hold=HEIR)
    assert_ran(played([*BEGIN, (Claim, there), *RUN], Policy(enforcement="report", on_crash="refuse")), "unknown")


def test_old_keys() -> None:
    """A UUIDv7 from before the retention would be refused with late="refuse"; the key is freed again."""
    old = "01890a5d-ac96-774b-bcce-b302099a8057"
    hold = Hold(SCOPE, old, 1, TOKEN)
    policy = Policy(enforcement="report", late="refuse")
    result = played([*BEGIN, (Claim, hold), (Now, NOW), (Release, Verdict.DONE), *RUN], policy, old)
    assert_ran(result, "expired", Key(old).short())
    made = Key(old).made_at
    assert made is not None
    young: list[Line] = [*BEGIN, (Claim, hold), (Now, made + timedelta(hours=1)), *RUN, (Complete, Verdict.DONE)]
    assert_ran(played(young, policy, old), "new", Key(old).short(), hold=hold)


def test_lost_reply() -> None:
    """A claim whose reply was lost is found by its token."""
    mine = found(token=TOKEN)
    script: list[Line] = [*BEGIN, (Claim, Again.AGAIN), (Claim, mine), *RUN, (Complete, Verdict.DONE)]
    assert_ran(played(script), "new", hold=HOLD)


def test_rivals_for_ever() -> None:
    """A claim that keeps meeting rivals would have been told to wait."""
    assert_ran(played([*BEGIN, *[(Claim, Again.AGAIN)] * CLAIM_TRIES, *RUN]), "conflict")


# Before the claim


def test_no_key() -> None:
    """A request without a key is asked nothing, and is counted: as missing where one is required."""
    assert_ran(played(RUN, key=None), "keyless", None)
    assert_ran(played(RUN, Policy(enforcement="report", required=True), None), "missing", None)


def test_bad_key() -> None:
    """A key that can't be read would have been refused."""
    assert_ran(played(RUN, key="a,b"), "malformed", None)


def test_personal_key() -> None:
    """A key that looks like an e-mail address is warned about, as it will be."""
    mail = "ada@example.org"
    hold = Hold(SCOPE, mail, 1, TOKEN)
    result = played([TOLD, *BEGIN, (Claim, hold), *RUN, (Complete, Verdict.DONE)], key=mail)
    assert told(result)[0] == PersonalKey(Key(mail).short())


@pytest.mark.parametrize(
    "script, outcome",
    [
        ([(NameScope, None)], "unscoped"),
        ([(NameScope, ShuttingDown())], "shutting_down"),
        ([(NameScope, "alice"), (ReadBody, None)], "too_large"),
        ([(NameScope, "alice"), (ReadBody, BodyIncomplete())], "incomplete"),
    ],
)
def test_refused_before_the_claim(script: list[Line], outcome: Outcome) -> None:
    """What would have been refused before the claim runs all the same."""
    assert_ran(played([*script, *RUN]), outcome, None)


def test_keys_of_bodies() -> None:
    """A key that is made of the body is looked up like any other; a body that makes none would have been refused."""
    recipe = BodyHash(fields=["amount"], window=timedelta(minutes=10))
    policy = Policy(enforcement="report", key_from=recipe)
    asked = head(None, (b"content-type", b"application/json"))
    made = recipe.key("alice", Subject("POST", "/orders/17", b"", asked.headers, BODY))
    hold = Hold(SCOPE, made.value, 1, TOKEN)
    result = play(serve(PORTS, asked, policy, TOKEN), [*BEGIN, (Claim, hold), *RUN, (Complete, Verdict.DONE)])
    assert_ran(result, "new", made.short(), hold=hold)
    claim = result.commands[2]
    assert isinstance(claim, Claim)
    place = fingerprint_of(None, Subject("POST", "/orders/17", b"", (), b""))
    assert (claim.key, claim.fingerprint, claim.retention) == (made.value, place, recipe.window)
    assert_ran(played([*BEGIN, *RUN], policy, None), "missing", None)
    there = Found(State.COMPLETE, 1, OTHER_TOKEN, place, TOMBSTONE, lease_is_over=True, is_expired=False)
    assert_ran(play(serve(PORTS, asked, policy, TOKEN), [*BEGIN, (Claim, there), *RUN]), "replay", made.short())


# What fails


@pytest.mark.parametrize("error", [UNREACHABLE, StoreNotReady()], ids=["unreachable", "not ready"])
@pytest.mark.parametrize("before", [[], [(Claim, found(lease_is_over=True))]], ids=["claim", "take-over"])
def test_store_fails(before: list[Line], error: Exception) -> None:
    """Without the store the handler runs as ever, nothing is tried twice, and somebody is told."""
    asked: Line = (TakeOver, error) if before else (Claim, error)
    result = played([*BEGIN, *before, asked, TOLD, *RUN])
    assert_ran(result, "failed")
    assert told(result)[0] == ReportFailed(SHORT, "store", str(error))


def test_store_fails_at_the_end() -> None:
    """A store that fails when the answer has left is told of, and that is all."""
    result = played([*BEGIN, (Claim, HOLD), *RUN, (Complete, UNREACHABLE), TOLD])
    assert_ran(result, "new", hold=HOLD)
    assert told(result)[-1] == ReportFailed(SHORT, "store", "no route")


@pytest.mark.parametrize(
    "error, reason", [(KeyError("x-account"), "'x-account'"), (ZeroDivisionError(), "ZeroDivisionError")]
)
def test_scope_function_fails(error: Exception, reason: str) -> None:
    """A scope function that raises changes no answer, and is told of."""
    result = played([(NameScope, error), TOLD, *RUN])
    assert_ran(result, "failed", None)
    assert told(result)[0] == ReportFailed(None, "application", reason)


def test_scope_function_is_wrong() -> None:
    """A scope that can't be one is told of with what it must be."""
    result = played([(NameScope, 7.5), TOLD, *RUN])
    assert_ran(result, "failed", None)
    assert re.match("scope must return a string", told(result)[0].reason)


# The caller goes away


@pytest.mark.parametrize("script", [[(NameScope, Interrupted())], [(NameScope, "alice"), (ReadBody, Interrupted())]])
def test_interrupted_before_the_claim(script: list[Line]) -> None:
    """A caller that goes before the claim has nothing run behind its back."""
    with pytest.raises(Interrupted):
        played(script)


def test_interrupted_while_the_handler_runs() -> None:
    """A handler that is cancelled is not run again behind, and what it did is not known: its lease ends the record."""
    with pytest.raises(Interrupted):
        played([*BEGIN, (Claim, HOLD), (RunUnguarded, Interrupted()), TOLD])


@pytest.mark.parametrize("endpoint", ["POST /orders/{number}", None])
def test_endpoint(endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route's template is told, which is known once the handler has run; where that fails, it is left out."""

    def asked() -> str:
        assert endpoint, "a framework's mistake"
        return endpoint

    monkeypatch.setattr(PORTS, "endpoint", asked)
    assert told(played(RUN, key=None)) == [Reported(None, "keyless", "POST /orders/*", endpoint)]


@pytest.mark.parametrize("answer", [Verdict.DONE, UNREACHABLE], ids=["done", "failed"])
def test_interrupted_while_claiming(answer: object) -> None:
    """A caller that goes while the key is claimed has it freed behind, and nothing run."""
    flow = serve(PORTS, head(), POLICY, TOKEN)
    with pytest.raises(Interrupted):
        play(flow, [*BEGIN, (Claim, Interrupted()), (Release, answer)])
