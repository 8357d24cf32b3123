"""Finishing what no client came back for: what is run, what waits, what is parked."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from semel.core.commands import Again, Complete, FindStuck, Look, Note, Park, Release, TakeOver, Verdict
from semel.core.events import FinishedAbandoned, FinishedAccepted, GaveUpAbandoned, NotLoggedIn, TookOver
from semel.core.handler import Answered, Lost, RunHandler
from semel.core.key import Key
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.record import Hold, Record, Stuck
from semel.core.recovery import Done, Progress, written
from semel.core.upkeep import MAX_ATTEMPTS
from semel.errors import InProgress, StoreUnavailable
from semel.flows.finish import MAX_OPERATIONS, FinishReport, finish, finish_abandoned
from semel.flows.reply import Send
from tests.core.test_record import PROCESSING
from tests.kit.ports import PORTS, FinishOne, Tell
from tests.kit.script import Line, play

LONG = timedelta(hours=1)
PROGRESS = Progress((Done("phase", "ride_created", {"id": 7}),))


def stuck(attempt: int = 1, silent_for: timedelta = LONG, tries: int = 0) -> Stuck:
    hold = Hold("alice", "key-1", attempt, b"d" * 16)
    return Stuck(hold, "rerun", written(PROGRESS), has_request=True, silent_for=silent_for, tries=tries)


def found(*stuck: Stuck) -> tuple[type[Any], object]:
    return FindStuck, stuck


def taken(attempt: int = 2) -> Hold:
    return Hold("alice", "key-1", attempt, b"t" * 16)


def record(hold: Hold) -> Record:
    steps = written(PROGRESS)
    return replace(PROCESSING, attempt=hold.attempt, token=hold.token, steps=steps, recovery_point="ride_created")


def test_finished() -> None:
    """What is stuck and whose time has come is run, told of, and counted by whether it ended."""
    played = play(
        finish_abandoned(PORTS), [found(stuck(), stuck(2)), (FinishOne, 201), (Tell, None), (FinishOne, None)]
    )
    assert played.commands[0] == FindStuck(
        MAX_OPERATIONS, with_request=True, with_no_token=True, with_pending=True, only_due=True
    )
    tell = played.commands[2]
    assert isinstance(tell, Tell)
    assert isinstance(tell.happening, FinishedAbandoned)
    assert (tell.happening.attempt, tell.happening.status) == (2, 201)
    assert played.result == FinishReport(finished=1, failed=1)
    assert str(played.result) == "completed: 1 finished, 1 failed, 0 parked"
    assert not played.result.is_idle


def test_accepted() -> None:
    """What was accepted is told of as such. What was pending is in its first attempt, what was taken over in the next;
    one that another has is not counted.
    """
    pending, taken_over = accepted(stuck(1)), accepted(stuck(2, tries=1))
    ends: list[Line] = [(FinishOne, 201), (Tell, None), (FinishOne, 500), (Tell, None), (FinishOne, Again.AGAIN)]
    played = play(finish_abandoned(PORTS), [found(pending, taken_over, pending), *ends])
    told = [each.happening for each in played.commands if isinstance(each, Tell)]
    assert [type(each) for each in told] == [FinishedAccepted, FinishedAccepted]
    assert [(each.attempt, each.status) for each in told if isinstance(each, FinishedAccepted)] == [(1, 201), (3, 500)]
    assert played.result == FinishReport(finished=2)


def accepted(each: Stuck) -> Stuck:
    return replace(each, is_accepted=True)


def test_nothing_is_due() -> None:
    """Where no operation's time has come, nothing is done."""
    report = play(finish_abandoned(PORTS), [found()]).result
    assert report == FinishReport()
    assert report.is_idle


def test_parked_after_so_many_attempts() -> None:
    """An operation that was tried too often is parked and told of; one that a rival parked is not counted twice."""
    tired = stuck(tries=MAX_ATTEMPTS)
    played = play(
        finish_abandoned(PORTS), [found(tired, tired), (Park, Verdict.DONE), (Tell, None), (Park, Verdict.FENCED)]
    )
    assert played.commands[1] == Park(tired.hold, if_silent=True)
    tell = played.commands[2]
    assert isinstance(tell, Tell)
    assert isinstance(tell.happening, GaveUpAbandoned)
    assert played.result == FinishReport(parked=1)


def test_store_in_trouble_ends_the_run() -> None:
    """Where the store can't be reached the run ends, and says how far it came."""
    error = StoreUnavailable("It is away.")
    report = play(finish_abandoned(PORTS), [found(stuck(), stuck()), (FinishOne, None), (FinishOne, error)]).result
    assert report == FinishReport(failed=1, error=error)
    assert str(report).endswith("ended early: It is away.")


def test_one_is_taken_over_and_run() -> None:
    """The operation is taken over from the hold that was seen, and run on from the steps that are stored then."""
    hold = taken()
    answer = Answer(201)
    played = play(
        finish(PORTS, stuck(), Policy(), b"t" * 16),
        [
            (TakeOver, hold),
            (Tell, None),
            (Look, record(hold)),
            (RunHandler, Answered(answer)),
            (Complete, Verdict.DONE),
        ],
    )
    take_over, tell, _, run, _ = played.commands
    assert isinstance(take_over, TakeOver)
    assert (take_over.seen, take_over.is_abandoned) == (stuck().hold, True)
    assert isinstance(tell, Tell)
    assert isinstance(tell.happening, TookOver)
    assert isinstance(run, RunHandler)
    assert (run.hold, run.progress) == (hold, PROGRESS)
    assert played.result == Send(answer)


def test_a_rival_was_quicker() -> None:
    """Whoever comes second runs nothing."""
    assert play(finish(PORTS, stuck(), Policy(), b"t" * 16), [(TakeOver, Again.AGAIN)]).result is None


@pytest.mark.parametrize("status", [401, 403, 407])
def test_refused_for_want_of_credentials(status: int) -> None:
    """Credentials are not stored, so such a refusal ends nothing: the client, who has them, may still come back. It is
    told, since the app's login may not know of workers.
    """
    hold = taken()
    script = [(TakeOver, hold), (Tell, None), (Look, record(hold)), (RunHandler, Answered(Answer(status)))]
    played = play(finish(PORTS, stuck(), Policy(), b"t" * 16), [*script, (Tell, None), (Release, Verdict.DONE)])
    tell = played.commands[-2]
    assert isinstance(tell, Tell)
    assert tell.happening == NotLoggedIn(Key(hold.key).short(), hold.attempt, status)
    assert played.commands[-1] == Release(hold)


@pytest.mark.parametrize("error", [StoreUnavailable("It is away."), InProgress()])
def test_refused(error: Exception) -> None:
    """What would be refused to a client is only counted here."""
    reply = play(finish(PORTS, stuck(), Policy(), b"t" * 16), [(TakeOver, error)]).result
    assert isinstance(reply, Send)
    assert reply.answer.status in {409, 503}


def test_lost_while_it_ran() -> None:
    """An operation that another worker has taken over meanwhile is that one's to end, and is only counted here."""
    hold = taken()
    script = [(TakeOver, hold), (Tell, None), (Look, record(hold)), (RunHandler, Lost()), (Tell, None), (Note, None)]
    script.append((Look, record(replace(hold, attempt=3))))
    reply = play(finish(PORTS, stuck(), Policy(), b"t" * 16), script).result
    assert isinstance(reply, Send)
    assert reply.answer.status == 409


def test_its_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that this process works on, or may be alive elsewhere after an outage, is not taken over."""
    monkeypatch.setattr(PORTS, "is_kept", lambda _: True)
    assert play(finish(PORTS, stuck(), Policy(), b"t" * 16), []).result is None
