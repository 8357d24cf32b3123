"""A relay and a consumer, as the work of a forked child that may be killed anywhere. It judges nothing.

The broker is a Redis, or a folder with a file of messages and one of acks: killed at every line, a child needs no
server. Bugs that relays and consumers have in the wild can be planted in both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psycopg
import redis

from semel.core.outbox import BROKER_SCHEDULE, Delivered, Ending, Message, Verdict
from semel.inbox import Duplicate, Inbox, Ran
from semel.publishers import Publisher, publisher
from semel.stores import AsyncStore, async_store, store
from semel.work.relay import Relay
from semel.work.service import outcome
from torture.job import Job
from torture.tracing import Lines
from torture.witness import append, open_sqlite

#: What may be planted, and what it must lead to.
BUGS = {
    "deleted before it is sent": "lost",
    "acked before COMMIT": "lost",
    "seen in a transaction before": "lost",
    "seen in a transaction after": "doubled",
}

STREAM = "orders"
GROUP = "shipping"
CONSUMER = "consumer"
SENT, ACKED = "sent.jsonl", "acked.jsonl"
#: Short: a killed relay's messages wait as long.
LEASE = timedelta(seconds=0.5)
POLL_SECONDS = 0.02

#: (place at the broker, message id, order)
Delivery = tuple[str, str, str]


def work(job: Job) -> dict[str, Any]:
    """Do *job*; return the report."""
    lines = Lines(job.fault, job.only_files)
    # Made before lines are counted: most of them would be those that write SQL, at the start of a process.
    run = _consuming(job) if job.action == "consume" else _relaying(job)
    if job.counts_lines or (job.fault and job.fault.line):
        lines.start()
    try:
        run()
    finally:
        lines.stop()
    return {"lines": lines.count}


class DeletesFirst(Relay[Any]):
    """A planted bug: what it is about to send is deleted, and then sent."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Delete, then send."""
        await self.settle([Ending(message.id, "delivered") for message in messages])
        verdicts = await super().publish(messages)
        return verdicts  # noqa: RET504 - a line of its own: a fault may be there


class FilePublisher:
    """Appends each message to a file: what is written is sent."""

    schedule = BROKER_SCHEDULE

    def __init__(self, folder: Path) -> None:
        """Send to the file in *folder*."""
        self._file = folder / SENT

    async def open(self) -> None:
        """Nothing is kept open."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Write a line for each."""
        for message in messages:
            append(self._file, {"id": message.id, "order": json.loads(message.payload)["order"]})
        return [Delivered() for _ in messages]

    async def close(self) -> None:
        """Nothing is open."""


def _relaying(job: Job) -> Callable[[], None]:
    kind = DeletesFirst if job.planted == "deleted before it is sent" else Relay
    opened: Any = async_store(job.url) if job.entry == "asgi" else store(job.url)
    names = [job.to] if job.to else [key for _, key in job.payments]
    relays = [kind(opened, name, _publisher(job, name), lease=LEASE) for name in names]
    if job.entry == "asgi":
        return lambda: asyncio.run(_arelay(opened, relays, is_endless=job.is_endless))
    return lambda: _relay(relays, is_endless=job.is_endless)


def _publisher(job: Job, name: str) -> Publisher:
    return publisher(name, job.broker) if job.broker.startswith("redis:") else FilePublisher(Path(job.broker))


def _relay(relays: Sequence[Relay[Any]], *, is_endless: bool) -> None:
    for relay in relays:
        relay.run_once()
        while is_endless:
            time.sleep(POLL_SECONDS)
            relay.run_once()


async def _arelay(opened: AsyncStore, relays: Sequence[Relay[Any]], *, is_endless: bool) -> None:
    async with opened:
        for relay in relays:
            await outcome(relay.run_once())
            while is_endless:
                await asyncio.sleep(POLL_SECONDS)
                await outcome(relay.run_once())


class Broker(Protocol):
    """What a consumer needs of one."""

    def deliveries(self) -> Iterator[Delivery]:
        """Return what is to be handled: first what was delivered and never acked."""

    def ack(self, place: str) -> None:
        """Deliver it no more."""


class Folder:
    """Messages in a file, and acks in another. It ends when all are acked."""

    def __init__(self, folder: Path, only: Sequence[str]) -> None:
        """Deliver what is in *folder*, or *only* those orders."""
        self._acked = folder / ACKED
        done = {json.loads(line) for line in self._acked.read_text().splitlines()}
        sent = [json.loads(line) for line in (folder / SENT).read_text().splitlines()]
        found = [(str(number), each["id"], each["order"]) for number, each in enumerate(sent)]
        self._left = [each for each in found if each[0] not in done and (not only or each[2] in only)]

    def deliveries(self) -> Iterator[Delivery]:
        """Return each message as often as it was sent."""
        return iter(self._left)

    def ack(self, place: str) -> None:
        """Write it down."""
        append(self._acked, place)


class Stream:
    """A stream of Redis, which may be killed meanwhile. It never ends."""

    def __init__(self, url: str) -> None:
        """Read the stream at *url*."""
        self._redis: Any = redis.Redis.from_url(url)

    def deliveries(self) -> Iterator[Delivery]:
        """Return what is pending, then what is new; after a broken connection, from the beginning."""
        place = "0"
        while True:
            try:
                self._join()
                found = self._redis.xreadgroup(GROUP, CONSUMER, {STREAM: place}, count=10, block=200)
            except redis.ConnectionError:
                place = "0"
                time.sleep(POLL_SECONDS)
                continue
            entries = [entry for _, entries in found for entry in entries]
            for number, fields in entries:
                yield number.decode(), fields[b"id"].decode(), json.loads(fields[b"payload"])["order"]
            # Pending ones that could not be acked come again.
            place = "0" if entries and place == "0" else ">"

    def ack(self, place: str) -> None:
        """Tell it; if it is not there, it will deliver the message again."""
        try:
            self._redis.xack(STREAM, GROUP, place)
        except redis.ConnectionError:
            time.sleep(POLL_SECONDS)

    def _join(self) -> None:
        try:
            self._redis.xgroup_create(STREAM, GROUP, "0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise


def _consuming(job: Job) -> Callable[[], None]:
    orders = [key for _, key in job.payments]
    broker: Broker = Stream(job.broker) if job.broker.startswith("redis:") else Folder(Path(job.broker), orders)
    inbox = Inbox(job.url, consumer=GROUP)
    inbox.check()
    return lambda: _consume(job, broker, inbox)


def _consume(job: Job, broker: Broker, inbox: Inbox) -> None:
    for place, message_id, order in broker.deliveries():
        if job.planted == "acked before COMMIT":
            broker.ack(place)
        if _is_handled(job, inbox, message_id, order):
            broker.ack(place)


def _is_handled(job: Job, inbox: Inbox, message_id: str, order: str) -> bool:
    if job.planted == "seen in a transaction before":
        verdict = inbox.receive(message_id, _nothing)
        if isinstance(verdict, Ran):
            _pack_alone(job, order)
        return True
    if job.planted == "seen in a transaction after":
        _pack_alone(job, order)
        inbox.receive(message_id, _nothing)
        return True
    verdict = inbox.receive(message_id, _pack, order, payload=order)
    if isinstance(verdict, Duplicate):
        append(Path(job.history).with_suffix(".duplicates"), message_id)
    return verdict.ack


def _nothing(_connection: Any) -> None:
    pass


def _pack(connection: Any, order: str) -> None:
    marks = "%s, %s, %s, %s" if isinstance(connection, psycopg.Connection) else "?, ?, ?, ?"
    insert = f"INSERT INTO effects (key, step, attempt, worker) VALUES ({marks})"  # noqa: S608 - of two literals
    connection.execute(insert, (order, "parcel", 1, "consumer"))


def _pack_alone(job: Job, order: str) -> None:
    own = open_sqlite(job.url) if job.url.startswith("sqlite:") else psycopg.connect(job.url, autocommit=True)
    _pack(own, order)
    own.close()
