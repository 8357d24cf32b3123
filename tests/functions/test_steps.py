"""Phases, effects and transactions of functions, and workers that were too slow."""

import asyncio
import sqlite3
from copy import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import semel
from semel import NoEffect, Policy
from semel.core.commands import Look
from semel.core.state import State
from semel.errors import LeaseLost, NotReplayable, OutcomeUnknown, RecoveryPointLost, ResultNotJSON
from semel.functions import FailedBefore, idempotent
from semel.stores import Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore

ATOMIC = Policy(mode="atomic")


class Clock:
    """The clock of a store in memory."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 16, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def move(self, by: timedelta) -> None:
        self.now += by


def test_a_retry_goes_on_from_the_recovery_point(keys: Store) -> None:
    """A function that fails between its steps is run again, and repeats no step that is done."""
    calls: list[str] = []
    faults = [OSError("away")]

    def reserve(_connection: object, seats: int) -> dict[str, int]:
        calls.append("reserve")
        return {"seats": seats}

    def charge(reserved: dict[str, int], *, idempotency_key: str) -> str:
        calls.append("charge")
        return idempotency_key

    @idempotent(key="number", store=keys, name="book")
    def book(number: int) -> list[Any]:
        operation = semel.current()
        reserved = operation.phase("reserved", reserve, 2)
        if faults:
            raise faults.pop()
        return [operation.recovery_point, reserved, operation.effect("charged", charge, reserved)]

    with pytest.raises(OSError, match="away"):
        book(1)
    first = book(1)
    assert first[:2] == ["reserved", {"seats": 2}]
    assert book(1) == first
    assert calls == ["reserve", "charge"]


def test_a_bad_result_after_steps_is_free_to_be_put_right(memory: MemoryStore) -> None:
    """What a function of steps did is recorded, so a result that is no JSON can be put right in the code."""
    calls: list[str] = []
    result: list[Any] = [{1}]

    def charge(*, idempotency_key: str) -> None:
        calls.append(idempotency_key)

    @idempotent(key="number", store=memory, name="pay")
    def pay(number: int) -> Any:
        semel.current().effect("charged", charge)
        return result[0]

    with pytest.raises(ResultNotJSON):
        pay(1)
    result[0] = [1]
    assert pay(1) == [1]
    assert len(calls) == 1


def test_code_that_forgets_a_stored_step_is_refused(memory: MemoryStore) -> None:
    """A function may not end without the steps that are stored: its result would be another's."""
    faults = [OSError("away")]

    @idempotent(key="number", store=memory, name="pay")
    def pay(number: int) -> str:
        if faults:
            semel.current().phase("reserved", lambda _: 1)
            raise faults.pop()
        return "paid"

    with pytest.raises(OSError, match="away"):
        pay(1)
    with pytest.raises(RecoveryPointLost):
        pay(1)


def test_an_effect_that_nobody_can_know_is_parked(memory: MemoryStore) -> None:
    """An effect whose outcome is unknown waits for an operator, and the caller is told so."""
    faults = [OSError("away")]

    def charge(*, idempotency_key: str) -> None:
        raise faults[0]

    @idempotent(key="number", store=memory, name="pay")
    def pay(number: int) -> None:
        semel.current().effect("charged", charge, on_unknown="park")

    with pytest.raises(OSError, match="away"):
        pay(1)
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            pay(1)


def test_who_lost_its_lease_stores_nothing() -> None:
    """A worker that was silent past its lease is told so, and the result is the other's."""
    clock = Clock()
    memory = MemoryStore(clock=clock)

    def send(number: int) -> str:
        attempt = semel.current().attempt
        if attempt == 1:
            clock.move(timedelta(seconds=31))
            assert elsewhere(number) == "attempt 2"
        return f"attempt {attempt}"

    here, elsewhere = (
        idempotent(key="number", store=store, lease=timedelta(seconds=30), name="send")(send)
        for store in (memory, copy(memory))
    )
    with pytest.raises(LeaseLost):
        here(1)
    assert here(1) == "attempt 2"


async def test_who_lost_its_lease_stores_nothing_on_a_loop() -> None:
    """The same, on an event loop; a failure that was to be kept is not kept either."""
    clock = Clock()
    memory = MemoryStore(clock=clock)

    async def send(number: int) -> str:
        attempt = semel.current().attempt
        if attempt == 1:
            clock.move(timedelta(seconds=31))
            assert await elsewhere(number) == "attempt 2"
            raise ValueError("late")
        return f"attempt {attempt}"

    here, elsewhere = (
        idempotent(key="number", store=store, lease=timedelta(seconds=30), keep=ValueError, name="send")(send)
        for store in (AsyncMemoryStore(memory=memory), AsyncMemoryStore(memory=memory))
    )
    with pytest.raises(LeaseLost):
        await here(1)
    assert await here(1) == "attempt 2"


async def test_who_lost_its_lease_is_stopped() -> None:
    """An async function whose operation another worker has is cancelled, and its caller told why."""
    clock = Clock()
    memory = MemoryStore(clock=clock)
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def send(number: int) -> str:
        if semel.current().attempt == 1:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()
        return "sent"

    here, elsewhere = (
        idempotent(key="number", store=store, lease=timedelta(milliseconds=300), name="send")(send)
        for store in (AsyncMemoryStore(memory=memory), AsyncMemoryStore(memory=memory))
    )
    first = asyncio.create_task(here(1))
    await begun.wait()
    clock.move(timedelta(seconds=1))
    assert await elsewhere(1) == "sent"
    with pytest.raises(LeaseLost):
        await first
    assert stopped.is_set()


@pytest.mark.parametrize("on_crash, runs", [("rerun", 2), ("refuse", 1)])
def test_after_a_crash_the_setting_decides(on_crash: Any, runs: int) -> None:
    """A function whose process died is run again when its lease has ended, or refused as unknown."""
    clock = Clock()
    count: list[int] = []

    class Died(BaseException):
        """Nothing after it is executed, as in a process that is killed."""

    @idempotent(
        key="number", store=MemoryStore(clock=clock), lease=timedelta(seconds=30), on_crash=on_crash, name="send"
    )
    def send(number: int) -> str:
        count.append(number)
        if len(count) == 1:
            raise Died
        return "sent"

    with pytest.raises(Died):
        send(1)
    clock.move(timedelta(seconds=31))
    if on_crash == "refuse":
        with pytest.raises(OutcomeUnknown):
            send(1)
    else:
        assert send(1) == "sent"
    assert len(count) == runs


def count_rows(url: str, table: str) -> int:
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        try:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
        finally:
            connection.close()
    with psycopg.connect(url) as server:
        found = server.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
        assert found
        return int(found[0])


def create_table(url: str) -> None:
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.execute("CREATE TABLE sent (number int)")
        connection.close()
    else:
        with psycopg.connect(url) as server:
            server.execute("CREATE TABLE sent (number int)")


def test_atomic(durable_url: str) -> None:
    """In atomic mode what a function writes commits with its result, and not at all if it fails."""
    create_table(durable_url)
    ends: list[Any] = [OSError("away"), {1}, ValueError("odd"), "sent"]

    @idempotent(key="number", store=durable_url, policy=ATOMIC, keep=ValueError, name="send")
    def send(number: int) -> Any:
        semel.current().connection.execute(f"INSERT INTO sent VALUES ({number})")
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    with pytest.raises(OSError, match="away"):
        send(1)
    with pytest.raises(ResultNotJSON):  # It is rolled back, so it may run again.
        send(1)
    with pytest.raises(ValueError, match="odd"):
        send(1)
    with pytest.raises(FailedBefore, match="odd"):
        send(1)
    assert count_rows(durable_url, "sent") == 0
    assert send(2) == send(2) == "sent"
    assert count_rows(durable_url, "sent") == 1


async def test_atomic_on_a_loop(durable_url: str) -> None:
    """The same, in an async function."""
    create_table(durable_url)

    @idempotent(key="number", store=durable_url, policy=ATOMIC, name="send")
    async def send(number: int) -> str:
        connection = semel.current().connection
        written = connection.execute(f"INSERT INTO sent VALUES ({number})")
        if hasattr(written, "__await__"):
            await written
        if number < 0:
            raise NoEffect
        return "sent"

    with pytest.raises(NoEffect):
        await send(-1)
    assert await send(2) == await send(2) == "sent"
    assert count_rows(durable_url, "sent") == 1


def test_what_is_kept_of_a_failure(memory: MemoryStore) -> None:
    """A kept failure is a failed operation to an operator; a result over the limit has no body."""

    @idempotent(
        key="number", store=memory, keep=ValueError, name="send", scope="acme", policy=Policy(max_response_body=3)
    )
    def send(number: int) -> str:
        if number == 1:
            raise ValueError("odd")
        return "four"

    with pytest.raises(ValueError, match="odd"):
        send(1)
    send(2)
    failed, large = (memory.perform(Look("acme\tCALL send", key)) for key in ("1", "2"))
    assert failed is not None
    assert large is not None
    assert (failed.state, large.state) == (State.FAILED, State.COMPLETE)
    assert failed.answer is not None
    assert failed.answer.body == b'{"error": "ValueError", "message": "odd"}'
    with pytest.raises(NotReplayable):
        send(2)
