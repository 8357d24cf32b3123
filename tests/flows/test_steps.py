"""A phase and an effect: what each asks for, in what order, the first time, on a retry, and when something fails."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from semel.core.commands import Commit, Open, Park, Save, Settle, Undo, Verdict
from semel.core.derive import derive
from semel.core.events import ParkedUnknown
from semel.core.handler import Applied, Doubt
from semel.core.key import Key
from semel.core.record import Hold, Record
from semel.core.recovery import Begun, Done, Progress, written
from semel.core.state import State
from semel.errors import (
    AnswerNotStored,
    CommitUnknown,
    HandlerIsOver,
    Interrupted,
    LeaseLost,
    NoEffect,
    OutcomeUnknown,
    RecoveryPointLost,
    ResultNotJSON,
    StepInsideStep,
    StepNameInvalid,
    StepRepeated,
    StepUnfinished,
    StoreUnavailable,
)
from semel.flows.handle import COMPLETE_PAUSES
from semel.flows.steps import RENEWALS, OnUnknown, Story, effect, phase
from tests.kit.ports import PORTS, AskOutside, CallInside, CallOutside, Pause, Renewal, Tell
from tests.kit.script import Line, Played, play

HOLD = Hold("alice", "key-1", 2, b"t" * 16)
NOW = datetime(2025, 1, 1, tzinfo=UTC)

RIDE = Done("phase", "ride", {"id": 7})
CHARGE = Done("effect", "charge", "ch_1")
CHARGING = Begun("charge")
RODE = Progress((RIDE,))
CHARGED = Progress((RIDE, CHARGE))
HALF = Progress((RIDE, CHARGING))
KEY = derive("alice", "key-1", "charge")

UNREACHABLE = StoreUnavailable("no route")
NO_REPLY = CommitUnknown("reset")

UNDO: Line = (Undo, None)
SAVED: Line = (Save, Verdict.DONE)
INSIDE: list[Line] = [(Open, None), (CallInside, {"id": 7})]
COMMITTED: list[Line] = [*INSIDE, (Commit, Verdict.DONE)]


def patiently(kind: Any) -> list[Line]:
    """A store that fails every time it is asked."""
    return [line for _ in COMPLETE_PAUSES for line in ((kind, UNREACHABLE), (Pause, None))] + [(kind, UNREACHABLE)]


def rode() -> Story:
    """An operation whose ride is created, by this run."""
    story = Story(HOLD, Progress())
    play(phase(PORTS, story, "ride"), COMMITTED)
    return story


def resumed(progress: Progress) -> Story:
    """An operation that an earlier attempt has brought so far, after its ride."""
    story = Story(HOLD, progress)
    assert play(phase(PORTS, story, "ride"), []).result == {"id": 7}
    return story


def charge(story: Story, script: list[Line], on_unknown: OnUnknown = "retry") -> Played[Any]:
    return play(effect(PORTS, story, "charge", on_unknown), script)


def record(progress: Progress, hold: Hold = HOLD) -> Record:
    return Record(
        scope=hold.scope,
        key=hold.key,
        state=State.PROCESSING,
        attempt=hold.attempt,
        token=hold.token,
        fingerprint=b"",
        recovery_point=progress.recovery_point,
        steps=written(progress),
        answer=None,
        created_at=NOW,
        lease_expires_at=NOW,
        completed_at=None,
        expires_at=NOW,
        lease_left=timedelta(0),
        retention_left=timedelta(0),
    )


def test_no_step_after_the_end() -> None:
    """A step that begins when its handler has ended is refused, and one that was not begun or not ended is an error."""
    story = Story(HOLD, Progress())
    story.promised.append("ride")
    assert "'ride'" in str(story.skipped)
    taking = phase(PORTS, story, "ride")
    taking.send(None)
    assert (story.promised, story.running) == ([], "ride")
    assert "'ride'" in str(story.skipped)
    taking.close()
    assert story.skipped is None
    story.is_over = True
    with pytest.raises(HandlerIsOver):
        play(phase(PORTS, story, "ride"), [])


# A phase


def test_phase_commits_with_its_recovery_point() -> None:
    """A phase's function runs in a transaction that also stores its result, and where a retry goes on."""
    story = Story(HOLD, Progress())
    played = play(phase(PORTS, story, "ride"), COMMITTED)
    assert played == Played((Open(), CallInside(), Commit(HOLD, RODE)), {"id": 7})
    assert (story.progress, story.taken, story.skipped, story.is_used) == (RODE, ("ride",), None, True)


def test_phase_that_is_done_is_not_run() -> None:
    """A retry gets the stored result, and asks for nothing."""
    story = Story(HOLD, RODE)
    assert play(phase(PORTS, story, "ride"), []) == Played((), {"id": 7})
    assert (story.progress, story.taken) == (RODE, ("ride",))


def test_phase_returns_what_a_retry_will_get() -> None:
    """What a phase returns is what JSON makes of it, the first time too."""
    played = play(
        phase(PORTS, Story(HOLD, Progress()), "ride"), [(Open, None), (CallInside, (1, 2)), (Commit, Verdict.DONE)]
    )
    assert played.result == [1, 2]


@pytest.mark.parametrize("error", [ZeroDivisionError(), NoEffect(), UNREACHABLE, Interrupted()])
@pytest.mark.parametrize("at", [0, 1], ids=["open", "call"])
def test_phase_that_fails_is_undone(error: Exception, at: int) -> None:
    """Whatever goes wrong, nothing is left open; the phase may be tried again, or another follow."""
    story = Story(HOLD, Progress())
    with pytest.raises(type(error)):
        play(phase(PORTS, story, "ride"), [*INSIDE[:at], (INSIDE[at][0], error), UNDO])
    assert (story.progress, story.taken, story.running, story.skipped) == (Progress(), (), None, None)
    assert play(phase(PORTS, story, "another"), COMMITTED).result == {"id": 7}


def test_phase_whose_result_is_no_json() -> None:
    """A result that can't be stored undoes what the phase wrote."""
    story = Story(HOLD, Progress())
    with pytest.raises(ResultNotJSON, match="'ride' returned set"):
        play(phase(PORTS, story, "ride"), [(Open, None), (CallInside, {1}), UNDO])


@pytest.mark.parametrize("error", [ValueError("duplicate"), UNREACHABLE], ids=["deferred constraint", "store"])
def test_phase_that_is_not_committed(error: Exception) -> None:
    """A COMMIT that was refused, or never sent, has done nothing: the phase may be tried again."""
    story = Story(HOLD, Progress())
    with pytest.raises(type(error)):
        play(phase(PORTS, story, "ride"), [*INSIDE, (Commit, error), UNDO])
    assert story.skipped is None
    assert play(phase(PORTS, story, "ride"), COMMITTED).result == {"id": 7}


def test_phase_is_fenced() -> None:
    """A worker that lost its lease commits no phase, and takes no further step."""
    story = Story(HOLD, Progress())
    with pytest.raises(LeaseLost):
        play(phase(PORTS, story, "ride"), [*INSIDE, (Commit, Verdict.FENCED), UNDO])
    assert story.is_lost
    with pytest.raises(LeaseLost):
        play(phase(PORTS, story, "ride"), [])


# A phase's COMMIT without a reply


def test_lost_reply_and_the_phase_is_committed() -> None:
    """The record holds this step, so the phase is done."""
    story = Story(HOLD, Progress())
    played = play(phase(PORTS, story, "ride"), [*INSIDE, (Commit, NO_REPLY), (Settle, record(RODE))])
    assert played.commands[-1] == Settle(HOLD)
    assert (played.result, story.progress, story.skipped) == ({"id": 7}, RODE, None)


def test_lost_reply_and_the_phase_is_rolled_back() -> None:
    """The record does not hold this step, so nothing has happened: it may be tried again."""
    story = Story(HOLD, Progress())
    with pytest.raises(StoreUnavailable, match="The phase was rolled back: reset"):
        play(phase(PORTS, story, "ride"), [*INSIDE, (Commit, NO_REPLY), (Settle, record(Progress())), UNDO])
    assert play(phase(PORTS, story, "ride"), COMMITTED).result == {"id": 7}


@pytest.mark.parametrize(
    "there",
    [None, record(RODE, Hold("alice", "key-1", 3, HOLD.token)), record(RODE, Hold("alice", "key-1", 2, b"o" * 16))],
    ids=["gone", "another attempt", "another token"],
)
def test_lost_reply_and_the_lease_is_lost(there: Record | None) -> None:
    """The record is somebody else's by now: nothing more may be done."""
    story = Story(HOLD, Progress())
    with pytest.raises(LeaseLost):
        play(phase(PORTS, story, "ride"), [*INSIDE, (Commit, NO_REPLY), (Settle, there), UNDO])
    assert story.is_lost


def test_lost_reply_is_resolved_patiently() -> None:
    """The record is asked for again, with pauses."""
    tries: list[Line] = [(Settle, UNREACHABLE), (Pause, None), (Settle, record(RODE))]
    played = play(phase(PORTS, Story(HOLD, Progress()), "ride"), [*INSIDE, (Commit, NO_REPLY), *tries])
    assert played.commands[-2] == Pause(COMPLETE_PAUSES[0])
    assert played.result == {"id": 7}


#: How a COMMIT can end of which this run can't know the outcome.
IN_DOUBT: list[list[Line]] = [
    [(Commit, NO_REPLY), *patiently(Settle), UNDO],
    [(Commit, NO_REPLY), (Settle, Interrupted()), UNDO],
    [(Commit, AnswerNotStored()), UNDO],
    [(Commit, Interrupted()), UNDO],
]
HOW = ["unresolved", "interrupted while resolving", "no replica", "interrupted"]


def doubtful(ending: list[Line]) -> Story:
    """An operation whose first phase ended so."""
    story = Story(HOLD, Progress())
    with pytest.raises((StoreUnavailable, AnswerNotStored, Interrupted)):
        play(phase(PORTS, story, "ride"), [*INSIDE, *ending])
    assert (story.progress, story.taken, story.in_doubt) == (Progress(), (), "ride")
    return story


@pytest.mark.parametrize("ending", IN_DOUBT, ids=HOW)
def test_phase_in_doubt_that_was_committed(ending: list[Line]) -> None:
    """A handler that tries again asks the record first: what was committed after all is not written twice."""
    story = doubtful(ending)
    assert play(phase(PORTS, story, "ride"), [(Settle, record(RODE))]) == Played((Settle(HOLD),), {"id": 7})
    assert (story.progress, story.skipped) == (RODE, None)


@pytest.mark.parametrize("ending", IN_DOUBT, ids=HOW)
def test_phase_in_doubt_that_was_rolled_back(ending: list[Line]) -> None:
    """What was rolled back is run again."""
    story = doubtful(ending)
    assert play(phase(PORTS, story, "ride"), [(Settle, record(Progress())), *COMMITTED]).result == {"id": 7}
    assert story.progress == RODE


def test_phase_in_doubt_and_the_store_stays_away() -> None:
    """While nobody can be asked, the phase is not run again."""
    story = doubtful(IN_DOUBT[0])
    with pytest.raises(StoreUnavailable):
        play(phase(PORTS, story, "ride"), patiently(Settle))
    assert (story.in_doubt, story.running) == ("ride", None)


def test_nothing_follows_a_phase_in_doubt() -> None:
    """Another step would overwrite one that may be stored; and an answer would be one without it."""
    story = doubtful(IN_DOUBT[0])
    with pytest.raises(StepUnfinished, match="'ride'"):
        play(phase(PORTS, story, "another"), [])
    with pytest.raises(StepUnfinished, match="'ride'"):
        charge(story, [])
    assert isinstance(story.skipped, StepUnfinished)


# An effect


def test_effect_is_stored_before_and_after() -> None:
    """That it is about to be called is stored before, its result after; the call has a key of its own."""
    story = rode()
    played = charge(story, [SAVED, (CallOutside, "ch_1"), SAVED])
    assert played == Played((Save(HOLD, HALF, RODE), CallOutside(KEY), Save(HOLD, CHARGED, HALF)), "ch_1")
    assert (story.progress, story.taken, story.skipped) == (CHARGED, ("ride", "charge"), None)


@pytest.mark.parametrize("on_unknown", ["retry", "verify", "park"])
def test_effect_that_is_done_is_not_called(on_unknown: OnUnknown) -> None:
    """A retry gets the stored result, and asks nobody."""
    assert charge(resumed(CHARGED), [], on_unknown) == Played((), "ch_1")


@pytest.mark.parametrize("on_unknown", ["verify", "park"])
def test_first_call_asks_no_question(on_unknown: OnUnknown) -> None:
    """What to do in doubt does not matter while there is none."""
    assert charge(rode(), [SAVED, (CallOutside, "ch_1"), SAVED], on_unknown).result == "ch_1"


def test_retry_calls_again_with_the_same_key() -> None:
    """An effect that was begun is called again with the key of the first time, and its intent is stored already."""
    played = charge(resumed(HALF), [(CallOutside, "ch_1"), SAVED])
    assert played == Played((CallOutside(KEY), Save(HOLD, CHARGED, HALF)), "ch_1")


def test_verify_finds_that_it_happened() -> None:
    """Where it can be asked for, an effect that happened is not called again: its result is stored."""
    played = charge(resumed(HALF), [(AskOutside, Applied("ch_1")), SAVED], "verify")
    assert played == Played((AskOutside(KEY), Save(HOLD, CHARGED, HALF)), "ch_1")


def test_verify_finds_that_it_did_not_happen() -> None:
    """One that did not happen is called."""
    script: list[Line] = [(AskOutside, Doubt.NOT_APPLIED), (CallOutside, "ch_1"), SAVED]
    assert charge(resumed(HALF), script, "verify").commands == (
        AskOutside(KEY),
        CallOutside(KEY),
        Save(HOLD, CHARGED, HALF),
    )


@pytest.mark.parametrize(
    "on_unknown, script",
    [("park", []), ("verify", [(AskOutside, Doubt.CANT_TELL)])],
    ids=["park", "verify can't tell"],
)
def test_park(on_unknown: OnUnknown, script: list[Line]) -> None:
    """What nobody knows is parked, people are told, and the effect is not called; nor is any other step taken."""
    story = resumed(HALF)
    flow = effect(PORTS, story, "charge", on_unknown)
    command = flow.send(None)
    for kind, answer in script:
        assert isinstance(command, kind)
        command = flow.send(answer)
    assert command == Park(HOLD)
    PORTS.take_said()
    with pytest.raises(OutcomeUnknown):
        flow.send(Verdict.DONE)
    assert PORTS.take_said() == [Tell(ParkedUnknown(Key("key-1").short(), 2, "charge"))]
    assert story.is_parked
    with pytest.raises(OutcomeUnknown):
        charge(story, [], on_unknown)
    with pytest.raises(OutcomeUnknown):
        play(phase(PORTS, story, "receipt"), [])


def test_park_that_fails_calls_nothing() -> None:
    """An operation that can't be parked is left as it is: the next attempt comes to the same place."""
    story = resumed(HALF)
    with pytest.raises(StoreUnavailable):
        charge(story, [(Park, UNREACHABLE)], "park")
    assert not story.is_parked
    assert isinstance(story.skipped, StepUnfinished)


def test_verify_that_fails_calls_nothing() -> None:
    """While the provider can't be asked, nothing is called."""
    with pytest.raises(OSError, match="timed out"):
        charge(resumed(HALF), [(AskOutside, OSError("timed out"))], "verify")


def test_effect_whose_result_is_no_json() -> None:
    """A result that can't be stored leaves the effect in doubt: it happened."""
    story = rode()
    with pytest.raises(ResultNotJSON, match="'charge' returned bytes"):
        charge(story, [SAVED, (CallOutside, b"ch_1")])
    assert (story.progress, story.in_doubt) == (HALF, "charge")
    with pytest.raises(ResultNotJSON):
        charge(resumed(HALF), [(AskOutside, Applied({1}))], "verify")


# An effect that did nothing


def test_no_effect_forgets_that_it_was_begun() -> None:
    """A call that says it did nothing leaves nothing to be unsure of, and other steps may follow."""
    story = rode()
    with pytest.raises(NoEffect):
        charge(story, [SAVED, (CallOutside, NoEffect()), SAVED])
    assert (story.progress, story.taken, story.skipped) == (RODE, ("ride",), None)
    script: list[Line] = [SAVED, (CallOutside, "ch_1"), SAVED]
    assert charge(story, script).result == "ch_1"


def test_no_effect_is_stored() -> None:
    """That it did nothing is stored: what is saved is the progress without it."""
    flow = effect(PORTS, rode(), "charge", "retry")
    assert flow.send(None) == Save(HOLD, HALF, RODE)
    assert flow.send(Verdict.DONE) == CallOutside(KEY)
    assert flow.throw(NoEffect()) == Save(HOLD, RODE, HALF)


def test_no_effect_after_it_was_verified() -> None:
    """The same after the provider said that the call of an earlier attempt did nothing either."""
    story = resumed(HALF)
    with pytest.raises(NoEffect):
        charge(story, [(AskOutside, Doubt.NOT_APPLIED), (CallOutside, NoEffect()), SAVED], "verify")
    assert story.progress == RODE


def test_no_effect_of_the_second_call() -> None:
    """A second call that did nothing says nothing of the first: that one stays in doubt."""
    story = resumed(HALF)
    with pytest.raises(NoEffect):
        charge(story, [(CallOutside, NoEffect())])
    assert (story.progress, story.in_doubt) == (HALF, "charge")


def test_no_effect_that_can_not_be_stored() -> None:
    """If that it did nothing can't be stored, it stays in doubt."""
    story = rode()
    with pytest.raises(StoreUnavailable):
        charge(story, [SAVED, (CallOutside, NoEffect()), *patiently(Save)])
    assert (story.progress, story.in_doubt) == (HALF, "charge")


# An effect that failed


@pytest.mark.parametrize("begin", [rode, lambda: resumed(HALF)], ids=["first run", "retry"])
@pytest.mark.parametrize("error", [OSError("reset"), Interrupted()], ids=["failed", "interrupted"])
def test_nothing_follows_an_effect_in_doubt(begin: Any, error: Exception) -> None:
    """After an effect that failed no other step may follow, and no answer: the error says which effect it was."""
    story = begin()
    saved = [SAVED] if story.progress == RODE else []
    with pytest.raises(type(error)):
        charge(story, [*saved, (CallOutside, error)])
    assert (story.progress, story.running, story.in_doubt) == (HALF, None, "charge")
    with pytest.raises(StepUnfinished, match="'charge'"):
        play(phase(PORTS, story, "receipt"), [])
    assert isinstance(story.skipped, StepUnfinished)


@pytest.mark.parametrize(
    "on_unknown, script",
    [
        ("retry", [(CallOutside, "ch_1"), SAVED]),
        ("verify", [(AskOutside, Applied("ch_1")), SAVED]),
        ("verify", [(AskOutside, Doubt.NOT_APPLIED), (CallOutside, "ch_1"), SAVED]),
    ],
    ids=["retry", "applied", "not applied"],
)
def test_effect_in_doubt_may_be_tried_again(on_unknown: OnUnknown, script: list[Line]) -> None:
    """A handler may try the same effect again: it is the same doubt as after a crash, and decided the same way."""
    story = rode()
    with pytest.raises(OSError, match="reset"):
        charge(story, [SAVED, (CallOutside, OSError("reset"))], on_unknown)
    assert charge(story, script, on_unknown).result == "ch_1"
    assert (story.progress, story.skipped) == (CHARGED, None)
    assert (
        play(phase(PORTS, story, "receipt"), [(Open, None), (CallInside, None), (Commit, Verdict.DONE)]).result is None
    )


# The store fails


@pytest.mark.parametrize("at", [0, 1], ids=["before", "after"])
def test_saving_is_patient(at: int) -> None:
    """What is stored around an effect is tried again, with pauses."""
    lines: list[Line] = [SAVED, SAVED]
    tries: list[Line] = [(Save, UNREACHABLE), (Pause, None), (Save, UNREACHABLE), (Pause, None), SAVED]
    before, after = ([*tries], [lines[1]]) if at == 0 else ([lines[0]], [*tries])
    played = charge(rode(), [*before, (CallOutside, "ch_1"), *after])
    assert [each.duration for each in played.commands if isinstance(each, Pause)] == list(COMPLETE_PAUSES[:2])
    assert played.result == "ch_1"


def test_intent_that_can_not_be_stored_is_not_acted_on() -> None:
    """What can't be stored before is not called. Nothing has happened, so it may be tried again, or another follow."""
    story = rode()
    with pytest.raises(StoreUnavailable):
        charge(story, patiently(Save))
    assert (story.progress, story.skipped) == (RODE, None)
    assert charge(story, [SAVED, (CallOutside, "ch_1"), SAVED]).result == "ch_1"


def test_result_that_can_not_be_stored() -> None:
    """A result that can't be stored leaves the effect in doubt."""
    story = rode()
    with pytest.raises(StoreUnavailable):
        charge(story, [SAVED, (CallOutside, "ch_1"), *patiently(Save)])
    assert (story.progress, story.in_doubt) == (HALF, "charge")


def test_result_that_can_not_be_stored_at_once() -> None:
    """The run that has a result calls nothing for it again: only to store it is tried once more."""
    story = rode()
    with pytest.raises(StoreUnavailable):
        charge(story, [SAVED, (CallOutside, "ch_1"), *patiently(Save)])
    assert charge(story, [SAVED]).result == "ch_1"
    assert story.rest is None


# The lease is lost

FENCED = Verdict.FENCED


@pytest.mark.parametrize(
    "progress, script, on_unknown",
    [
        (RODE, [(Save, FENCED)], "retry"),
        (RODE, [SAVED, (CallOutside, "ch_1"), (Save, FENCED)], "retry"),
        (RODE, [SAVED, (CallOutside, NoEffect()), (Save, FENCED)], "retry"),
        (HALF, [(Park, FENCED)], "park"),
    ],
    ids=["intent", "result", "no effect", "park"],
)
def test_effect_is_fenced(progress: Progress, script: list[Line], on_unknown: OnUnknown) -> None:
    """A worker that lost its lease writes nothing around an effect, and takes no further step."""
    story = resumed(progress)
    with pytest.raises(LeaseLost):
        charge(story, script, on_unknown)
    assert (story.is_lost, story.is_parked) == (True, False)
    with pytest.raises(LeaseLost):
        play(phase(PORTS, story, "receipt"), [])


def test_lease_is_lost_between_intent_and_call() -> None:
    """A worker that is told of its loss after it stored the intent does not call."""
    story = rode()
    flow = effect(PORTS, story, "charge", "retry")
    assert flow.send(None) == Save(HOLD, HALF, RODE)
    story.is_lost = True
    with pytest.raises(LeaseLost):
        flow.send(Verdict.DONE)


@pytest.mark.parametrize(
    "begin", [lambda story: phase(PORTS, story, "ride"), lambda story: effect(PORTS, story, "charge", "retry")]
)
def test_lost_lease_stops_every_step(begin: Any) -> None:
    """A worker that was told of its loss begins no step, and is given no stored result."""
    story = Story(HOLD, CHARGED)
    story.is_lost = True
    with pytest.raises(LeaseLost):
        play(begin(story), [])


# The lease may have run out


@pytest.fixture
def in_doubt() -> Iterator[Callable[[int], None]]:
    """Have it be unknown so many times whether the lease has run out."""

    def doubt(times: int) -> None:
        PORTS.doubts = times

    yield doubt
    PORTS.doubts = 0


RENEWED: list[Line] = [(Renewal, None), SAVED]


@pytest.mark.parametrize("doubts", [1, RENEWALS])
def test_effect_that_is_recorded_late(in_doubt: Callable[[int], None], doubts: int) -> None:
    """Where an effect's lease may have run out before it is called, it is renewed first, and a write tells whether no
    other worker had taken over by then.
    """
    in_doubt(doubts)
    played = charge(rode(), [SAVED, *RENEWED * doubts, (CallOutside, "ch_1"), SAVED])
    assert played.commands[1:3] == (Renewal(HOLD), Save(HOLD, HALF, HALF))


@pytest.mark.parametrize("on_unknown, asked", [("retry", []), ("verify", [(AskOutside, Doubt.NOT_APPLIED)])])
def test_resumed_effect_whose_lease_may_have_run_out(
    in_doubt: Callable[[int], None], on_unknown: OnUnknown, asked: list[Line]
) -> None:
    """One that an earlier attempt has begun is not called again before the same is done."""
    in_doubt(1)
    charge(resumed(HALF), [*asked, *RENEWED, (CallOutside, "ch_1"), SAVED], on_unknown)


def test_effect_whose_lease_was_lost_before_it(in_doubt: Callable[[int], None]) -> None:
    """If another worker has the operation by then, it is not called."""
    in_doubt(1)
    with pytest.raises(LeaseLost):
        charge(rode(), [SAVED, (Renewal, None), (Save, Verdict.FENCED)])


def test_effect_whose_lease_can_not_be_renewed(in_doubt: Callable[[int], None]) -> None:
    """If the store takes too long each time, it is not called either: a retry asks what became of it."""
    in_doubt(RENEWALS + 1)
    with pytest.raises(StoreUnavailable):
        charge(rode(), [SAVED, *RENEWED * RENEWALS])


# What the code may not do


def test_step_inside_a_step() -> None:
    """A step that is begun before the one around it has ended is refused, and does the outer one no harm."""
    story = Story(HOLD, Progress())
    outer = phase(PORTS, story, "ride")
    outer.send(None)
    with pytest.raises(StepInsideStep, match="'charge' was begun inside 'ride'"):
        charge(story, [])
    with pytest.raises(StepInsideStep, match="'ride' was begun inside 'ride'"):
        play(phase(PORTS, story, "ride"), [])
    assert outer.send(None) == CallInside()
    outer.send({"id": 7})
    with pytest.raises(StopIteration):
        outer.send(Verdict.DONE)
    assert charge(story, [SAVED, (CallOutside, "ch_1"), SAVED]).result == "ch_1"


def test_step_inside_an_effect() -> None:
    """The same inside an effect."""
    story = rode()
    outer = effect(PORTS, story, "charge", "retry")
    outer.send(None)
    with pytest.raises(StepInsideStep, match="'receipt' was begun inside 'charge'"):
        play(phase(PORTS, story, "receipt"), [])


def test_repeated_and_bad_names() -> None:
    """One name is one step, and a bad name is none: nothing is asked for."""
    story = rode()
    with pytest.raises(StepRepeated):
        play(phase(PORTS, story, "ride"), [])
    with pytest.raises(StepNameInvalid):
        play(phase(PORTS, story, "a ride"), [])


def test_code_that_goes_another_way() -> None:
    """Steps that are stored and that the code does not take are a loud error, and nothing is run."""
    with pytest.raises(RecoveryPointLost):
        play(phase(PORTS, Story(HOLD, CHARGED), "order"), [])
    with pytest.raises(RecoveryPointLost):
        play(phase(PORTS, resumed(HALF), "receipt"), [])


def test_code_that_ends_early() -> None:
    """A handler that ends before it has taken all the steps that are stored has skipped some."""
    assert isinstance(Story(HOLD, CHARGED).skipped, RecoveryPointLost)
    assert isinstance(resumed(CHARGED).skipped, RecoveryPointLost)
    assert Story(HOLD, Progress()).skipped is None
    assert not Story(HOLD, Progress()).is_used
    assert Story(HOLD, CHARGED).is_used
