"""The queue of a batcher: whose turn it is, and how much goes out at once."""

from __future__ import annotations

from datetime import timedelta

import pytest

from semel.core.commands import Claim, Complete, Look, Now, Renew, Resolution, TakeOver
from semel.core.message import Answer, Head, Request
from semel.core.record import Hold
from semel.core.state import Event
from semel.stores import fair_queue
from semel.stores.fair_queue import MAX_BATCH, MAX_BATCH_BYTES, FairQueue, scope_of, size_of

LEASE = timedelta(seconds=30)
HOLD = Hold("alice", "key", 1, bytes(16))
ANSWER = Answer(200, (), b"twelve bytes")


def claim(size: int | None, scope: str = "alice") -> Claim:
    request = None if size is None else Request(Head("POST", "/", b"", ()), bytes(size), "alice")
    return Claim(scope, "key", bytes(16), b"", LEASE, LEASE, request=request)


def queue(*asked: str, size: int = 0) -> FairQueue[str]:
    """Commands that wait; the scope of each is its first letter."""
    made: FairQueue[str] = FairQueue()
    for name in asked:
        made.append(claim(size, scope=name[0]), name)
    return made


def test_scopes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each scope goes first, then the second of each; of one scope they go in the order in which they came."""
    monkeypatch.setattr(fair_queue, "MAX_BATCH", 3)
    waiting = queue("a1", "a2", "a3", "b1", "c1", "b2")
    assert waiting.take() == ["a1", "b1", "c1"]
    waiting.append(Look("c", "key"), "c2")
    assert waiting.take() == ["a2", "b2", "c2"]
    assert waiting.take() == ["a3"]
    assert not waiting
    assert waiting.take() == []


def test_turns_go_on_over_batches() -> None:
    """A scope that was served in one batch is behind the others in the next."""
    waiting = queue(*[f"a{number}" for number in range(2 * MAX_BATCH)])
    assert len(waiting.take()) == MAX_BATCH
    waiting.append(Look("b", "key"), "b1")
    assert "b1" in waiting.take()[:2]


def test_large_ones_go_alone() -> None:
    """What is larger than a batch may be goes by itself, and what follows does not wait for more than one of them."""
    waiting = queue("a1", "a2", size=2 * MAX_BATCH_BYTES)
    waiting.append(claim(10, scope="b"), "b1")
    assert [waiting.take() for _ in range(3)] == [["a1"], ["b1"], ["a2"]]


def test_batches_are_bounded_in_bytes() -> None:
    """Those of middle size go together as long as they fit, and none is put off for ever by smaller ones."""
    waiting = queue(*[f"a{number}" for number in range(6)], size=MAX_BATCH_BYTES // 2)
    assert [waiting.take() for _ in range(4)] == [["a0", "a1"], ["a2", "a3"], ["a4", "a5"], []]


def test_first_is_in_the_next_batch() -> None:
    """Whoever is to carry the next batch is the first of it, whatever comes meanwhile."""
    waiting = queue("a1", "a2", "b1")
    assert waiting.take() == ["a1", "a2", "b1"]  # all of them: there are no turns to take
    assert waiting.first is None
    waiting = queue("b1", "a1")
    assert waiting.first == "b1"
    waiting.append(claim(0, scope="c"), "c1")
    assert waiting.first == "b1"
    waiting.remove("b1")
    waiting.remove("not there")
    assert waiting.first == "a1"
    assert sorted(waiting) == ["a1", "c1"]
    waiting.clear()
    assert not waiting


def test_what_a_command_weighs() -> None:
    """The bodies that a command carries are what counts; and it is its record's scope that has the turn."""
    assert [size_of(claim(size)) for size in (None, 0, 7)] == [0, 0, 7]
    assert size_of(TakeOver(claim(7), HOLD)) == 7
    assert size_of(Complete(HOLD, Event.COMPLETE, ANSWER)) == size_of(Resolution(HOLD, ANSWER)) == 12
    assert size_of(Complete(HOLD, Event.COMPLETE, Answer(200, (), None))) == size_of(Now()) == 0
    for command in (claim(7), TakeOver(claim(7), HOLD), Complete(HOLD, Event.COMPLETE, ANSWER), Look("alice", "key")):
        assert scope_of(command) == "alice"
    assert scope_of(Renew(((HOLD, LEASE),))) == scope_of(Now()) == ""
