"""A phase, and an effect: one step of an operation, recorded so that no retry takes it twice.

A phase is the one place, beside atomic mode, where a transaction is open across a yield: its function runs inside.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

from semel.core.commands import Commit, Mark, Park, Save, Settle, Verdict
from semel.core.derive import derive
from semel.core.events import ParkedUnknown
from semel.core.handler import Applied, Doubt
from semel.core.key import Key
from semel.core.record import Hold, Milestone
from semel.core.recovery import Begun, Done, Kind, Progress, Step, as_json, check_end, next_step, read_back
from semel.errors import (
    AnswerNotStored,
    CommitUnknown,
    HandlerIsOver,
    Interrupted,
    LeaseLost,
    NoEffect,
    OutcomeUnknown,
    RecoveryPointLost,
    StepError,
    StepInsideStep,
    StepUnfinished,
    StoreError,
    StoreUnavailable,
)
from semel.flows.handle import COMPLETE_PAUSES
from semel.flows.ports import Ports, StepPorts

#: How often a lease is renewed before an effect, where the store takes so long each time that it may have run out.
RENEWALS = 3

#: What to do about an effect that was begun and has an unknown outcome.
OnUnknown = Literal["retry", "verify", "park"]


class Story:
    """Where one run of a handler is among the steps of its operation."""

    def __init__(self, hold: Hold, progress: Progress) -> None:
        """Begin at the first step; *progress* is what earlier attempts have done."""
        self.hold = hold
        self.progress = progress
        self.taken: tuple[str, ...] = ()
        #: The step that is being taken.
        self.running: str | None = None
        #: The steps that were asked for and not begun: an ``await`` may be missing.
        self.promised: list[str] = []
        #: Whether the handler has ended.
        self.is_over = False
        #: A step that failed in this very run with an unknown outcome: an effect, or a phase's COMMIT.
        self.in_doubt: str | None = None
        #: The result of that effect, where it is known and the store did not take it.
        self.unsaved: Done | None = None
        #: Whether this handler works in steps at all.
        self.is_used = bool(progress.steps)
        #: Another worker has the operation.
        self.is_lost = False
        #: An effect's outcome can't be known.
        self.is_parked = False

    @property
    def skipped(self) -> StepError | None:
        """What to say of a handler that ends here, before its steps have, or without those that are stored."""
        if unfinished := self.in_doubt or self.running or next(iter(self.promised), None):
            return StepUnfinished(unfinished)
        try:
            check_end(self.progress, self.taken)
        except RecoveryPointLost as lost:
            return lost
        return None

    @property
    def rest(self) -> Save | None:
        """What is still to be stored when the handler has ended."""
        done = self.unsaved
        return None if done is None else Save(self.hold, self.progress.plus(done), self.progress)

    def begin(self, kind: Kind, name: str) -> Step | None:
        """Begin a step; return what is stored of it."""
        if name in self.promised:
            self.promised.remove(name)
        if self.is_lost or self.is_parked or self.is_over:
            self.check()
        if self.running is not None:
            raise StepInsideStep(name, self.running)
        self.is_used = True
        if self.in_doubt not in {None, name}:
            raise StepUnfinished(str(self.in_doubt))
        return next_step(self.progress, self.taken, kind, name)

    def check(self) -> None:
        """Raise where nothing more may be done."""
        if self.is_lost:
            raise LeaseLost
        if self.is_parked:
            raise OutcomeUnknown
        if self.is_over:
            raise HandlerIsOver

    def end(self, name: str) -> None:
        """The step *name* is done, and stored."""
        self.taken = (*self.taken, name)
        self.in_doubt = None


async def phase(ports: StepPorts, story: Story, name: str) -> Any:
    """Run a function in a transaction that also stores its result and the recovery point; or return what is stored."""
    done = story.begin("phase", name)
    if not isinstance(done, Done):
        story.running = name
        try:
            done = await _take_phase(ports, story, name)
        finally:
            story.running = None
    story.end(name)
    return done.result


async def effect(ports: StepPorts, story: Story, name: str, on_unknown: OnUnknown) -> Any:
    """Call the outside world with a key of its own: the intent is stored before, the result after."""
    done = stored = story.begin("effect", name)
    if not isinstance(done, Done):
        story.running = name
        try:
            done = story.unsaved or await _call(ports, story, name, on_unknown, stored)
            # Until it is stored, this run alone knows of it: it must not call the function again.
            story.unsaved = done
            await _save(ports, story, story.progress.plus(done))
            story.unsaved = None
        finally:
            story.running = None
    story.end(name)
    return done.result


async def _take_phase(ports: StepPorts, story: Story, name: str) -> Done:
    if story.in_doubt == name:
        # This very run has tried to commit it, and does not know whether it did.
        story.progress = await _settled(ports, story)
        story.in_doubt = None
        stored = next_step(story.progress, story.taken, "phase", name)
        if isinstance(stored, Done):
            return stored
    try:
        await ports.open()
        done = Done("phase", name, as_json(name, (await ports.call_inside())))
        await _commit(ports, story, done)
    except Exception:
        # Whatever it was, nothing of this may be left open; where the transaction has ended this does nothing.
        await ports.undo()
        raise
    return done


async def _commit(ports: StepPorts, story: Story, done: Done) -> None:
    """Commit a phase; where that fails, leave it in doubt unless it is known to be rolled back."""
    progress = story.progress.plus(done)
    story.in_doubt = done.name
    try:
        verdict = await ports.commit(Commit(story.hold, progress, story.progress))
        if verdict is Verdict.FENCED:
            _check_fence(story, verdict)
    except CommitUnknown as unknown:
        if (await _settled(ports, story)) != progress:
            story.in_doubt = None
            raise StoreUnavailable(f"The phase was rolled back: {unknown}") from unknown
    except (AnswerNotStored, Interrupted):
        # Committed here, and perhaps not where it has to be to survive this server; or it was not waited for.
        raise
    except Exception:
        story.in_doubt = None
        raise
    story.progress = progress


async def _settled(ports: StepPorts, story: Story) -> Progress:
    """Wait until no COMMIT of this run is under way any more, and read how far the record says it has come."""
    hold = story.hold
    for pause in (*COMPLETE_PAUSES, None):
        try:
            record = await ports.ask(Settle(hold))
        except StoreError:
            if pause is None:
                raise
            await ports.pause(pause)
        else:
            if record is not None and (record.attempt, record.token) == (hold.attempt, hold.token):
                return read_back(record.steps)
            story.is_lost = True
            raise LeaseLost
    raise AssertionError  # pragma: no cover - the last round returned or raised


async def _call(ports: StepPorts, story: Story, name: str, on_unknown: OnUnknown, stored: Step | None) -> Done:
    key = derive(story.hold.scope, story.hold.key, name)
    if stored is None:
        await _save(ports, story, story.progress.plus(Begun(name)))
        await _make_sure(ports, story)
    story.in_doubt = name
    if stored is not None:
        known = await _ask(ports, story, name, on_unknown, key)
        if known is not None:
            return Done("effect", name, as_json(name, known.result))
        await _make_sure(ports, story)
    story.check()
    try:
        return Done("effect", name, as_json(name, (await ports.call_outside(key))))
    except NoEffect:
        # This call did nothing. Unless an earlier one is still in doubt, there is nothing to be unsure of next time.
        if stored is None or on_unknown == "verify":
            await _save(ports, story, story.progress.without_unknown())
            story.in_doubt = None
        raise


async def _make_sure(ports: StepPorts, story: Story) -> None:
    """Call nothing that another worker may be calling: where the store has answered late, or this process was paused,
    the lease may have run out meanwhile. Once it is renewed none can take over; a write tells whether one has.
    """
    for _ in range(RENEWALS):
        if ports.is_sure(story.hold):
            return
        await ports.renew(story.hold)
        await _save(ports, story, story.progress)
    if not ports.is_sure(story.hold):
        raise StoreUnavailable("The lease could not be renewed before the effect, so it was not called.")


async def _ask(ports: StepPorts, story: Story, name: str, on_unknown: OnUnknown, key: str) -> Applied | None:
    """Decide about an effect that was begun before; None: call it, with the same key as then."""
    if on_unknown == "retry":
        return None
    found = (await ports.verify(key)) if on_unknown == "verify" else Doubt.CANT_TELL
    if found is Doubt.CANT_TELL:
        await _park(ports, story, name)
    return found if isinstance(found, Applied) else None


async def _park(ports: StepPorts, story: Story, name: str) -> None:
    _check_fence(story, (await ports.ask(Park(story.hold, reason=f"effect {name} unknown"))))
    story.is_parked = True
    ports.tell(ParkedUnknown(Key(story.hold.key).short(), story.hold.attempt, name))
    raise OutcomeUnknown


async def park(ports: Ports, story: Story, what: str) -> None:
    """Stop the operation until an operator resolves it: its handler can't find out what became of *what*.

    Where the store can't be reached, the record stays as it is, and ``on_crash`` decides at the end of its lease.
    """
    story.check()
    with suppress(StoreError):
        _check_fence(story, await ports.ask(Park(story.hold, reason=f"{what} unknown")))
        ports.tell(ParkedUnknown(Key(story.hold.key).short(), story.hold.attempt, what))
    story.is_parked = True


async def _save(ports: StepPorts, story: Story, progress: Progress) -> None:
    """Store how far it has come, patiently: an effect may have happened already."""
    for pause in (*COMPLETE_PAUSES, None):
        try:
            verdict = await ports.ask(Save(story.hold, progress, story.progress))
        except StoreError:
            if pause is None:
                raise
            await ports.pause(pause)
        else:
            _check_fence(story, verdict)
            story.progress = progress
            return
    raise AssertionError  # pragma: no cover - the last round returned or raised


def _check_fence(story: Story, verdict: Verdict) -> None:
    if verdict is Verdict.FENCED:
        story.is_lost = True
        raise LeaseLost


async def mark(ports: Ports, story: Story, milestone: Milestone) -> None:
    """Store how far the handler says that it is; raise ``LeaseLost`` where another worker has the operation.

    Nothing is decided by it, and no retry sees it.
    """
    story.check()
    # What can't be shown is no reason to stop the work that it is about.
    with suppress(StoreError):
        _check_fence(story, await ports.ask(Mark(story.hold, milestone)))
