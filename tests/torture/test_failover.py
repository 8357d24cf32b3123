"""The short variant of the fail-overs of ``make torture``."""

import os
from contextlib import ExitStack
from datetime import timedelta

import pytest

from semel.core.commands import Claim, Complete, Look, TakeOver, Verdict
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.state import Event
from tests.kit.servers.base import until
from tests.stores.colours import COLOURS, Process, process
from torture.failover import failing_over
from torture.proxied import proxies
from torture.scenario import Plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # Two nodes copy, die and recover, however busy the machine is.

SEED = 8
LEASE = timedelta(minutes=10)  # It does not end here by itself.
ANSWER = Answer(201, (), b"{}")


def silent(_line: str) -> None:
    pass


def claim(key: str) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", LEASE, timedelta(hours=1))


def taken_over(living: Process, held: Hold) -> Hold:
    """Wait until *held* can be taken over, and do so."""
    taken: list[Hold] = []

    def is_mine() -> bool:
        got = living.perform(TakeOver(claim(held.key), held))
        taken.extend([got] if isinstance(got, Hold) else [])
        return bool(taken)

    until(f"{held.key} can be taken over", is_mine)
    return taken[0]


def test_a_fail_over_loses_and_doubles_nothing() -> None:
    """The primary of a synchronous standby is killed under load. Every payment is made once, in either colour, and no
    process is restarted. A claim of before is there on the new primary, where its lock is not: with instant take-over
    it can be taken over at once, and then its first worker is fenced.
    """
    with failing_over("", Plan(SEED, tell=silent), synchronous=True, fsync=False) as run, ExitStack() as stack:
        processes = {
            colour: stack.enter_context(process(colour, f"{run.cluster.url}&takeover=instant")) for colour in COLOURS
        }
        holds = {colour: each.perform(claim(f"held-{colour}")) for colour, each in processes.items()}
        run.bring_about({"postmaster killed": 1}, crowds=2)
        outcome = run.judged()
        assert outcome.violations == ()
        assert outcome.parts == {"postmaster killed": 1}
        for colour, first in processes.items():
            held = holds[colour]
            assert isinstance(held, Hold)
            with process(colour, f"{run.cluster.url}&takeover=instant") as second:
                taken = taken_over(second, held)
                assert taken.attempt == held.attempt + 1
                assert first.perform(Complete(held, Event.COMPLETE, ANSWER)) is not Verdict.DONE
                assert second.perform(Complete(taken, Event.COMPLETE, ANSWER)) is Verdict.DONE
            seen = first.perform(Look("alice", held.key))
            assert seen is not None
            assert seen.attempt == taken.attempt


def test_a_fail_over_behind_proxies_loses_and_doubles_nothing() -> None:
    """The same where a client knows one host: HAProxy, or PgBouncer in front of it. Either may be killed as well."""
    with failing_over("", Plan(SEED, tell=silent), through=proxies, synchronous=True, fsync=False) as run:
        faults = {"postmaster killed": 1, "HAProxy restarted": 1, "PgBouncer killed": 1}
        run.bring_about(faults, crowds=2)
        outcome = run.judged()
        assert outcome.violations == ()
        assert outcome.parts == faults
