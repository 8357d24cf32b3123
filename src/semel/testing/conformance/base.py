"""What the tests of the suite have in common: their fixtures, and commands to begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar
from uuid import uuid4

import pytest

from semel.core.commands import Claim, Complete, Look, TakeOver
from semel.core.message import Answer
from semel.core.record import Hold, Record
from semel.core.state import Event
from semel.testing.conformance.handles import Candidate, Handle, handle

T = TypeVar("T")
Age = Callable[[timedelta], None]

#: Far longer than any test takes, so that only ``age`` can end one.
LEASE = timedelta(minutes=30)
RETENTION = timedelta(hours=24)

#: As long as the longest fingerprint there is.
FINGERPRINT = bytes(range(69))

CREATED = Answer(201, ((b"content-type", b"application/json"), (b"location", b"/charges/1")), b'{"id": 1}')


class Suite:
    """The fixtures of the suite."""

    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        """Give the store under test. Every subclass has its own."""
        raise NotImplementedError("Override the fixture `candidate`, and return a Candidate(open=..., age=...).")

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, candidate: Candidate) -> Iterator[Handle]:
        """The store under test."""
        opened = handle(candidate.open())
        yield opened
        opened.close()

    @pytest.fixture(scope="class")
    @classmethod
    def rival(cls, candidate: Candidate) -> Iterator[Handle]:
        """Another handle on the same data, as another process has one."""
        opened = handle(candidate.open())
        yield opened
        opened.close()

    @pytest.fixture
    def age(self, candidate: Candidate) -> Age:
        """Make every record older."""
        return candidate.age

    @pytest.fixture
    def scope(self) -> str:
        """A scope that no other test uses."""
        return f"scope-{uuid4().hex}"


def claim_on(
    scope: str,
    key: str = "key",
    *,
    fingerprint: bytes = FINGERPRINT,
    lease: timedelta = LEASE,
    retention: timedelta = RETENTION,
) -> Claim:
    """Return a claim with a token of its own."""
    return Claim(scope, key, uuid4().bytes, fingerprint, lease, retention)


def held(store: Handle, claim: Claim) -> Hold:
    """Make *claim*, which nothing stands in the way of."""
    return _of(Hold, store.perform(claim))


def taken_over(store: Handle, claim: Claim, seen: Hold) -> Hold:
    """Take over from *seen*, which nothing stands in the way of."""
    return _of(Hold, store.perform(TakeOver(claim, seen)))


def completed(store: Handle, claim: Claim, answer: Answer = CREATED) -> Hold:
    """Make *claim* and store its *answer*."""
    hold = held(store, claim)
    store.perform(Complete(hold, Event.COMPLETE, answer))
    return hold


def record(store: Handle, scope: str, key: str = "key") -> Record:
    """Look at a record that is there."""
    return _of(Record, store.perform(Look(scope, key)))


def _of(kind: type[T], value: object) -> T:
    assert isinstance(value, kind), f"{kind.__name__} expected, not {value!r}"  # noqa: S101 - a suite of tests
    return value
