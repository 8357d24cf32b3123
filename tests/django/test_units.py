"""A handler's transaction in Django: what the ORM writes commits with the record, or neither does."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, Self

import psycopg
import pytest
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.db.transaction import TransactionManagementError

from semel.core.commands import Begin, Look, Open, Settle, Undo, Verdict
from semel.core.key import Key
from semel.core.record import Hold
from semel.core.recovery import written
from semel.errors import AnswerNotStored, CommitUnknown, ConfigurationError, StoreUnavailable
from semel.stores.django import DjangoStore
from semel.stores.django import postgres as on_postgres
from semel.stores.django.postgres import Postgres
from tests.django import project
from tests.django.operations import ANSWER, STEPS, begun, claim_on, finish, finished, step
from tests.django.shop.models import Payment
from tests.kit import servers
from torture.proxy import Cut, Lost, Proxy, is_commit

DEFERRED = """
CREATE TABLE shelves (id integer PRIMARY KEY);
CREATE TABLE books (shelf integer REFERENCES shelves DEFERRABLE INITIALLY DEFERRED);
"""


def pay(account: str = "alice") -> None:
    Payment.objects.create(amount=5, account=account)


def paid() -> list[str]:
    """Say who has paid, as everybody else sees it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: [each.account for each in Payment.objects.order_by("id")]).result()


def is_usable(store: DjangoStore) -> None:
    """See that the thread's connection is in order."""
    assert (connection.in_atomic_block, connection.get_autocommit()) == (False, True)
    lent, claim = store.transaction(), claim_on("afterwards")
    hold = begun(lent, claim)
    pay("afterwards")
    finished(lent, claim, hold)
    assert paid()[-1] == "afterwards"


class TestEnds:
    def test_commit(self, database: str) -> None:
        """What the ORM has written is seen with the record, and not before."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay()
        assert lent.connection is connections["default"]
        assert (paid(), store_look(store)) == ([], None)
        finished(lent, claim, hold)
        assert (paid(), store_look(store)) == (["alice"], ANSWER)
        is_usable(store)

    def test_undo(self, database: str) -> None:
        """Undone, neither is there."""
        store = DjangoStore()
        lent = store.transaction()
        begun(lent, claim_on())
        pay()
        lent.perform(Undo())
        assert (paid(), store_look(store)) == ([], None)
        is_usable(store)

    def test_phase(self, database: str) -> None:
        """A phase that writes nothing, and one that does, commit their step with it."""
        store = DjangoStore()
        for key, writes in (("idle", False), ("busy", True)):
            hold = store.perform(claim_on(key))
            assert isinstance(hold, Hold)
            lent = store.transaction()
            lent.perform(Open())
            if writes:
                pay(key)
            assert lent.perform(step(hold)) is Verdict.DONE
            record = store.perform(Look("alice", key))
            assert record is not None
            assert record.steps == written(STEPS)
        assert paid() == ["busy"]

    def test_fenced(self, database: str) -> None:
        """Where the record is not what was seen, what the handler wrote is undone."""
        store = DjangoStore()
        lent = store.transaction()
        lent.perform(Open())
        pay()
        assert lent.perform(step(Hold("alice", "nobody's", 1, bytes(16)))) is Verdict.FENCED
        assert paid() == []
        is_usable(store)

    def test_inner_blocks(self, database: str) -> None:
        """Blocks inside the handler are savepoints, as ever: one may fail, and the rest is kept."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay("kept")
        with suppress(DatabaseError), transaction.atomic():
            pay("undone")
            raise DatabaseError
        with pytest.raises(RuntimeError, match="durable"), transaction.atomic(durable=True):
            pass
        finished(lent, claim, hold)
        assert paid() == ["kept"]

    def test_begins_with_the_write_lock(self, sqlite: str) -> None:
        """On SQLite, a handler that reads first and writes then is not too late, whoever wrote meanwhile."""
        write = "INSERT INTO shop_payment (amount, account) VALUES (1, 'rival')"
        with Rival(sqlite) as rival:
            store = DjangoStore()
            lent, claim = store.transaction(), claim_on()
            hold = begun(lent, claim)
            assert Payment.objects.count() == 0
            assert rival.execute(write) == "database is locked"
            pay()
            finished(lent, claim, hold)
            assert rival.execute(write) == "done"

    @project.since_5_1
    def test_begins_as_django_does(self, django_sqlite_url: str) -> None:
        """Where the project's own transactions take the write lock at once, ours are begun the same way."""
        entry = project.settings_of(django_sqlite_url, transaction_mode="IMMEDIATE")
        with project.databases(default=entry):
            is_usable(DjangoStore())

    @pytest.mark.parametrize(
        "options",
        [{}, pytest.param({"transaction_mode": "IMMEDIATE"}, marks=project.since_5_1)],
        ids=["usual", "immediate"],
    )
    def test_locked_by_another_process(self, django_sqlite_url: str, options: dict[str, Any]) -> None:
        """A file that another process keeps locked is the store's trouble, and the connection stays in order."""
        entry = project.settings_of(django_sqlite_url, timeout=0.1, **options)
        with project.databases(default=entry), Rival(django_sqlite_url) as rival:
            store = DjangoStore()
            rival.execute("BEGIN IMMEDIATE")
            lent = store.transaction()
            with pytest.raises(StoreUnavailable, match="locked"):
                lent.perform(Begin(claim_on()))
            with pytest.raises(StoreUnavailable, match="locked"):
                store.perform(claim_on())
            rival.execute("ROLLBACK")
            is_usable(store)

    def test_readers_of_an_old_journal(self, django_sqlite_url: str) -> None:
        """Without write-ahead logging a reader can hold up a commit; then it is certain that nothing was committed."""
        with closing(sqlite3.connect(django_sqlite_url.removeprefix("sqlite:///"))) as file:
            assert file.execute("PRAGMA journal_mode = DELETE").fetchall() == [("delete",)]
        entry = project.settings_of(django_sqlite_url, timeout=0.1)
        with project.databases(default=entry), Rival(django_sqlite_url) as rival:
            store = DjangoStore()
            rival.read()
            with pytest.raises(StoreUnavailable, match="locked"):
                store.perform(claim_on())
            lent, claim = store.transaction(), claim_on()
            hold = begun(lent, claim)
            pay()
            with pytest.raises(StoreUnavailable, match="locked") as error:
                lent.perform(finish(claim, hold))
            assert not isinstance(error.value, CommitUnknown)
            lent.perform(Undo())
            rival.execute("COMMIT")
            assert (paid(), store_look(store)) == ([], None)
            is_usable(store)


class TestHooks:
    def test_order(self, database: str) -> None:
        """What waits for the commit with on_commit runs when all is committed; undone, it does not run."""
        store, seen = DjangoStore(), list[Any]()
        for ends in (Undo(), None):
            lent, claim = store.transaction(), claim_on()
            hold = begun(lent, claim)
            pay()
            transaction.on_commit(lambda: seen.append((paid(), store_look(store), connection.in_atomic_block)))
            if ends is None:
                finished(lent, claim, hold)
            else:
                lent.perform(ends)
        assert seen == [(["alice"], ANSWER, False)]

    def test_failure(self, database: str, caplog: pytest.LogCaptureFixture) -> None:
        """One that fails is told of in the log, and does not look as if the commit had failed."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay()
        transaction.on_commit(lambda: 1 / 0)
        with caplog.at_level(logging.ERROR, "semel"):
            finished(lent, claim, hold)
        assert f"transaction itself is committed. key={Key(claim.key).short()}" in caplog.text
        assert "ZeroDivisionError" in caplog.text
        assert (paid(), store_look(store)) == (["alice"], ANSWER)
        is_usable(store)

    def test_may_write(self, database: str) -> None:
        """One may have a transaction of its own, and claim keys."""
        store, seen = DjangoStore(), list[Any]()

        def hook() -> None:
            with transaction.atomic():
                pay("hook")
            seen.append(store.perform(claim_on("hook")))

        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        transaction.on_commit(hook)
        finished(lent, claim, hold)
        assert isinstance(seen[0], Hold)
        assert paid() == ["hook"]


class TestMistakes:
    def test_set_rollback(self, database: str) -> None:
        """A handler that has asked for a rollback gets it, and an error instead of a silent success."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay()
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError, match="nothing was written"):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert (paid(), store_look(store)) == ([], None)
        is_usable(store)

    def test_broken_block(self, database: str) -> None:
        """So does one whose inner block without a savepoint has failed."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay()
        with suppress(DatabaseError), transaction.atomic(savepoint=False):
            raise DatabaseError
        with pytest.raises(TransactionManagementError, match="nothing was written"):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert paid() == []
        is_usable(store)

    def test_failed_statement(self, postgres: str) -> None:
        """On PostgreSQL, so does one that has caught the error of a statement outside of an inner block."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay()
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        with pytest.raises(TransactionManagementError, match="nothing was written"):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert paid() == []
        is_usable(store)

    @pytest.mark.parametrize("sql", ["COMMIT", "ROLLBACK"])
    def test_ended_inside(self, database: str, sql: str) -> None:
        """A handler that ends the transaction by name is told that it must not; its record is not written."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        with connection.cursor() as cursor:
            cursor.execute(sql)
        with pytest.raises(ConfigurationError, match="ended inside the handler"):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert store_look(store) is None
        is_usable(store)

    def test_ended_inside_a_phase(self, postgres: str) -> None:
        """So is a phase that has done nothing else before."""
        store = DjangoStore()
        hold = store.perform(claim_on())
        assert isinstance(hold, Hold)
        lent = store.transaction()
        lent.perform(Open())
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")
        with pytest.raises(ConfigurationError, match="ended inside the handler"):
            lent.perform(step(hold))
        lent.perform(Undo())
        is_usable(store)

    def test_block_left_open(self, database: str) -> None:
        """A block that the handler has entered and not left is undone with the rest, and told of."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        transaction.atomic().__enter__()
        pay()
        with pytest.raises(ConfigurationError, match="ended inside the handler"):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert paid() == []
        is_usable(store)

    def test_closed_inside(self, database: str) -> None:
        """A handler that closes the connection loses what it wrote, and the next request gets another."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay()
        connection.close()
        with pytest.raises(StoreUnavailable, match="nothing was written"):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert paid() == []
        is_usable(store)

    def test_constraint_at_the_end(self, database: str) -> None:
        """A constraint that is checked at COMMIT undoes everything, and is the application's own error."""
        with connection.cursor() as cursor:
            for statement in DEFERRED.split(";")[:-1]:
                cursor.execute(statement)
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay()
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO books VALUES (7)")
        with pytest.raises(IntegrityError):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert (paid(), store_look(store)) == ([], None)
        is_usable(store)


class TestLostCommits:
    @pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER])
    def test_lost_reply(self, django_postgres_url: str, cut: Cut, caplog: pytest.LogCaptureFixture) -> None:
        """A COMMIT whose reply was lost is unknown, and Settle finds out; functions given to on_commit are not run."""
        lost: list[Lost] = []

        def choose(sql: str, _marks: tuple[str, ...]) -> Cut | None:
            return cut if is_commit(sql) and not lost else None

        with Proxy(django_postgres_url, choose, lost.append) as proxy:
            entry = project.settings_of(proxy.address(django_postgres_url))
            with project.databases(default=entry):
                store, hooks = DjangoStore(), list[str]()
                lent, claim = store.transaction(), claim_on()
                hold = begun(lent, claim)
                pay()
                transaction.on_commit(lambda: hooks.append("run"))
                with pytest.raises(CommitUnknown):
                    lent.perform(finish(claim, hold))
                lent.perform(Undo())
                record = store.perform(Settle(hold))
                assert [each.cut for each in lost] == [cut]
                assert (record is not None) == (cut is Cut.AFTER)
                assert paid() == (["alice"] if cut is Cut.AFTER else [])
                assert hooks == []
                assert "1 on_commit functions were not run (" in caplog.text
                assert "<lambda>): " in caplog.text
                assert f"key={Key(claim.key).short()}" in caplog.text
                is_usable(store)

    def test_connection_that_is_lost_after_the_commit(
        self, django_postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is committed is committed, even if the connection is of no use to Django after it."""
        entry = project.settings_of(django_postgres_url) | {"CONN_HEALTH_CHECKS": True}
        with project.databases(default=entry):
            store, wrapper = DjangoStore(), connections["default"]
            lent, claim = store.transaction(), claim_on()
            hold = begun(lent, claim)
            pay()
            commit, port = Postgres.commit, wrapper.settings_dict["PORT"]

            def commit_and_lose(database: Postgres, wrapper: Any) -> Any:
                said = commit(database, wrapper)
                wrapper.connection.close()
                wrapper.health_check_done = False
                wrapper.settings_dict["PORT"] = "1"
                return said

            monkeypatch.setattr(Postgres, "commit", commit_and_lose)
            finished(lent, claim, hold)
            wrapper.settings_dict["PORT"] = port
            monkeypatch.undo()
            assert (paid(), store_look(store)) == (["alice"], ANSWER)
            is_usable(store)

    def test_settle_waits_but_not_for_ever(self, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who asks what became of a COMMIT waits for a transaction that is still at the key, for some seconds."""
        monkeypatch.setattr(on_postgres, "_IMPATIENT", b"SET LOCAL lock_timeout = '50ms'")
        store, ready, go_on = DjangoStore(), threading.Event(), threading.Event()
        claim = claim_on()

        def work() -> None:
            lent = store.transaction()
            hold = begun(lent, claim)
            ready.set()
            go_on.wait(60)
            finished(lent, claim, hold)

        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(work)
            assert ready.wait(60)
            with pytest.raises(StoreUnavailable, match="busy"):
                store.perform(Settle(Hold("alice", "key", 1, claim.token)))
            go_on.set()
            running.result()
        assert store.perform(Settle(Hold("alice", "key", 1, claim.token))) is not None

    def test_failed_commit_of_a_file(self, sqlite: str) -> None:
        """Trouble at the very end of a SQLite transaction leaves open whether it was committed."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        pay()
        # The one way to fail a COMMIT without breaking a disk.
        connection.connection.set_authorizer(
            lambda _, what, *__: sqlite3.SQLITE_DENY if what == "COMMIT" else sqlite3.SQLITE_OK
        )
        with pytest.raises(CommitUnknown):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert store.perform(Settle(hold)) is None
        is_usable(store)


class TestReplica:
    @pytest.fixture
    def alone(self) -> Iterator[str]:
        """A server of this test's own: its settings are changed."""
        with servers.postgres(settings={"synchronous_commit": "on"}) as server:
            yield server.url

    def test_commit_that_did_not_reach_the_replica(self, alone: str) -> None:
        """A commit whose wait for the replica was cancelled is there, and is not reported as stored."""
        with project.databases(default=alone), psycopg.connect(alone, autocommit=True) as operator:
            project.make_tables()
            store, hooks = DjangoStore(), list[str]()
            lent, claim = store.transaction(), claim_on()
            hold = begun(lent, claim)
            pay()
            transaction.on_commit(lambda: hooks.append("run"))
            pid = connection.connection.info.backend_pid
            operator.execute("ALTER SYSTEM SET synchronous_standby_names = 'nowhere'")
            operator.execute("SELECT pg_reload_conf()")
            until(operator, "SELECT setting = 'nowhere' FROM pg_settings WHERE name = 'synchronous_standby_names'")

            def give_up() -> None:
                until(operator, f"SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = {pid}")
                operator.execute(f"SELECT pg_cancel_backend({pid})".encode())
                operator.execute("ALTER SYSTEM RESET synchronous_standby_names")
                operator.execute("SELECT pg_reload_conf()")

            with ThreadPoolExecutor(1) as thread:
                giving_up = thread.submit(give_up)
                with pytest.raises(AnswerNotStored, match="replica"):
                    lent.perform(finish(claim, hold))
                giving_up.result()
            assert hooks == ["run"]
            assert (paid(), store_look(store)) == (["alice"], ANSWER)


def store_look(store: DjangoStore) -> Any:
    """Return the stored answer, as everybody else sees it."""
    with ThreadPoolExecutor(1) as thread:
        record = thread.submit(store.perform, Look("alice", "key")).result()
    return record and record.answer


def until(operator: psycopg.Connection[Any], query: str) -> None:
    """Ask until it is so. The test's own time limit ends it."""
    while operator.execute(query.encode()).fetchall() != [(True,)]:
        pass


class Rival:
    """Another process that writes to the same SQLite file, and waits for nobody."""

    def __init__(self, url: str) -> None:
        self._connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)

    def execute(self, sql: str) -> str:
        try:
            self._connection.execute(sql).close()
        except sqlite3.OperationalError as error:
            return str(error)
        return "done"

    def read(self) -> None:
        """Begin to read, and go on doing so."""
        self._connection.execute("BEGIN").close()
        self._connection.execute("SELECT count(*) FROM shop_payment").fetchall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
