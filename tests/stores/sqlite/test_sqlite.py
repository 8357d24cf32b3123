"""What is special to SQLite: its file, its locks, its forks. What every store does is in shared/test_conformance.py."""

import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import (
    AddCounts,
    Begin,
    Browse,
    Claim,
    Command,
    Complete,
    FindStuck,
    Finish,
    Look,
    Note,
    Now,
    ReadCounts,
    ReadTrail,
    Reap,
    Reaped,
    Release,
    Renew,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.errors import ConfigurationError, StoreError, StoreNotReady, StoreReadOnly, StoreRefused, StoreUnavailable
from semel.stores.sqlite import AsyncSQLiteStore, SQLiteStore, file
from semel.stores.sqlite.file import locate
from semel.stores.sqlite.statements import Bulk, Statements, chunks
from semel.stores.sqlite.writer import Writer
from semel.stores.statement import Names, Query, load_migrations

LEASE = timedelta(seconds=30)
RETENTION = timedelta(hours=24)
ANSWER = Answer(201, ((b"content-type", b"text/plain"), (b"x-name", b"\xe9")), b"made")
NOBODY = 65534

SERVING = (
    "find",
    "claim",
    "complete",
    "complete_one",
    "renew",
    "renew_one",
    "take_over",
    "release",
    "give_up",
    "exists",
    "save",
    "mark",
    "park",
    "is_parked",
    "finish",
    "look",
    "read_request",
    "sweep",
    "discard",
    "unpark",
    "resolve",
)

#: A record in each state there is, as the third migration left the table.
EVERY_STATE = """
INSERT INTO semel_keys (
    scope, key, state, attempt, token, fingerprint, recovery_point, on_crash, after_retention, created_at,
    lease_expires_at, completed_at, expires_at, steps, status, headers, request, request_body, tries, accepted,
    milestone, body
)
SELECT
    'scope', column1, column2, column3, column4, x'01', column5, 'refuse', column6, now - 9000,
    now + column7, now + column8, now + column9, column10, column11, column12, column13, column14, column15, column16,
    column17, column18
FROM semel_keys_clock, (VALUES
    ('pending', 'pending', 1, randomblob(16), NULL, 'delete', NULL, NULL, 90000, NULL, NULL, NULL, '{}', x'6f', 0, 1,
        NULL, NULL),
    ('processing', 'processing', 1, randomblob(16), NULL, 'delete', 90000, NULL, 90000, NULL, NULL, NULL, NULL, NULL,
        0, 0, '{"fraction":0.5,"note":null}', NULL),
    ('stuck', 'processing', 3, randomblob(16), 'paid', 'strip', -90, NULL, 90000, '[]', NULL, NULL, '{}', x'6f', 2, 1,
        NULL, NULL),
    ('nobody''s', 'processing', 2, zeroblob(16), NULL, 'delete', -90, NULL, 90000, NULL, NULL, NULL, NULL, NULL, 0, 0,
        NULL, NULL),
    ('unknown', 'unknown', 1, randomblob(16), 'paid', 'delete', NULL, NULL, -90, '[]', NULL, NULL, NULL, NULL, 0, 0,
        NULL, NULL),
    ('complete', 'complete', 1, randomblob(16), NULL, 'delete', NULL, -9, 90000, NULL, 201, '[["a","b"]]', NULL, NULL,
        0, 0, NULL, x'6f6b'),
    ('with steps', 'complete', 2, randomblob(16), 'paid', 'delete', NULL, -9, 90000, '[]', 201, '[]', NULL, NULL, 1, 1,
        NULL, x''),
    ('failed', 'failed', 1, randomblob(16), NULL, 'strip', NULL, -9, 90000, NULL, 500, '[]', NULL, NULL, 0, 0, NULL,
        x'6f'),
    ('not kept', 'complete', 1, randomblob(16), NULL, 'delete', NULL, -9, 90000, NULL, 200, '[]', NULL, NULL, 0, 0,
        NULL, NULL),
    ('stripped', 'complete', 1, randomblob(16), NULL, 'keep', NULL, -9, -90, NULL, 200, '[]', NULL, NULL, 0, 0, NULL,
        NULL),
    ('expired', 'complete', 1, randomblob(16), NULL, 'delete', NULL, -9, -90, NULL, 200, '[]', NULL, NULL, 0, 0, NULL,
        x'6f'),
    ('late', 'complete', 1, randomblob(16), NULL, 'strip', NULL, -9, -80, NULL, 200, '[]', NULL, NULL, 0, 0, NULL,
        x'6f'),
    ('abandoned', 'processing', 1, randomblob(16), NULL, 'delete', -90, NULL, -70, NULL, NULL, NULL, NULL, NULL, 0, 0,
        NULL, NULL)
);
INSERT INTO semel_audit (at, scope, key, attempt, event, actor) VALUES (0, 'scope', 'key', 1, 'claimed', 'host:7');
"""


def a_claim(key: str = "key", token: bytes | None = None) -> Claim:
    return Claim("scope", key, token or os.urandom(16), b"print", LEASE, RETENTION)


def done(store: SQLiteStore, key: str = "key") -> Hold:
    hold = store.perform(a_claim(key))
    assert isinstance(hold, Hold)
    assert store.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
    return hold


@pytest.fixture
def path(sqlite_url: str) -> Path:
    return Path(sqlite_url.removeprefix("sqlite:///"))


@pytest.fixture
def store(sqlite_url: str) -> Iterator[SQLiteStore]:
    with SQLiteStore(sqlite_url) as store:
        yield store


class TestSchema:
    def test_the_migrations_lead_to_the_schema(self, store: SQLiteStore, path: Path) -> None:
        """A file that went through every migration looks like a fresh install, to the last constraint."""
        schema = (files("semel.stores.sqlite") / "schema.sql").read_text()
        objects = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
        with closing(sqlite3.connect(":memory:")) as fresh, closing(sqlite3.connect(path)) as migrated:
            fresh.executescript(schema)
            assert migrated.execute(objects).fetchall() == fresh.execute(objects).fetchall()

    def test_migrating_again_does_nothing(self, sqlite_url: str) -> None:
        """`migrate` says what it applied: everything at first, nothing afterwards."""
        for expected in (
            [
                "0001_pre_keys",
                "0002_pre_steps",
                "0003_pre_accepted",
                "0004_pre_lean",
                "0005_pre_messages",
                "0006_pre_trace",
                "0007_pre_counts",
            ],
            [],
        ):
            store = SQLiteStore(sqlite_url)
            assert store.migrate() == expected
            store.close()

    def test_two_tables_live_in_one_file(self, store: SQLiteStore, sqlite_url: str) -> None:
        """`?table=` names another table, with everything that belongs to it; the two know nothing of each other."""
        done(store)
        with SQLiteStore(f"{sqlite_url}?table=others") as other:
            assert other.migrate() == []
            assert isinstance(other.perform(a_claim()), Hold)

    def test_a_strange_table_is_left_alone(self, sqlite_url: str, path: Path) -> None:
        """A table of the same name that Semel did not make is not touched, and the error says what to do."""
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE semel_keys (mine)")
        with pytest.raises(StoreNotReady, match=r"not Semel's. Add \?table="):
            SQLiteStore(sqlite_url).open()

    def test_every_commit_is_on_the_disk(self, store: SQLiteStore) -> None:
        """Write-ahead logging, and synchronous is FULL (2): an acknowledged commit outlives a power cut."""
        done(store)
        connection = store._writer.opened
        assert connection is not None
        assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
        assert connection.execute("PRAGMA synchronous").fetchall() == [(2,)]

    def test_an_older_file_keeps_its_records(self, sqlite_url: str, path: Path) -> None:
        """The second migration makes the table anew: records and their order stay, and so do views that name it."""
        migrations = dict(load_migrations("semel.stores.sqlite", Names()))
        with closing(sqlite3.connect(path)) as old:
            old.executescript(migrations["0001_pre_keys"])
            old.execute("INSERT INTO semel_keys_migrations VALUES ('0001_pre_keys', 0)")
            for number in range(3):
                old.execute(
                    "INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, completed_at,"
                    " expires_at, status, headers, body) SELECT 'scope', ?, 'complete', 2, zeroblob(16), x'01', 0, 0,"
                    " now + 1000000, 201, '[]', x'6f6b' FROM semel_keys_clock",
                    (f"key-{number}",),
                )
            old.execute("CREATE VIEW report AS SELECT count(*) AS keys FROM semel_keys")
            old.commit()
        with SQLiteStore(sqlite_url) as store:
            assert [record.key for record in store.perform(Browse(9))] == ["key-2", "key-1", "key-0"]
            found = store.perform(a_claim("key-1"))
            assert isinstance(found, Found)
            assert (found.answer, found.attempt, found.steps) == (Answer(201, (), b"ok"), 2, None)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT keys FROM report").fetchall() == [(3,)]

    def test_an_older_file_keeps_what_was_in_progress(self, sqlite_url: str, path: Path) -> None:
        """So does the third: what was begun goes on, with its steps and its request, and nothing of it was accepted."""
        migrations = dict(load_migrations("semel.stores.sqlite", Names()))
        with closing(sqlite3.connect(path)) as old:
            for name in ("0001_pre_keys", "0002_pre_steps"):
                old.executescript(migrations[name])
                old.execute("INSERT INTO semel_keys_migrations VALUES (?, 0)", (name,))
            old.execute(
                "INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, recovery_point, on_crash,"
                " after_retention, created_at, lease_expires_at, expires_at, steps, request, request_body, tries)"
                " SELECT 'scope', 'key', 'processing', 2, zeroblob(16), x'01', 'paid', 'refuse', 'strip', 0, 0,"
                " now + 1000000, '[]', '{}', x'6f6b', 3 FROM semel_keys_clock",
            )
            old.execute("CREATE VIEW report AS SELECT count(*) AS keys FROM semel_keys")
            before = old.execute("SELECT * FROM semel_keys").fetchall()
            names = [name for name, *_ in old.execute("SELECT * FROM semel_keys").description]
            old.commit()
        with SQLiteStore(sqlite_url) as store:
            (stuck,) = store.perform(FindStuck(9, with_no_token=True, with_pending=True))
            assert (stuck.tries, stuck.is_accepted, stuck.has_request, stuck.steps) == (3, False, True, "[]")
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute(f"SELECT {', '.join(names)} FROM semel_keys").fetchall() == before
            assert connection.execute("SELECT accepted, milestone FROM semel_keys").fetchall() == [(0, None)]
            assert connection.execute("SELECT keys FROM report").fetchall() == [(1,)]

    def test_an_older_file_keeps_every_state(self, sqlite_url: str, path: Path) -> None:
        """The fourth makes the table anew once more: a record in any state is what it was, and goes on from there."""
        migrations = dict(load_migrations("semel.stores.sqlite", Names()))
        with closing(sqlite3.connect(path)) as old:
            for name in ("0001_pre_keys", "0002_pre_steps", "0003_pre_accepted"):
                old.executescript(migrations[name])
                old.execute("INSERT INTO semel_keys_migrations VALUES (?, 0)", (name,))
            old.executescript(EVERY_STATE)
            old.execute("CREATE VIEW report AS SELECT count(*) AS keys FROM semel_keys")
            before = old.execute("SELECT * FROM semel_keys ORDER BY rowid").fetchall()
            names = [name for name, *_ in old.execute("SELECT * FROM semel_keys").description]
            lines = old.execute("SELECT * FROM semel_audit").fetchall()
            old.commit()
        with SQLiteStore(sqlite_url) as store:
            assert store.migrate() == []
            stuck = store.perform(FindStuck(9, with_no_token=True, with_pending=True))
            assert {each.hold.key for each in stuck} == {"pending", "stuck", "nobody's"}
            found = store.perform(a_claim("complete"))
            assert isinstance(found, Found)
            assert found.answer == Answer(201, ((b"a", b"b"),), b"ok")
            assert store.perform(Reap(9, Answer(408))) == Reaped(deleted=1, stripped=1, failed=1)
            assert {record.request_line for record in store.perform(Browse(20))} == {""}
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT keys FROM report").fetchall() == [(len(before) - 1,)]
            kept = connection.execute(f"SELECT {', '.join(names)} FROM semel_keys ORDER BY rowid").fetchall()
            reaped = {"expired", "late", "abandoned"}
            assert [row for row in kept if row[1] not in reaped] == [row for row in before if row[1] not in reaped]
            assert connection.execute("SELECT * FROM semel_audit").fetchall()[: len(lines)] == lines

    def test_a_file_that_was_put_back_says_what_to_do(self, sqlite_url: str, path: Path) -> None:
        """An old table in place of the one that was opened is an error that names the command, for every statement."""
        commands: list[Command[Any]] = [Look("scope", "key"), a_claim(), FindStuck(9)]
        with SQLiteStore(sqlite_url) as store:
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("ALTER TABLE semel_keys RENAME COLUMN accepted TO unheard_of")
            for command in commands:
                with pytest.raises(StoreNotReady, match=r"or old ones\. Run: semel migrate sqlite:///"):
                    store.perform(command)

    @pytest.mark.parametrize(
        "wrong, rule",
        [
            ("state = 'pending', lease_expires_at = NULL", "pending_is_accepted"),
            ("accepted = 1", "accepted_has_a_request"),
            ("accepted = 2", "accepted BETWEEN"),
        ],
    )
    def test_rules(self, store: SQLiteStore, path: Path, wrong: str, rule: str) -> None:
        """The table refuses what no record may be, whoever writes it."""
        store.perform(a_claim())
        with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.IntegrityError, match=rule):
            connection.execute(f"UPDATE semel_keys SET {wrong}")

    def test_a_strange_trail_is_left_alone(self, sqlite_url: str, path: Path) -> None:
        """A table of the trail's name that Semel did not make is not touched either."""
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE semel_audit (mine)")
        with pytest.raises(StoreNotReady, match=r"a table semel_audit that is not Semel's. Add \?table="):
            SQLiteStore(sqlite_url).open()

    @pytest.mark.parametrize("name", SERVING)
    def test_requests_go_by_the_primary_key(self, store: SQLiteStore, path: Path, name: str) -> None:
        """No statement that serves a request reads through the table."""
        steps = plan(path, name)
        assert "SCAN semel_keys" not in steps
        assert name in {"claim", "finish"} or any("(scope=? AND key=?)" in step for step in steps)

    @pytest.mark.parametrize(
        "name, index",
        [
            ("find_due", "semel_keys USING INDEX semel_keys_reap (expires_at<?)"),
            ("find_stuck", "semel_keys USING INDEX semel_keys_in_progress"),
            ("read_trail", "semel_audit USING INDEX semel_audit_key (scope=? AND key=?)"),
            ("reap_trail", "semel_audit USING INTEGER PRIMARY KEY"),
        ],
    )
    def test_upkeep_goes_by_indexes(self, store: SQLiteStore, path: Path, name: str, index: str) -> None:
        """Upkeep reads what it is about, and not through all that is kept."""
        assert any(index in step for step in plan(path, name)), plan(path, name)


class TestBatches:
    def test_many_claims_on_one_key_have_one_winner(self, store: SQLiteStore) -> None:
        """Of the claims of many threads on one key one wins, and the others are told who."""
        with ThreadPoolExecutor(16) as threads:
            got = list(threads.map(lambda _: store.perform(a_claim()), range(200)))
        (winner,) = [each for each in got if isinstance(each, Hold)]
        assert {each.token for each in got if isinstance(each, Found)} == {winner.token}

    def test_a_key_twice_in_a_batch_has_one_winner(self, sqlite_url: str) -> None:
        """Claims to one key in one statement are no different: one wins."""
        writer = Writer(locate(sqlite_url))
        got = writer.execute([a_claim(f"key-{number % 50}") for number in range(100)])
        writer.close()
        assert [type(each) for each in got] == [Hold] * 50 + [Found] * 50

    def test_a_refused_row_fails_alone(self, sqlite_url: str) -> None:
        """A row that the table refuses, or that can't even be bound, fails by itself; its neighbours are stored."""
        writer = Writer(locate(sqlite_url))
        good = [a_claim(f"key-{number}") for number in range(5)]
        got = writer.execute([good[0], a_claim("short", b"token"), good[1], a_claim("\ud800"), *good[2:]])
        holds = [each for each in got if isinstance(each, Hold)]
        assert [hold.key for hold in holds] == [claim.key for claim in good]
        assert isinstance(got[1], StoreRefused)
        assert isinstance(got[3], StoreRefused)

        endings = [Complete(hold, Event.COMPLETE, ANSWER) for hold in holds]
        endings[2] = Complete(holds[2], Event.COMPLETE, Answer(42))
        verdicts = writer.execute(endings)
        assert [each for each in verdicts if each is Verdict.DONE] == [Verdict.DONE] * 4
        assert isinstance(verdicts[2], StoreRefused)
        writer.close()

    def test_a_file_without_counts(self, sqlite_url: str, path: Path) -> None:
        """Without the table of counts, what is asked of it fails alone: requests do not depend on it."""
        writer = Writer(locate(sqlite_url))
        writer.open()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("DROP TABLE semel_counts")
        added, read, claimed, now = writer.execute([AddCounts({"ran": 1}), ReadCounts(60), a_claim(), Now()])
        assert [type(added), type(read), type(claimed)] == [StoreNotReady, StoreNotReady, Hold]
        assert not isinstance(now, Exception)
        [found] = writer.execute([a_claim()])
        assert isinstance(found, Found), "it was committed"
        writer.close()

    def test_commands_of_every_kind_share_a_batch(self, sqlite_url: str) -> None:
        """Outcomes come in the order of the commands, whatever the order in which they were carried out."""
        writer = Writer(locate(sqlite_url))
        one, two, three = (Hold("scope", f"key-{number}", 1, bytes([number]) * 16) for number in range(3))
        writer.execute([a_claim(hold.key, hold.token) for hold in (one, two, three)])
        commands: list[Command[Any]] = [
            Now(),
            Release(two),
            a_claim("new"),
            Renew(((three, LEASE), (Hold("scope", "gone", 1, b"x" * 16), LEASE))),
            Complete(one, Event.COMPLETE, ANSWER),
            a_claim(one.key),
            Look("scope", "nobody's"),
        ]
        now, released, claimed, lost, completed, found, looked = writer.execute(commands)
        writer.close()
        assert now.tzinfo is not None
        assert released is completed is Verdict.DONE
        assert isinstance(claimed, Hold)
        assert {hold.key for hold in lost} == {"gone"}
        assert isinstance(found, Found)
        assert looked is None

    @pytest.mark.parametrize("count", [0, 1, 3, 100, 128, 300])
    def test_batches_are_cut_into_powers_of_two(self, count: int) -> None:
        """Nothing is left out, and the sizes are few, so that all their statements stay prepared."""
        sizes = [len(chunk) for chunk in chunks(range(count))]
        assert sum(sizes) == count
        assert set(sizes) <= {1, 2, 4, 8, 16, 32, 64, 128}

    def test_a_replay_writes_nothing(self, store: SQLiteStore, path: Path) -> None:
        """A replay changes no page, adds nothing to the log, and needs no write lock."""
        done(store)
        with closing(sqlite3.connect(path, isolation_level=None)) as witness:
            witness.execute("BEGIN IMMEDIATE")
            log = Path(f"{path}-wal")
            before = (witness.execute("PRAGMA data_version").fetchone(), log.read_bytes(), path.read_bytes())
            for _ in range(10):
                found = store.perform(a_claim())
                assert isinstance(found, Found)
                assert found.answer == ANSWER
            assert before == (witness.execute("PRAGMA data_version").fetchone(), log.read_bytes(), path.read_bytes())

    def test_browsing_leaves_bodies_behind(self, store: SQLiteStore) -> None:
        """A list of records has their statuses and headers but no bodies; a tombstone is still told from an answer."""
        done(store, "kept")
        hold = store.perform(a_claim("tombstone"))
        assert isinstance(hold, Hold)
        store.perform(Complete(hold, Event.COMPLETE, Answer(200, (), None)))
        bodies = {record.key: record.answer and record.answer.body for record in store.perform(Browse(limit=9))}
        assert bodies == {"kept": b"", "tombstone": None}


class TestTrail:
    def test_it_can_be_turned_off(self, sqlite_url: str, path: Path) -> None:
        """With audit=off nothing is written down, in transactions neither."""
        with SQLiteStore(f"{sqlite_url}?audit=off") as store:
            hold = done(store)
            store.perform(Note(hold, "replayed"))
            transaction, claim = store.transaction(), a_claim("atomic")
            begun = transaction.perform(Begin(claim))
            assert isinstance(begun, Hold)
            transaction.perform(Finish(claim, begun, None, Event.COMPLETE, ANSWER))
            assert store.perform(ReadTrail("scope", "key")) == ()
            assert store.perform(ReadTrail("scope", "atomic")) == ()
            assert store.notes_replays is False

    @pytest.mark.parametrize("kind", [SQLiteStore, AsyncSQLiteStore])
    def test_replays_are_noted_on_request(self, sqlite_url: str, kind: type[SQLiteStore | AsyncSQLiteStore]) -> None:
        """With audit=replays the store says that it wants to be told of replays."""
        assert kind(f"{sqlite_url}?audit=replays").notes_replays is True
        assert kind(f"{sqlite_url}?audit=on").notes_replays is False

    def test_a_line_that_is_refused_fails_alone(self, sqlite_url: str) -> None:
        """A note that can't be stored, and an actor whose name is no text, stop nothing else."""
        writer = Writer(locate(f"{sqlite_url}?audit=all"))
        (hold,) = writer.execute([a_claim()])
        refused, verdict = writer.execute([Note(hold, "\ud800"), Complete(hold, Event.COMPLETE, ANSWER)], "\ud800")
        assert isinstance(refused, StoreRefused)
        assert verdict is Verdict.DONE
        (_, line), *_ = writer.execute([ReadTrail("scope", "key")])
        writer.close()
        assert (line.event, line.actor) == ("completed", "?")


class TestClock:
    @pytest.fixture
    def set_clock(self, store: SQLiteStore, path: Path) -> Callable[[timedelta], None]:
        """Set this database's clock, which a file has for itself: so far ahead of the machine's."""
        store.migrate()
        with closing(sqlite3.connect(path)) as connection:
            [(made,)] = connection.execute("SELECT sql FROM sqlite_schema WHERE name = 'semel_keys_clock'")

        def set_clock(ahead: timedelta) -> None:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                moved = made.replace(" AS now", f" + {ahead // timedelta(milliseconds=1)} AS now")
                connection.executescript(f"BEGIN; DROP VIEW semel_keys_clock; {moved}; COMMIT")

        return set_clock

    def test_a_clock_that_was_set_back(self, store: SQLiteStore, set_clock: Callable[[timedelta], None]) -> None:
        """What was left while the clock was behind is found, whether or not a service looked meanwhile: nothing is
        looked for by its age.
        """
        set_clock(timedelta(hours=1))
        done(store)
        assert store.perform(FindStuck(9)) == ()
        set_clock(timedelta(0))
        for key in ("seen", "unseen"):
            assert isinstance(store.perform(replace(a_claim(key), lease=timedelta(0))), Hold)
            set_clock(timedelta(0) if key == "seen" else timedelta(hours=2))
            assert key in {stuck.hold.key for stuck in store.perform(FindStuck(9))}


class TestTrouble:
    def test_a_locked_file_is_opened_to_read(self, store: SQLiteStore, sqlite_url: str, path: Path) -> None:
        """A process that opens a file whose write lock is taken, by a handler of atomic mode that takes its time, gives
        replays at once.
        """
        done(store)
        with closing(sqlite3.connect(path, isolation_level=None)) as handler, closing(SQLiteStore(sqlite_url)) as late:
            handler.execute("BEGIN IMMEDIATE")
            found = late.perform(a_claim())
        assert isinstance(found, Found)
        assert found.answer == ANSWER

    async def test_a_locked_file_is_opened_to_read_on_a_loop(
        self, store: SQLiteStore, sqlite_url: str, path: Path
    ) -> None:
        """The same on an event loop."""
        done(store)
        late = AsyncSQLiteStore(sqlite_url)
        with closing(sqlite3.connect(path, isolation_level=None)) as handler:
            handler.execute("BEGIN IMMEDIATE")
            found = await late.perform(a_claim())
        await late.close()
        assert isinstance(found, Found)
        assert found.answer == ANSWER

    def test_a_locked_file_fails_the_writes_only(
        self, sqlite_url: str, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While another process keeps the file locked nothing is claimed and nothing sent, but replays are given."""
        monkeypatch.setattr(file, "BUSY_TIMEOUT", timedelta(milliseconds=1))
        writer = Writer(locate(sqlite_url))
        (hold,) = writer.execute([a_claim("old")])
        with closing(sqlite3.connect(path, isolation_level=None)) as rival:
            rival.execute("BEGIN IMMEDIATE")
            refused, found = writer.execute([a_claim("new"), a_claim("old")])
        assert isinstance(refused, StoreUnavailable)
        assert "locked by another process" in str(refused)
        assert refused.was_sent is False
        assert found.token == hold.token
        assert isinstance(writer.execute([a_claim("new")])[0], Hold)
        writer.close()

    def test_a_commit_that_fails_counts_as_sent(self, sqlite_url: str) -> None:
        """Trouble at the very end of a transaction leaves open whether it was carried out; here it was not."""
        writer = Writer(locate(sqlite_url))
        writer.open()
        connection = writer.opened
        assert connection is not None
        # The one way to fail a COMMIT without breaking a disk.
        connection.set_authorizer(lambda _, what, *__: sqlite3.SQLITE_DENY if what == "COMMIT" else sqlite3.SQLITE_OK)
        (refused,) = writer.execute([a_claim()])
        assert isinstance(refused, StoreUnavailable)
        assert refused.was_sent is True
        assert isinstance(writer.execute([a_claim()])[0], Hold)
        writer.close()

    @pytest.mark.parametrize(
        "url, says",
        [
            ("sqlite://", "Use memory://"),
            ("sqlite:///", "Use memory://"),
            ("sqlite:///:memory:", "Use memory://"),
            (":memory:", "not a SQLite URL"),
            ("sqlite://semel.db", "names a host, 'semel.db'"),
            ("sqlite:///semel.db?tables=x", "tables. There are audit and table"),
            ("sqlite:///semel.db?table=x;drop", "not a table name"),
            ("sqlite:///semel.db?table=order", "'order' is a word of SQL"),
            ("sqlite:///semel.db?table=sqlite_keys", "'sqlite_keys' is a word of SQL"),
            ("sqlite:///semel.db?table=semel_audit", "'semel_audit' is a name that Semel itself uses"),
            ("sqlite:///semel.db?table=judged", "'judged' is a name that Semel itself uses"),
            ("sqlite:///semel.db?audit=yes", "audit=yes. It is on, all, replays or off"),
        ],
    )
    @pytest.mark.parametrize("kind", [SQLiteStore, AsyncSQLiteStore])
    def test_a_wrong_url_is_refused(self, kind: Callable[[str], object], url: str, says: str) -> None:
        """A URL that can't be meant is refused when the store is made, and the error says what to write."""
        with pytest.raises(ConfigurationError) as refused:
            kind(url)
        assert says in str(refused.value)

    def test_a_relative_path_is_fixed_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that changes its folder afterwards keeps its file; and %20 is a space."""
        monkeypatch.chdir(tmp_path)
        store = SQLiteStore("sqlite:///my%20keys.db")
        monkeypatch.chdir("/")
        done(store)
        store.close()
        assert (tmp_path / "my keys.db").exists()

    def test_a_missing_folder_is_named(self, tmp_path: Path) -> None:
        """No folder is made up: the error names the one that is missing."""
        with pytest.raises(StoreUnavailable, match=f"no folder {tmp_path}/absent to keep semel.db in"):
            SQLiteStore(f"sqlite:///{tmp_path}/absent/semel.db").perform(a_claim())

    def test_another_file_is_no_database(self, sqlite_url: str, path: Path) -> None:
        """A file of another kind is named and left as it is."""
        path.write_text("Dear diary, " * 100)
        with pytest.raises(StoreUnavailable, match=r"semel.db is not a SQLite database"):
            SQLiteStore(sqlite_url).open()
        assert path.read_text().startswith("Dear diary")

    def test_a_folder_is_no_database(self, tmp_path: Path) -> None:
        """A folder can't be opened as a file."""
        with pytest.raises(StoreUnavailable, match="can’t be used"):
            SQLiteStore(f"sqlite:///{tmp_path}").open()

    @pytest.mark.parametrize("what", ["file", "folder of a new file", "folder of an old file"])
    def test_what_can_only_be_read_is_told_at_once(self, what: str) -> None:
        """A file or folder that this user may not write is reported on opening, as read-only."""
        with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which is shut to other users
            path = Path(folder) / "semel.db"
            if what != "folder of a new file":
                with SQLiteStore(f"sqlite:///{path}") as made:  # closed again, so that no log is left beside it
                    made.migrate()
                path.chmod(0o444 if what == "file" else 0o666)
            path.parent.chmod(0o777 if what == "file" else 0o555)
            assert as_nobody(SQLiteStore(f"sqlite:///{path}").open) is StoreReadOnly
            path.parent.chmod(0o700)


def plan(path: Path, name: str) -> list[str]:
    """How SQLite would carry out a statement."""
    statement = getattr(Statements(Names()), name)
    if isinstance(statement, Query):
        sql, parameters = statement.numbered.replace("$", "?"), [None] * len(statement.parameters)
    else:
        sql = statement.of(4) if isinstance(statement, Bulk) else statement
        # What all rows share is numbered, and given once.
        shared = {int(number) for number in re.findall(r"\?(\d+)", sql)}
        parameters = [None] * (len(shared) + len(re.findall(r"\?(?!\d)", sql)))
    with closing(sqlite3.connect(path)) as connection:
        return [step for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall()]


def as_nobody(act: Callable[[], None]) -> type[StoreError] | None:
    """The error that *act* ends with for somebody who is not root."""
    kinds: list[type[StoreError] | None] = [None, StoreReadOnly, StoreUnavailable]
    child = os.fork()
    if not child:
        code = len(kinds)
        try:
            if not os.geteuid():
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            act()
            code = 0
        except StoreError as error:
            code = kinds.index(type(error))
        finally:
            os._exit(code)
    return kinds[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
