"""The checker sees each thing that must not be, in evidence that is made up here."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from torture import checker
from torture.checker import Charge, Effect, Event, Verdict, check

KEY = "pay-1"


def sent(form: str) -> Event:
    return Event("sent", KEY, form)


def paid(form: str, attempt: int = 1, **more: Any) -> Event:
    return Event("answer", KEY, form, 201, json.dumps({"attempt": attempt}), **more)


def refused(form: str, code: str, **more: Any) -> Event:
    return Event("answer", KEY, form, 409, json.dumps({"code": code}), **more)


def accepted() -> Event:
    return Event("answer", KEY, "accepted", 202)


def row(step: str, attempt: int = 1) -> Effect:
    return Effect(KEY, step, attempt, "worker 1")


def kinds(verdict: Verdict) -> set[str]:
    return {violation.kind for violation in verdict.violations}


RIDE = [row("ride")]
STEPS = [row("ride"), row("receipt")]
CHARGED = [Charge("a", KEY, is_first=True)]
ANOTHERS = Event("answer", KEY, "phase", 201, json.dumps({"attempt": 1, "key": "pay-2"}))


def test_the_checker_imports_nothing_of_what_it_judges() -> None:
    """It needs the standard library only: a library can't be its own witness."""
    tree = ast.parse(Path(checker.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} == {
        "__future__",
        "collections",
        "dataclasses",
        "json",
        "typing",
    }


@pytest.mark.parametrize(
    "effects, charges, form", [([row("paid")], [], "guard"), (RIDE, [], "phase"), (STEPS, CHARGED, "steps")]
)
def test_what_was_done_once_is_right(effects: list[Effect], charges: list[Charge], form: str) -> None:
    """One of each row, one charge and one answer are no violation."""
    verdict = check(effects, charges, [sent(form), paid(form)])
    assert (verdict.violations, verdict.keys, verdict.answered) == ((), 1, 1)


def test_a_charge_may_be_asked_for_twice_under_one_key() -> None:
    """A provider that honours keys charges once: the second call is a retry."""
    charges = [*CHARGED, Charge("a", KEY, is_first=False)]
    assert not check(STEPS, charges, [sent("steps"), paid("steps", attempt=2)]).violations


@pytest.mark.parametrize(
    "effects, charges, events, kind",
    [
        pytest.param([*RIDE, row("ride", 2)], [], [sent("phase"), paid("phase")], "doubled", id="a row twice"),
        pytest.param([*RIDE, row("ride", 2)], [], [sent("phase")], "doubled", id="a row twice, and no answer"),
        pytest.param([*RIDE, row("paid")], [], [sent("phase"), paid("phase")], "doubled", id="a row of another form"),
        pytest.param(RIDE, [], [sent("phase"), paid("phase"), paid("phase", 2)], "doubled", id="two answers"),
        pytest.param(
            STEPS,
            [*CHARGED, Charge("b", KEY, is_first=True)],
            [sent("steps"), paid("steps")],
            "doubled",
            id="two charges",
        ),
        pytest.param(RIDE, CHARGED, [sent("phase"), paid("phase")], "doubled", id="a charge of another form"),
        pytest.param(RIDE, [], [sent("phase"), ANOTHERS], "wrong", id="another request's answer"),
        pytest.param([Effect("other", "ride", 1, "")], [], [], "doubled", id="a row that no request asked for"),
        pytest.param([], [], [sent("phase"), paid("phase")], "lost", id="an answer and no row"),
        pytest.param(RIDE, CHARGED, [sent("steps"), paid("steps")], "lost", id="an answer and half the rows"),
        pytest.param(STEPS, [], [sent("steps"), paid("steps")], "lost", id="an answer and no charge"),
        pytest.param([], CHARGED, [sent("accepted"), accepted()], "lost", id="accepted, and never done"),
        pytest.param(STEPS, [], [sent("accepted"), accepted()], "lost", id="accepted, and never charged"),
        pytest.param(STEPS, CHARGED, [sent("accepted"), accepted()], "stuck", id="accepted for ever"),
        pytest.param(RIDE, [], [sent("phase")], "stuck", id="no answer"),
        pytest.param(RIDE, [], [sent("phase"), refused("phase", "in-progress")], "stuck", id="busy for ever"),
        pytest.param(RIDE, [], [sent("phase"), refused("phase", "outcome-unknown")], "stuck", id="it can be known"),
    ],
)
def test_each_violation_is_found(effects: list[Effect], charges: list[Charge], events: list[Event], kind: str) -> None:
    """Evidence of what must not be is a violation of its kind, in a line that a person can read."""
    found = [each for each in check(effects, charges, events).violations if each.kind == kind]
    assert found
    assert str(found[0]).startswith(f"{kind}: ")


def test_a_plain_handlers_outcome_may_be_unknown() -> None:
    """A client that is told so has its final answer, whether or not the row is there; but never two."""
    events = [sent("guard"), refused("guard", "outcome-unknown")]
    assert kinds(check([], [], events)) == {"idle"}
    assert kinds(check([row("paid")], [], events)) == {"idle"}
    assert kinds(check([row("paid")] * 2, [], events)) == {"doubled", "idle"}


def test_what_was_accepted_is_not_made_yet() -> None:
    """A 202 is no payment; the answer that a client gets later is one."""
    later = [sent("accepted"), accepted(), sent("accepted"), paid("accepted", 2, is_replay=True)]
    verdict = check(STEPS, CHARGED, later, ("accepted", "take-over", "replay"))
    assert not verdict.violations
    assert verdict.answered == 1
    assert not check(STEPS, CHARGED, later[:2]).answered


def test_a_run_without_progress_proves_nothing() -> None:
    """No evidence at all is a violation, and so is a run in which no payment was made."""
    assert kinds(check([], [], [])) == {"idle"}


def test_what_had_to_happen_and_did_not_is_a_violation() -> None:
    """A run that wants a take-over, a replay, a fenced zombie and a resolved unknown fails where one is missing."""
    wanted: tuple[checker.Sight, ...] = ("take-over", "replay", "fenced zombie", "resolved unknown")
    plain = check(RIDE, [], [sent("phase"), paid("phase")], wanted)
    assert [violation.why for violation in plain.violations] == [f"never happened: {sight}" for sight in wanted]
    events = [
        *[sent("phase"), refused("phase", "in-progress", has_run=True)],
        *[sent("phase"), Event("swallowed", KEY, "phase"), paid("phase", 2, has_run=True)],
        *[sent("phase"), paid("phase", 2, is_replay=True)],
    ]
    verdict = check([row("ride", 2)], [], events, wanted)
    assert not verdict.violations
    assert {sight: verdict.seen[sight] for sight in wanted} == dict.fromkeys(wanted, 1)


def test_a_replay_resolves_nothing() -> None:
    """An unknown COMMIT counts as resolved only when the very request that met it was answered."""
    events = [sent("phase"), Event("swallowed", KEY, "phase"), sent("phase"), paid("phase", is_replay=True)]
    assert not check(RIDE, [], events).seen["resolved unknown"]
