"""What waits in a store, planted in each kind of store by its own commands."""

import os
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest

from semel.core.commands import Claim, Complete, Erase, Park
from semel.core.message import Answer, Head, Request
from semel.core.record import Hold
from semel.core.state import Event
from semel.doctor import Limits, Verdict, examine
from semel.outbox import Outbox
from semel.stores import Store, store
from tests.doctor.planting import examined, finding, plants

DAY, OVER = timedelta(days=1), timedelta(microseconds=1)
#: Everything is old.
AT_ONCE = Limits(stuck=timedelta(), accepted=timedelta(), outbox=timedelta(), expired=timedelta())
TEXT = ((b"content-type", b"text/plain"),)


@pytest.fixture(params=["sqlite_url", "postgres_url", "redis_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def keys(url: str) -> Iterator[Store]:
    opened = store(url)
    yield opened
    opened.close()


def claim(
    keys: Store, key: str, lease: timedelta = DAY, retention: timedelta = DAY, request: Request | None = None
) -> Hold:
    asked = Claim(
        "acme",
        key,
        os.urandom(16),
        b"\x0a" * 32,
        lease,
        retention,
        request=request,
        is_accepted=request is not None,
        after_retention="strip",
    )  # fmt: skip - one word a line would fill the screen
    hold = keys.perform(asked)
    assert isinstance(hold, Hold)
    return hold


@plants("store-parked", "store-stuck", "store-accepted", "store-expired", "store-not-kept")
def test_operations(keys: Store, url: str) -> None:
    """What waits for a person, a worker or the reaper is counted, and its age told; what is well is not."""
    well = examine(url, only=["store-*"], limits=AT_ONCE)
    assert {each.verdict for each in well.findings if each.check.name.startswith("store-")} == {Verdict.OK}
    keys.perform(Complete(claim(keys, "done"), Event.COMPLETE, Answer(201, (), b"{}")))
    claim(keys, "running")
    assert examined(url, "store-stuck", limits=AT_ONCE).verdict is Verdict.OK

    keys.perform(Park(claim(keys, "parked")))
    claim(keys, "stuck", lease=OVER)
    claim(keys, "accepted", request=Request(Head("POST", "/jobs", b"", ()), b"", "acme"))
    keys.perform(Complete(claim(keys, "late", retention=OVER), Event.COMPLETE, Answer(200, (), b"")))
    keys.perform(Complete(claim(keys, "large"), Event.COMPLETE, Answer(200, TEXT, None)))
    report = examine(url, only=["store-*"], limits=AT_ONCE)
    for name in ("parked", "stuck", "accepted", "expired", "not-kept"):
        found = finding(report, f"store-{name}")
        assert found.verdict is Verdict.WRONG, found
        assert found.evidence.startswith("1 "), found
    assert finding(examine(url), "store-accepted").verdict is Verdict.OK, "It has waited for a moment only."


def test_what_was_erased(keys: Store, url: str) -> None:
    """An answer that was erased is not one that could not be kept."""
    keys.perform(Complete(claim(keys, "done"), Event.COMPLETE, Answer(201, TEXT, b"{}")))
    keys.perform(Erase("acme", 10))
    assert examined(url, "store-not-kept").verdict is Verdict.OK


@plants("store-outbox", "store-dead-letters", "store-inbox", "store-webhooks")
def test_messages(postgres_url: str) -> None:
    """Messages that are not sent, dead letters, parked messages and closed endpoints are found."""
    outbox = Outbox(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        outbox.add(connection, "order.paid", b"{}", to="shop")
        outbox.add(connection, "order.paid", b"{}", to="shop")
        connection.execute("UPDATE semel_outbox SET state = 'dead', ended_at = now() WHERE seq = 2")
        connection.execute(
            "INSERT INTO semel_webhooks (name, url, secrets, state, reason) VALUES ('hook', 'x', '[]', 'off', 'gone')"
        )
        connection.execute(
            "INSERT INTO semel_inbox (consumer, message_id, state, attempts) VALUES ('billing', 'm', 'parked', 5)"
        )
    report = examine(postgres_url, limits=AT_ONCE)
    for name, said in {
        "outbox": "1 messages wait",
        "dead-letters": "1 message is a dead letter",
        "inbox": "1 message is parked",
        "webhooks": "hook is off (gone)",
    }.items():
        found = finding(report, f"store-{name}")
        assert found.verdict is Verdict.WRONG
        assert found.evidence.startswith(said)
    assert finding(report, "store-webhooks").mend == "semel webhooks enable hook"
