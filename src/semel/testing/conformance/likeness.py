"""Any sequence of commands gets the reference store's answers: a search by Hypothesis for one that does not."""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from semel.core.commands import (
    Browse,
    Claim,
    Command,
    Complete,
    Discard,
    FindStuck,
    Look,
    Mark,
    Park,
    ReadRequest,
    ReadTrail,
    Reap,
    Release,
    Renew,
    Resolution,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Unpark,
)
from semel.core.message import Answer
from semel.core.record import AfterRetention, Found, Hold, Milestone, OnCrash, Record
from semel.core.recovery import Progress
from semel.core.state import Event
from semel.stores.memory import MemoryStore
from semel.testing.conformance.base import ABANDONED, IN_DOUBT, REQUEST, RIDE, Suite, reap_everything, timeless
from semel.testing.conformance.handles import Candidate, Handle

#: Every duration is a multiple of this. The real clock advances by far less in a test, so it can't change a result.
TICK = timedelta(minutes=10)
#: The tolerance between two running clocks.
MOMENT = TICK / 2

#: Before and after any store's clock.
LONG_AGO, FAR_AHEAD = datetime(2020, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC)

KEYS = ("a", "b", "c")
Sight = tuple[Claim, Hold]
ticks = st.integers(min_value=1, max_value=4).map(lambda count: count * TICK)
progress = st.sampled_from([Progress(), RIDE, IN_DOUBT])
#: More than there ever is.
ALL = 100_000
answers = st.builds(
    Answer,
    st.integers(min_value=200, max_value=599),
    st.lists(st.tuples(st.sampled_from([b"link", b"etag"]), st.binary(max_size=3)), max_size=3).map(tuple),
    st.none() | st.binary(max_size=8),
)


class Twins(RuleBasedStateMachine):
    """Two stores that get the same commands, and must give the same answers."""

    #: Everything that was ever claimed or taken over, and by what claim: zombies included.
    sights: Bundle[Sight] = Bundle("sights")

    def __init__(self, store: Handle, candidate: Candidate) -> None:
        """Compare *store* to a reference with a clock that only tests move."""
        super().__init__()
        self._store = store
        self._age = candidate.age
        self._now = datetime(2025, 1, 1, tzinfo=UTC)
        self._reference = MemoryStore(clock=lambda: self._now)
        self._scope = f"twins-{uuid4().hex}"
        # The records of earlier examples would be reaped together with this one's.
        reap_everything(store, candidate.age)

    @rule(
        target=sights,
        key=st.sampled_from(KEYS),
        fingerprint=st.binary(max_size=2),
        lease=ticks,
        more=ticks,
        on_crash=st.sampled_from(["rerun", "refuse"]),
        after_retention=st.sampled_from(["delete", "strip"]),
        has_request=st.booleans(),
        is_accepted=st.booleans(),
        made_at=st.sampled_from([None, LONG_AGO, FAR_AHEAD]),
    )
    def claim(
        self,
        *,
        key: str,
        fingerprint: bytes,
        lease: timedelta,
        more: timedelta,
        on_crash: OnCrash,
        after_retention: AfterRetention,
        has_request: bool,
        is_accepted: bool,
        made_at: datetime | None,
    ) -> Sight:
        """Claim a key; a hold that is found can be used by later commands."""
        request = REQUEST if has_request or is_accepted else None
        token, retention = uuid4().bytes, lease + more
        return self._claim(
            Claim(
                self._scope,
                key,
                token,
                fingerprint,
                lease,
                retention,
                on_crash,
                after_retention,
                request,
                is_accepted,
                made_at,
            )
        )

    @rule(target=sights, sight=sights)
    def claim_again(self, sight: Sight) -> Sight:
        """Repeat a claim, as after a lost reply."""
        return self._claim(sight[0])

    @rule(target=sights, by=sights, of=sights, is_fresh=st.booleans(), is_abandoned=st.booleans())
    def take_over(self, *, by: Sight, of: Sight, is_fresh: bool, is_abandoned: bool) -> Any:
        """Take a record over, also with an outdated hold, also twice with one claim; or as workers do."""
        claim, seen = by[0], of[1]
        claim = replace(claim, key=seen.key, token=uuid4().bytes if is_fresh else claim.token)
        got = self._both(TakeOver(claim, seen, is_abandoned))
        return (claim, got) if isinstance(got, Hold) else multiple()

    @rule(sight=sights, event=st.sampled_from([Event.COMPLETE, Event.FAIL]), answer=answers)
    def complete(self, sight: Sight, event: Event, answer: Answer) -> None:
        """Store an answer under any hold there ever was."""
        self._both(Complete(sight[1], event, answer))

    @rule(sight=sights, knows=st.booleans())
    def release(self, sight: Sight, knows: bool) -> None:  # noqa: FBT001 - Hypothesis names it
        """Free a key under any hold there ever was."""
        self._both(Release(sight[1] if knows else replace(sight[1], attempt=0)))

    @rule(sight=sights, steps=progress, before=progress)
    def save(self, sight: Sight, steps: Progress, before: Progress) -> None:
        """Save steps under any hold there ever was, on top of any there might be."""
        self._both(Save(sight[1], steps, before))

    @rule(sight=sights, percent=st.integers(min_value=0, max_value=100), note=st.none() | st.text(max_size=3))
    def mark(self, sight: Sight, percent: int, note: str | None) -> None:
        """Say how far it is, under any hold there ever was."""
        self._both(Mark(sight[1], Milestone(percent / 100, note)))

    @rule(sight=sights, if_silent=st.booleans())
    def park(self, sight: Sight, if_silent: bool) -> None:  # noqa: FBT001 - Hypothesis names it
        """Park any hold there ever was."""
        self._both(Park(sight[1], if_silent=if_silent))

    @rule(sight=sights, steps=progress, answer=answers, how=st.sampled_from([Sweep, Discard, Unpark, Resolution]))
    def look_after(self, sight: Sight, steps: Progress, answer: Answer, how: type[Command[Any]]) -> None:
        """Do what the sweeper or an operator does, to any hold there ever was."""
        hold = sight[1]
        commands = (Sweep(hold), Discard(hold), Unpark(hold, steps), Resolution(hold, answer))
        self._both(next(command for command in commands if isinstance(command, how)))

    @rule(target=sights, sight=sights)
    def follow(self, sight: Sight) -> Any:
        """Read the current holder of a record, if there is one."""
        record = self._reference.perform(Look(self._scope, sight[1].key))
        if record is None:
            return multiple()
        return sight[0], Hold(self._scope, record.key, record.attempt, record.token)

    @rule()
    def reap(self) -> None:
        """Reap all that is due: the order of two that expire together is up to each store."""
        self._both(Reap(ALL, ABANDONED))

    @rule(sight=sights)
    def read(self, sight: Sight) -> None:
        """Read what is kept of any hold there ever was."""
        self._both(ReadRequest(sight[1]))
        one, other = (each.perform(Settle(sight[1])) for each in (self._store, self._reference))
        assert _timeless(one) == _timeless(other)

    @rule(with_request=st.booleans(), with_no_token=st.booleans(), with_pending=st.booleans())
    def find_stuck(self, *, with_request: bool, with_no_token: bool, with_pending: bool) -> None:
        """Find the same stuck records."""
        command = FindStuck(ALL, with_request=with_request, with_no_token=with_no_token, with_pending=with_pending)
        one, other = (
            {
                (each.hold, each.on_crash, each.steps, each.has_request, each.tries, each.is_accepted)
                for each in store.perform(command)
                if each.hold.scope == self._scope
            }
            for store in (self._store, self._reference)
        )
        assert one == other

    @rule(leases=st.lists(st.tuples(sights, ticks), max_size=4))
    def renew(self, leases: list[tuple[Sight, timedelta]]) -> None:
        """Renew any holds there ever were."""
        # A process holds a record once, so no renewal names one twice.
        once = {hold.key: (hold, lease) for (_, hold), lease in leases}
        self._both(Renew(tuple(once.values())))

    @rule(duration=ticks)
    def age(self, duration: timedelta) -> None:
        """Let time pass."""
        self._age(duration)
        self._now += duration

    def teardown(self) -> None:
        """Check that both have the same audit trail."""
        for key in KEYS:
            one, other = (
                [(line.attempt, line.event, line.detail) for line in each.perform(ReadTrail(self._scope, key))]
                for each in (self._store, self._reference)
            )
            assert one == other

    @invariant()
    def look_alike(self) -> None:
        """Both show the same records."""
        for key in KEYS:
            one, other = (each.perform(Look(self._scope, key)) for each in (self._store, self._reference))
            assert _timeless(one) == _timeless(other)
            assert _near(one, other)
        for state in {each.state for each in self._reference.perform(Browse(9))}:
            browse = Browse(9, scope=self._scope, state=state)
            one_page, other_page = (
                {each.key for each in store.perform(browse)} for store in (self._store, self._reference)
            )
            assert one_page == other_page

    def _both(self, command: Command[Any]) -> Any:
        said, wanted = self._store.perform(command), self._reference.perform(command)
        alike = timeless(said) == timeless(wanted)
        assert alike, f"{command} is answered {said}, and by the reference {wanted}"
        if isinstance(said, Found) and said.retention_left is not None:
            assert abs(said.retention_left - wanted.retention_left) < MOMENT
        return wanted

    def _claim(self, claim: Claim) -> Sight:
        got: Hold | Found = self._both(claim)
        return claim, Hold(claim.scope, claim.key, got.attempt, got.token)


def _timeless(record: Record | None) -> tuple[object, ...]:
    if record is None:
        return ()
    return (
        record.state,
        record.attempt,
        record.token,
        record.fingerprint,
        record.recovery_point,
        record.steps,
        record.answer,
        record.is_expired,
        record.is_stuck,
        record.is_accepted,
        record.milestone,
    )


def _near(one: Record | None, other: Record | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = [(one.lease_left, other.lease_left), (one.retention_left, other.retention_left)]
    return all(
        mine is theirs if mine is None or theirs is None else abs(mine - theirs) < MOMENT for mine, theirs in pairs
    )


class Likeness(Suite):
    """Against the reference."""

    def test_likeness_to_the_reference(self, store: Handle, candidate: Candidate) -> None:
        """No sequence of commands is found with answers that differ from those of the reference store."""
        run_state_machine_as_test(
            lambda: Twins(store, candidate),  # type: ignore[arg-type]  # it is documented to take a factory
            settings=settings(
                max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
