"""Steps, transactions that the store joins, and upkeep, on PostgreSQL: in both colours, and with rivals in the way."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import psycopg
import pytest

from semel.core.commands import (
    Begin,
    Claim,
    Commit,
    Complete,
    Discard,
    FindStuck,
    Finish,
    Look,
    Note,
    Open,
    Park,
    ReadRequest,
    ReadTrail,
    Reap,
    Reaped,
    ReapTrail,
    Release,
    Resolution,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Undo,
    Unpark,
    Verdict,
)
from semel.core.fingerprint import Fingerprinter, Subject
from semel.core.message import Answer, Head, Request
from semel.core.record import NO_TOKEN, Found, Hold, Record
from semel.core.recovery import Begun, Done, Progress, written
from semel.core.state import Event, State
from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores import async_store, store
from semel.stores.connections.endings import is_fence
from semel.stores.postgres import async_store as async_module
from semel.stores.postgres import store as sync_module
from semel.stores.postgres.address import SESSION, Address
from semel.stores.postgres.async_store import AsyncPostgresStore
from semel.stores.postgres.joined import JoinedStatements
from semel.stores.postgres.statements import Statements
from semel.stores.postgres.store import PostgresStore
from semel.stores.statement import Joined, Names
from semel.stores.transaction import AsyncConnections, AsyncUnit, Connections, Unit
from semel.testing.conformance.handles import Handle, handle

T = TypeVar("T")

LEASE, RETENTION = timedelta(minutes=30), timedelta(hours=24)
SUBJECT = Subject("POST", "/charges", b"", (), b"{}")
FINGERPRINT = Fingerprinter().of(SUBJECT)
OTHER_FINGERPRINT = Fingerprinter().of(Subject("POST", "/charges", b"", (), b"[]"))
ANSWER = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')
ABANDONED = Answer(408, (), b"abandoned")
PROGRESS = Progress((Done("phase", "ride_created", {"id": 7}), Begun("charge_created")))
SECRETS = ((b"authorization", b"Bearer s3cret"), (b"cookie", b"s3cret"), (b"proxy-authorization", b"s3cret"))
HEADERS = ((b"content-type", b"text/plain"), (b"x-name", b"J\xe9r\xf4me"))
REQUEST = Request(Head("POST", "/a%20b\udc80", b"q=\xff", HEADERS), b"\x00\xff body", "alice \N{SNOWMAN}")
JOINED = JoinedStatements(Statements(Names()), "the server")


def claim(key: str = "k", fingerprint: bytes = FINGERPRINT, **more: Any) -> Claim:
    return Claim("alice", key, uuid4().bytes, fingerprint, LEASE, more.pop("retention", RETENTION), **more)


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def url(postgres_url: str) -> str:
    """The URL of a database that has the table."""
    store(postgres_url).migrate()
    return postgres_url


@pytest.fixture(params=[store, async_store], ids=["sync", "async"])
def opener(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def semel(url: str, opener: Any) -> Iterator[Handle]:
    """The store, in each colour."""
    made = handle(opener(url))
    yield made
    made.close()


@pytest.fixture
def operator(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def held(semel: Handle, asked: Claim) -> Hold:
    hold = semel.perform(asked)
    assert isinstance(hold, Hold)
    return hold


def record(semel: Handle, key: str = "k") -> Record:
    found = semel.perform(Look("alice", key))
    assert found is not None
    return found


def age(operator: psycopg.Connection[Any], by: timedelta, key: str = "%") -> None:
    times = ("created_at", "lease_expires_at", "completed_at", "expires_at")
    back = ", ".join(f"{time} = {time} - %(by)s" for time in times)
    operator.execute(f"UPDATE semel_keys SET {back} WHERE key LIKE %(key)s".encode(), {"by": by, "key": key})
    operator.execute("UPDATE semel_keys_watermark SET swept_to = swept_to - %s", [by])


def trail(semel: Handle, key: str = "k") -> list[tuple[int, str, str | None]]:
    return [(line.attempt, line.event, line.detail) for line in semel.perform(ReadTrail("alice", key))]


class TestSteps:
    def test_save_stores_steps_and_recovery_point(self, semel: Handle) -> None:
        """What is saved comes back as text to whoever claims next, and its last finished step is the recovery point."""
        hold = held(semel, claim())
        assert semel.perform(Save(hold, PROGRESS)) is Verdict.DONE

        assert (record(semel).steps, record(semel).recovery_point) == (written(PROGRESS), "ride_created")
        found = semel.perform(claim())
        assert isinstance(found, Found)
        assert found.steps == written(PROGRESS)

    def test_save_of_no_steps_stores_none(self, semel: Handle) -> None:
        """Saving an empty progress takes steps and recovery point away again."""
        hold = held(semel, claim())
        semel.perform(Save(hold, PROGRESS))

        assert semel.perform(Save(hold, Progress(), PROGRESS)) is Verdict.DONE
        assert (record(semel).steps, record(semel).recovery_point) == (None, None)

    def test_save_without_the_hold_is_fenced(self, semel: Handle) -> None:
        """Another attempt's number, another's token and a record that has ended each fence a save off."""
        hold = held(semel, claim())
        for strange in (Hold("alice", "k", 2, hold.token), Hold("alice", "k", 1, uuid4().bytes)):
            assert semel.perform(Save(strange, PROGRESS)) is Verdict.FENCED
        semel.perform(Complete(hold, Event.COMPLETE, ANSWER))

        assert semel.perform(Save(hold, PROGRESS)) is Verdict.FENCED
        assert record(semel).steps is None

    def test_release_keeps_a_record_with_steps(self, semel: Handle) -> None:
        """A first attempt that saved a step gives up: the record stays, nobody's, and may be taken over at once."""
        hold = held(semel, claim())
        semel.perform(Save(hold, PROGRESS))
        assert semel.perform(Release(hold)) is Verdict.DONE

        left = record(semel)
        assert (left.token, left.steps, left.is_stuck) == (NO_TOKEN, written(PROGRESS), True)
        assert isinstance(semel.perform(TakeOver(claim(), Hold("alice", "k", 1, NO_TOKEN))), Hold)

    def test_take_over_keeps_steps_policy_and_request(self, semel: Handle, operator: Any) -> None:
        """After a take-over the record's steps, its policy and its request are those of the first claim."""
        hold = held(semel, claim(on_crash="refuse", after_retention="strip", request=REQUEST))
        semel.perform(Save(hold, PROGRESS))
        age(operator, LEASE)
        heir = semel.perform(TakeOver(claim(), hold))

        assert isinstance(heir, Hold)
        assert record(semel).steps == written(PROGRESS)
        assert semel.perform(ReadRequest(heir)) == REQUEST
        assert _policy(operator) == ("refuse", "strip")

    def test_take_over_of_an_expired_record_starts_anew(self, semel: Handle, operator: Any) -> None:
        """A record that expired takes its policy and its request from the late claim, and has no steps."""
        hold = held(semel, claim(on_crash="refuse", after_retention="strip"))
        semel.perform(Save(hold, PROGRESS))
        age(operator, RETENTION)
        heir = semel.perform(TakeOver(claim(request=REQUEST), hold))

        assert isinstance(heir, Hold)
        assert (heir.attempt, record(semel).steps, record(semel).recovery_point) == (1, None, None)
        assert semel.perform(ReadRequest(heir)) == REQUEST
        assert _policy(operator) == ("rerun", "delete")

    def test_completing_forgets_the_request_and_keeps_the_steps(self, semel: Handle, operator: Any) -> None:
        """A finished record has its steps, for people to look at, and nothing of the request."""
        hold = held(semel, claim(request=REQUEST))
        semel.perform(Save(hold, PROGRESS))
        assert semel.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE

        assert record(semel).steps == written(PROGRESS)
        assert operator.execute("SELECT request, request_body FROM semel_keys").fetchall() == [(None, None)]

    def test_credentials_of_a_request_are_not_stored(self, semel: Handle, operator: Any) -> None:
        """Of a kept request everything comes back byte for byte, except the headers that are credentials."""
        asked = Request(Head("POST", REQUEST.head.path, REQUEST.head.query, SECRETS + HEADERS), REQUEST.body, "alice")
        hold = held(semel, claim(request=asked))
        kept = semel.perform(ReadRequest(hold))

        assert kept is not None
        assert (kept.head.headers, kept.body, kept.head.query) == (HEADERS, REQUEST.body, REQUEST.head.query)
        assert "s3cret" not in operator.execute("SELECT request FROM semel_keys").fetchone()[0]

    def test_request_is_read_by_its_holder_alone(self, semel: Handle) -> None:
        """A hold that is no longer the record's reads no request, and neither does one of a record without."""
        held(semel, claim(request=REQUEST))

        assert semel.perform(ReadRequest(Hold("alice", "k", 1, uuid4().bytes))) is None
        assert semel.perform(ReadRequest(held(semel, claim("bare")))) is None


class TestParking:
    def test_parked_record_is_unknown_and_has_no_lease(self, semel: Handle) -> None:
        """Parking stops an operation; asking again says that it is done; and its worker can't end it any more."""
        hold = held(semel, claim())
        assert semel.perform(Park(hold)) is Verdict.DONE
        assert semel.perform(Park(hold)) is Verdict.DONE

        parked = record(semel)
        assert (parked.state, parked.lease_expires_at, parked.token) == (State.UNKNOWN, None, hold.token)
        assert semel.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.FENCED
        assert trail(semel) == [(1, "parked", None)]

    def test_parking_the_silent_spares_the_living(self, semel: Handle, operator: Any) -> None:
        """Whoever parks a silent worker's operation is fenced off while that worker's lease runs."""
        hold = held(semel, claim())
        assert semel.perform(Park(hold, if_silent=True)) is Verdict.FENCED
        age(operator, LEASE)

        assert semel.perform(Park(hold, if_silent=True)) is Verdict.DONE

    def test_unparked_operation_goes_on_with_what_was_said(self, semel: Handle) -> None:
        """After an operator's word the operation is nobody's and to be taken over at once, with the steps as told."""
        hold = held(semel, claim())
        assert semel.perform(Unpark(hold, PROGRESS)) is Verdict.FENCED
        semel.perform(Park(hold))
        assert semel.perform(Unpark(hold, PROGRESS)) is Verdict.DONE

        left = record(semel)
        assert (left.token, left.steps, left.is_stuck) == (NO_TOKEN, written(PROGRESS), True)
        assert trail(semel)[-1] == (2, "resolved", None)

    def test_resolved_answer_is_not_the_late_workers(self, semel: Handle, operator: Any) -> None:
        """A parked operation can be ended by an operator's answer; its worker, awake again, is fenced off."""
        hold = held(semel, claim(request=REQUEST))
        assert semel.perform(Resolution(hold, ANSWER)) is Verdict.FENCED
        semel.perform(Park(hold))
        assert semel.perform(Resolution(hold, ANSWER)) is Verdict.DONE

        assert (record(semel).state, record(semel).answer) == (State.COMPLETE, ANSWER)
        assert operator.execute("SELECT request FROM semel_keys").fetchone() == (None,)
        assert semel.perform(Complete(hold, Event.COMPLETE, ABANDONED)) is Verdict.FENCED

    @pytest.mark.parametrize("parked", [True, False])
    def test_discarded_record_is_gone(self, semel: Handle, *, parked: bool) -> None:
        """An operator can free a key whatever it did, as long as it has not ended."""
        hold = held(semel, claim())
        if parked:
            semel.perform(Park(hold))
        assert semel.perform(Discard(Hold("alice", "k", 1, uuid4().bytes))) is Verdict.FENCED
        assert semel.perform(Discard(hold)) is Verdict.DONE

        assert semel.perform(Look("alice", "k")) is None
        assert trail(semel)[-1] == (1, "discarded", None)

    def test_finished_record_can_not_be_discarded(self, semel: Handle) -> None:
        """An answer that was given stays."""
        hold = held(semel, claim())
        semel.perform(Complete(hold, Event.COMPLETE, ANSWER))

        assert semel.perform(Discard(hold)) is Verdict.FENCED


class TestStuck:
    def test_stuck_are_those_past_their_lease_longest_silent_first(self, semel: Handle, operator: Any) -> None:
        """Only records in progress under a lease that ran out are stuck; those that were freed are left out."""
        old = held(semel, claim("old", on_crash="refuse", request=REQUEST))
        older, freed, parked, ended = [held(semel, claim(key)) for key in ("older", "freed", "parked", "ended")]
        semel.perform(Save(older, PROGRESS))
        semel.perform(Park(parked))
        semel.perform(Complete(ended, Event.COMPLETE, ANSWER))
        age(operator, LEASE + timedelta(minutes=1))
        age(operator, timedelta(minutes=5), "older")
        semel.perform(Sweep(freed))
        held(semel, claim("alive"))

        first, second = semel.perform(FindStuck(10))
        assert (first.hold, first.on_crash, first.steps, first.has_request) == (
            older,
            "rerun",
            written(PROGRESS),
            False,
        )
        assert (second.hold, second.on_crash, second.steps, second.has_request) == (old, "refuse", None, True)
        assert timedelta(minutes=6) <= first.silent_for < timedelta(minutes=7)
        assert [each.hold for each in semel.perform(FindStuck(1))] == [older]
        assert [each.hold for each in semel.perform(FindStuck(10, with_request=True))] == [old]
        everyone = semel.perform(FindStuck(10, with_no_token=True))
        assert [each.hold.key for each in everyone if each.is_unheld] == ["freed"]

    def test_sweeping_frees_a_dead_workers_key_and_no_other(self, semel: Handle, operator: Any) -> None:
        """A sweep takes the key from a silent worker, keeps the record, and is fenced off from a living one."""
        hold = held(semel, claim())
        assert semel.perform(Sweep(hold)) is Verdict.FENCED
        age(operator, LEASE)
        assert semel.perform(Sweep(hold)) is Verdict.DONE

        assert record(semel).token == NO_TOKEN
        assert semel.perform(Sweep(hold)) is Verdict.FENCED
        assert semel.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.FENCED
        assert trail(semel)[-1] == (1, "swept", None)


class TestReaping:
    def test_each_kind_meets_its_fate(self, semel: Handle, operator: Any) -> None:
        """Past retention, what ended is deleted or stripped, what nobody ended fails, and what is parked stays."""
        for key, after in (("delete", "delete"), ("strip", "strip")):
            semel.perform(Complete(held(semel, claim(key, after_retention=after)), Event.COMPLETE, ANSWER))
        held(semel, claim("silent", request=REQUEST))
        semel.perform(Park(held(semel, claim("parked"))))
        age(operator, RETENTION)
        held(semel, claim("young"))

        assert semel.perform(Reap(10, ABANDONED)) == Reaped(deleted=1, stripped=1, failed=1)
        assert semel.perform(Look("alice", "delete")) is None
        assert record(semel, "strip").answer == Answer(201, (), None)
        assert (record(semel, "silent").state, record(semel, "silent").answer) == (State.FAILED, ABANDONED)
        assert record(semel, "parked").state is State.UNKNOWN
        assert trail(semel, "silent") == [(1, "abandoned", None)]
        (line,) = semel.perform(ReadTrail("", ""))
        assert (line.attempt, line.event, line.detail) == (0, "reaped", "1 deleted, 1 stripped")
        # What failed is deleted the next time; the tombstone stays for good.
        assert semel.perform(Reap(10, ABANDONED)) == Reaped(deleted=1)
        assert semel.perform(Reap(10, ABANDONED)) == Reaped()

    def test_what_is_in_flight_is_not_reaped(self, semel: Handle, operator: Any) -> None:
        """A worker that renews its lease past retention keeps its record."""
        hold = held(semel, claim(retention=timedelta(0)))

        assert semel.perform(Reap(10, ABANDONED)) == Reaped()
        assert semel.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE

    def test_worker_that_was_given_up_is_fenced_off(self, semel: Handle, operator: Any) -> None:
        """A worker that wakes after its record was abandoned is not told that its own answer was stored."""
        hold = held(semel, claim())
        age(operator, RETENTION)
        semel.perform(Reap(10, ABANDONED))

        assert semel.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.FENCED

    def test_oldest_go_first_and_never_more_than_asked(self, semel: Handle, operator: Any) -> None:
        """A round touches as many records as it was told, whatever their kind, the longest expired first."""
        for number in range(4):
            hold = held(semel, claim(f"k{number}"))
            if number % 2:
                semel.perform(Complete(hold, Event.COMPLETE, ANSWER))
            age(operator, RETENTION - timedelta(hours=number), f"k{number}")
        age(operator, timedelta(hours=5))

        assert semel.perform(Reap(3, ABANDONED)) == Reaped(deleted=1, failed=2)
        assert record(semel, "k3").state is State.COMPLETE

    def test_reapers_do_not_wait_for_each_other(self, semel: Handle, operator: Any, url: str) -> None:
        """What another has locked is left to it, and the next in line is reaped."""
        for number in range(4):
            semel.perform(Complete(held(semel, claim(f"k{number}")), Event.COMPLETE, ANSWER))
        age(operator, RETENTION)
        with psycopg.connect(url) as other:
            statement = Statements(Names()).of(Reap(2, ABANDONED))
            cursor = psycopg.RawCursor(other)
            cursor.execute(statement.sql.encode(), statement.parameters)
            assert statement.read(cursor.fetchall()) == Reaped(deleted=2)

            assert semel.perform(Reap(3, ABANDONED)) == Reaped(deleted=2)

    @pytest.mark.parametrize("rows", [0, 20_000])
    def test_reaping_walks_the_indexes(self, url: str, rows: int) -> None:
        """Whatever the table's size, analysed or not, the reaper and the sweeper read it through their indexes."""
        with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.RawCursor) as connection:
            for setting, value in SESSION.items():
                connection.execute("SELECT set_config($1, $2, false)", [setting, value])
            connection.execute("SET plan_cache_mode = force_generic_plan")
            connection.execute(_FINISHED, [rows])
            reap = _plan(connection, Reap(1000, ABANDONED))
            stuck = _plan(connection, FindStuck(1000))
            lines = _plan(connection, ReapTrail(1000, RETENTION))

        assert "Seq Scan" not in reap + stuck + lines
        assert "Index Scan using semel_keys_expiry" in reap
        assert "semel_keys_upkeep" in stuck
        assert "semel_keys_age" in stuck
        assert "semel_audit_at" in lines

    def test_statement_that_takes_too_long_is_an_error_to_act_on(
        self, url: str, opener: Any, operator: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A statement that the server cuts short is not sent again, and comes out as ``StoreUnavailable``."""
        operator.execute(_FINISHED.replace("$1", "1").encode())
        operator.execute(_SLOW_DELETE.encode())
        monkeypatch.setattr(async_module, "SESSION", SESSION | {"statement_timeout": "200ms"})
        monkeypatch.setattr(sync_module, "_OPTIONS", "-c statement_timeout=200ms")
        slow = handle(opener(url))
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            slow.perform(Reap(10, ABANDONED))
        slow.close()

        assert operator.execute("SELECT last_value FROM tries").fetchone() == (1,)


class TestTrail:
    @pytest.mark.parametrize("audit", ["on", "all", "replays"])
    def test_changes_leave_lines(self, url: str, opener: Any, audit: str) -> None:
        """Steps, take-overs and what is given up are in the trail in their order, and where everything is asked for,
        claims and endings as well; renewals and replays are not.
        """
        semel = handle(opener(f"{url}?audit={audit}"))
        hold = held(semel, claim())
        semel.perform(Save(hold, PROGRESS))
        semel.perform(Release(hold))
        heir = semel.perform(TakeOver(claim(), Hold("alice", "k", 1, NO_TOKEN)))
        assert isinstance(heir, Hold)
        semel.perform(Complete(heir, Event.FAIL, ANSWER))
        semel.perform(claim())
        semel.perform(Complete(heir, Event.FAIL, ANSWER))
        semel.perform(Release(held(semel, claim("gone"))))

        ordinary = {"claimed", "failed"} if audit == "on" else set()
        assert trail(semel) == [
            line
            for line in (
                (1, "claimed", None),
                (1, "saved", "effect charge_created begun"),
                (1, "given up", None),
                (2, "taken over", None),
                (2, "failed", None),
            )
            if line[1] not in ordinary
        ]
        assert trail(semel, "gone")[-1] == (1, "released", None)
        assert len(semel.perform(ReadTrail("alice", "k", limit=2))) == 2
        semel.close()

    def test_lines_name_the_actor(self, url: str) -> None:
        """A line says which process wrote it, or which operator."""
        with PostgresStore(url) as postgres:
            hold = postgres.perform(claim())
            assert isinstance(hold, Hold)
            postgres.perform(Save(hold, PROGRESS))
            postgres.actor = "jane"
            postgres.perform(Note(hold, "replayed", "from afar"))
            first, second = postgres.perform(ReadTrail("alice", "k"))

        assert first.actor.count(":") == 1
        assert (second.event, second.actor, second.detail) == ("replayed", "jane", "from afar")

    def test_trail_can_be_turned_off(self, url: str, opener: Any) -> None:
        """With ``?audit=off`` everything works as before, and no line is written."""
        quiet = handle(opener(f"{url}?audit=off"))
        hold = held(quiet, claim())
        quiet.perform(Save(hold, PROGRESS))
        quiet.perform(Note(hold, "replayed"))
        quiet.perform(Complete(hold, Event.COMPLETE, ANSWER))

        assert trail(quiet) == []
        quiet.close()

    @pytest.mark.parametrize("audit, noted", [("on", False), ("all", False), ("off", False), ("replays", True)])
    def test_replays_are_noted_when_asked_for(self, opener: Any, audit: str, *, noted: bool) -> None:
        """Only with ``?audit=replays`` is a store to be told of replays."""
        assert opener(f"postgresql://localhost/db?audit={audit}").notes_replays is noted

    def test_old_lines_are_deleted(self, semel: Handle, operator: Any) -> None:
        """Lines older than asked for go, at most so many at a time, and the young ones stay."""
        hold = held(semel, claim())
        semel.perform(Save(hold, PROGRESS))
        semel.perform(Park(hold))
        semel.perform(Park(held(semel, claim("other"))))
        operator.execute("UPDATE semel_audit SET at = at - interval '1 day' WHERE key = 'k'")

        assert semel.perform(ReapTrail(1, timedelta(hours=1))) == 1
        assert semel.perform(ReapTrail(10, timedelta(hours=1))) == 1
        assert semel.perform(ReapTrail(10, timedelta(hours=1))) == 0
        assert trail(semel, "other") == [(1, "parked", None)]


class TestJoined:
    """On plain connections, as an application has them."""

    @pytest.fixture
    def mine(self, url: str) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(url) as connection:
            yield connection

    @pytest.fixture
    def rival(self, url: str) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(url) as connection:
            yield connection

    def test_first_to_begin_has_the_key(self, mine: Any, rival: Any) -> None:
        """Of two transactions under one key the second learns that the first runs, and whether it is the same."""
        asked = claim()
        assert _join(mine, JOINED.begin(Begin(asked))).seen == Hold("alice", "k", 1, asked.token)

        same = _join(rival, JOINED.begin(Begin(claim()))).seen
        assert isinstance(same, Found)
        assert (same.state, same.lease_is_over, same.is_expired) == (State.PROCESSING, False, False)
        assert Fingerprinter().matches(same.fingerprint, FINGERPRINT, SUBJECT)
        rival.rollback()

        other = _join(rival, JOINED.begin(Begin(claim(fingerprint=OTHER_FINGERPRINT)))).seen
        assert isinstance(other, Found)
        assert not Fingerprinter().matches(other.fingerprint, OTHER_FINGERPRINT, SUBJECT)

    def test_equal_racers_know_each_other(self, url: str) -> None:
        """Of equal requests that begin at the same instant one has the key, and none takes another for different."""
        with ExitStack() as stack, ThreadPoolExecutor(8) as threads:
            racers = [stack.enter_context(psycopg.connect(url)) for _ in range(8)]
            start = threading.Barrier(len(racers))

            def begin(racer: psycopg.Connection[Any], key: str) -> Hold | Found:
                start.wait()
                return _join(racer, JOINED.begin(Begin(claim(key)))).seen

            for key in map(str, range(20)):
                got = list(threads.map(begin, racers, [key] * len(racers)))
                assert [isinstance(each, Hold) for each in got].count(True) == 1
                assert {each.fingerprint for each in got if isinstance(each, Found)} == {FINGERPRINT}

    def test_other_keys_are_not_in_the_way(self, mine: Any, rival: Any) -> None:
        """Another key, another scope and another table have locks of their own."""
        _join(mine, JOINED.begin(Begin(claim())))
        elsewhere = JoinedStatements(Statements(Names(schema="public")), "the server")

        assert isinstance(_join(rival, JOINED.begin(Begin(claim("other")))).seen, Hold)
        assert isinstance(_join(rival, elsewhere.begin(Begin(claim()))).seen, Hold)

    def test_key_is_free_again_after_a_rollback(self, mine: Any, rival: Any) -> None:
        """A transaction that is rolled back leaves neither a lock nor a record behind."""
        _join(mine, JOINED.begin(Begin(claim())))
        mine.rollback()

        assert isinstance(_join(rival, JOINED.begin(Begin(claim()))).seen, Hold)

    def test_finished_record_commits_with_the_handlers_writes(self, mine: Any, rival: Any, semel: Handle) -> None:
        """The record is there when the transaction commits, and whoever begins then is given the answer."""
        asked = claim(on_crash="refuse", after_retention="strip")
        hold = _begun(mine, asked)
        assert _verdict(mine, JOINED.finish(Finish(asked, hold, None, Event.COMPLETE, ANSWER))) is Verdict.DONE
        assert semel.perform(Look("alice", "k")) is None
        mine.commit()

        found = _join(rival, JOINED.begin(Begin(claim()))).seen
        assert isinstance(found, Found)
        assert (found.state, found.answer, found.token) == (State.COMPLETE, ANSWER, asked.token)
        left = record(semel)
        assert left.completed_at is not None
        assert left.expires_at - left.completed_at == RETENTION
        assert trail(semel) == []

    def test_finish_is_fenced_by_whoever_was_there_first(self, mine: Any, semel: Handle) -> None:
        """A record that came up meanwhile is not overwritten: neither one in progress nor one that has ended."""
        asked = claim()
        hold = _begun(mine, asked)
        rival = held(semel, claim())
        finish = Finish(asked, hold, None, Event.COMPLETE, ANSWER)
        assert _verdict(mine, JOINED.finish(finish)) is Verdict.FENCED
        mine.rollback()
        semel.perform(Complete(rival, Event.FAIL, ABANDONED))

        assert _verdict(mine, JOINED.finish(finish)) is Verdict.FENCED
        mine.rollback()
        assert record(semel).answer == ABANDONED

    def test_finish_takes_the_place_of_a_dead_worker(self, mine: Any, semel: Handle, operator: Any) -> None:
        """A record under a lease that ran out is ended as the same operation, with its age and its steps."""
        seen = held(semel, claim(request=REQUEST))
        semel.perform(Save(seen, PROGRESS))
        asked = claim()
        finish = Finish(asked, Hold("alice", "k", 2, asked.token), seen, Event.COMPLETE, ANSWER)
        assert _verdict(mine, JOINED.finish(finish)) is Verdict.FENCED
        mine.rollback()
        age(operator, LEASE)
        before = record(semel)
        assert _verdict(mine, JOINED.finish(finish)) is Verdict.DONE
        mine.commit()

        left = record(semel)
        assert (left.state, left.attempt, left.token, left.answer) == (State.COMPLETE, 2, asked.token, ANSWER)
        assert (left.created_at, left.expires_at, left.steps) == (before.created_at, before.expires_at, before.steps)

    def test_finish_takes_the_place_of_an_expired_record(self, mine: Any, semel: Handle, operator: Any) -> None:
        """A record that expired is replaced altogether; one that another has taken over since is not."""
        seen = held(semel, claim(after_retention="strip"))
        semel.perform(Save(seen, PROGRESS))
        semel.perform(Complete(seen, Event.COMPLETE, ABANDONED))
        age(operator, RETENTION)
        asked = claim(fingerprint=OTHER_FINGERPRINT)
        hold = Hold("alice", "k", 1, asked.token)
        strange = Hold("alice", "k", 1, uuid4().bytes)
        assert _verdict(mine, JOINED.finish(Finish(asked, hold, strange, Event.FAIL, ANSWER))) is Verdict.FENCED
        assert _verdict(mine, JOINED.finish(Finish(asked, hold, seen, Event.FAIL, ANSWER))) is Verdict.DONE
        mine.commit()

        left = record(semel)
        assert (left.state, left.fingerprint, left.steps) == (State.FAILED, OTHER_FINGERPRINT, None)
        assert not left.is_expired
        assert _policy(operator) == ("rerun", "delete")

    def test_step_commits_with_the_phases_writes(self, mine: Any, semel: Handle) -> None:
        """A phase's step is stored in the phase's own transaction, and only by the holder."""
        hold = held(semel, claim())
        strange = Hold("alice", "k", 2, hold.token)
        assert _verdict(mine, JOINED.commit(Commit(strange, PROGRESS))) is Verdict.FENCED
        assert _verdict(mine, JOINED.commit(Commit(hold, PROGRESS))) is Verdict.DONE
        assert record(semel).steps is None
        mine.commit()

        assert record(semel).steps == written(PROGRESS)
        assert trail(semel)[-1] == (1, "saved", "effect charge_created begun")

    def test_settling_waits_for_an_atomic_transaction(self, mine: Any, semel: Handle, url: str) -> None:
        """Whoever asks what became of a lost COMMIT gets its answer when the transaction has ended."""
        asked = claim()
        hold = _begun(mine, asked)
        _verdict(mine, JOINED.finish(Finish(asked, hold, None, Event.COMPLETE, ANSWER)))
        with ThreadPoolExecutor() as threads:
            settled = threads.submit(semel.perform, Settle(hold))
            _until_somebody_waits(url, settled)
            mine.commit()

            left = settled.result()
            assert left is not None
            assert (left.token, left.answer) == (asked.token, ANSWER)

    def test_settling_waits_for_a_phase(self, mine: Any, semel: Handle, url: str) -> None:
        """The same for a phase, whose transaction holds the record."""
        hold = held(semel, claim())
        _verdict(mine, JOINED.commit(Commit(hold, PROGRESS)))
        with ThreadPoolExecutor() as threads:
            settled = threads.submit(semel.perform, Settle(hold))
            _until_somebody_waits(url, settled)
            mine.commit()

            left = settled.result()
            assert left is not None
            assert left.steps == written(PROGRESS)

    def test_settling_after_a_rollback_finds_nothing(self, mine: Any, semel: Handle) -> None:
        """A transaction that did not commit left no record."""
        hold = _begun(mine, claim())
        mine.rollback()

        assert semel.perform(Settle(hold)) is None

    def test_settling_does_not_wait_for_ever(
        self, mine: Any, url: str, opener: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Past the limit for locks the answer is that the store can't tell now."""
        monkeypatch.setattr(async_module, "SESSION", SESSION | {"lock_timeout": "10ms"})
        monkeypatch.setattr(sync_module, "_OPTIONS", "-c lock_timeout=10ms")
        hold = _begun(mine, claim())
        impatient = handle(opener(url))
        with pytest.raises(StoreUnavailable, match="lock timeout") as told:
            impatient.perform(Settle(hold))
        impatient.close()

        assert not told.value.was_sent


class TestTransactions:
    def test_given_connections_are_used(self, url: str) -> None:
        """An application's own connections carry its writes and the record in one transaction."""
        asked = claim()
        with psycopg.connect(url) as connection, PostgresStore(url, connections=_Given(connection)) as postgres:
            transaction = postgres.transaction()
            hold = transaction.perform(Begin(asked))
            assert isinstance(hold, Hold)
            assert transaction.connection is connection
            connection.execute("CREATE TABLE charges ()")
            assert transaction.perform(Finish(asked, hold, None, Event.COMPLETE, ANSWER)) is Verdict.DONE

            assert isinstance(postgres.perform(claim()), Found)

    async def test_given_connections_are_used_on_a_loop(self, url: str) -> None:
        """The same on an event loop."""
        asked = claim()
        async with (
            await psycopg.AsyncConnection.connect(url) as connection,
            AsyncPostgresStore(url, connections=_AsyncGiven(connection)) as postgres,
        ):
            transaction = postgres.transaction()
            hold = await transaction.perform(Begin(asked))
            assert isinstance(hold, Hold)
            assert await transaction.perform(Finish(asked, hold, None, Event.COMPLETE, ANSWER)) is Verdict.DONE

            found = await postgres.perform(claim())
            assert isinstance(found, Found)

    def test_store_has_connections_of_its_own(self, url: str) -> None:
        """With nothing but a URL a transaction commits the handler's write and its record; closing is not the end."""
        with PostgresStore(url) as postgres:
            for key in ("first", "second"):
                asked = claim(key)
                transaction = postgres.transaction()
                hold = transaction.perform(Begin(asked))
                assert isinstance(hold, Hold)
                transaction.connection.execute("CREATE TABLE IF NOT EXISTS charges ()")
                transaction.connection.execute("INSERT INTO charges DEFAULT VALUES")
                assert transaction.perform(Finish(asked, hold, None, Event.COMPLETE, ANSWER)) is Verdict.DONE
                postgres.close()

            assert isinstance(postgres.perform(claim("second")), Found)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM charges").fetchone() == (2,)

    async def test_store_on_a_loop_has_connections_of_its_own(self, url: str) -> None:
        """The same on an event loop."""
        async with AsyncPostgresStore(url) as postgres:
            for key in ("first", "second"):
                asked = claim(key)
                transaction = postgres.transaction()
                hold = await transaction.perform(Begin(asked))
                assert isinstance(hold, Hold)
                await transaction.connection.execute("CREATE TABLE IF NOT EXISTS charges ()")
                await transaction.connection.execute("INSERT INTO charges DEFAULT VALUES")
                assert await transaction.perform(Finish(asked, hold, None, Event.COMPLETE, ANSWER)) is Verdict.DONE
                await postgres.close()

            found = await postgres.perform(claim("second"))
            assert isinstance(found, Found)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM charges").fetchone() == (2,)

    def test_store_on_the_next_loop_starts_afresh(self, url: str) -> None:
        """A store that was used on one event loop lends transactions on the next."""
        postgres = AsyncPostgresStore(url)

        async def begin_and_undo() -> None:
            transaction = postgres.transaction()
            begun = await transaction.perform(Begin(claim()))
            assert isinstance(begun, Hold)
            await transaction.perform(Undo())
            await postgres.close()

        asyncio.run(begin_and_undo())
        asyncio.run(begin_and_undo())

    def test_phase_is_rolled_back_with_its_step(self, url: str) -> None:
        """A phase whose hold was lost leaves neither its write nor its step behind."""
        with PostgresStore(url) as postgres:
            hold = postgres.perform(claim())
            assert isinstance(hold, Hold)
            transaction = postgres.transaction()
            transaction.perform(Open())
            transaction.connection.execute("CREATE TABLE charges ()")
            strange = Hold("alice", "k", 2, hold.token)

            assert transaction.perform(Commit(strange, PROGRESS)) is Verdict.FENCED
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT to_regclass('charges')").fetchone() == (None,)

    def test_transactions_are_not_shared_with_a_forked_child(self, url: str) -> None:
        """A forked child begins transactions on connections of its own, and its parent's go on working."""
        postgres = PostgresStore(url)
        parents = postgres.transaction()
        assert isinstance(parents.perform(Begin(claim("parent"))), Hold)
        child = os.fork()
        if child == 0:
            childs = postgres.transaction()
            fine = isinstance(childs.perform(Begin(claim("child"))), Hold)
            fine = fine and isinstance(postgres.transaction().perform(Begin(claim("parent"))), Found)
            os._exit(0 if fine else 1)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert parents.connection.execute("SELECT 1").fetchone() == (1,)
        parents.perform(Undo())
        postgres.close()

    def test_pool_and_audit_are_read_off_the_url(self) -> None:
        """``?pool=`` and ``?audit=`` are Semel's own, and no driver sees them."""
        address = Address.of("postgresql://localhost/db?pool=3&audit=off&sslmode=disable")

        assert (address.pool, address.audit, address.url) == (3, "off", "postgresql://localhost/db?sslmode=disable")
        assert (Address.of("postgresql://localhost/db").pool, Address.of("postgresql:///").audit) == (16, "on")

    @pytest.mark.parametrize(
        "said",
        [
            *("audit=yes", "audit=", "pool=0", "pool=many", "pool=", f"pool={'9' * 5000}"),
            *("connections=0", "connections=7", "connections=", f"connections={'1' * 5000}"),
        ],
        ids=lambda said: said[:20],
    )
    def test_wrong_parameter_is_an_error_that_quotes_it(self, opener: Any, said: str) -> None:
        """A value that means nothing is refused when the store is made."""
        with pytest.raises(ConfigurationError, match=said):
            opener(f"postgresql://localhost/db?{said}")


class _Given(Connections):
    """One connection of the application's."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def begin(self, _command: Begin | Open, _opening: str | None = None) -> Unit:
        return _GivenUnit(self._connection)

    def close(self) -> None:
        """It is the application's."""


class _GivenUnit(Unit):
    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def run(self, joined: Joined[T]) -> T:
        return _join(self.connection, joined)

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()


class _AsyncGiven(AsyncConnections):
    """The same on an event loop."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def begin(self, _command: Begin | Open, _opening: str | None = None) -> AsyncUnit:
        return _AsyncGivenUnit(self._connection)

    async def close(self) -> None:
        """It is the application's."""


class _AsyncGivenUnit(AsyncUnit):
    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection

    async def run(self, joined: Joined[T]) -> T:
        cursor = psycopg.AsyncRawCursor(self.connection)
        await cursor.execute(joined.query.numbered.encode(), joined.in_order)
        return joined.read(await cursor.fetchall() if cursor.description else [])

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()


_FINISHED = """
INSERT INTO semel_keys
       (scope, key, state, attempt, token, fingerprint, status, headers, created_at, completed_at, expires_at)
SELECT 'alice', 'k' || n, 'complete', 1, decode(md5(n::text), 'hex'), '', 200, '[]', now(), now(), now()
  FROM generate_series(1, $1::int) AS n
"""

#: A sequence counts what is rolled back, too.
_SLOW_DELETE = """
CREATE SEQUENCE tries;
CREATE FUNCTION delay() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN PERFORM nextval(''tries''), pg_sleep(60); RETURN OLD; END';
CREATE TRIGGER delay BEFORE DELETE ON semel_keys FOR EACH ROW EXECUTE FUNCTION delay();
"""


def _join(connection: psycopg.Connection[Any], joined: Joined[T]) -> T:
    cursor = psycopg.RawCursor(connection)
    cursor.execute(joined.query.numbered.encode(), joined.in_order)
    return joined.read(cursor.fetchall() if cursor.description else [])


def _verdict(connection: psycopg.Connection[Any], joined: Joined[Verdict]) -> Verdict:
    """Run a statement that fails where it is fenced, so that a COMMIT sent with it is not carried out."""
    connection.execute("SELECT 1")  # begins a transaction, which stays open; the next block is a savepoint in it
    try:
        with connection.transaction():
            return _join(connection, joined)
    except psycopg.Error as error:
        if not is_fence(error, error.sqlstate, Names()):
            raise
        return Verdict.FENCED


def _begun(connection: psycopg.Connection[Any], asked: Claim) -> Hold:
    hold = _join(connection, JOINED.begin(Begin(asked))).seen
    assert isinstance(hold, Hold)
    return hold


def _plan(connection: psycopg.Connection[Any], command: Any) -> str:
    statement = Statements(Names()).of(command)
    plan = connection.execute(f"EXPLAIN {statement.sql}".encode(), statement.parameters)
    return "\n".join(line for (line,) in plan)


def _policy(connection: psycopg.Connection[Any]) -> Any:
    return connection.execute("SELECT on_crash, after_retention FROM semel_keys").fetchone()


def _until_somebody_waits(url: str, pending: Future[Any]) -> None:
    """Return when a session of Semel's waits for a lock; fail when what should wait is done."""
    with psycopg.connect(url, autocommit=True) as watcher:
        while not pending.done():
            waiting = watcher.execute(
                "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            if waiting.fetchall():
                return
    raise AssertionError("it did not wait")
