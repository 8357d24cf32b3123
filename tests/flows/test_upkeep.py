"""Sweeping, reaping and resolving: what is asked for, in what order, and what is counted."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from semel.core.commands import (
    Discard,
    FindStuck,
    Note,
    Park,
    Reap,
    Reaped,
    ReapTrail,
    Resolution,
    RotateAnswers,
    Rotated,
    Survey,
    Surveyed,
    Sweep,
    Unpark,
    Verdict,
)
from semel.core.events import StoreSurveyed, Swept, SweptUnknown
from semel.core.key import Key
from semel.core.message import Answer
from semel.core.record import Hold, OnCrash, Record, Stuck
from semel.core.recovery import Begun, Done, Progress, written
from semel.core.state import State
from semel.core.upkeep import MAX_BATCH
from semel.errors import StoreNotReady, StoreUnavailable
from semel.flows import upkeep
from semel.flows.upkeep import (
    ABANDONED,
    MAX_SURVEYED,
    ReapReport,
    SurveyReport,
    SweepReport,
    hold_of,
    reap,
    release,
    resolve_applied,
    resolve_not_applied,
    rotate,
    survey,
    sweep,
)
from tests.kit.ports import PORTS, Tell
from tests.kit.script import Line, play

SHORT = Key("key-1").short()
TOKEN = b"t" * 16
HOLD = Hold("alice", "key-1", 3, TOKEN)
SILENT = timedelta(seconds=40)
RETENTION = timedelta(days=90)

CUT_SHORT = StoreUnavailable("time-out", was_sent=True)

CREATED = Done("phase", "ride_created", {"id": 7})
CHARGING = Begun("charge_created")


def stuck(key: str = "key-1", on_crash: OnCrash = "rerun", *, has_request: bool = False) -> Stuck:
    return Stuck(Hold("alice", key, 3, TOKEN), on_crash, None, has_request, SILENT)


def parked(*steps: Done | Begun) -> Record:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    progress = Progress(steps)
    return Record(
        scope="alice",
        key="key-1",
        state=State.UNKNOWN,
        attempt=3,
        token=TOKEN,
        fingerprint=b"",
        recovery_point=progress.recovery_point,
        steps=written(progress),
        answer=None,
        created_at=now,
        lease_expires_at=None,
        completed_at=None,
        expires_at=now,
        lease_left=None,
        retention_left=timedelta(0),
    )


# Sweeping


def test_nothing_to_sweep() -> None:
    """Where nothing is stuck, one look is all."""
    played = play(sweep(PORTS, 5), [(FindStuck, ())])
    assert played.commands == (FindStuck(5),)
    assert played.result == SweepReport()
    assert played.result.is_idle


def test_sweeping_frees_and_tells() -> None:
    """A dead worker's key is freed if it is still dead, and people are told, without the key itself."""
    script: list[Line] = [(FindStuck, (stuck(),)), (Sweep, Verdict.DONE), (Tell, None)]
    played = play(sweep(PORTS, 5), script)
    assert played.commands[1:] == (Sweep(HOLD), Tell(Swept(SHORT, 3, 40.0)))
    assert played.result == SweepReport(freed=1)
    assert not played.result.is_idle


def test_sweeping_parks_and_tells() -> None:
    """What may not run again is parked, if its worker is still silent, and people are told."""
    script: list[Line] = [(FindStuck, (stuck(on_crash="refuse"),)), (Park, Verdict.DONE), (Tell, None)]
    played = play(sweep(PORTS, 5), script)
    assert played.commands[1:] == (Park(HOLD, if_silent=True), Tell(SweptUnknown(SHORT, 3)))
    assert played.result == SweepReport(parked=1)


@pytest.mark.parametrize("on_crash, command", [("rerun", Sweep), ("refuse", Park)])
def test_sweeping_second(on_crash: OnCrash, command: type) -> None:
    """Whoever finds that another was quicker tells nobody and counts nothing."""
    played = play(sweep(PORTS, 5), [(FindStuck, (stuck(on_crash=on_crash),)), (command, Verdict.FENCED)])
    assert played.result == SweepReport()


def test_sweeping_leaves_requests_to_the_completer() -> None:
    """With a completer at work, what it can finish is left to it; without one, it is freed."""
    found = (stuck(has_request=True),)
    assert play(sweep(PORTS, 5, has_completer=True), [(FindStuck, found)]).result == SweepReport(left=1)
    freeing: list[Line] = [(FindStuck, found), (Sweep, Verdict.DONE), (Tell, None)]
    assert play(sweep(PORTS, 5), freeing).result == SweepReport(freed=1)


def test_what_is_left_hides_nothing() -> None:
    """However many are left to the completer, those behind them are found."""
    left = tuple(stuck(f"left-{number}", has_request=True) for number in range(2))
    script: list[Line] = [
        (FindStuck, left),
        (FindStuck, (*left, stuck("a"), stuck("b"))),
        *[(Sweep, Verdict.DONE), (Tell, None)] * 2,
        (FindStuck, left),
    ]
    played = play(sweep(PORTS, 2, has_completer=True), script)
    assert [each.limit for each in played.commands if isinstance(each, FindStuck)] == [2, 4, 4]
    assert played.result == SweepReport(freed=2, left=2)


def test_sweeping_ends() -> None:
    """A sweep ends, even where workers die as fast as it sweeps."""
    rounds: list[Line] = [(FindStuck, (stuck(),)), (Sweep, Verdict.DONE), (Tell, None)]
    assert play(sweep(PORTS, 1), rounds * upkeep.MAX_ROUNDS).result == SweepReport(freed=upkeep.MAX_ROUNDS)


def test_sweeping_an_odd_key() -> None:
    """A key that no header could have carried does not stop the sweeper."""
    script: list[Line] = [(FindStuck, (stuck("kéy\n"),)), (Sweep, Verdict.DONE), (Tell, None)]
    assert play(sweep(PORTS, 5), script).result.freed == 1


def test_sweeping_and_the_store_goes_away() -> None:
    """A sweep that the store cuts off says how far it came, and why it ended."""
    script: list[Line] = [
        (FindStuck, (stuck("a"), stuck("b"))),
        (Sweep, Verdict.DONE),
        (Tell, None),
        (Sweep, CUT_SHORT),
    ]
    report = play(sweep(PORTS, 5), script).result
    assert report == SweepReport(freed=1, error=CUT_SHORT)
    assert str(report) == "swept: 1 freed, 0 parked, 0 left to the completer; then it ended: time-out"


# Reaping


def test_abandoned_is_408() -> None:
    """An operation that nobody ended within its retention is stored as a problem with status 408."""
    assert ABANDONED.status == 408
    assert json.loads(ABANDONED.body or b"")["code"] == "operation-abandoned"


def test_reaping_until_a_batch_is_not_full() -> None:
    """The reaper goes on while its batches are full, then turns to the audit trail, and counts it all."""
    script: list[Line] = [
        (Reap, Reaped(deleted=6, stripped=3, failed=1)),
        (Reap, Reaped(deleted=9)),
        (ReapTrail, 10),
        (ReapTrail, 0),
    ]
    played = play(reap(PORTS, 10, RETENTION, largest=10), script)
    assert played.commands == (Reap(10, ABANDONED),) * 2 + (ReapTrail(10, RETENTION),) * 2
    assert played.result == ReapReport(deleted=15, stripped=3, abandoned=1, audit_lines=10, batch=10)
    assert str(played.result) == "reaped: 15 deleted, 3 stripped, 1 abandoned, 10 audit lines deleted"
    assert not played.result.is_idle


def test_nothing_to_reap() -> None:
    """Where nothing is past retention, two looks are all; and one, where the trail is kept for ever."""
    assert play(reap(PORTS), [(Reap, Reaped()), (ReapTrail, 0)]).result == ReapReport()
    kept = play(reap(PORTS, audit_retention=None), [(Reap, Reaped())])
    assert kept.commands == (Reap(MAX_BATCH, ABANDONED),)
    assert kept.result.is_idle


def test_batch_is_halved_and_grows_again() -> None:
    """A batch that is too much for the store is tried at half the size, and grows again when it succeeds."""
    script: list[Line] = [
        (Reap, CUT_SHORT),
        (Reap, CUT_SHORT),
        (Reap, Reaped(deleted=25)),
        (Reap, Reaped(deleted=31)),
        (Reap, Reaped(deleted=1)),
        (ReapTrail, CUT_SHORT),
        (ReapTrail, 0),
    ]
    played = play(reap(PORTS, 100, RETENTION, largest=100), script)
    assert [command.limit for command in played.commands if isinstance(command, Reap | ReapTrail)] == [
        100, 50, 25, 31, 38, 47, 23,
    ]  # fmt: skip
    assert played.result == ReapReport(deleted=57, batch=28)


def test_reaper_gives_up() -> None:
    """When not even one record can be reaped, the run ends with what was done and why; the trail is left alone."""
    script: list[Line] = [(Reap, Reaped(deleted=2)), (Reap, CUT_SHORT), (Reap, CUT_SHORT)]
    report = play(reap(PORTS, 2, RETENTION, largest=2), script).result
    assert report == ReapReport(deleted=2, batch=1, error=CUT_SHORT)
    assert str(report).endswith("; then it ended: time-out")
    assert not report.is_idle


def test_reaper_does_not_insist() -> None:
    """A store that can't be reached, or that is not ready, is not asked again for less."""
    for error in (StoreUnavailable("no route"), StoreNotReady()):
        assert play(reap(PORTS, 8, RETENTION, largest=8), [(Reap, error)]).result == ReapReport(batch=8, error=error)


def test_reaping_ends() -> None:
    """A run ends, even where records expire as fast as it reaps them."""
    script: list[Line] = [(Reap, Reaped(deleted=1))] * upkeep.MAX_ROUNDS
    report = play(reap(PORTS, 1, None, largest=1), script).result
    assert report == ReapReport(deleted=upkeep.MAX_ROUNDS, batch=1)


def test_partitions_until_there_is_nothing_to_do() -> None:
    """Partitions are made and dropped step by step, with the batch of the reaper, and all of it is reported."""
    script: list[Line] = [
        (RotateAnswers, Rotated(made=1)),
        (RotateAnswers, Rotated(dropped=1)),
        (RotateAnswers, Rotated(deleted=7, trouble="early")),
        (RotateAnswers, Rotated(trouble="the role app may not")),
    ]
    played = play(rotate(PORTS, ReapReport(deleted=3, batch=7)), script)
    assert played.commands == (RotateAnswers(7),) * 4
    assert played.result == ReapReport(
        deleted=3,
        partitions_made=1,
        partitions_dropped=1,
        answers=7,
        trouble="the role app may not",
        batch=7,
    )
    said = "0 audit lines deleted, 1 partitions made, 1 dropped, 7 answers deleted; the role app may not"
    assert str(played.result).endswith(said)
    assert not played.result.is_idle


def test_no_partitions() -> None:
    """Where there is nothing to do, one look is all, and the report is what it was; trouble alone is no work."""
    assert play(rotate(PORTS, ReapReport(batch=7)), [(RotateAnswers, Rotated())]).result == ReapReport(batch=7)
    assert play(rotate(PORTS, ReapReport()), [(RotateAnswers, Rotated(trouble="no"))]).result.is_idle


def test_partitions_wait_for_the_next_run() -> None:
    """A run that was cut short does nothing with partitions; one that is cut short there says so. Each run ends."""
    cut = ReapReport(deleted=1, error=CUT_SHORT)
    assert play(rotate(PORTS, cut), []).result == cut
    assert play(rotate(PORTS, ReapReport(deleted=1)), [(RotateAnswers, CUT_SHORT)]).result == cut
    script: list[Line] = [(RotateAnswers, Rotated(made=1))] * upkeep.MAX_ROUNDS
    assert play(rotate(PORTS, ReapReport()), script).result.partitions_made == upkeep.MAX_ROUNDS


# What operators say


@pytest.mark.parametrize("verdict", Verdict)
def test_release(verdict: Verdict) -> None:
    """Freeing a key is one write, made only if the record is still the one that the operator saw."""
    played = play(release(PORTS, HOLD), [(Discard, verdict)])
    assert played.commands == (Discard(HOLD),)
    assert played.result is verdict


def test_hold_of_a_record() -> None:
    """What an operator saw is named by its attempt and its token."""
    assert hold_of(parked()) == HOLD


def test_effect_was_applied() -> None:
    """An effect that happened is stored with its result, and the operation may go on behind it."""
    played = play(resolve_applied(PORTS, parked(CREATED, CHARGING), {"id": 9}), [(Unpark, Verdict.DONE), (Note, None)])
    assert played.commands == (
        Unpark(HOLD, Progress((CREATED, Done("effect", "charge_created", {"id": 9})))),
        Note(HOLD, "applied", "charge_created"),
    )
    assert played.result is Verdict.DONE


def test_effect_was_not_applied() -> None:
    """An effect that did not happen is forgotten, and the operation may go on from the step before."""
    played = play(resolve_not_applied(PORTS, parked(CREATED, CHARGING)), [(Unpark, Verdict.DONE), (Note, None)])
    assert played.commands == (Unpark(HOLD, Progress((CREATED,))), Note(HOLD, "not applied", "charge_created"))


def test_operation_was_applied() -> None:
    """An operation without an unknown effect that took effect ends with the answer that the operator gives."""
    for record in (parked(), parked(CREATED)):
        played = play(resolve_applied(PORTS, record, {"id": "ü"}), [(Resolution, Verdict.DONE), (Note, None)])
        answer = Answer(200, ((b"content-type", b"application/json"),), '{"id": "ü"}'.encode())
        assert played.commands == (Resolution(HOLD, answer), Note(HOLD, "applied"))


@pytest.mark.parametrize("steps, step", [((), None), ((CHARGING,), "charge_created")])
def test_operation_was_not_applied(steps: tuple[Begun, ...], step: str | None) -> None:
    """An operation that did nothing is forgotten: as a record, it would refuse a second run for ever."""
    played = play(resolve_not_applied(PORTS, parked(*steps)), [(Discard, Verdict.DONE), (Note, None)])
    assert played.commands == (Discard(HOLD), Note(HOLD, "not applied", step))


@pytest.mark.parametrize("steps, step", [((), None), ((CHARGING,), "charge_created")])
def test_accepted_operation_was_not_applied(steps: tuple[Begun, ...], step: str | None) -> None:
    """One that was accepted is not forgotten, though it did nothing: it goes back to the workers."""
    record = replace(parked(*steps), is_accepted=True)
    played = play(resolve_not_applied(PORTS, record), [(Unpark, Verdict.DONE), (Note, None)])
    assert played.commands == (Unpark(HOLD, Progress()), Note(HOLD, "not applied", step))


def test_done_steps_are_never_forgotten() -> None:
    """Steps that are done stay done: an operation that was parked between two of them goes on from there."""
    played = play(resolve_not_applied(PORTS, parked(CREATED)), [(Unpark, Verdict.DONE), (Note, None)])
    assert played.commands[0] == Unpark(HOLD, Progress((CREATED,)))


def test_resolving_second() -> None:
    """An operator who comes second changes nothing, and leaves no trace of having said anything."""
    assert play(resolve_applied(PORTS, parked(CHARGING), 1), [(Unpark, Verdict.FENCED)]).result is Verdict.FENCED
    assert play(resolve_not_applied(PORTS, parked()), [(Discard, Verdict.FENCED)]).result is Verdict.FENCED


def test_survey() -> None:
    """A survey is one command, and what it found is for gauges: the log has nothing of it."""
    seen = StoreSurveyed(1, 0, 0, 0, 0, 2.5, 0.0)
    played = play(survey(PORTS), [(Survey, Surveyed(datetime(2026, 11, 18, tzinfo=UTC), seen, 0, None))])
    report = played.result
    assert played.commands == (Survey(MAX_SURVEYED, with_messages=True),)
    assert report == SurveyReport(seen)
    assert report.is_idle
    assert str(report) == "surveyed the store"


def test_a_survey_that_fails() -> None:
    """A store that can't be reached is said, and the next survey comes in its time."""
    report = play(survey(PORTS), [(Survey, CUT_SHORT)]).result
    assert (report.survey, report.error, report.is_idle) == (None, CUT_SHORT, False)
    assert str(report) == "could not survey the store: time-out"
