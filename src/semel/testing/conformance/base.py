"""What the tests of the suite share: fixtures, and helpers that make commands. It tests nothing by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from semel.core.commands import Claim, Command, Complete, Look, Now, Park, Reap, Save, TakeOver, Verdict
from semel.core.message import Answer, Head, Request
from semel.core.record import AfterRetention, Found, Hold, OnCrash, Record
from semel.core.recovery import Begun, Done, Progress, read_back
from semel.core.state import Event
from semel.testing.conformance.handles import Candidate, Handle, handle

T = TypeVar("T")
Age = Callable[[timedelta], None]

#: Far longer than any test takes, so that only ``age`` can end one.
LEASE = timedelta(minutes=30)
RETENTION = timedelta(hours=24)

#: As long as the longest fingerprint there is.
FINGERPRINT = bytes(range(37))

#: The steps of an operation in the middle, with a result of odd text.
RIDE = Progress((Done("phase", "ride_created", {"id": 7, "name": "Zoë 租 \"'\\"}),))
#: The same, and an effect with an unknown outcome.
IN_DOUBT = RIDE.plus(Begun("charge_created"))

#: A request to be stored, with everything that is hard to store.
REQUEST = Request(
    Head("POST", "/rides/%2F/Zoë", b"a=1&a=2&%ff", ((b"content-type", b"text/plain"), (b"x-odd", b"\xe9\xff"))),
    b"\x00\xff'\\",
    "Zoë's account",
)

#: The reaper's answer for an operation that did not end.
ABANDONED = Answer(408, ((b"content-type", b"application/problem+json"),), b'{"status": 408}')

CREATED = Answer(201, ((b"content-type", b"application/json"), (b"location", b"/charges/1")), b'{"id": 1}')


class Suite:
    """The fixtures of the suite."""

    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        """Return the store under test. Every subclass defines its own."""
        raise NotImplementedError("Override the fixture `candidate`, and return a Candidate(open=..., age=...).")

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, candidate: Candidate) -> Iterator[Handle]:
        """The store under test."""
        opened = handle(candidate.open(), has_transactions=candidate.has_transactions)
        yield opened
        opened.close()

    @pytest.fixture(scope="class")
    @classmethod
    def rival(cls, candidate: Candidate) -> Iterator[Handle]:
        """Another handle on the same data, as another process has one."""
        opened = handle(candidate.open(), has_transactions=candidate.has_transactions)
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

    @staticmethod
    def _is_fenced(store: Handle, scope: str, command: Command[Verdict], key: str = "key") -> None:
        before = record(store, scope, key)
        verdict = store.perform(command)
        assert verdict is Verdict.FENCED, f"{command} is {verdict}"  # noqa: S101 - a suite of tests
        assert same_but_for_the_clock(before, record(store, scope, key))  # noqa: S101 - as above


def claim_on(
    scope: str,
    key: str = "key",
    *,
    fingerprint: bytes = FINGERPRINT,
    lease: timedelta = LEASE,
    retention: timedelta = RETENTION,
    on_crash: OnCrash = "rerun",
    after_retention: AfterRetention = "delete",
    made_at: datetime | None = None,
    request: Request | None = None,
) -> Claim:
    """Return a claim with a token of its own."""
    return Claim(
        scope, key, uuid4().bytes, fingerprint, lease, retention, on_crash, after_retention, request, made_at=made_at
    )


def accepted_on(scope: str, key: str = "key", *, request: Request = REQUEST, **more: Any) -> Claim:
    """Return a claim that only stores its request, to be run by a worker."""
    return replace(claim_on(scope, key, request=request, **more), is_accepted=True)


def held(store: Handle, claim: Claim) -> Hold:
    """Make *claim*, which must succeed."""
    return _of(Hold, store.perform(claim))


def taken_over(store: Handle, claim: Claim, seen: Hold) -> Hold:
    """Take over from *seen*, which must succeed."""
    return _of(Hold, store.perform(TakeOver(claim, seen)))


def worker_of(store: Handle, seen: Hold) -> Hold:
    """Begin what was *seen*, or take it over, as workers do; it must succeed."""
    return _of(Hold, store.perform(TakeOver(claim_on(seen.scope, seen.key), seen, is_abandoned=True)))


def completed(store: Handle, claim: Claim, answer: Answer = CREATED) -> Hold:
    """Make *claim* and store its *answer*."""
    hold = held(store, claim)
    store.perform(Complete(hold, Event.COMPLETE, answer))
    return hold


def record(store: Handle, scope: str, key: str = "key") -> Record:
    """Read a record that exists."""
    return _of(Record, store.perform(Look(scope, key)))


def found(store: Handle, scope: str, key: str = "key") -> Found:
    """Claim a key that is in use, and return what is found."""
    return _of(Found, store.perform(claim_on(scope, key)))


def saved(store: Handle, hold: Hold, progress: Progress = RIDE) -> Hold:
    """Store the steps of *hold*, which must succeed."""
    before = read_back(record(store, hold.scope, hold.key).steps)
    verdict = store.perform(Save(hold, progress, before))
    assert verdict is Verdict.DONE  # noqa: S101 - a suite of tests
    return hold


def parked(store: Handle, claim: Claim, progress: Progress = IN_DOUBT) -> Hold:
    """Make *claim*, and park it at an effect with an unknown outcome."""
    hold = saved(store, held(store, claim), progress)
    verdict = store.perform(Park(hold))
    assert verdict is Verdict.DONE  # noqa: S101 - a suite of tests
    return hold


def same_but_for_the_clock(one: Record, other: Record) -> bool:
    """Whether two reads of a record show the same, apart from the time between them."""
    return one == replace(other, lease_left=one.lease_left, retention_left=one.retention_left)


def held_as(claim: Claim) -> Hold:
    """Return the hold that *claim* is given on a new key."""
    return Hold(claim.scope, claim.key, 1, claim.token)


def timeless(outcome: object) -> object:
    """Return what a claim found, without the values that change with the clock."""
    return replace(outcome, retention_left=None) if isinstance(outcome, Found) else outcome


def reap_everything(store: Handle, age: Age) -> None:
    """Clear what other tests have left, so that the reaped records can be counted."""
    store.perform(Now())  # opens it, so that there is something to age
    age(10 * RETENTION)
    while store.perform(Reap(1000, ABANDONED)).total:
        pass


def _of(kind: type[T], value: object) -> T:
    assert isinstance(value, kind), f"{kind.__name__} expected, not {value!r}"  # noqa: S101 - a suite of tests
    return value
