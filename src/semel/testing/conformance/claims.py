"""Guarantees 1, 4 and 7: a claim is one atomic step, and returns what it found."""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from datetime import timedelta
from operator import attrgetter
from typing import Any

import pytest

from semel.core.commands import Claim, Complete, Look
from semel.core.record import Found, Hold
from semel.core.state import Event, State
from semel.testing.conformance.base import (
    CREATED,
    FINGERPRINT,
    LEASE,
    RETENTION,
    Age,
    Suite,
    claim_on,
    completed,
    found,
    held,
    timeless,
)
from semel.testing.conformance.handles import Handle, race

CROWD = 50
#: Two readings of a store's clock in one test are no further apart than this.
MOMENT = timedelta(minutes=1)
MANY = 500

ODD_KEYS = (
    "it's",
    'a "quoted" key',
    "back\\slash",
    "\\x00",
    "100%",
    "%s %(key)s :key $1 ?",
    "under_score",
    "'; DROP TABLE semel_keys; --",
    "{a,b}",
    "NULL",
    " ",
    "~" * 1024,
)
ODD_SCOPES = ("Zoë", "租户-七", "🂡", "a\tPOST /charges", "it's", "%", "x" * 1024)


class Claims(Suite):
    """Claims."""

    def test_new_key_is_held(self, store: Handle, scope: str) -> None:
        """A claim on a new key is a hold: attempt 1, under the claim's own token."""
        claim = claim_on(scope)
        assert store.perform(claim) == Hold(scope, "key", 1, claim.token)

    def test_processing_key_is_found(self, store: Handle, rival: Handle, scope: str) -> None:
        """A claim on a key in progress finds who holds it, and that the lease runs."""
        hold = held(store, claim_on(scope))
        found = Found(State.PROCESSING, 1, hold.token, FINGERPRINT, None, lease_is_over=False, is_expired=False)
        for each in (store, rival):
            assert timeless(each.perform(claim_on(scope, fingerprint=b"another"))) == found

    def test_dead_holders_key_is_found(self, store: Handle, scope: str, age: Age) -> None:
        """A claim finds that a lease has run out; it does not take the record over by itself."""
        hold = held(store, claim_on(scope))
        age(LEASE)
        found = Found(State.PROCESSING, 1, hold.token, FINGERPRINT, None, lease_is_over=True, is_expired=False)
        assert timeless(store.perform(claim_on(scope))) == found
        assert timeless(store.perform(claim_on(scope))) == found

    @pytest.mark.parametrize(
        "event, state", [(Event.COMPLETE, State.COMPLETE), (Event.FAIL, State.FAILED)], ids=["complete", "failed"]
    )
    def test_ended_key_is_found(self, store: Handle, rival: Handle, scope: str, event: Event, state: State) -> None:
        """A claim on a key that has ended finds the answer, and no holder."""
        hold = held(store, claim_on(scope))
        store.perform(Complete(hold, event, CREATED))
        found = Found(state, 1, hold.token, FINGERPRINT, CREATED, lease_is_over=True, is_expired=False)
        for each in (store, rival):
            assert timeless(each.perform(claim_on(scope))) == found

    def test_expired_key_is_found(self, store: Handle, scope: str, age: Age) -> None:
        """A record past its retention is found as expired, until it is taken over or reaped."""
        hold = completed(store, claim_on(scope))
        age(RETENTION)
        found = Found(State.COMPLETE, 1, hold.token, FINGERPRINT, CREATED, lease_is_over=True, is_expired=True)
        assert timeless(store.perform(claim_on(scope))) == found

    def test_how_long_an_answer_is_kept(self, store: Handle, scope: str, age: Age) -> None:
        """A claim that finds an answer gets its remaining time, by the store's clock; negative when it is over."""
        completed(store, claim_on(scope))
        age(timedelta(hours=1))
        for left in (RETENTION - timedelta(hours=1), -timedelta(hours=1)):
            seen = found(store, scope)
            assert seen.retention_left is not None
            assert left - MOMENT < seen.retention_left <= left
            assert seen.is_expired == (left < timedelta(0))
            age(RETENTION)

    def test_nothing_ends_before_its_time(self, store: Handle, scope: str, age: Age) -> None:
        """A lease and a retention that have a minute left are not over."""
        store.perform(claim_on(scope, retention=LEASE))
        age(LEASE - timedelta(minutes=1))
        found = store.perform(claim_on(scope))
        assert isinstance(found, Found)
        assert (found.lease_is_over, found.is_expired) == (False, False)

    def test_crowd_on_one_new_key(self, store: Handle, scope: str) -> None:
        """Of 50 claims on one new key at once, exactly one is a hold."""
        self._one_of(store.perform_all([claim_on(scope) for _ in range(CROWD)]))

    def test_rivals_on_one_new_key(self, store: Handle, rival: Handle, scope: str) -> None:
        """Of two processes that claim a new key at the same moment, one gets it, each time."""
        for number in range(20):
            self._one_of(race([(each, claim_on(scope, f"key {number}")) for each in (store, rival)]))

    def test_crowd_of_distinct_keys(self, store: Handle, scope: str) -> None:
        """500 claims on 500 keys at once: every one is a hold, under its own token."""
        claims = [claim_on(scope, f"key {number}") for number in range(MANY)]
        wanted = [Hold(scope, claim.key, 1, claim.token) for claim in claims]
        assert store.perform_all(claims) == wanted

    def test_crowd_of_old_and_new_keys(self, store: Handle, scope: str) -> None:
        """Every caller gets its own result, though new, running and ended keys are claimed together."""
        completed(store, claim_on(scope, "ended"))
        held(store, claim_on(scope, "running"))
        keys = ["ended", "running", "new"] * 20
        got = store.perform_all(
            [claim_on(scope, f"{key} {number}" if key == "new" else key) for number, key in enumerate(keys)]
        )
        states = {"ended": State.COMPLETE, "running": State.PROCESSING}
        for key, each in zip(keys, got, strict=True):
            assert isinstance(each, Hold) if key == "new" else isinstance(each, Found) and each.state == states[key]

    def test_claim_whose_reply_was_lost(self, store: Handle, rival: Handle, scope: str) -> None:
        """A claim that is repeated after a lost reply finds its own token."""
        claim = claim_on(scope)
        held(store, claim)
        for each in (store, rival):
            found = each.perform(claim)
            assert isinstance(found, Found)
            assert (found.token, found.attempt) == (claim.token, 1)

    def test_same_claim_twice_at_once(self, store: Handle, scope: str) -> None:
        """The same claim twice in one batch is one hold: the other result, whatever it is, has the same token."""
        claim = claim_on(scope)
        got = store.perform_all([claim, claim])
        assert len({each for each in got if isinstance(each, Hold)}) <= 1
        assert {each.token for each in got if isinstance(each, (Hold, Found))} == {claim.token}

    def test_scopes_never_meet(self, store: Handle, scope: str) -> None:
        """One key in two scopes is two records, ended and answered apart."""
        first, second = claim_on(f"{scope} a"), claim_on(f"{scope} b")
        completed(store, first)
        assert isinstance(store.perform(second), Hold)
        assert store.perform(Look(f"{scope} c", "key")) is None

    def test_scope_and_key_do_not_run_together(self, store: Handle, scope: str) -> None:
        """Scope "ab" with key "c" is not scope "a" with key "bc"."""
        held(store, claim_on(f"{scope}ab", "c"))
        held(store, claim_on(f"{scope}a", "bc"))

    def test_case_counts(self, store: Handle, scope: str) -> None:
        """Keys and scopes are compared byte for byte: case, trailing spaces and accents count."""
        for claim in (
            claim_on(scope, "a"),
            claim_on(scope, "A"),
            claim_on(scope, "a "),
            claim_on(scope + "é", "a"),
            claim_on(scope + "e\N{COMBINING ACUTE ACCENT}", "a"),
        ):
            held(store, claim)

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys(self, store: Handle, scope: str, key: str) -> None:
        """A key is opaque: quotes, backslashes, percent signs and SQL are only characters."""
        self._there_and_back(store, claim_on(scope, key))

    @pytest.mark.parametrize("odd", ODD_SCOPES)
    def test_odd_scopes(self, store: Handle, scope: str, odd: str) -> None:
        """A scope is any text up to 1,024 characters."""
        self._there_and_back(store, claim_on((scope + odd)[-1024:]))

    @pytest.mark.parametrize("fingerprint", [b"", b"\x00\xff'\\", FINGERPRINT], ids=["none", "odd", "longest"])
    def test_fingerprints_come_back(self, store: Handle, scope: str, fingerprint: bytes) -> None:
        """The fingerprint is stored with the claim, whatever its bytes; an empty one, too."""
        held(store, claim_on(scope, fingerprint=fingerprint))
        found = store.perform(claim_on(scope))
        assert isinstance(found, Found)
        assert found.fingerprint == fingerprint

    def test_another_token_finds_nothing_changed(self, store: Handle, scope: str) -> None:
        """A claim that came too late has changed nothing."""
        held(store, claim_on(scope))
        before = store.perform(Look(scope, "key"))
        store.perform_all([claim_on(scope, fingerprint=b"another") for _ in range(5)])
        after = store.perform(Look(scope, "key"))
        all_but_the_clock = attrgetter(
            "created_at", "lease_expires_at", "expires_at", "fingerprint", "token", "attempt"
        )
        assert all_but_the_clock(after) == all_but_the_clock(before)

    @staticmethod
    def _one_of(got: list[Any]) -> None:
        assert sum(isinstance(each, Hold) for each in got) == 1

    @staticmethod
    def _there_and_back(store: Handle, claim: Claim) -> None:
        hold = completed(store, claim)
        assert (hold.scope, hold.key) == (claim.scope, claim.key)
        found = store.perform(claim_on(claim.scope, claim.key))
        assert isinstance(found, Found)
        assert found.answer == CREATED
        looked = store.perform(Look(claim.scope, claim.key))
        assert looked is not None
        assert (looked.scope, looked.key) == (claim.scope, claim.key)
