"""The store on Django's own connection: when it may be used, how it is closed, and what goes wrong."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import unittest
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase, TransactionTestCase, override_settings
from django.test.utils import setup_test_environment, teardown_test_environment
from django.urls import path

from semel.core.commands import Begin, Browse, Claim, Complete, Look, Note, Now, ReadTrail, Renew, Undo, Verdict
from semel.core.record import Found, Hold, Record
from semel.core.state import Event, State
from semel.django import async_store, store
from semel.errors import ConfigurationError, StoreNotReady, StoreReadOnly, StoreRefused, StoreUnavailable
from semel.stores.django import DjangoStore, turns
from semel.stores.leases import Leases
from semel.stores.sqlite import file
from semel.stores.statement import Names
from tests.django import project
from tests.django.operations import ANSWER, begun, claim_on, finish, finished
from tests.django.shop.models import Payment


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Call it as another request would be served."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def run(case: type[unittest.TestCase]) -> None:
    """Run the tests of a class, as Django's own runner does."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert not [*result.errors, *result.failures]
    assert result.testsRun


class TestAutocommit:
    def test_each_command_is_a_transaction(self, database: str) -> None:
        """A claim is seen by everybody as soon as it is made."""
        store = DjangoStore()
        assert isinstance(store.perform(claim_on()), Hold)
        assert isinstance(in_a_thread(lambda: store.perform(claim_on())), Found)
        assert not connection.in_atomic_block

    def test_inside_atomic(self, database: str) -> None:
        """Inside a transaction of the application's a command is refused, since nobody else would see it."""
        with transaction.atomic(), pytest.raises(ConfigurationError, match=r"Put transaction\.atomic"):
            DjangoStore().perform(claim_on())
        with transaction.atomic(), pytest.raises(ConfigurationError, match="ATOMIC_REQUESTS"):
            DjangoStore().transaction().perform(Begin(claim_on()))
        assert isinstance(DjangoStore().perform(claim_on()), Hold)

    def test_no_autocommit(self, database: str) -> None:
        """A connection that commits nothing by itself is refused."""
        transaction.set_autocommit(False)
        with pytest.raises(ConfigurationError, match="autocommit"):
            DjangoStore().perform(claim_on())
        with pytest.raises(ConfigurationError, match="autocommit"):
            DjangoStore().transaction().perform(Begin(claim_on()))
        transaction.rollback()
        transaction.set_autocommit(True)

    def test_what_may_be_asked_in_a_lent_transaction(self, database: str) -> None:
        """While a handler has the transaction, only the clock can be read beside it."""
        store = DjangoStore()
        lent = store.transaction()
        begun(lent, claim_on())
        assert store.perform(Now()).tzinfo is not None
        with pytest.raises(ConfigurationError, match="Claim was used inside"):
            store.perform(claim_on("other"))
        with pytest.raises(ConfigurationError, match="inside the transaction of another"):
            store.transaction().perform(Begin(claim_on("other")))
        lent.perform(Undo())
        assert isinstance(store.perform(claim_on("other")), Hold)

    def test_row_that_is_refused(self, database: str) -> None:
        """A value that the database can't hold is that command's own trouble, and nobody else's."""
        store = DjangoStore()
        with pytest.raises(StoreRefused):
            store.perform(claim_on("half a \ud800 pair"))
        assert isinstance(store.perform(claim_on()), Hold)

    def test_rows_are_read_as_they_are(self, database: str) -> None:
        """What the application wants its rows and times to be like changes nothing for the store."""
        connection.ensure_connection()
        if connection.vendor == "sqlite":
            connection.connection.row_factory = sqlite3.Row
        else:
            connection.connection.row_factory = psycopg.rows.dict_row
        store = DjangoStore()
        hold = store.perform(claim_on())
        assert isinstance(hold, Hold)
        store.perform(Complete(hold, Event.COMPLETE, ANSWER))
        record = store.perform(Look("alice", "key"))
        assert isinstance(record, Record)
        assert record.answer == ANSWER
        assert record.created_at.tzinfo is not None
        assert store.perform(Now()).tzinfo is not None

    @pytest.mark.parametrize("zone", [{"USE_TZ": False}, {"TIME_ZONE": "Europe/Rome"}], ids=["none", "another"])
    def test_time_zones(self, database: str, zone: dict[str, Any]) -> None:
        """Times are what they are, whatever zone the project is in, and if it is in none."""
        with override_settings(**zone):
            before, after = DjangoStore().perform(Now()), datetime.now(UTC)  # noqa: TID251 - of one machine
            assert abs(after - before) < timedelta(minutes=1)
            connection.close()

    def test_audit(self, database: str) -> None:
        """The audit trail is written, or not, as the store is told; replays are for the entry point to note."""
        for audit, lines in (("on", 0), ("all", 1), ("off", 0), ("replays", 1)):
            store = DjangoStore(audit=audit)  # type: ignore[arg-type]  # one of them
            store.perform(claim_on(audit))
            assert len(store.perform(ReadTrail("alice", audit, 9))) == lines
            assert store.notes_replays == (audit == "replays")
        store = DjangoStore()
        store.actor = "operator \udcff"
        store.perform(Note(Hold("alice", "on", 1, bytes(16)), "looked"))
        assert store.perform(ReadTrail("alice", "on", 9))[-1].actor.startswith("operator")


class TestInTests:
    def test_test_case(self, database: str) -> None:
        """Inside the transaction of ``django.test.TestCase`` everything works, and is gone with it."""

        class Case(TestCase):  # type: ignore[misc]  # Django has no types
            databases = frozenset({"default"})

            def test_guard(self) -> None:
                store = DjangoStore()
                hold = store.perform(claim_on())
                assert isinstance(hold, Hold)
                assert isinstance(store.perform(claim_on()), Found)
                with pytest.raises(StoreRefused):
                    store.perform(claim_on("half a \ud800 pair"))
                assert store.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
                assert Payment.objects.count() == 0

            def test_atomic(self) -> None:
                store, calls = DjangoStore(), list[str]()
                for key, is_kept in (("one", True), ("two", False)):
                    lent, claim = store.transaction(), claim_on(key)
                    hold = begun(lent, claim)
                    Payment.objects.create(amount=5, account=key)
                    transaction.on_commit(lambda: calls.append("run"))
                    if is_kept:
                        finished(lent, claim, hold)
                    lent.perform(Undo())
                assert [each.account for each in Payment.objects.all()] == ["one"]
                lent = store.transaction()
                found = lent.perform(Begin(claim_on("one")))
                lent.perform(Undo())
                assert isinstance(found, Found)
                assert found.answer == ANSWER
                assert calls == []  # As ever in a TestCase, unless captureOnCommitCallbacks() is asked to.

            def test_inside_an_inner_block(self) -> None:
                with transaction.atomic(), pytest.raises(ConfigurationError, match="Put"):
                    DjangoStore().perform(claim_on())

        run(Case)
        assert DjangoStore().perform(Look("alice", "one")) is None

    def test_lease_of_a_test(self, postgres: str) -> None:
        """What was claimed in the transaction of a test, its leases's thread can't see; it is not lost for that."""

        class Case(TestCase):  # type: ignore[misc]  # as above
            databases = frozenset({"default"})

            def test(self) -> None:
                store = DjangoStore()
                claim = claim_on()
                hold = store.perform(claim)
                assert isinstance(hold, Hold)
                foreign = Hold("alice", "another", 1, bytes(16))
                renew = Renew(((hold, claim.lease), (foreign, claim.lease)))
                assert in_a_thread(lambda: store.perform(renew)) == {foreign}

        run(Case)

    def test_transaction_test_case(self, database: str) -> None:
        """What a ``TransactionTestCase`` has committed is gone after it; outside of a test run nothing is touched."""
        keys = iter(["one", "two"])

        class Case(TransactionTestCase):  # type: ignore[misc]  # as above
            databases = frozenset({"default"})

            def test(self) -> None:
                assert isinstance(DjangoStore().perform(claim_on(next(keys))), Hold)

        run(Case)
        assert isinstance(DjangoStore().perform(claim_on("one")), Found)
        setup_test_environment()
        try:
            run(Case)
        finally:
            teardown_test_environment()
        assert DjangoStore().perform(Browse(9)) == ()
        assert DjangoStore().perform(ReadTrail("alice", "two", 9)) == ()

    def test_in_memory(self) -> None:
        """A SQLite database in memory, as tests have it, is as good as a file for one thread."""

        class Case(TransactionTestCase):  # type: ignore[misc]  # as above
            databases = frozenset({"default"})

            def test(self) -> None:
                store = DjangoStore()
                store.open()
                lent, claim = store.transaction(), claim_on()
                hold = begun(lent, claim)
                Payment.objects.create(amount=5, account="alice")
                finished(lent, claim, hold)
                assert isinstance(store.perform(claim_on()), Found)

        entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
        with project.databases(default=entry):
            project.make_tables()
            run(Case)


class TestReadiness:
    def test_ping(self, database: str) -> None:
        """A view can ask whether the store is ready, also where ATOMIC_REQUESTS has opened a transaction around it."""
        store().ping()
        with transaction.atomic():
            store().ping()
        assert asyncio.run(self._aping())

    async def _aping(self) -> bool:
        await async_store().ping()
        return True

    def test_open(self, database: str) -> None:
        """A store whose tables are there opens, and closing it closes nothing of Django's."""
        connection.ensure_connection()
        with DjangoStore() as store:
            pass
        assert connection.connection is not None
        assert store.migrate() == []

    @pytest.mark.parametrize("which", ["postgres_url", "sqlite_url"])
    def test_no_tables(self, which: str, request: pytest.FixtureRequest) -> None:
        """Where the tables are missing, the store says how to make them; and can do it itself."""
        with project.databases(default=request.getfixturevalue(which)):
            store = DjangoStore()
            lent = store.transaction()
            for ask in (store.open, lambda: store.perform(claim_on()), lambda: lent.perform(Begin(claim_on()))):
                with pytest.raises(StoreNotReady, match=r"manage\.py migrate semel --database=default"):
                    ask()
            lent.perform(Undo())
            assert store.migrate() == [
                "0001_pre_keys",
                "0002_pre_steps",
                "0003_pre_accepted",
                "0004_pre_lean",
                "0005_pre_messages",
                "0006_pre_trace",
                "0007_pre_counts",
                *(["0008_pre_answers"] if which == "postgres_url" else []),
            ]
            store.open()
            assert isinstance(store.perform(claim_on()), Hold)

    def test_replica(self, postgres: str) -> None:
        """A server that takes no writes is told apart from one that is away."""
        entry = project.settings_of(postgres, options="-c default_transaction_read_only=on")
        with project.databases(default=entry), pytest.raises(StoreReadOnly, match=r'SEMEL\["DATABASE"\]'):
            DjangoStore().perform(claim_on())

    def test_read_only_file(self, django_sqlite_url: str) -> None:
        """A file that can only be read is found out when the store is opened."""
        file = django_sqlite_url.removeprefix("sqlite:///")
        entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": f"file:{file}?mode=ro"}
        with project.databases(default=entry), pytest.raises(StoreReadOnly):
            DjangoStore().open()

    def test_unreachable(self, tmp_path: Path) -> None:
        """A database that can't be reached is the store's trouble, and nothing was sent to it."""
        for entry in (
            project.settings_of("postgresql://nobody@127.0.0.1:1/nowhere"),
            project.settings_of(f"sqlite:///{tmp_path / 'no such folder' / 'a.db'}"),
        ):
            with project.databases(default=entry):
                for ask in (
                    lambda: DjangoStore().perform(claim_on()),
                    lambda: DjangoStore().transaction().perform(Begin(claim_on())),
                    DjangoStore().open,
                ):
                    with pytest.raises(StoreUnavailable) as error:
                        ask()
                    assert not error.value.was_sent

    def test_unknown_alias(self, sqlite: str) -> None:
        """An alias that is not in DATABASES is a mistake of the developer's."""
        with pytest.raises(ConfigurationError, match="DATABASES has no 'archive'"):
            DjangoStore("archive").perform(claim_on())

    def test_other_vendors(self) -> None:
        """Another database than PostgreSQL and SQLite is refused, with what can be done."""
        entry = {"ENGINE": "django.db.backends.dummy"}
        with project.databases(default=entry), pytest.raises(ConfigurationError, match="PostgreSQL or SQLite"):
            DjangoStore().perform(claim_on())

    def test_other_driver(self, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A connection of psycopg2's is refused by the name of what to install."""
        wrapper = connections["default"]
        wrapper.ensure_connection()
        with monkeypatch.context() as patch:
            patch.setattr(wrapper, "Database", type("psycopg2", (), {}))
            patch.setattr(wrapper, "connection", object())
            with pytest.raises(ConfigurationError, match="uses psycopg2"):
                DjangoStore().perform(claim_on())


class TestPreparing:
    @pytest.mark.parametrize("options, is_prepared", [({}, False), ({"prepare_threshold": 1}, True)])
    def test_statements_are_prepared_where_the_application_has_it_so(
        self, postgres: str, options: dict[str, Any], is_prepared: bool
    ) -> None:
        """Whether statements are prepared is the application's choice: a pooler between may not bear it."""
        with project.databases(default=project.settings_of(postgres, **options)):
            store = DjangoStore()
            connection.ensure_connection()  # One that is opened for a command alone is closed after it.
            for number in range(4):
                store.perform(claim_on(key=f"key-{number}"))
            with connection.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%semel_keys%'")
                ((count,),) = cursor.fetchall()
            assert bool(count) == is_prepared


class TestLostConnections:
    def test_command(self, postgres: str) -> None:
        """A connection that the server has closed is replaced, and the command is carried out."""
        connection.ensure_connection()
        end_session(postgres)
        assert isinstance(DjangoStore().perform(claim_on()), Hold)

    def test_beginning(self, postgres: str) -> None:
        """So it is at the beginning of a handler's transaction."""
        store = DjangoStore()
        connection.ensure_connection()
        end_session(postgres)
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        Payment.objects.create(amount=5, account="alice")
        finished(lent, claim, hold)
        assert Payment.objects.count() == 1

    def test_handler(self, postgres: str) -> None:
        """One that is lost while the handler runs takes everything with it, and the next request has another."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on()
        hold = begun(lent, claim)
        Payment.objects.create(amount=5, account="alice")
        end_session(postgres)
        with pytest.raises(StoreUnavailable):
            lent.perform(finish(claim, hold))
        lent.perform(Undo())
        assert not connection.in_atomic_block
        assert Payment.objects.count() == 0
        assert isinstance(store.perform(claim_on()), Hold)

    @project.since_5_1
    def test_pool(self, django_postgres_url: str) -> None:
        """From a pool of Django's, a broken connection is given back as such, and none stays out."""
        entry = project.settings_of(django_postgres_url, pool={"min_size": 1, "max_size": 2, "timeout": 10})
        with project.databases(default=entry):
            store = DjangoStore()
            for number in range(4):
                assert isinstance(store.perform(claim_on(f"a{number}")), Hold)
                end_session(django_postgres_url)
                lent, claim = store.transaction(), claim_on(f"b{number}")
                hold = begun(lent, claim)
                finished(lent, claim, hold)
                in_a_thread(lambda: store.perform(Look("alice", "a")))
            connection.close()
            assert connection.pool.get_stats()["pool_available"] >= 1


def end_session(url: str) -> None:
    """Do as a restart of the server does to those who are connected."""
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(url, autocommit=True) as operator:
        operator.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}".encode())


class TestThreads:
    def test_connection_of_a_thread_that_serves_nobody(self, database: str) -> None:
        """Where no request's end closes it, a connection that was opened for a command is closed after it."""
        opened: list[bool] = []

        def renew() -> None:
            DjangoStore().perform(Renew(()))
            opened.append(connection.connection is not None)
            lent, claim = DjangoStore().transaction(), claim_on()
            finished(lent, claim, begun(lent, claim))
            opened.append(connection.connection is not None)

        in_a_thread(renew)
        assert opened == [False, False]

    def test_leases(self, database: str) -> None:
        """Leases are kept alive from a thread of the leases's own."""
        store = DjangoStore()
        claim = claim_on()
        hold = store.perform(claim)
        assert isinstance(hold, Hold)

        def lease_ends() -> Any:
            record = in_a_thread(lambda: store.perform(Look("alice", "key")))
            return record.lease_expires_at

        before = lease_ends()
        leases = Leases(store.perform)
        try:
            leases.add(hold, timedelta(milliseconds=150))
            while lease_ends() == before:
                pass
        finally:
            leases.close()

    def test_connection_that_was_there(self, database: str) -> None:
        """One that the application had opened is left to the application, which may be reading from it."""
        connection.ensure_connection()
        before = connection.connection
        DjangoStore().perform(claim_on())
        assert connection.connection is before

    def test_connection_that_may_stay(self, django_postgres_url: str) -> None:
        """With CONN_MAX_AGE it stays for the next command, as long as Django would keep it."""
        entry = project.settings_of(django_postgres_url) | {"CONN_MAX_AGE": 60}
        with project.databases(default=entry):
            DjangoStore().perform(claim_on())
            before = connection.connection
            assert before is not None
            DjangoStore().perform(claim_on())
            assert connection.connection is before
            connection.close_at = 0
            DjangoStore().perform(claim_on())
            assert connection.connection is None

    def test_request(self, database: str) -> None:
        """While a request is served, Django closes its connection when that has ended, and not we in the middle."""
        seen: list[bool] = []

        def view(_request: HttpRequest) -> HttpResponse:
            DjangoStore().perform(claim_on())
            seen.append(connection.connection is not None)
            return HttpResponse("done")

        with project.serving([path("", view)]):
            in_a_thread(lambda: Client().post("/"))
        assert seen == [True]

    def test_two_on_one_key(self, database: str) -> None:
        """While one thread is at a key, another one is told so at once, whatever the database."""
        store, ready, go_on = DjangoStore(), threading.Event(), threading.Event()

        def first() -> None:
            lent, claim = store.transaction(), claim_on()
            hold = begun(lent, claim)
            ready.set()
            go_on.wait(60)
            finished(lent, claim, hold)

        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(first)
            assert ready.wait(60)
            second = DjangoStore().transaction()
            seen = second.perform(Begin(claim_on()))
            second.perform(Undo())
            assert isinstance(seen, Found)
            assert (seen.state, running.done()) == (State.PROCESSING, False)
            go_on.set()
            running.result()

    def test_replay_does_not_wait(self, sqlite: str) -> None:
        """On SQLite, an answer that is there is given while somebody else's handler has the write lock."""
        store = DjangoStore()
        lent, claim = store.transaction(), claim_on("done")
        finished(lent, claim, begun(lent, claim))
        begun(lent, claim_on("running"))
        seen = in_a_thread(lambda: store.transaction().perform(Begin(claim_on("done"))))
        assert isinstance(seen, Found)
        assert seen.answer == ANSWER
        lent.perform(Undo())

    def test_file_that_is_kept_locked(self, sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who waits in vain for its turn at a SQLite file is told which handler kept it."""
        monkeypatch.setattr(turns, "BUSY_TIMEOUT", timedelta(milliseconds=100))
        store = DjangoStore()
        lent = store.transaction()
        begun(lent, claim_on("slow"))
        for ask in (lambda: store.perform(claim_on()), lambda: store.transaction().perform(Begin(claim_on()))):
            with pytest.raises(StoreUnavailable, match="that of key"):
                in_a_thread(ask)
        lent.perform(Undo())
        assert isinstance(store.perform(claim_on()), Hold)
        assert isinstance(store.transaction().perform(Begin(claim_on())), Found)

    def test_fork(self, sqlite: str) -> None:
        """In a forked child nobody waits for a turn that a thread of the parent's had."""
        place = file.Place(Path("unused"), Names())
        turns.turns_of("default").take("that of the parent", place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking beside threads from 3.12 on
            child = os.fork()
        if child == 0:
            # In a thread of its own, since this one's connection is the parent's.
            os._exit(0 if isinstance(in_a_thread(lambda: DjangoStore().perform(claim_on())), Hold) else 1)
        assert os.waitpid(child, 0)[1] == 0
        turns.turns_of("default").give_on()
        assert isinstance(DjangoStore().perform(claim_on()), Found)

    def test_other_aliases(self, django_postgres_url: str, django_sqlite_url: str) -> None:
        """Each alias is a store of its own."""
        with project.databases(default=django_postgres_url, archive=django_sqlite_url):
            claim: Claim = claim_on()
            for alias in ("default", "archive"):
                assert isinstance(DjangoStore(alias).perform(claim), Hold)
            assert isinstance(DjangoStore("archive").perform(claim), Found)
            assert connections["archive"].vendor == "sqlite"
