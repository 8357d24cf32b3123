"""The partitioned layout: where large answers are, what the reaper does with their partitions, and how a store gets
from one layout to the other. The whole of the conformance suite is run on it in ``shared/test_conformance.py``.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from semel import stores
from semel.core.commands import (
    Begin,
    Claim,
    Complete,
    Erase,
    Finish,
    Look,
    Park,
    Reap,
    Resolution,
    RotateAnswers,
    Rotated,
    Settle,
    TakeOver,
    Undo,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import AfterRetention, Found, Hold
from semel.core.state import Event
from semel.errors import ConfigurationError
from semel.flows.upkeep import ABANDONED
from semel.stores import Store
from semel.stores.alembic import include_name
from semel.testing.clock import Clock
from semel.work import Reaper
from tests.kit.servers.base import until
from tests.kit.servers.programs import POSTGRES, find
from tests.stores.colours import COLOURS, Process, process
from tests.stores.postgres.test_migrating import served_while

DAY, HOUR, LEASE = timedelta(days=1), timedelta(hours=1), timedelta(seconds=30)
LIMIT = 1024
#: It can't be compressed.
LARGE = Answer(200, ((b"content-type", b"application/octet-stream"),), os.urandom(10_000))
#: The partitions that are made ahead, beside today's.
AHEAD = 3

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "scale.md").read_text()

PROGRAMS = replace(POSTGRES, names=("postgres", "pg_dump", "pg_restore"))

Server = psycopg.Connection[Any]


@pytest.fixture
def url(migrated_postgres_url: str) -> str:
    """A store that has the partitioned layout."""
    with closing(stores.store(migrated_postgres_url)) as store:
        assert store.lay_out("partitioned") == ["partitioned layout applied"]
    return migrated_postgres_url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with closing(stores.store(url)) as opened_store:
        yield opened_store


@pytest.fixture
def server(url: str) -> Iterator[Server]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def claim(key: str = "k", retention: timedelta = DAY, after: AfterRetention = "delete") -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", LEASE, retention, after_retention=after)


def held(store: Store, asked: Claim) -> Hold:
    hold = store.perform(asked)
    assert isinstance(hold, Hold)
    return hold


def answered(store: Store, key: str = "k", answer: Answer = LARGE, **more: Any) -> Hold:
    hold = held(store, claim(key, **more))
    assert store.perform(Complete(hold, Event.COMPLETE, answer)) is Verdict.DONE
    return hold


def replayed(store: Store, key: str = "k") -> Answer | None:
    found = store.perform(claim(key))
    assert isinstance(found, Found)
    return found.answer


def stored(server: Server) -> list[tuple[Any, ...]]:
    """What the rows have: the day, and the length of a body of their own."""
    return server.execute("SELECT answer_day, octet_length(body) FROM semel_keys ORDER BY key").fetchall()


def partitions(server: Server) -> list[str]:
    rows = server.execute(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'semel_answers'::regclass ORDER BY 1"
    )
    return [name.removeprefix("semel_answers_") for (name,) in rows]


def places(server: Server) -> list[str]:
    """In which partitions there are answers."""
    rows = server.execute("SELECT tableoid::regclass::text FROM semel_answers ORDER BY 1").fetchall()
    return [name.removeprefix("semel_answers_") for (name,) in rows]


def today(server: Server, ago: timedelta = timedelta(0)) -> date:
    """The day in UTC, by the server's clock, so long ago."""
    found: date = server.execute("SELECT ((now() - %s) AT TIME ZONE 'UTC')::date", [ago]).fetchall()[0][0]
    return found


def named(day: date) -> str:
    return f"{day:%y%m%d}"


def rotate(store: Store) -> Rotated:
    """Let it do all that there is to do."""
    done = Rotated()
    while (step := store.perform(RotateAnswers(1000))).total:
        done = Rotated(done.made + step.made, done.dropped + step.dropped, done.deleted + step.deleted)
    return done


def part(server: Server, day: date) -> None:
    """Make the partition of a day."""
    made = f"CREATE TABLE semel_answers_{named(day)} PARTITION OF semel_answers FOR VALUES IN ('{day}')"
    server.execute(made.encode())


def from_the_past(server: Server, store: Store, key: str, day: date, *, has_partition: bool = True) -> None:
    """Have a large answer that expired on *day*, as if it had been stored before that day."""
    if has_partition:
        part(server, day)
    hold = held(store, claim(key))
    server.execute(
        "UPDATE semel_keys SET expires_at = %s WHERE key = %s", [datetime(*day.timetuple()[:3], 12, tzinfo=UTC), key]
    )
    assert store.perform(Complete(hold, Event.COMPLETE, LARGE)) is Verdict.DONE


class TestAnswers:
    @pytest.mark.parametrize("colour", COLOURS)
    def test_large_and_small(self, url: str, server: Server, colour: str) -> None:
        """A body of more than a kilobyte is in the partition of the day on which it expires; a smaller one, an empty
        one and none are in the row. All are replayed, and looked at, byte for byte.
        """
        bodies = [None, b"", bytes(LIMIT), bytes(LIMIT + 1), LARGE.body]
        with process(colour, url) as opened:
            for number, body in enumerate(bodies):
                hold = opened.perform(claim(str(number)))
                assert isinstance(hold, Hold)
                opened.perform(Complete(hold, Event.COMPLETE, Answer(200, (), body)))
            for number, body in enumerate(bodies):
                self.is_kept(opened, str(number), body)
        day = today(server) + DAY
        assert stored(server) == [(None, None), (None, 0), (None, LIMIT), (day, None), (day, None)]
        assert places(server) == [named(day)] * 2

    @staticmethod
    def is_kept(opened: Process, key: str, body: bytes | None) -> None:
        found, record = opened.perform(claim(key)), opened.perform(Look("alice", key))
        assert isinstance(found, Found)
        assert record is not None
        assert found.answer == record.answer == Answer(200, (), body)

    def test_what_is_waited_for(self, url: str, store: Store, server: Server) -> None:
        """After a COMMIT without a reply, the record is read when the transaction that wrote it has ended, and with it
        the answer, which is younger than the statement that waits.
        """
        hold = held(store, claim())
        with psycopg.connect(url) as other, ThreadPoolExecutor() as threads:
            other.execute(
                "UPDATE semel_keys SET state = 'complete', status = 200, headers = '[]', completed_at = now(),"
                " lease_expires_at = NULL, body = %s",
                [LARGE.body],
            )
            settling = threads.submit(store.perform, Settle(hold))
            until("it waits", lambda: bool(server.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall()))
            other.commit()
            record = settling.result()
        assert record is not None
        assert record.answer == Answer(200, (), LARGE.body)

    def test_atomic(self, store: Store, server: Server) -> None:
        """A handler's own transaction has its large answer in it, and nothing of it where that is rolled back; so has
        one that takes the place of a record that expired.
        """
        asked = claim()
        for commits in (False, True):
            transaction = store.transaction()
            hold = transaction.perform(Begin(asked))
            assert isinstance(hold, Hold)
            if commits:
                transaction.perform(Finish(asked, hold, None, Event.COMPLETE, LARGE))
            else:
                transaction.perform(Undo())
            assert len(places(server)) == commits
        assert replayed(store) == LARGE
        server.execute("UPDATE semel_keys SET expires_at = now() - interval '1 second'")
        again, other = claim(), Answer(201, (), os.urandom(5000))
        transaction = store.transaction()
        seen = transaction.perform(Begin(again))
        assert isinstance(seen, Found)
        transaction.perform(
            Finish(again, Hold("alice", "k", 1, again.token), Hold("alice", "k", 1, hold.token), Event.COMPLETE, other)
        )
        assert replayed(store) == other

    def test_taken_over(self, store: Store, server: Server) -> None:
        """A record that expired begins anew without its old answer, whether the new one is large or not."""
        hold = answered(store)
        for body in (b"small", os.urandom(3000), b"small"):
            server.execute("UPDATE semel_keys SET expires_at = now() - interval '1 second'")
            asked = claim()
            taken = store.perform(TakeOver(asked, hold))
            assert isinstance(taken, Hold)
            assert stored(server) == [(None, None)]
            store.perform(Complete(taken, Event.COMPLETE, Answer(200, (), body)))
            assert replayed(store) == Answer(200, (), body)
            hold = taken

    def test_tombstone(self, store: Store, server: Server) -> None:
        """Where a late retry is refused, what is left of the record points to no answer."""
        answered(store, after="strip")
        server.execute("UPDATE semel_keys SET expires_at = now() - interval '1 second'")
        assert store.perform(Reap(10, ABANDONED)).stripped == 1
        assert stored(server) == [(None, None)]
        answer = replayed(store)
        assert answer is not None
        assert answer.is_tombstone

    def test_answers_of_operators(self, store: Store, server: Server) -> None:
        """Answers that operators give have no token of their own: they stay in their rows, and apart."""
        answers = [Answer(200, (), os.urandom(4000)) for _ in range(2)]
        for number, answer in enumerate(answers):
            hold = held(store, claim(str(number)))
            assert store.perform(Park(hold)) is Verdict.DONE
            assert store.perform(Resolution(hold, answer)) is Verdict.DONE
        assert [replayed(store, "0"), replayed(store, "1")] == answers
        assert stored(server) == [(None, 4000)] * 2

    def test_one_token_twice(self, store: Store, server: Server) -> None:
        """Where there is an answer with that token and day already, the second stays in its row."""
        first = answered(store)
        server.execute("UPDATE semel_keys SET expires_at = now() - interval '1 second'")
        asked = Claim("alice", "other", first.token, b"fingerprint", LEASE, DAY)
        other = Answer(200, (), os.urandom(5000))
        store.perform(Complete(held(store, asked), Event.COMPLETE, other))
        assert replayed(store, "other") == other
        assert stored(server) == [(today(server) + DAY, None), (None, 5000)]

    def test_erased(self, store: Store, server: Server) -> None:
        """Erasing a customer deletes its large answers, too, and no others."""
        answered(store)
        hold = held(store, Claim("acme", "k", os.urandom(16), b"fingerprint", LEASE, DAY))
        store.perform(Complete(hold, Event.COMPLETE, LARGE))
        assert len(places(server)) == 2
        assert store.perform(Erase("acme", 10, is_preview=True)).count == 1
        assert len(places(server)) == 2
        store.perform(Erase("acme", 10))
        assert len(places(server)) == 1
        assert store.perform(Erase("acme", 10, is_preview=True)).count == 0
        assert replayed(store) == LARGE

    def test_midnight(self, url: str, store: Store, server: Server) -> None:
        """A key that was answered on one side of midnight is a replay on the other, and claimed once: there is one
        primary key. Past its retention it is a new operation.
        """
        clock = Clock(url)
        answered(store)
        for _ in range(3):
            clock.advance(7 * HOUR)
            assert replayed(store) == LARGE
            rotate(store)
        clock.advance(7 * HOUR)
        found = store.perform(claim())
        assert isinstance(found, Found)
        assert found.is_expired
        assert server.execute("SELECT count(*) FROM semel_keys").fetchall() == [(1,)]

    def test_other_names(self, migrated_postgres_url: str, server: Server) -> None:
        """With other names, in another schema, functions find their tables whatever the search path of a session is."""
        name = "k" * 48
        where = f"{migrated_postgres_url}?schema=billing&table={name}"
        with closing(stores.store(where)) as store:
            store.migrate()
            store.lay_out("partitioned")
            answered(store)
            assert replayed(store) == LARGE
            assert rotate(store).made == 1
            Reaper(store).run_once()
        server.execute("SET search_path = ''")
        [(body,)] = server.execute(
            f"SELECT billing.{name}_answer(answer_day, token) FROM billing.{name}".encode()
        ).fetchall()
        assert body == LARGE.body
        server.execute(f"UPDATE billing.{name} SET body = 'small'".encode())
        assert server.execute(f"SELECT answer_day, body FROM billing.{name}".encode()).fetchall() == [(None, b"small")]

    def test_a_schema_that_is_renamed(self, url: str, store: Store, server: Server) -> None:
        """Functions find their tables as the store finds the records, by the search path of the session: the answers
        are there after a schema was renamed, and for a role other than the one that migrated.
        """
        answered(store)
        server.execute("ALTER SCHEMA public RENAME TO elsewhere")
        with closing(stores.store(f"{url}?options=-csearch_path%3Delsewhere")) as moved:
            assert replayed(moved) == LARGE
            answered(moved, "new")
            assert Reaper(moved).run_once().partitions_made == 1
        server.execute("ALTER SCHEMA elsewhere RENAME TO public")
        assert [day for day, _ in stored(server)] == [today(server) + DAY] * 2

    def test_a_row_that_is_copied(self, store: Store, server: Server) -> None:
        """A row that is written as it was read, as from a dump of the data, keeps its answer."""
        answered(store)
        server.execute(
            "CREATE TABLE copied AS SELECT * FROM semel_keys; DELETE FROM semel_keys;"
            "INSERT INTO semel_keys SELECT * FROM copied; DROP TABLE copied"
        )
        assert replayed(store) == LARGE

    def test_dumped_and_restored(self, url: str, store: Store, empty_postgres_url: str, tmp_path: Path) -> None:
        """What pg_dump writes is restored, with its answers, its functions and its trigger."""
        answered(store)
        programs, dump = find(PROGRAMS, tmp_path), tmp_path / "dump"
        subprocess.run([programs / "pg_dump", "-Fc", "--no-owner", "-f", dump, url], check=True)
        subprocess.run([programs / "pg_restore", "--no-owner", "-e", "-d", empty_postgres_url, dump], check=True)
        with psycopg.connect(empty_postgres_url, autocommit=True) as other:
            with closing(stores.store(empty_postgres_url)) as restored:
                assert replayed(restored) == LARGE
                answered(restored, "new")
                assert replayed(restored, "new") == LARGE
            assert places(other) == [named(today(other) + DAY)] * 2


class TestReaper:
    def test_made_ahead(self, store: Store, server: Server) -> None:
        """There are partitions up to the last day on which a record expires, and three more."""
        assert partitions(server) == [*(named(today(server) + DAY * n) for n in range(AHEAD + 1)), "rest"]
        held(store, claim(retention=10 * DAY))
        report = Reaper(store).run_once()
        assert (report.partitions_made, report.is_idle) == (10, False)
        assert ", 10 partitions made, 0 dropped" in str(report)
        assert partitions(server) == [*(named(today(server) + DAY * n) for n in range(10 + AHEAD + 1)), "rest"]
        assert Reaper(store).run_once().is_idle

    def test_a_year(self, store: Store, server: Server) -> None:
        """A record that is kept for years does not make a partition for each of its days."""
        held(store, claim(retention=5000 * DAY))
        assert rotate(store).made == 400 - AHEAD
        answered(store, "k2", retention=5000 * DAY)
        assert places(server) == ["rest"]

    def test_dropped(self, store: Store, server: Server) -> None:
        """A partition goes when its day is over for an hour, and every record of that day is reaped."""
        old = today(server) - 2 * DAY
        from_the_past(server, store, "k", old)
        before = partitions(server)
        assert before[0] == named(old)
        assert rotate(store) == Rotated()
        assert partitions(server) == before
        report = Reaper(store).run_once()
        assert (report.deleted, report.partitions_dropped) == (1, 1)
        assert partitions(server) == before[1:]

    def test_an_operation_that_takes_days(self, store: Store, server: Server) -> None:
        """While a record of a day is in progress, the partition of that day is kept: its answer goes there."""
        old = today(server) - 2 * DAY
        part(server, old)
        hold = held(store, claim())
        server.execute("UPDATE semel_keys SET expires_at = now() - interval '2 days'")
        assert Reaper(store).run_once().is_idle
        store.perform(Complete(hold, Event.COMPLETE, LARGE))
        assert places(server) == [named(old)]
        assert Reaper(store).run_once().partitions_dropped == 1

    def test_yesterday_within_the_hour(self, store: Store, server: Server) -> None:
        """The day that has just ended is kept for an hour more."""
        recent = today(server, HOUR)
        if recent != today(server):
            part(server, recent)
        assert Reaper(store).run_once().partitions_dropped == 0
        assert named(recent) in partitions(server)

    def test_no_reaper(self, store: Store, server: Server) -> None:
        """Without a partition an answer goes to the default one and is replayed from there; its day stays there. When
        it has expired it is deleted, and not before.
        """
        far = today(server) + 20 * DAY
        answered(store, retention=20 * DAY)
        assert places(server) == ["rest"]
        assert replayed(store) == LARGE
        assert rotate(store).made == 19  # today + 4 to today + 19, and 21 to 23
        assert named(far) not in partitions(server)
        answered(store, "k2", retention=20 * DAY)
        assert places(server) == ["rest"] * 2
        assert Reaper(store).run_once().is_idle
        from_the_past(server, store, "old", today(server) - 3 * DAY, has_partition=False)
        assert places(server) == ["rest"] * 3
        assert rotate(store) == Rotated()
        report = Reaper(store).run_once()
        assert (report.deleted, report.answers) == (1, 1)
        assert "1 answers deleted" in str(report)
        assert [replayed(store, key) for key in ("k", "k2")] == [LARGE] * 2

    def test_a_reader_in_the_way(self, url: str, store: Store, server: Server) -> None:
        """While an open transaction has read a partition, it is not dropped, and none is made; requests for other large
        answers go on. When it has ended, both are done.
        """
        from_the_past(server, store, "old", today(server) - 2 * DAY)
        answered(store)
        with psycopg.connect(url) as reader:
            reader.execute("SELECT count(*) FROM semel_answers")
            held(store, claim("far", retention=10 * DAY))
            report = Reaper(store).run_once()
            assert (report.deleted, report.partitions_made, report.partitions_dropped) == (1, 0, 0)
            assert (report.error, report.trouble) == (None, None)
            assert replayed(store) == LARGE
        report = Reaper(store).run_once()
        assert (report.partitions_made, report.partitions_dropped) == (10, 1)

    def test_requests_meanwhile(self, url: str, store: Store, server: Server) -> None:
        """A request that comes while a drop waits for its lock is answered when that gives up."""
        from_the_past(server, store, "old", today(server) - 2 * DAY)
        answered(store)
        with (
            psycopg.connect(url) as reader,
            closing(stores.store(url)) as other,
            ThreadPoolExecutor() as threads,
        ):
            reader.execute("SELECT count(*) FROM semel_answers")
            dropping = threads.submit(Reaper(other).run_once)
            for number in range(50):
                answered(store, f"k{number}")
                assert replayed(store, f"k{number}") == LARGE
            assert dropping.result().partitions_dropped == 0

    def test_without_rights(self, url: str, store: Store, server: Server, caplog: pytest.LogCaptureFixture) -> None:
        """A role that may not make or drop tables serves all the same; the report and one line of the log say what to
        run, and as which role.
        """
        role = f"semel_role_{uuid4().hex[:12]}"
        server.execute(
            f"CREATE ROLE {role} LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE ON semel_keys, semel_audit,"
            f" semel_keys_watermark, semel_answers, semel_answers_rest TO {role}".encode()
        )
        parts = urlsplit(url)
        try:
            with closing(
                stores.store(parts._replace(netloc=f"{role}@{parts.netloc.partition('@')[2]}").geturl())
            ) as mine:
                from_the_past(server, mine, "old", today(server) - 2 * DAY)
                from_the_past(server, mine, "older", today(server) - 5 * DAY, has_partition=False)
                answered(mine)
                assert replayed(mine) == LARGE
                reaper = Reaper(mine)
                with caplog.at_level(logging.WARNING, "semel"):
                    report = reaper.run_once()
                    reaper.run_once()
            assert (report.deleted, report.partitions_dropped, report.answers) == (2, 0, 1)
            said = f"the role {role} may not make or drop partitions of semel_answers: run semel reap as"
            assert said in str(report)
            assert caplog.text.count(said) == 1
            assert Reaper(store).run_once().partitions_dropped == 1
        finally:
            server.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())

    def test_made_by_a_member(self, url: str, server: Server) -> None:
        """A partition belongs to the owner of the others, whichever member of that role made it; one that does not
        can't be dropped by the owner, and that is said.
        """
        owner, member = (f"semel_{each}_{uuid4().hex[:12]}" for each in ("owner", "member"))
        tables = server.execute("SELECT relname FROM pg_class WHERE relname ~ '^semel_' AND relkind IN ('r', 'p')")
        server.execute(
            f"CREATE ROLE {owner} LOGIN; CREATE ROLE {member} LOGIN IN ROLE {owner};"
            f"GRANT CREATE, USAGE ON SCHEMA public TO {owner};"
            f"{';'.join(f'ALTER TABLE {name} OWNER TO {owner}' for (name,) in tables)}".encode()
        )
        parts = urlsplit(url)
        one, other = (
            stores.store(parts._replace(netloc=f"{role}@{parts.netloc.partition('@')[2]}").geturl())
            for role in (member, owner)
        )
        try:
            with closing(one), closing(other):
                held(one, claim("k", 9 * DAY))
                assert Reaper(one).run_once().partitions_made == 9
                assert server.execute(
                    "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relname ~ '^semel_answers_'"
                ).fetchall() == [(owner,)]
                server.execute(f"SET ROLE {member}".encode())
                part(server, today(server) - 3 * DAY)
                server.execute("RESET ROLE")
                report = Reaper(other).run_once()
                assert (report.partitions_dropped, report.error) == (0, None)
                assert "must be owner of table" in str(report)
                assert Reaper(one).run_once().partitions_dropped == 1
        finally:
            server.execute(f"REASSIGN OWNED BY {owner}, {member} TO CURRENT_USER".encode())
            server.execute(f"DROP OWNED BY {owner}, {member}; DROP ROLE {owner}, {member}".encode())

    def test_a_table_in_the_way(self, store: Store, server: Server) -> None:
        """Where a table has the name of a partition, as one that was detached has, the others are made, and it is
        told.
        """
        held(store, claim("k", 9 * DAY))
        name = f"semel_answers_{named(today(server) + 5 * DAY)}"
        server.execute(f"CREATE TABLE {name} (number int)".encode())
        report = Reaper(store).run_once()
        assert (report.partitions_made, report.error) == (8, None)
        assert f'relation "{name}" already exists' in str(report)

    def test_a_role_that_may_not_move(self, url: str, store: Store, server: Server) -> None:
        """Where a role may not write answers, they stay in their rows."""
        role = f"semel_role_{uuid4().hex[:12]}"
        server.execute(
            f"CREATE ROLE {role} LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE ON semel_keys, semel_audit TO {role};"
            f"GRANT SELECT ON semel_answers TO {role}".encode()
        )
        parts = urlsplit(url)
        try:
            with closing(
                stores.store(parts._replace(netloc=f"{role}@{parts.netloc.partition('@')[2]}").geturl())
            ) as mine:
                answered(mine)
                assert replayed(mine) == LARGE
            assert stored(server) == [(None, 10_000)]
        finally:
            server.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())

    def test_a_role_that_is_added_later(self, url: str, store: Store, server: Server) -> None:
        """A role that has of the large answers what the page says for requests serves, and its reaper says what it may
        not do instead of failing; with what the page says for workers it empties the default partition, and erases.
        """
        serving, working = re.findall(r"`(GRANT [^`]+ ON semel_answers[^`]*)`", PAGE)
        role = f"semel_role_{uuid4().hex[:12]}"
        server.execute(
            f"CREATE ROLE {role} LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE ON semel_keys, semel_audit,"
            f" semel_keys_watermark TO {role}; {serving} TO {role}".encode()
        )
        parts = urlsplit(url)
        mine = stores.store(parts._replace(netloc=f"{role}@{parts.netloc.partition('@')[2]}").geturl())
        try:
            with closing(mine):
                from_the_past(server, mine, "old", today(server) - 5 * DAY, has_partition=False)
                answered(mine, retention=9 * DAY)
                assert replayed(mine) == LARGE
                report = Reaper(mine).run_once()
                assert (report.deleted, report.answers, report.error) == (1, 0, None)
                assert f"the role {role} may not make or drop partitions" in str(report)
                server.execute("".join(f"{each} TO {role};" for each in working.split("; ")).encode())
                assert Reaper(mine).run_once().answers == 1
                assert mine.perform(Erase("alice", 10)).count == 1
            assert places(server) == []
        finally:
            server.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


class TestLayouts:
    def test_there_and_back(self, url: str, store: Store, server: Server) -> None:
        """To ask for the layout that there is does nothing. On the way back the table stays until its answers have
        expired, and they are served from it; then it goes, and what pointed to it is past its retention.
        """
        answered(store)
        assert store.plan_layout("partitioned") == ()
        assert store.lay_out("partitioned") == []
        [planned] = store.plan_layout("plain")
        assert [each.lock for each in planned.statements] == ["ACCESS EXCLUSIVE"]
        done, left = store.lay_out("plain")
        assert done == "plain layout applied"
        assert f"semel_answers has answers until {today(server) + DAY}" in left
        assert store.lay_out("plain") == [left]
        assert replayed(store) == LARGE
        answered(store, "new")
        assert stored(server) == [(today(server) + DAY, None), (None, 10_000)]
        assert Reaper(store).run_once().is_idle
        server.execute("UPDATE semel_answers SET day = day - 4")
        server.execute("UPDATE semel_keys SET answer_day = answer_day - 4, expires_at = expires_at - interval '4 days'")
        assert store.lay_out("plain") == ["plain layout applied"]
        assert store.lay_out("plain") == []
        assert store.perform(RotateAnswers(10)) == Rotated()
        found = store.perform(claim())
        assert isinstance(found, Found)
        assert found.is_expired
        assert store.lay_out("partitioned") == ["partitioned layout applied"]

    def test_what_is_planned(self, migrated_postgres_url: str) -> None:
        """The plan has every statement, with what it locks; of tables in use that is an instant."""
        with closing(stores.store(migrated_postgres_url)) as store:
            [planned] = store.plan_layout("partitioned")
            blocks = [each.blocks for each in planned.statements]
            assert blocks.pop() == "claims, answers and replays, for an instant"
            assert set(blocks) == {"nothing: no code uses the new table yet"}
            assert store.plan_layout("plain") == ()

    def test_what_is_planned_on_the_way_back(self, store: Store, server: Server) -> None:
        """Where no answer is left that has to be served, the table goes at once; and the plan says so."""
        [planned] = store.plan_layout("plain")
        assert [each.table for each in planned.statements] == ["semel_keys", "semel_answers"]
        assert store.lay_out("plain") == ["plain layout applied"]
        assert server.execute("SELECT to_regclass('semel_answers')").fetchall() == [(None,)]
        assert store.plan_layout("plain") == ()

    def test_grants(self, migrated_postgres_url: str) -> None:
        """What roles may do with the records, they may do with the answers."""
        role = f"semel_role_{uuid4().hex[:12]}"
        with psycopg.connect(migrated_postgres_url, autocommit=True) as server:
            server.execute(f'CREATE ROLE "{role} x"; GRANT SELECT, INSERT ON semel_keys TO "{role} x"'.encode())
            try:
                with closing(stores.store(migrated_postgres_url)) as store:
                    store.lay_out("partitioned")
                for table in ("semel_answers", "semel_answers_rest"):
                    rights = ("SELECT", "INSERT", "UPDATE", "DELETE")
                    rows = [
                        server.execute("SELECT has_table_privilege(%s, %s, %s)", [f"{role} x", table, right]).fetchall()
                        for right in rights
                    ]
                    assert rows == [[(True,)], [(True,)], [(False,)], [(False,)]]
            finally:
                server.execute(f'DROP OWNED BY "{role} x"; DROP ROLE "{role} x"'.encode())

    def test_older_tables(self, migrated_postgres_url: str) -> None:
        """A store that lacks the migration says so, and nothing is changed."""
        with (
            psycopg.connect(migrated_postgres_url) as server,
            closing(stores.store(migrated_postgres_url)) as store,
        ):
            server.execute("DELETE FROM semel_keys_migrations WHERE name LIKE '0008%'")
            server.commit()
            with pytest.raises(ConfigurationError, match="lacks 0008_pre_answers"):
                store.lay_out("partitioned")

    @pytest.mark.parametrize("other", ["memory://", "sqlite:///semel.db", "redis://127.0.0.1:1"])
    def test_other_stores(self, other: str) -> None:
        """Other stores have no partitions, and say so."""
        with closing(stores.store(other)) as store:
            for ask in (store.lay_out, store.plan_layout):
                with pytest.raises(
                    ConfigurationError, match="partitions, which are dropped as a whole, are PostgreSQL's"
                ):
                    ask("partitioned")

    def test_neighbours(self, url: str, store: Store, server: Server) -> None:
        """Partitions are no tables of others, neither to us nor to Alembic."""
        assert not store.has_neighbours()
        for name in ("semel_answers", *(f"semel_answers_{each}" for each in partitions(server))):
            assert not include_name(name, "table", {})
        assert include_name("semel_answers_of_mine", "table", {})

    def test_through_a_pooler(self, migrated_postgres_url: str, pgbouncer_server: Any) -> None:
        """The layout can be changed through PgBouncer, and large answers are replayed through it."""
        with closing(stores.store(pgbouncer_server.through(migrated_postgres_url))) as store:
            assert store.lay_out("partitioned") == ["partitioned layout applied"]
            answered(store)
            assert replayed(store) == LARGE
            assert rotate(store).made == 1
            assert store.lay_out("plain")[0] == "plain layout applied"

    async def test_under_load(self, migrated_postgres_url: str) -> None:
        """Requests with large answers go on while the layout becomes the partitioned one, and the plain one again: none
        fails, none has another answer, and none is run twice.
        """
        url = migrated_postgres_url

        def there_and_back() -> list[str]:
            with closing(stores.store(url)) as store:
                told = []
                for layout in ("partitioned", "plain", "partitioned"):
                    told += store.lay_out(layout)
                    Reaper(store).run_once()
                return [each for each in told if each.endswith("applied")]

        body = "x" * 5000
        told = await served_while(url, there_and_back, body)
        assert told == ["partitioned layout applied", "plain layout applied", "partitioned layout applied"]
        with psycopg.connect(url) as server:
            rows = server.execute("SELECT count(*) FILTER (WHERE body IS NULL), count(*) FROM semel_keys").fetchall()
            places_used = server.execute("SELECT count(*) FROM semel_answers").fetchall()
        assert rows[0][0] == places_used[0][0] > 0
