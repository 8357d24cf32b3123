"""One delivery of a message: its order, with a list of answers; and death before and after every step, on stores."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel.calls import Call
from semel.core.commands import ReapInbox
from semel.core.events import MessageParked, MessageReused, TryNotCounted
from semel.core.inbox import Busy, Duplicate, Failed, Parked, Ran, Receipt, ReceiptState, Returned, Seen
from semel.errors import (
    CommitUnknown,
    ConfigurationError,
    Interrupted,
    MessageDiffers,
    Overtaken,
    StoreReadOnly,
    StoreUnavailable,
)
from semel.flows.receive import Delivery, InboxReport, reap_inbox, receive
from semel.inbox.ports import ThreadPorts, caught
from semel.stores import Store, store
from semel.stores.dialect import messages_of
from semel.stores.inbox import InboxStatements
from tests.kit.crash import Crash, every_crash
from tests.kit.ports import Asked, Flow

DELIVERY = Delivery("billing", "m-1", b"1" * 32)
DONE = Receipt(ReceiptState.DONE, 0, b"1" * 32, mark=7)
FAILING = Receipt(ReceiptState.FAILING, 1, b"1" * 32, "boom")
PARKED = Receipt(ReceiptState.PARKED, 5, b"1" * 32, "boom")
NEW, TAKEN = Seen(None), Seen(None, has_lock=False)
BOOM = ValueError("boom")
LOST = CommitUnknown("lost")


@dataclass(frozen=True)
class Step:
    """One call of a port."""

    name: str
    args: tuple[Any, ...] = ()


class StepPorts:
    """Ports that leave the flow with each call."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, happening: Any) -> None:
        self.told.append(happening)

    def __getattr__(self, name: str) -> Callable[..., Asked]:
        return lambda *args: Asked(Step(name, args))


def play(*script: tuple[str, Any]) -> tuple[Any, list[Any]]:
    """Run the flow with these answers to these calls, in order; return what came of it and what was told."""
    ports, left = StepPorts(), list(script)
    flow = receive(ports, DELIVERY)
    answer: Any = None
    try:
        while True:
            step = flow.throw(answer) if isinstance(answer, Exception) else flow.send(answer)
            assert left, f"{step} was not expected"
            name, answer = left.pop(0)
            assert step.name == name, f"{step} came in the place of {name}"
    except StopIteration as end:
        assert not left, f"{left} never came"
        return end.value, ports.told
    except Exception as error:  # noqa: BLE001 - it is what came of it
        assert not left, f"{left} never came after {error!r}"  # noqa: PT017 - the flow raised it, not the test
        return error, ports.told


OPEN, UNDO, SAVE = ("open", None), ("undo", None), ("save", None)
LOOKS = [("look", NEW), ("look", NEW)]
BEGUN = [OPEN, *LOOKS]
RETURNED = [*BEGUN, ("call_inside", Returned("paid"))]
RAISED = [*BEGUN, ("call_inside", Failed(BOOM)), UNDO]


def test_a_first_delivery() -> None:
    """The lock and two looks, the handler, the receipt, COMMIT: in this order."""
    assert play(*RETURNED, ("note_done", DONE), SAVE) == (Ran("paid"), [])


@pytest.mark.parametrize(
    "seen, verdict", [(Seen(DONE), Duplicate()), (Seen(PARKED), Parked(5, "boom")), (TAKEN, Busy())]
)
def test_nothing_to_run(seen: Seen, verdict: object) -> None:
    """What was handled, is parked, or is being handled: one look, and nothing is written."""
    assert play(OPEN, ("look", seen), UNDO) == (verdict, [])


def test_a_rival_between_the_looks() -> None:
    """A rival that committed before the lock was ours is seen by the second look."""
    assert play(OPEN, ("look", NEW), ("look", Seen(DONE)), UNDO) == (Duplicate(), [])


def test_another_payload() -> None:
    """Another payload under the same id is refused and told, and nothing is run."""
    seen = Seen(Receipt(ReceiptState.DONE, 0, b"2" * 32))
    refused, told = play(OPEN, ("look", seen), UNDO)
    assert isinstance(refused, MessageDiffers)
    assert told == [MessageReused("m-1", "billing", (b"2" * 32).hex(), (b"1" * 32).hex())]


def test_a_failure_is_counted_and_raised() -> None:
    """The handler's writes are rolled back first; the count commits by itself, and the error is raised."""
    assert play(*RAISED, *BEGUN, ("note_failure", FAILING), SAVE, UNDO) == (BOOM, [])


def test_the_last_failure_parks() -> None:
    """The failure that parks a message is told, and returned as a verdict."""
    verdict, told = play(*RAISED, *BEGUN, ("note_failure", PARKED), SAVE)
    assert verdict == Parked(5, "boom")
    assert told == [MessageParked("m-1", "billing", 5, "boom")]


def test_a_parked_receipt_may_have_no_words() -> None:
    """What is told of a parked message is text, whatever the store has of its error."""
    _, told = play(*RAISED, *BEGUN, ("note_failure", Receipt(ReceiptState.PARKED, 5)), SAVE)
    assert told == [MessageParked("m-1", "billing", 5, "")]


def test_a_failure_that_does_not_count() -> None:
    """A conflict with another transaction is raised and not counted."""
    ending = ("call_inside", Failed(BOOM, counts=False))
    assert play(*BEGUN, ending, UNDO, *BEGUN, UNDO) == (BOOM, [])


def test_a_failure_after_a_rivals_success() -> None:
    """A handler that failed because a rival had handled the message is a duplicate, and not a failure."""
    assert play(*RAISED, OPEN, ("look", Seen(DONE)), UNDO) == (Duplicate(), [])
    assert play(*RAISED, *BEGUN, ("note_failure", None), SAVE) == (Duplicate(), [])


def test_a_failure_while_a_rival_runs() -> None:
    """While a rival has the lock, the failure is raised and not counted: the rival may succeed."""
    assert play(*RAISED, OPEN, ("look", TAKEN), UNDO, UNDO) == (BOOM, [])


@pytest.mark.parametrize("at", ["open", "look", "note_failure", "save"])
def test_a_failure_that_cant_be_counted(at: str) -> None:
    """Where the store can't count a failure, that is told, and the handler's error is raised all the same."""
    rest = [*BEGUN, ("note_failure", FAILING), SAVE]
    names = [name for name, _ in rest]
    reached = [*rest[: names.index(at)], (at, StoreUnavailable("away"))]
    error, told = play(*RAISED, *reached, UNDO)
    assert error is BOOM
    assert told == [TryNotCounted("m-1", "billing", "away")]


def test_a_receipt_that_is_there_already() -> None:
    """A receipt that another wrote first undoes the handler's writes."""
    assert play(*RETURNED, ("note_done", None), UNDO) == (Duplicate(), [])


@pytest.mark.parametrize("at", ["note_done", "save"])
@pytest.mark.parametrize(
    "then, verdict",
    [([OPEN, ("look", Seen(DONE)), UNDO], Duplicate()), (BEGUN, Busy()), ([OPEN, ("look", TAKEN), UNDO], Busy())],
    ids=["by a rival", "by another message", "by one that still runs"],
)
def test_overtaken(at: str, then: list[Any], verdict: object) -> None:
    """Under an older snapshot, what was in the way is looked at again: a duplicate, or it has to come again."""
    ended: list[Any] = [("note_done", DONE), ("save", DONE)]
    ended = [*ended[: ["note_done", "save"].index(at)], (at, Overtaken())]
    assert play(*RETURNED, *ended, UNDO, *then, UNDO) == (verdict, [])


def test_a_constraint_at_commit() -> None:
    """An error of the application's own at COMMIT is a failure of the handler."""
    ended = [("note_done", DONE), ("save", BOOM), UNDO]
    assert play(*RETURNED, *ended, *BEGUN, ("note_failure", FAILING), SAVE, UNDO) == (BOOM, [])


@pytest.mark.parametrize("error", [StoreUnavailable("away"), ConfigurationError("x"), Interrupted()])
@pytest.mark.parametrize("at", range(len(RETURNED) + 2))
def test_trouble_is_raised_with_nothing_open(error: Exception, at: int) -> None:
    """Trouble with the store, or a caller that has gone, at any step: rolled back, raised, not counted, no verdict."""
    steps = [*RETURNED, ("note_done", DONE), SAVE]
    assert play(*steps[:at], (steps[at][0], error), UNDO) == (error, [])


def test_a_receipt_that_is_refused() -> None:
    """What can't be written after the handler, and could before, is the handler's failure, if it can be counted."""
    ended: list[Any] = [*RETURNED, ("note_done", StoreReadOnly("read only")), UNDO]
    error, told = play(*ended, *BEGUN, ("note_failure", FAILING), SAVE, UNDO)
    assert "role, search_path, read only" in str(error)
    assert told == []
    error, told = play(*ended, ("open", StoreReadOnly("It has become a replica.")), UNDO)
    assert told == [TryNotCounted("m-1", "billing", "It has become a replica.")]


UNKNOWN = [*RETURNED, ("note_done", DONE), ("save", LOST)]


def test_a_lost_commit_that_happened() -> None:
    """A COMMIT without a reply is looked up; the receipt bears the mark of this very run."""
    assert play(*UNKNOWN, OPEN, ("look", Seen(DONE)), ("look", Seen(DONE)), UNDO) == (Ran("paid"), [])
    rivals = Seen(Receipt(ReceiptState.DONE, 0, mark=8), has_lock=False)
    assert play(*UNKNOWN, OPEN, ("look", rivals), UNDO) == (Duplicate(), [])


def test_a_lost_commit_that_did_not_happen() -> None:
    """Without a receipt, under the lock, it was rolled back: raised, so that the message comes again."""
    error, _ = play(*UNKNOWN, OPEN, *LOOKS, UNDO, UNDO)
    assert isinstance(error, StoreUnavailable)
    assert not isinstance(error, CommitUnknown)
    seen = Seen(FAILING)
    error, _ = play(*UNKNOWN, OPEN, ("look", seen), ("look", seen), UNDO, UNDO)
    assert isinstance(error, StoreUnavailable)


def test_a_lost_commit_that_stays_unknown() -> None:
    """While the store is away, or the lost transaction is still under way, it waits; then it raises, and never acks."""
    away, busy = [("open", StoreUnavailable()), UNDO], [OPEN, ("look", TAKEN), UNDO]
    pause = ("pause", None)
    looks = [*away, pause, *busy, pause, *away, pause, *busy]
    assert play(*UNKNOWN, *looks, UNDO) == (LOST, [])


def test_a_lost_commit_that_ends_late() -> None:
    """A COMMIT that was still under way is found when it has ended."""
    busy = [OPEN, ("look", TAKEN), UNDO, ("pause", None)]
    assert play(*UNKNOWN, *busy, OPEN, ("look", Seen(DONE, has_lock=False)), UNDO) == (Ran("paid"), [])


class Reaping:
    """A store that has so many old receipts."""

    def __init__(self, *counts: int | StoreUnavailable) -> None:
        self.counts = list(counts)

    async def ask(self, command: Any) -> Any:
        assert command == ReapInbox(10, timedelta(days=14))
        count = self.counts.pop(0)
        if isinstance(count, Exception):
            raise count
        return count

    def tell(self, happening: Any) -> None: ...


@pytest.mark.parametrize(
    "counts, report",
    [
        ([0], InboxReport()),
        ([10, 10, 3], InboxReport(23)),
        ([10] * 1000, InboxReport(10_000)),
        ([10, StoreUnavailable("away")], InboxReport(10, StoreUnavailable("away"))),
    ],
    ids=["none", "some", "too many for one run", "trouble"],
)
async def test_reaping(counts: list[Any], report: InboxReport) -> None:
    """Old receipts are deleted batch by batch, until one is not full; a run ends, and says why it ended early."""
    came = await reap_inbox(Reaping(*counts), timedelta(days=14), 10)
    assert (came.deleted, str(came.error)) == (report.deleted, str(report.error))
    assert came.is_idle is (counts == [0])
    assert str(came).startswith(f"reaped the inbox: {report.deleted} receipts deleted")
    assert ("away" in str(came)) is (report.error is not None)


class Consumer:
    """A consumer's process: a delivery, with ports on a real store, one call at a time."""

    def __init__(self, opened: Store, message_id: str, handler: Callable[..., Any], max_attempts: int = 5) -> None:
        delivery = Delivery("billing", message_id)
        statements = InboxStatements(messages_of(opened))
        call = Call("billing", caught(handler), (message_id,))
        self._real = ThreadPorts(opened, call, statements, delivery, max_attempts)
        self._delivery = delivery
        self.message = message_id

    def flow(self) -> Flow[Any]:
        return receive(StepPorts(), self._delivery)

    def perform(self, step: Step) -> Any:
        call = getattr(self._real, step.name)(*step.args)
        try:
            call.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError(step)

    def die(self) -> None:
        """What the operating system does: the connection is closed, and the database rolls back."""
        self.perform(Step("undo"))

    def live(self) -> Any:
        flow, answer = self.flow(), None
        try:
            while True:
                step = flow.throw(answer) if isinstance(answer, Exception) else flow.send(answer)
                try:
                    answer = self.perform(step)
                except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                    answer = error
        except StopIteration as end:
            return end.value


@dataclass(frozen=True)
class Database:
    store: Store
    #: How many parcels a message has sent.
    parcels: Callable[[str], int]
    receipt: Callable[[str], tuple[str, int] | None]


@contextmanager
def sqlite_database(url: str) -> Iterator[Database]:
    path = Path(url.removeprefix("sqlite:///"))
    with closing(store(url)) as opened, closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as other:
        opened.migrate()
        other.execute("CREATE TABLE parcels (message TEXT NOT NULL)")
        yield Database(
            opened,
            lambda each: other.execute("SELECT count(*) FROM parcels WHERE message = ?", [each]).fetchall()[0][0],
            lambda each: other.execute(
                "SELECT state, attempts FROM semel_inbox WHERE message_id = ?", [each]
            ).fetchone(),
        )


@contextmanager
def postgres_database(url: str) -> Iterator[Database]:
    with closing(store(url)) as opened, psycopg.connect(url, autocommit=True) as other:
        other.execute("CREATE TABLE parcels (message TEXT NOT NULL)")
        yield Database(
            opened,
            lambda each: other.execute("SELECT count(*) FROM parcels WHERE message = %s", [each]).fetchall()[0][0],
            lambda each: other.execute(
                "SELECT state, attempts FROM semel_inbox WHERE message_id = %s", [each]
            ).fetchone(),
        )


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    url = request.getfixturevalue(f"{request.param}_url")
    with sqlite_database(url) if request.param == "sqlite" else postgres_database(url) as opened:
        yield opened


def ship(connection: Any, message_id: str) -> str:
    connection.execute(f"INSERT INTO parcels VALUES ('{message_id}')")
    return "shipped"


def test_death_at_every_step(database: Database) -> None:
    """The consumer dies before or after any step: parcel and receipt, or neither; and the redelivery makes it one."""
    places = []
    for crash in crashes(database, ship):
        consumer = crash.world
        places.append((crash.command.name, crash.when))
        is_committed = places[-1] == ("save", "after")
        left = database.parcels(consumer.message), database.receipt(consumer.message)
        assert left == ((1, ("done", 0)) if is_committed else (0, None)), crash
        expected = Duplicate() if is_committed else Ran("shipped")
        assert Consumer(database.store, consumer.message, ship).live() == expected, crash
        assert database.parcels(consumer.message) == 1, crash
    names = ["open", "look", "look", "call_inside", "note_done", "save"]
    assert places == [(name, when) for name in names for when in ("before", "after")]


def test_death_while_a_failure_is_counted(database: Database) -> None:
    """The consumer dies anywhere in a try that fails: nothing of it is left, and it is counted once or not at all."""

    def fail(connection: Any, message: str) -> None:
        ship(connection, message)
        raise BOOM

    counted = []
    for crash in crashes(database, fail):
        message = crash.world.message
        counted.append(database.receipt(message))
        assert database.parcels(message) == 0, crash
        assert Consumer(database.store, message, ship).live() == Ran("shipped"), crash
        assert database.parcels(message) == 1, crash
    assert set(counted) == {None, ("failing", 1)}


def crashes(database: Database, handler: Callable[..., Any]) -> Iterator[Crash[Consumer]]:
    """Each death of a consumer, in a message of its own."""
    numbers = count()
    try:
        for crash in every_crash(lambda: Consumer(database.store, f"m-{next(numbers)}", handler)):
            crash.world.die()
            yield crash
    except ValueError as error:
        assert error is BOOM  # noqa: PT017 - the flow came to its end


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url
