"""An inbox in Django's own database: what the ORM writes in the handler commits with the receipt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, transaction

from semel.errors import ConfigurationError, StoreNotReady
from semel.flows.receive import InboxReport
from semel.inbox import AsyncInbox, Busy, Duplicate, Inbox, Parked, Ran, Verdict
from semel.stores.django import AsyncDjangoStore, DjangoStore
from semel.work import InboxReaper
from tests.django.shop.models import Payment

DELIVERIES, MESSAGES = 100, 5


def pay(lent: Any, account: str) -> str:
    assert lent.in_atomic_block
    Payment.objects.create(amount=5, account=account)
    return account


def fail(_lent: Any, account: str) -> None:
    pay(_lent, account)
    raise ValueError("no stock")


def paid() -> list[str]:
    """Say who has paid, as other connections see it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_paid).result()


def _paid() -> list[str]:
    try:
        return [each.account for each in Payment.objects.order_by("account")]
    finally:
        connection.close()


def test_once(database: str) -> None:
    """The payment and the receipt are one commit; on_commit functions run after it, and a redelivery runs nothing."""
    inbox, notified = Inbox(DjangoStore(), consumer="billing"), []

    def handler(lent: Any, account: str) -> str:
        transaction.on_commit(lambda: notified.append(account))
        assert not notified
        return pay(lent, account)

    assert inbox.receive("m-1", handler, "alice", payload=b"1") == Ran("alice")
    assert inbox.receive("m-1", handler, "alice", payload=b"1") == Duplicate()
    assert (paid(), notified) == (["alice"], ["alice"])
    assert (connection.in_atomic_block, connection.get_autocommit()) == (False, True)


def test_failures(database: str) -> None:
    """A failed try leaves no payment; it is counted, and the last one parks the message."""
    inbox = Inbox(DjangoStore(), consumer="billing", max_attempts=2)
    with pytest.raises(ValueError, match="no stock"):
        inbox.receive("m-1", fail, "alice")
    assert inbox.receive("m-1", fail, "alice") == Parked(2, "ValueError: no stock")
    assert inbox.receive("m-1", pay, "alice") == Parked(2, "ValueError: no stock")
    assert paid() == []


def test_at_once(database: str) -> None:
    """Deliveries in many threads: each message is handled once."""
    inbox = Inbox(DjangoStore(), consumer="billing")

    def deliver(number: int) -> Verdict[str]:
        name = f"m-{number % MESSAGES}"
        try:
            while (verdict := inbox.receive(name, pay, name)) == Busy():
                pass
        finally:
            connection.close()
        return verdict

    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(deliver, range(DELIVERIES)))
    assert sum(isinstance(each, Ran) for each in verdicts) == MESSAGES
    assert paid() == [f"m-{number}" for number in range(MESSAGES)]


def test_inside_another_transaction(database: str) -> None:
    """A delivery is a transaction of its own: inside one of the application's it is refused, and nothing is run."""
    inbox = Inbox(DjangoStore(), consumer="billing")
    with transaction.atomic(), pytest.raises((ConfigurationError, RuntimeError)):
        inbox.receive("m-1", pay, "alice")
    assert paid() == []


def test_no_table(database: str) -> None:
    """Without the table nothing is run, and the error names Django's own command."""
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE semel_inbox")
    with pytest.raises(StoreNotReady, match=r"manage\.py migrate semel"):
        Inbox(DjangoStore(), consumer="billing").receive("m-1", pay, "alice")
    assert paid() == []


def test_reaping(database: str) -> None:
    """The services of a Django project delete old receipts."""
    store = DjangoStore()
    Inbox(store, consumer="billing").receive("m-1", pay, "alice")
    by = "interval '30 days'" if connection.vendor == "postgresql" else "30 * 86400000"
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE semel_inbox SET changed_at = changed_at - {by}")
    assert InboxReaper(store).run_once() == InboxReport(1)


async def test_async(database: str) -> None:
    """In an async consumer a plain handler runs in the ORM's thread, in its transaction."""
    inbox = AsyncInbox(AsyncDjangoStore(), consumer="billing", max_attempts=1)
    assert await inbox.receive("m-1", pay, "alice") == Ran("alice")
    assert await inbox.receive("m-1", pay, "alice") == Duplicate()
    assert await inbox.receive("m-2", fail, "bob") == Parked(1, "ValueError: no stock")

    async def with_orm(_lent: Any, account: str) -> str:
        await Payment.objects.acreate(amount=5, account=account)
        return account

    assert await inbox.receive("m-3", with_orm, "carol") == Ran("carol")
    assert paid() == ["alice", "carol"]
