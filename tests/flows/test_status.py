"""Whoever asks what became of an operation: what is looked for, and what he is told."""

from dataclasses import replace
from datetime import timedelta

from semel.core.commands import Again, Look, Now
from semel.core.handler import TooManyWaiters, Wait
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import Record
from semel.core.state import State
from semel.core.status import Name
from semel.errors import StoreUnavailable
from semel.flows.reply import Send
from semel.flows.status import status
from tests.core.test_record import COMPLETE, NOW, PROCESSING
from tests.flows.test_serve import refusal
from tests.kit.ports import PORTS, Announce, NameScope
from tests.kit.script import Line, Played, play

PENDING = replace(PROCESSING, state=State.PENDING, lease_expires_at=None, lease_left=None, is_accepted=True)
UNKNOWN = replace(PENDING, state=State.UNKNOWN)
TOLD = Answer(200, ((b"cache-control", b"no-store"),))
ALICE: Line = (NameScope, "alice")
POLICY = Policy(in_progress="accept", wait=timedelta(seconds=10), max_waiters=7, max_waiters_per_key=3)
WAIT = Wait("alice", "key", timedelta(seconds=5), 7, 3)


def ask(script: list[Line], record: Record = PENDING, prefer: bytes | None = None) -> Played[Send]:
    headers = () if prefer is None else ((b"prefer", prefer),)
    return play(status(PORTS, Head("GET", "/jobs/x", b"", headers), str(Name.of(record)), POLICY, "/jobs"), script)


def expired(record: Record) -> Record:
    return replace(record, retention_left=timedelta(0))


def test_not_ended() -> None:
    """One read by primary key, and 202."""
    played = ask([ALICE, (Look, PENDING)])
    assert played.commands[1] == Look("alice", "key")
    assert played.result.answer.status == 202


def test_ended() -> None:
    """The answer itself, without the mark of a replay: who asks here has not got it yet. No cache may keep it, unless
    the handler said so.
    """
    assert ask([ALICE, (Look, COMPLETE)]).result.answer == TOLD
    public = Answer(200, ((b"cache-control", b"public"),))
    assert ask([ALICE, (Look, replace(COMPLETE, answer=public))]).result.answer == public


def test_an_ordinary_request_whose_process_died() -> None:
    """No worker will go on with it: its owner is told to send it again. One that was accepted is a worker's."""
    dead = replace(PROCESSING, lease_left=timedelta(0))
    assert refusal(ask([ALICE, (Look, dead)]).result)[:2] == (409, "idempotency-key-in-progress")
    assert refusal(ask([ALICE, (Look, dead)], prefer=b"wait=5").result)[0] == 409
    assert ask([ALICE, (Look, replace(dead, is_accepted=True))]).result.answer.status == 202


def test_nobody() -> None:
    """Nobody is not its owner either."""
    assert refusal(ask([(NameScope, None)]).result)[:2] == (404, "operation-not-found")


def test_a_name_that_is_none() -> None:
    """A name that can't be read is not looked for."""
    reply = play(status(PORTS, Head("GET", "/jobs/x", b"", ()), "x", POLICY, "/jobs"), []).result
    assert refusal(reply)[:2] == (404, "operation-not-found")


def test_gone() -> None:
    """A record that is not there is expired where its name says so, and otherwise was never there."""
    assert refusal(ask([ALICE, (Look, None), (Now, PENDING.expires_at)]).result)[:2] == (410, "operation-expired")
    assert refusal(ask([ALICE, (Look, None), (Now, NOW)]).result)[:2] == (404, "operation-not-found")


def test_another_operation_under_the_same_key() -> None:
    """A key that was used again after its retention has another address, and the old one is expired."""
    later = replace(PENDING, created_at=PENDING.expires_at, expires_at=PENDING.expires_at + timedelta(days=1))
    assert refusal(ask([ALICE, (Look, later), (Now, later.created_at)]).result)[0] == 410


def test_kept_for_longer() -> None:
    """The address of an operation stays good when a person has resolved it, and its retention begins anew."""
    resolved = replace(COMPLETE, expires_at=COMPLETE.expires_at + timedelta(days=1))
    assert ask([ALICE, (Look, resolved)], COMPLETE).result.answer == TOLD


def test_past_its_retention() -> None:
    """What is past its retention is expired, though it is still there; one that a worker is at is not given up."""
    for record in (PENDING, COMPLETE):
        assert refusal(ask([ALICE, (Look, expired(record))]).result)[:2] == (410, "operation-expired")
    assert ask([ALICE, (Look, expired(PROCESSING))]).result.answer.status == 202


def test_unknown() -> None:
    """One that is parked is said to be, however long ago."""
    for record in (UNKNOWN, expired(UNKNOWN)):
        assert refusal(ask([ALICE, (Look, record)]).result)[:2] == (409, "outcome-unknown")


def test_a_store_in_trouble() -> None:
    """A store that can't be reached is 503, with a time to come back."""
    code, slug, retry_after = refusal(ask([ALICE, (Look, StoreUnavailable("gone"))]).result)
    assert (code, slug, retry_after) == (503, "store-unavailable", b"2")


def test_waits_as_long_as_is_preferred() -> None:
    """A client that prefers to wait does, and tells the others what it has found."""
    script: list[Line] = [ALICE, (Look, PENDING), (Wait, Again.AGAIN), (Look, COMPLETE), (Announce, None)]
    played = ask(script, prefer=b"wait=5")
    assert played.commands[2] == WAIT
    announced = played.commands[4]
    assert isinstance(announced, Announce)
    assert (announced.found.state, announced.found.answer) == (State.COMPLETE, Answer(200))
    assert played.result.answer == TOLD


def test_waits_no_longer() -> None:
    """When the time is over, or there is no room, it is told how far it is."""
    played = ask([ALICE, (Look, PENDING), (Wait, TooManyWaiters.TOO_MANY), (Look, PENDING)], prefer=b"wait=5")
    assert played.result.answer.status == 202
