"""What each role needs on PostgreSQL, by the statements of the page."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from semel.core.commands import (
    Begin,
    Browse,
    Claim,
    Complete,
    Discard,
    FindStuck,
    Finish,
    Look,
    Mark,
    Note,
    Open,
    Park,
    ReadTrail,
    Release,
    Renew,
    Resolution,
    Save,
    Settle,
    TakeOver,
    Undo,
    Unpark,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import Found, Hold, Milestone
from semel.core.recovery import Done, Progress
from semel.core.state import Event, State
from semel.errors import StoreError
from semel.flows.erase import EraseReport, erase
from semel.flows.receive import InboxReport
from semel.flows.relay import RelayReport
from semel.guard.running import run
from semel.inbox import Inbox, Ran
from semel.outbox import Outbox
from semel.publishers import BROKER_SCHEDULE, Delivered, Message, Rejected
from semel.publishers import Verdict as PublisherVerdict
from semel.stores import Store, store
from semel.stores.dialect import messages_of
from semel.stores.inbox import InboxStatements
from semel.stores.outbox import OutboxStatements, carry_out
from semel.stores.transaction import at_once
from semel.webhooks import Endpoints
from semel.work import InboxReaper, Reaper, Relay, Sweeper
from semel.work.service import ServicePorts

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "postgresql.md").read_text()
DAY, LONG, OVER = timedelta(days=1), timedelta(hours=1), timedelta(microseconds=1)
ANSWER = Answer(201, (), b"ok")
ROLES = ("semel_app", "semel_worker", "semel_reader")


@pytest.fixture
def urls(postgres_url: str) -> Iterator[dict[str, str]]:
    """The URL of each role. Roles are the whole server's, so these have names that no other test has."""
    with closing(store(postgres_url)) as keys:
        keys.migrate()
    (sql,) = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names = {role: f"{role}_{uuid4().hex[:12]}" for role in ROLES}
    for role, name in names.items():
        sql = sql.replace(role, name)
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute(sql.encode())
        try:
            yield {role: as_user(postgres_url, name) for role, name in names.items()}
        finally:
            for name in reversed(names.values()):
                owner.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


def as_user(url: str, name: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}").geturl()


def claim(key: str, lease: timedelta = LONG) -> Claim:
    return Claim("acme", key, os.urandom(16), b"fingerprint", lease, DAY)


def held(keys: Store, key: str, lease: timedelta = LONG) -> Hold:
    hold = keys.perform(claim(key, lease))
    assert isinstance(hold, Hold)
    return hold


def test_the_application(urls: dict[str, str]) -> None:
    """The role of an application does everything that requests and operators ask for, and sweeps."""
    with closing(store(urls["semel_app"])) as keys:
        keys.open()
        hold = held(keys, "done")
        steps = Progress((Done("phase", "paid", 1),))
        assert keys.perform(Renew(((hold, LONG),))) == frozenset()
        for command in (
            Save(hold, steps),
            Mark(hold, Milestone(0.5)),
            Complete(hold, Event.COMPLETE, ANSWER, wakes=True),
        ):
            assert keys.perform(command) is Verdict.DONE
        assert isinstance(keys.perform(claim("done")), Found)
        taken = keys.perform(TakeOver(claim("taken"), held(keys, "taken", OVER)))
        assert isinstance(taken, Hold)
        assert keys.perform(Release(taken)) is Verdict.DONE
        for key, ending in (("freed", Release), ("thrown away", Discard)):
            assert keys.perform(ending(held(keys, key))) is Verdict.DONE
        for key in ("resolved", "unparked"):
            parked = held(keys, key)
            keys.perform(Park(parked))
            assert (
                keys.perform(Resolution(parked, ANSWER) if key == "resolved" else Unpark(parked, steps)) is Verdict.DONE
            )
        keys.perform(Note(hold, "replayed"))
        assert keys.perform(Settle(hold)) is not None
        assert len(keys.perform(ReadTrail("acme", "done"))) == 2
        assert keys.perform(FindStuck(10)) == ()
        held(keys, "dead", OVER)
        assert Sweeper(keys).run_once().freed == 1
        asked, transaction = claim("atomic"), keys.transaction()
        begun = transaction.perform(Begin(asked))
        assert isinstance(begun, Hold)
        assert transaction.perform(Finish(asked, begun, None, Event.COMPLETE, ANSWER)) is Verdict.DONE


def test_the_trail_is_added_to_only(urls: dict[str, str], postgres_url: str) -> None:
    """The role of an application can't take a line away from the trail; that of a worker reaps it."""
    with closing(store(urls["semel_app"])) as keys:
        keys.perform(Note(held(keys, "done"), "replayed"))
        report = Reaper(keys, audit_retention=timedelta(0)).run_once()
        assert isinstance(report.error, StoreError)
    with closing(store(urls["semel_worker"])) as keys:
        report = Reaper(keys, audit_retention=timedelta(0)).run_once()
        assert (report.error, report.audit_lines) == (None, 1)


def test_messages(urls: dict[str, str]) -> None:
    """The role of an application receives messages, that of a worker deletes old receipts, and a reader lists them."""

    def fail(_connection: object) -> None:
        raise KeyError("stock")

    with Inbox(urls["semel_app"], consumer="billing") as inbox:
        assert inbox.receive("m-1", lambda _: 1) == Ran(1)
        with pytest.raises(KeyError):
            inbox.receive("m-2", fail)
        assert isinstance(InboxReaper(inbox.store, retention=timedelta(0)).run_once().error, StoreError)
    with closing(store(urls["semel_worker"])) as keys:
        assert InboxReaper(keys, retention=timedelta(0)).run_once() == InboxReport(1)
    with closing(store(urls["semel_reader"])) as keys:
        transaction = keys.transaction()
        transaction.perform(Open())
        found = transaction.run(InboxStatements(messages_of(keys)).list(None, None, 10))
        assert [each.message_id for each in found] == ["m-2"]
        transaction.perform(Undo())


def test_erasing(urls: dict[str, str]) -> None:
    """The role of a worker erases; that of an application can't delete lines of the trail, and is told so."""
    with closing(store(urls["semel_app"])) as keys:
        for key in ("one", "two"):
            hold = held(keys, key)
            keys.perform(Note(hold, "replayed"))
            keys.perform(Complete(hold, Event.COMPLETE, ANSWER))
        report = run(erase, ServicePorts(keys), "acme")
        assert (report.erased, report.audit_lines) == (2, 0)
        assert isinstance(report.error, StoreError)
    with closing(store(urls["semel_worker"])) as keys:
        assert run(erase, ServicePorts(keys), "acme") == EraseReport(0, 2)


def test_outbox(urls: dict[str, str]) -> None:
    """The role of an application adds messages, that of a worker relays and requeues them, and a reader lists them."""
    with psycopg.connect(urls["semel_app"]) as connection:
        for content_type in ("text/plain", "image/png"):
            Outbox(urls["semel_app"]).add(connection, "t", b"1", content_type=content_type, key="k")
    with closing(store(urls["semel_app"])) as keys:
        assert isinstance(relayed(keys).error, StoreError)
    with closing(store(urls["semel_worker"])) as keys:
        keys.open()
        report = relayed(keys)
        assert (report.error, report.sent, report.dead) == (None, 1, 1)
        assert at_once(carry_out(keys, OutboxStatements(messages_of(keys)).requeue(to="events"))) == 1
        assert relayed(keys).dead == 1
    with closing(store(urls["semel_reader"])) as keys:
        (dead,) = at_once(carry_out(keys, OutboxStatements(messages_of(keys)).browse("dead", None, 10)))
        assert dead.error == "no picture"
        assert len(keys.perform(ReadTrail("outbox:events", dead.id))) == 3
    with closing(store(urls["semel_worker"])) as keys:
        assert at_once(carry_out(keys, OutboxStatements(messages_of(keys)).drop(id=dead.id))) == 1


class NoPictures:
    """A destination that refuses pictures."""

    schedule = BROKER_SCHEDULE

    async def open(self) -> None: ...

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublisherVerdict]:
        return [Rejected("no picture") if each.content_type == "image/png" else Delivered() for each in messages]

    async def close(self) -> None: ...


def relayed(keys: Store) -> RelayReport:
    relay = Relay(keys, "events", NoPictures())
    report = relay.run_once()
    relay.close()
    return report


def test_endpoints(urls: dict[str, str]) -> None:
    """The role of an application keeps the endpoints of webhooks, and a reader lists them."""
    with closing(Endpoints(urls["semel_app"])) as endpoints:
        for name in ("acme", "ajax"):
            endpoints.add(name, "https://acme.example/hooks", secrets=["env:SECRET"])
        assert not endpoints.disable("acme", "moving").is_on
        endpoints.remove("ajax")
    with closing(Endpoints(urls["semel_reader"])) as endpoints:
        assert [each.name for each in endpoints.list()] == ["acme"]


def test_who_only_looks(urls: dict[str, str], postgres_url: str) -> None:
    """A role that can only read lists and shows keys, and changes none."""
    with closing(store(postgres_url)) as keys:
        keys.perform(Note(held(keys, "done"), "replayed"))
        held(keys, "dead", OVER)
        keys.perform(Discard(held(keys, "gone")))
    with closing(store(urls["semel_reader"])) as keys:
        assert [each.hold.key for each in keys.perform(FindStuck(10))] == ["dead"]
        assert {each.key for each in keys.perform(Browse(10, state=State.PROCESSING))} == {"done", "dead"}
        assert [each.key for each in keys.perform(Browse(10))] == ["dead", "done"]
        assert keys.perform(Look("acme", "done")) is not None
        assert len(keys.perform(ReadTrail("acme", "done"))) == 1
        with pytest.raises(StoreError):
            keys.perform(claim("another"))
