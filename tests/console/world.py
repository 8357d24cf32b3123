"""A store as operators meet it on a bad day: for the tests of the console, and for the pictures in the docs.

Nothing here knows the console.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import timedelta
from typing import Any
from uuid import UUID

from semel import stores
from semel.core.commands import (
    Claim,
    CommitAlone,
    Complete,
    Mark,
    Note,
    Open,
    Park,
    Save,
    TakeOver,
    Undo,
    Unpark,
)
from semel.core.message import Answer, Head, Request
from semel.core.outbox import Ending, Message, message_id
from semel.core.record import Hold, Milestone, Record
from semel.core.recovery import Begun, Done, Progress, read_back
from semel.core.state import Event
from semel.stores.dialect import messages_of
from semel.stores.inbox import InboxStatements
from semel.stores.outbox import OutboxStatements, carry_out
from semel.stores.transaction import at_once
from semel.testing.clock import Clock
from semel.webhooks import Endpoints

SCOPE = "acct_4Kd91"
#: The keys of the operations that have a story.
PARKED = "018f6c2e-77d1-7b0e-9c55-payment-parked"
STUCK = "018f6c2e-91aa-7c41-8e02-transfer-stuck"
EXPORT = "018f6c2e-a3b0-7d11-b1f6-export"
FINISHED = "018f6c2e-0aa1-7e19-a0c4-order"
#: Whatever a client may send: terminal escapes, markup, right-to-left text.
NASTY = "<script>alert(1)</script>\x1b[31m\u202egnp.exe"
NASTY_BODY = (
    b'<script>alert(1)</script><svg onload="alert(2)">\x00\x1b[2J\xe2\x80\xae</pre><img src=x onerror=alert(3)>'
)

_JSON = ((b"content-type", b"application/json"),)
_RIDE = Done("phase", "order_created", {"order": 4711})
_LINES = ("POST /payments", "POST /orders", "POST /transfers", "PATCH /accounts/7", "POST /refunds")


def claim(key: str, number: int, scope: str = SCOPE, **more: Any) -> Claim:
    terms: dict[str, Any] = {
        "lease": timedelta(seconds=30),
        "retention": timedelta(hours=24),
        "request_line": _LINES[number % len(_LINES)],
    }
    return Claim(scope, key, number.to_bytes(16, "big"), bytes(37), **terms | more)


def request(path: str, body: bytes = b'{"format": "csv"}') -> Request:
    return Request(Head("POST", path, b"", _JSON), body, SCOPE)


class World:
    """A store, and the means to fill it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = stores.store(url)
        self.clock = Clock(self.store if url.startswith("memory") else url)
        self._number = 0

    def held(self, key: str, **more: Any) -> Hold:
        self._number += 1
        hold = self.store.perform(claim(key, self._number, **more))
        assert isinstance(hold, Hold)
        return hold

    def ended(self, key: str, status: int = 201, body: bytes = b'{"id": 7}', **more: Any) -> Hold:
        hold = self.held(key, **more)
        event = Event.COMPLETE if status < 500 else Event.FAIL
        self.store.perform(Complete(hold, event, Answer(status, _JSON, body)))
        return hold

    def parked(self, key: str, **more: Any) -> Hold:
        hold = self.held(key, **more)
        done = Progress((_RIDE,))
        doubt = done.plus(Begun("charge_created"))
        self.store.perform(Save(hold, done))
        self.store.perform(Save(hold, doubt, done))
        self.store.perform(Park(hold, reason="the provider did not answer in 30 s"))
        return hold

    def stuck(self, key: str, **more: Any) -> Hold:
        """Its worker dies twice."""
        hold = self.held(key, **more)
        self.clock.advance(timedelta(minutes=2))
        again = self.held_again(key, hold)
        self.store.perform(Save(again, Progress((_RIDE,))))
        self.clock.advance(timedelta(minutes=2))
        return again

    def held_again(self, key: str, seen: Hold) -> Hold:
        """Another worker takes it over."""
        self._number += 1
        hold = self.store.perform(TakeOver(claim(key, self._number), seen))
        assert isinstance(hold, Hold)
        return hold

    def resolve(self, record: Record) -> None:
        """Another operator resolves it."""
        hold = Hold(record.scope, record.key, record.attempt, record.token)
        self.store.perform(Unpark(hold, read_back(record.steps).without_unknown()))

    def sql(self, statement: str) -> None:
        """Change a SQLite file behind the store's back."""
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
            connection.execute(statement)
            connection.commit()

    def accepted(self, key: str, **more: Any) -> Hold:
        return self.held(key, request=request("/exports"), is_accepted=True, request_line="POST /exports", **more)

    def running(self, key: str, fraction: float, note: str) -> Hold:
        seen = self.accepted(key)
        self._number += 1
        hold = self.store.perform(TakeOver(claim(key, self._number), seen, is_abandoned=True))
        assert isinstance(hold, Hold)
        self.store.perform(Mark(hold, Milestone(fraction, note)))
        return hold

    @property
    def outbox(self) -> OutboxStatements:
        return OutboxStatements(messages_of(self.store))

    def message(self, kind: str, to: str, *, key: str | None = None, name: str | None = None) -> str:
        self._number += 1
        made = Message(
            id=name or str(UUID(int=self._number)),
            type=kind,
            to=to,
            payload=json.dumps({"order": 4711, "note": "<b>paid</b>"}).encode(),
            key=key,
            headers=(("ce-source", "/orders"),),
        )
        at_once(carry_out(self.store, self.outbox.add(made)))
        return made.id

    def dead_letter(self, kind: str, to: str, error: str, name: str | None = None) -> str:
        made = self.message(kind, to, name=name)
        token = bytes(16)
        at_once(
            carry_out(
                self.store,
                self.outbox.claim(
                    to, token, timedelta(seconds=30), 1000, bytes=10**9, aside=False, after=0, due_from=0.0, floor=0
                ),
            )
        )
        endings = [Ending(made, "dead", None, error)]
        at_once(carry_out(self.store, self.outbox.settle(to, token, endings, keep=False)))
        return made

    def unhandled(self, consumer: str, name: str, error: str) -> None:
        statements = InboxStatements(messages_of(self.store))
        transaction = self.store.transaction()
        transaction.perform(Open())
        try:
            transaction.run(statements.note_failure(consumer, name, None, error, 1))
            transaction.perform(CommitAlone())
        finally:
            transaction.perform(Undo())

    def close(self) -> None:
        self.store.close()


def fill(world: World, *, many: int = 120) -> None:
    """Make a bad day."""
    tenants = (SCOPE, "acct_9fQ02", "acct_1Zz77", "shop-eu")
    for number in range(many):
        status = {0: 409, 7: 503, 13: 422}.get(number % 29, 201)
        world.ended(
            f"018f6c2e-{number * 7919 % 65536:04x}-7{number:03x}-9c55-{number * 104729:012x}",
            status,
            scope=tenants[number % len(tenants)],
        )
        if number % 10 == 0:
            world.clock.advance(timedelta(minutes=3))
    world.ended(NASTY, 200, NASTY_BODY, scope="<b>bold</b>\ttenant")
    world.parked(PARKED, request_line="POST /payments")
    world.clock.advance(timedelta(minutes=11))
    world.stuck(STUCK, request_line="POST /transfers")
    finished = world.held(FINISHED, request_line="POST /orders")
    done = Progress((_RIDE,))
    world.store.perform(Save(finished, done))
    both = done.plus(Begun("charge_created"))
    world.store.perform(Save(finished, both, done))
    all_done = done.plus(Done("effect", "charge_created", {"charge": "ch_1"}))
    world.store.perform(Save(finished, all_done, both))
    world.store.perform(Complete(finished, Event.COMPLETE, Answer(201, _JSON, b'{"order": 4711, "paid": true}')))
    world.store.perform(Note(finished, "replayed"))
    if world.store.dialect is not None:
        _fill_messages(world)
    world.running(EXPORT, 0.62, "31,000 of 50,000 rows")
    world.running(f"{EXPORT}-2", 0.08, "reading invoices")
    for number in range(4):
        world.accepted(f"{EXPORT}-{number + 3}")
    for number in range(3):
        world.held(f"live-{number}", lease=timedelta(minutes=10))


def _fill_messages(world: World) -> None:
    published = message_id(SCOPE, FINISHED, step="order_created", type_="order.paid", to="orders", number=0)
    world.dead_letter("order.paid", "ledger", "ConnectionResetError: the broker closed the channel")
    world.dead_letter("invoice.ready", "hook-acme", "500 Internal Server Error: <html><script>alert(1)</script>")
    for number in range(12):
        world.message("order.paid", "orders", key=f"order-{number}", name=published if number == 0 else None)
    for number in range(3):
        world.message("invoice.ready", "hook-acme", key=f"invoice-{number}")
    world.unhandled("billing", "evt_77120", 'IntegrityError: duplicate key value violates unique constraint "invoices"')
    endpoints = Endpoints(world.store)
    endpoints.add("hook-acme", "https://hooks.acme.example/semel", secrets=["env:ACME_SECRET"])
    endpoints.add("hook-blue", "https://blue.example/in", secrets=["env:BLUE_SECRET"])
    endpoints.disable("hook-blue", "410 Gone: it wants no more webhooks")


__all__ = ["EXPORT", "FINISHED", "NASTY", "NASTY_BODY", "PARKED", "SCOPE", "STUCK", "World", "claim", "fill"]
