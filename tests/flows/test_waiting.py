"""A duplicate that waits: what it asks for, in what order, and what it answers, in both modes."""

from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import pytest

from semel.core.commands import Again, Begin, Claim, Command, Complete, Finish, Look, Note, Release, Undo, Verdict
from semel.core.handler import Answered, RunHandler, TooManyWaiters, Wait
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import Found
from semel.core.state import State
from semel.errors import Interrupted
from semel.flows.reply import Reply
from semel.flows.serve import serve
from semel.flows.waiting import LeftWaiting
from tests.flows.test_serve import BEGIN, CREATED, CUT_OFF, HOLD, KEPT, KEY, TOKEN, found, head, refusal, sent
from tests.kit.ports import PORTS, Announce, Tell
from tests.kit.script import Line, Played, play

WAITS = Policy(in_progress="wait", wait=timedelta(seconds=10), max_waiters=7, max_waiters_per_key=3)
WAIT = Wait("alice", KEY, timedelta(seconds=10), 7, 3)
BUSY = found()
ENDED = found(State.COMPLETE, answer=KEPT, lease_is_over=True)
PARKED = found(State.UNKNOWN, lease_is_over=True)
UNDO: Line = (Undo, None)
TURNED_AWAY = (409, "idempotency-key-in-progress", b"1")

#: How each mode asks for the key, and what it does before it waits.
MODES: dict[Any, tuple[type[Command[Any]], list[Line]]] = {"guard": (Claim, []), "atomic": (Begin, [UNDO])}


class Mode:
    """One of the two, as a script has it."""

    def __init__(self, name: Literal["guard", "atomic"]) -> None:
        self.ask, self.let_go = MODES[name]
        self.policy = replace(WAITS, mode=name)
        #: To say when to come back. In atomic mode there is no lease to wait for.
        self.look_up: list[Line] = [(Look, None)] if name == "guard" else []

    def come(self, told: object) -> list[Line]:
        """Come upon an operation in progress, wait, and be told something."""
        return [*BEGIN, *self.look(BUSY), *self.let_go, (Wait, told)]

    def look(self, seen: Found) -> list[Line]:
        return [(self.ask, seen)]

    def play(self, script: list[Line], *more: tuple[bytes, bytes], policy: Policy | None = None) -> Played[Reply]:
        asked = Head("POST", "/charges", b"", (*head().headers, *more))
        return play(serve(PORTS, asked, policy or self.policy, TOKEN), script)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return Mode(request.param)


def is_replay(answer: Answer) -> bool:
    return dict(answer.headers).get(b"idempotent-replayed") == b"true"


def test_what_it_finds_is_told_to_the_others(mode: Mode) -> None:
    """Who waits and finds the answer tells it to the others who wait, before anything else."""
    result = mode.play([*mode.come(Again.AGAIN), *mode.look(ENDED), (Announce, None), *mode.let_go])
    assert WAIT in result.commands
    assert Announce("alice", KEY, ENDED) in result.commands
    assert is_replay(sent(result.result))


def test_what_it_is_told_it_need_not_ask(mode: Mode) -> None:
    """Who is told the answer asks nobody for it, and tells nobody."""
    assert is_replay(sent(mode.play([*mode.come(ENDED), *mode.let_go]).result))


def test_what_it_is_told_it_judges_for_itself(mode: Mode) -> None:
    """What another has found counts for the request that it was found of: with another body, the key is reused."""
    other = replace(ENDED, fingerprint=found(body=b"{}").fingerprint)
    result = mode.play([*mode.come(other), *mode.let_go])
    assert refusal(result.result)[:2] == (422, "idempotency-key-reused")


def test_what_it_is_told_is_no_transaction() -> None:
    """Who is told of an operation that may be taken over, in atomic mode, looks itself: it needs a transaction."""
    mode, dead = Mode("atomic"), found(lease_is_over=True)
    ran: list[Line] = [(RunHandler, Answered(CREATED)), (Finish, Verdict.DONE)]
    result = mode.play([*mode.come(dead), UNDO, *mode.look(dead), (Tell, None), *ran])
    assert sent(result.result) == CREATED
    assert sum(isinstance(command, Begin) for command in result.commands) == 2


def test_it_looks_as_often_as_it_is_told_to(mode: Mode) -> None:
    """While the first still runs, who waits looks and waits again, however often."""
    again: list[Line] = [*mode.look(BUSY), *mode.let_go, (Wait, Again.AGAIN)]
    result = mode.play([*mode.come(Again.AGAIN), *again * 20, *mode.look(ENDED), (Announce, None), *mode.let_go])
    assert result.commands.count(WAIT) == 21


def test_no_room_or_no_time(mode: Mode) -> None:
    """Where there is no room, or the time is over, it is told to come back."""
    assert refusal(mode.play([*mode.come(TooManyWaiters.TOO_MANY), *mode.look_up, *mode.let_go]).result) == TURNED_AWAY


def test_a_refusal_is_told_to_the_others_too(mode: Mode) -> None:
    """What all who wait will be refused for, they are told at once, and not one by one."""
    result = mode.play([*mode.come(Again.AGAIN), *mode.look(PARKED), (Announce, None), *mode.let_go])
    assert Announce("alice", KEY, PARKED) in result.commands
    assert refusal(result.result)[:2] == (409, "outcome-unknown")


def test_whoever_has_gone_lets_go_of_nothing(mode: Mode) -> None:
    """A client that goes while it is kept waiting holds nothing, so nothing is freed."""
    with pytest.raises(LeftWaiting):
        mode.play([*mode.come(Interrupted()), *mode.let_go])


def test_whoever_goes_while_it_looks_lets_go() -> None:
    """A client that goes while its claim is under way may have got the key, which is freed."""
    with pytest.raises(Interrupted):
        Mode("guard").play([*Mode("guard").come(Again.AGAIN), (Claim, Interrupted()), (Release, Verdict.DONE)])


def test_a_key_that_was_freed_is_claimed(mode: Mode) -> None:
    """When the first has freed its key, who waits claims it as anybody would, and runs."""
    ended: type[Command[Verdict]] = Complete if mode.ask is Claim else Finish
    script: list[Line] = [
        *mode.come(Again.AGAIN),
        (mode.ask, HOLD),
        (RunHandler, Answered(CREATED)),
        (ended, Verdict.DONE),
    ]
    result = mode.play(script)
    assert sent(result.result) == CREATED
    last = result.commands[-1]
    assert isinstance(last, Complete | Finish)
    assert last.wakes


def test_a_store_that_fails_meanwhile() -> None:
    """A store that can't be reached when it looks is a 503 to who looks, as to anybody."""
    mode = Mode("guard")
    result = mode.play([*mode.come(Again.AGAIN), (Claim, CUT_OFF), (Tell, None), (Release, Verdict.DONE)])
    assert refusal(result.result)[:2] == (503, "store-unavailable")


def test_a_replay_is_noted_once_for_each(mode: Mode) -> None:
    """In a store that notes replays, each of those who wait is one."""
    script: list[Line] = [*mode.come(ENDED), *mode.let_go, (Note, None)]
    result = play(serve(PORTS, head(), mode.policy, TOKEN, notes_replays=True), script)
    assert isinstance(result.commands[-1], Note)


@pytest.mark.parametrize(
    "said, policy, waits, applied",
    [
        pytest.param(b"wait=3", Policy(), 3, b"wait=3", id="a wish"),
        pytest.param(b"wait=300", Policy(), 10, b"wait=10", id="a wish that is too long"),
        pytest.param(b"wait=3", WAITS, 3, b"wait=3", id="less than the policy has it wait"),
        pytest.param(b"return=minimal", WAITS, 10, None, id="another wish"),
        pytest.param(b"wait=3", replace(WAITS, preferences=()), 10, None, id="a wish that is not met"),
    ],
)
def test_what_the_client_wishes(said: bytes, policy: Policy, waits: int, applied: bytes | None) -> None:
    """A client is kept waiting for as long as it says and the policy lets it, and is told whose word that was."""
    mode = Mode("guard")
    result = mode.play(mode.come(ENDED), (b"prefer", said), policy=policy)
    (wait,) = (each for each in result.commands if isinstance(each, Wait))
    assert wait.patience == timedelta(seconds=waits)
    assert dict(sent(result.result).headers).get(b"preference-applied") == applied


@pytest.mark.parametrize("policy", [Policy(), WAITS], ids=["conflict", "wait"])
def test_a_client_that_will_not_wait(policy: Policy) -> None:
    """Who says that it waits for no time is not kept waiting."""
    mode = Mode("guard")
    result = mode.play([*BEGIN, (Claim, BUSY), *mode.look_up], (b"prefer", b"wait=0"), policy=policy)
    assert refusal(result.result) == TURNED_AWAY
