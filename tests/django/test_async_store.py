"""The store on Django's own connection, for async views: in the thread where Django runs the ORM of a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.test import TestCase

from semel.core.commands import Begin, Look, Open, Renew, Undo, Verdict
from semel.core.record import Found, Hold
from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores.django import AsyncDjangoStore, DjangoStore
from semel.stores.transaction import AsyncTransaction
from tests.django.operations import ANSWER, claim_on, finish, step
from tests.django.requests import Request
from tests.django.shop.models import Payment
from tests.django.test_store import run


@pytest.fixture
async def request_() -> AsyncIterator[Request]:
    """One request of an ASGI server's."""
    made = Request()
    yield made
    await asyncio.to_thread(made.end)


async def begun(lent: AsyncTransaction, claim: Any) -> Hold:
    hold = await lent.perform(Begin(claim))
    assert isinstance(hold, Hold), hold
    return hold


def paid() -> list[str]:
    """Say who has paid, as everybody else sees it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: [each.account for each in Payment.objects.order_by("id")]).result()


class TestOneRequest:
    async def test_orm_writes_join(self, database: str, request_: Request) -> None:
        """What an async view writes through the ORM commits with its record."""
        store = AsyncDjangoStore()

        async def serve() -> None:
            lent, claim = store.transaction(), claim_on()
            hold = await begun(lent, claim)
            await Payment.objects.acreate(amount=5, account="alice")
            assert await asyncio.to_thread(paid) == []
            assert await lent.perform(finish(claim, hold)) is Verdict.DONE

        await request_.run(serve())
        assert await asyncio.to_thread(paid) == ["alice"]

    async def test_undone(self, database: str, request_: Request) -> None:
        """Undone, it is not there."""
        store = AsyncDjangoStore()

        async def serve() -> Any:
            lent = store.transaction()
            await begun(lent, claim_on())
            await Payment.objects.acreate(amount=5, account="alice")
            await lent.perform(Undo())
            return await store.perform(Look("alice", "key"))

        assert await request_.run(serve()) is None
        assert await asyncio.to_thread(paid) == []

    async def test_plain_functions_of_steps(self, database: str, request_: Request) -> None:
        """A plain function that a phase calls runs where its writes are in the phase's transaction."""
        store = AsyncDjangoStore()

        async def serve() -> None:
            hold = await store.perform(claim_on())
            assert isinstance(hold, Hold)
            lent = store.transaction()
            await lent.perform(Open())
            await store.start_in_thread(lambda: Payment.objects.create(amount=5, account="alice"))
            assert await asyncio.to_thread(paid) == []
            assert await lent.perform(step(hold)) is Verdict.DONE

        await request_.run(serve())
        assert await asyncio.to_thread(paid) == ["alice"]

    async def test_on_commit(self, database: str, request_: Request) -> None:
        """What waits for the commit runs after it, in the ORM's thread."""
        store, seen = AsyncDjangoStore(), list[bool]()

        def hook() -> None:
            seen.append(connection.in_atomic_block)

        async def serve() -> None:
            lent, claim = store.transaction(), claim_on()
            hold = await begun(lent, claim)
            await sync_to_async(transaction.on_commit)(hook)
            await lent.perform(finish(claim, hold))

        await request_.run(serve())
        assert seen == [False]

    async def test_renewal_beside_a_transaction(self, database: str, request_: Request) -> None:
        """Leases are renewed while the request's own thread is busy, and in a transaction."""
        store, go_on = AsyncDjangoStore(), threading.Event()

        async def serve() -> None:
            claim = claim_on()
            hold = await store.perform(claim)
            assert isinstance(hold, Hold)
            lent = store.transaction()
            # SQLite lets one write at a time, whoever it is: there a lease is renewed before or after.
            if connection.vendor == "postgresql":
                await lent.perform(Open())
            busy = asyncio.ensure_future(store.start_in_thread(lambda: go_on.wait(60)))
            assert await store.perform(Renew(((hold, claim.lease),))) == frozenset()
            go_on.set()
            await busy
            await lent.perform(Undo())

        await request_.run(serve())
        await store.close()

    async def test_open(self, database: str, request_: Request) -> None:
        """It opens where the tables are, and can be closed and used again."""
        async with AsyncDjangoStore() as store:
            pass
        assert isinstance(await request_.run(_awaited(store.perform(claim_on()))), Hold)

    async def test_two_in_one_thread(self, database: str) -> None:
        """Two transactions at once in one thread can't be: the second is told so, and the first is not touched."""
        store, request = AsyncDjangoStore(), Request()

        async def serve() -> None:
            first, claim = store.transaction(), claim_on()
            hold = await begun(first, claim)
            with pytest.raises(ConfigurationError, match="in its own thread"):
                await store.transaction().perform(Begin(claim_on("other")))
            assert await first.perform(finish(claim, hold)) is Verdict.DONE

        await request.run(serve())
        await asyncio.to_thread(request.end)


async def _awaited(step: Any) -> Any:
    return await step


class TestCancelled:
    async def test_command(self, database: str, request_: Request) -> None:
        """A command goes on when whoever waits for it is cancelled, and its outcome is there for the next."""
        store = AsyncDjangoStore()

        async def serve() -> Any:
            step = store.perform(claim_on())
            waiting = asyncio.ensure_future(_awaited(step))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert step.heir is not None
            return await step.heir

        assert isinstance(await request_.run(serve()), Hold)

    async def test_beginning(self, database: str, request_: Request) -> None:
        """A transaction that is begun for nobody is undone, and its key is free."""
        store = AsyncDjangoStore()

        async def serve() -> None:
            beginning = asyncio.ensure_future(store.transaction().perform(Begin(claim_on())))
            await asyncio.sleep(0)
            beginning.cancel()
            await asyncio.wait([beginning])
            assert beginning.cancelled()
            # In the same thread, so it comes after what was begun.
            while await sync_to_async(lambda: connection.in_atomic_block)():
                pass
            lent = store.transaction()
            await begun(lent, claim_on())
            await lent.perform(Undo())

        await request_.run(serve())

    async def test_commit(self, database: str, request_: Request) -> None:
        """A commit that nobody waits for any more is carried out."""
        store = AsyncDjangoStore()

        async def serve() -> None:
            lent, claim = store.transaction(), claim_on()
            hold = await begun(lent, claim)
            await Payment.objects.acreate(amount=5, account="alice")
            ending = asyncio.ensure_future(lent.perform(finish(claim, hold)))
            while not _is_committing(lent):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            ending.cancel()
            await asyncio.wait([ending])
            while await sync_to_async(lambda: connection.in_atomic_block)():
                pass
            record = await store.perform(Look("alice", "key"))
            assert record is not None
            assert record.answer == ANSWER

        await request_.run(serve())
        assert await asyncio.to_thread(paid) == ["alice"]

    def test_loop_that_ends(self, database: str) -> None:
        """When its loop ends in the middle, whoever waits for a command is told, and does not wait for ever."""
        store, told = AsyncDjangoStore(), list[BaseException | None]()
        go_on, began = threading.Event(), threading.Event()

        def hold_up() -> None:
            began.set()
            go_on.wait(60)

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            blocked = loop.run_in_executor(None, began.wait, 60)
            store.start_in_thread(hold_up)
            await blocked
            step = store.perform(claim_on())
            step.add_done_callback(lambda done: told.append(done.exception()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            loop.call_soon(go_on.set)

        asyncio.run(serve())
        assert len(told) == 1
        assert isinstance(told[0], StoreUnavailable)
        assert told[0].was_sent


def _is_committing(lent: AsyncTransaction) -> bool:
    # Its unit is given up in the moment in which the commit begins.
    return lent._unit is None


class TestLoopForOneRequest:
    @pytest.mark.parametrize("requests", [1, 4])
    def test_async_view_under_wsgi(self, database: str, requests: int) -> None:
        """Each request may have a loop of its own that ends with it, several at a time: one store serves them all."""
        store = AsyncDjangoStore()

        async def view(number: int) -> str:
            lent, claim = store.transaction(), claim_on(f"key-{number}")
            hold = await begun(lent, claim)
            await Payment.objects.acreate(amount=5, account=f"account-{number}")
            await lent.perform(finish(claim, hold))
            again = await store.perform(claim_on(f"key-{number}"))
            assert isinstance(again, Found)
            return threading.current_thread().name

        def serve(number: int) -> None:
            async_to_sync(view)(number)
            # The ORM's thread is the server's own, and so is its connection.
            assert not connection.in_atomic_block
            connection.close()

        with ThreadPoolExecutor(requests) as threads:
            list(threads.map(serve, range(2 * requests)))
        assert sorted(paid()) == sorted(f"account-{number}" for number in range(2 * requests))

    def test_test_case(self, database: str) -> None:
        """An async test of Django's TestCase has everything in the transaction of the test."""

        class Case(TestCase):  # type: ignore[misc]  # Django has no types
            databases = frozenset({"default"})

            async def test(self) -> None:
                store = AsyncDjangoStore()
                hold = await store.perform(claim_on("guarded"))
                assert isinstance(hold, Hold)
                lent, claim = store.transaction(), claim_on()
                mine = await begun(lent, claim)
                await Payment.objects.acreate(amount=5, account="alice")
                assert await lent.perform(finish(claim, mine)) is Verdict.DONE
                assert await Payment.objects.acount() == 1

        run(Case)
        assert paid() == []
        assert DjangoStore().perform(Look("alice", "key")) is None
