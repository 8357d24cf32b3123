"""What is behind a function: engines and pools of the application's own, outages, and operators."""

import pickle
import socket
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

import semel
from semel import Fingerprinter, Policy, functions, stores
from semel.core.commands import Look
from semel.core.state import State
from semel.errors import AnswerNotStored, InProgress, KeyReused, OutcomeUnknown, StoreUnavailable
from semel.flows.upkeep import resolve_applied
from semel.functions import FailedBefore, idempotent
from semel.guard.running import run
from semel.stores.memory import MemoryStore
from semel.work import Sweeper
from semel.work.service import ServicePorts

ATOMIC = Policy(mode="atomic")
NOWHERE = "postgresql://127.0.0.1:{}/semel"


@pytest.fixture
def unreachable_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    return NOWHERE.format(port)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sent (number int)"))
    yield engine
    engine.dispose()


def test_an_engine_of_the_applications_own(engine: Engine) -> None:
    """A function may keep its keys where the application's engine connects to, and write through it."""

    @idempotent(key="number", store=engine, policy=ATOMIC, name="send")
    def send(number: int) -> str:
        semel.current().connection.execute(text("INSERT INTO sent VALUES (:number)"), {"number": number})
        return "sent"

    assert send(1) == send(1) == "sent"
    functions.close()
    with engine.connect() as connection:  # It is still the application's.
        assert connection.execute(text("SELECT number FROM sent")).scalars().all() == [1]
    assert send(1) == "sent"


async def test_an_async_engine(engine: Engine) -> None:
    """The same, in an async function."""
    own = create_async_engine(str(engine.url).replace("sqlite:", "sqlite+aiosqlite:"))

    @idempotent(key="number", store=own, policy=ATOMIC, name="send")
    async def send(number: int) -> str:
        await semel.current().connection.execute(text("INSERT INTO sent VALUES (:number)"), {"number": number})
        return "sent"

    assert await send(1) == await send(1) == "sent"
    async with own.connect() as connection:
        assert (await connection.execute(text("SELECT number FROM sent"))).scalars().all() == [1]
    await own.dispose()


async def test_a_store_that_is_away(unreachable_url: str) -> None:
    """Where nobody can guard a function it is not run, and the caller is told when to come back."""

    @idempotent(key="number", store=unreachable_url, name="send")
    def send(number: int) -> None:
        raise AssertionError

    @idempotent(key="number", store=unreachable_url, name="send_async")
    async def send_async(number: int) -> None:
        raise AssertionError

    with pytest.raises(StoreUnavailable) as away:
        send(1)
    assert away.value.retry_after == 2
    with pytest.raises(StoreUnavailable):
        await send_async(1)


def test_a_result_that_could_not_be_stored(postgres_url: str) -> None:
    """When the function has run and its result can't be stored, key and result are kept, and stored when they can be:
    nothing is run again.
    """
    runs: list[int] = []
    with closing(stores.store(postgres_url)) as store:
        store.migrate()

        def rename(old: str, new: str) -> None:
            with psycopg.connect(postgres_url) as server:
                server.execute(f"ALTER TABLE {old} RENAME TO {new}".encode())

        @idempotent(key="number", store=store, name="send")
        def send(number: int) -> str:
            runs.append(number)
            rename("semel_keys", "semel_lost")
            return "sent"

        with pytest.raises(AnswerNotStored):
            send(1)
        rename("semel_lost", "semel_keys")
        functions.close()
        assert send(1) == "sent"
    assert runs == [1]


def test_a_policy_may_leave_arguments_out(memory: MemoryStore) -> None:
    """What a fingerprint omits is named like an argument; other things in it hold for functions too."""
    recipe = Fingerprinter(omit=("sent_at", "order.note"), secret=b"0123456789abcdef")

    @idempotent(key="number", store=memory, policy=Policy(fingerprint=recipe), name="send")
    def send(number: int, sent_at: str, order: dict[str, str]) -> str:
        return sent_at

    assert send(1, "10:00", {"item": "tea"}) == send(1, "10:05", {"item": "tea", "note": "hot"}) == "10:00"
    with pytest.raises(KeyReused):
        send(1, "10:00", {"item": "cake"})


def test_an_operator_says_what_came_of_it() -> None:
    """A call whose outcome is unknown gets the result that an operator has given it."""
    now = [datetime(2026, 11, 16, tzinfo=UTC)]
    memory = MemoryStore(clock=lambda: now[0])

    class Died(BaseException):
        """Nothing after it is executed, as in a process that is killed."""

    @idempotent(key="number", store=memory, scope="acme", name="send", on_crash="refuse")
    def send(number: int) -> Any:
        raise Died

    with pytest.raises(Died):
        send(1)
    now[0] += timedelta(minutes=5)
    with pytest.raises(OutcomeUnknown):
        send(1)
    Sweeper(memory).run_once()
    record = memory.perform(Look("acme\tCALL send", "1"))
    assert record is not None
    assert record.state is State.UNKNOWN
    run(resolve_applied, ServicePorts(memory), record, {"sent": True})
    assert send(1) == {"sent": True}


def test_refusals_cross_processes() -> None:
    """What is raised can be pickled, as a pool of processes does, with all that it says."""
    failed = pickle.loads(pickle.dumps(FailedBefore.of("ValueError", "odd")))  # noqa: S301 - our own
    assert (failed.error, failed.words) == ("ValueError", "odd")
    assert str(failed).endswith("It was ValueError: odd")
    busy = pickle.loads(pickle.dumps(InProgress(retry_after=3)))  # noqa: S301 - our own
    assert busy.retry_after == 3
