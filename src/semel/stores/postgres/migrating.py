"""Running PostgreSQL's migrations while requests go on: each statement in a transaction of its own, with a short wait
for its lock and further tries. What a statement locks is in ``locks.py``, what is missing in ``stores/migration.py``.

A statement and the note that it was run are one commit, so a migrator may die anywhere: the next one goes on at the
statement that was not run. An index that is made CONCURRENTLY can't be part of a transaction: it is noted afterwards,
and before it is made, one that an earlier run has left unfinished (*invalid*) is dropped.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores.migration import Book, PlannedMigration, book_of, half_name
from semel.stores.postgres.builder import PACKAGE
from semel.stores.postgres.locks import Step, steps_of
from semel.stores.statement import Names, load_migrations

#: Any number will do, so long as everybody who migrates takes the same one: "semel" in ASCII.
MIGRATION_LOCK = 0x73656D656C
BOOK = "CREATE TABLE {} (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"

#: How long a statement waits for its lock, since requests wait behind it meanwhile. It is longer than PostgreSQL's
#: deadlock_timeout of a second, after which an autovacuum in the way gives up.
LOCK_SECONDS = 2.0
#: How long requests go on before each further try.
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0)
#: How often to look who is in the way.
WATCH_SECONDS = 0.25
#: How often to look whether another migrator is done. A wait in the server would have a snapshot, for the end of which
#: an index that the other one makes CONCURRENTLY waits: a deadlock.
POLL_SECONDS = 0.2

#: The lock was not to be had in time; or a deadlock.
_IN_THE_WAY = frozenset({"55P03", "40P01"})

T = TypeVar("T")

_logger = logging.getLogger("semel")


class Session(Protocol):
    """A connection in autocommit."""

    #: Whether it is to the server itself, and not to a pooler.
    is_direct: bool

    def run(self, sql: str) -> list[Any]:
        """Run statements without parameters; return the rows of the first."""
        ...

    def another(self) -> AbstractContextManager[Session]:
        """Return a second connection, for a thread that watches the first."""
        ...

    def sqlstate(self, error: Exception) -> str | None:
        """Return the SQLSTATE of an error of the driver's."""
        ...


class Migrator:
    """Brings the tables with certain *names* up to date, over one session."""

    def __init__(self, session: Session, names: Names, where: str, *, with_post: bool = False) -> None:
        """Nothing is sent yet. *where* is the server, for people."""
        self._session = session
        self._names = names
        self._where = where
        self._with_post = with_post
        self._table = book_of(names)
        self._migrations = load_migrations(PACKAGE, names)

    def plan(self) -> tuple[PlannedMigration, ...]:
        """Return what ``run`` would do. Nothing is changed."""
        book = self._book()
        planned = []
        for name, script in book.pending(self._migrations, with_post=self._with_post):
            steps = [replace(step, is_on_new=step.is_on_new or book.is_new) for step in steps_of(script, self._names)]
            done = book.done(name)
            planned.append(PlannedMigration(name, done, tuple(step.planned for step in steps[done:])))
        return tuple(planned)

    def run(self, only: str | None = None) -> list[str]:
        """Run what is missing, or *only* one migration of it; return what was finished."""
        with self._alone():
            book = self._book()
            if book.is_new and only is None:
                return self._make()
            self._refuse_pooler(book)
            self._make_book()
            return list(self._go_on(only))

    def run_within(self, name: str) -> None:
        """Run one migration in the transaction that the session is in, as one part of it."""
        self._wait(f"SELECT pg_try_advisory_xact_lock({MIGRATION_LOCK})")
        book = self._book()
        if name in book.names:
            return
        steps = steps_of(dict(self._migrations)[name], self._names)
        if not all(step.joins for step in steps):
            raise ConfigurationError(f"{name} makes an index CONCURRENTLY, so it can't be part of a transaction.")
        self._make_book()
        texts = [step.text for step in steps[book.done(name) :]]
        self._tried(f"{name} needs locks on Semel's tables", partial(self._saved, texts, self._note(name, 1, 1)))

    def _saved(self, texts: list[str], note: str, watch: Watch) -> None:
        ((watch.pid,),) = self._session.run("SELECT pg_backend_pid()")
        self._session.run("SAVEPOINT semel_migrating")
        try:
            self._set(_limits(self._names, lock_timeout=_milliseconds(LOCK_SECONDS)), is_local=True)
            for text in (*texts, note):
                self._session.run(text)
        except Exception:
            with suppress(Exception):  # The connection is lost, and what it did with it.
                self._session.run("ROLLBACK TO SAVEPOINT semel_migrating")  # which frees the locks, too
            raise
        self._session.run("RELEASE SAVEPOINT semel_migrating")

    def _make(self) -> list[str]:
        """Make all tables in one transaction. No code uses them yet, so an index blocks none that is not."""
        with self._transaction():
            if not self._book().is_new:  # Through a pooler: another was first.
                return []
            self._make_book()
            for name, script in self._migrations:
                self._session.run(re.sub(r"\bINDEX CONCURRENTLY\b", "INDEX", script))
                self._session.run(f"INSERT INTO {self._table} (name) VALUES ('{name}')")  # noqa: S608 - see Names
        return [name for name, _ in self._migrations]

    def _go_on(self, only: str | None) -> Iterator[str]:
        while True:
            book = self._book()
            missing = book.pending(self._migrations, with_post=self._with_post or only is not None)
            found = next((each for each in missing if only in {None, each[0]}), None)
            if found is None:
                return
            name, steps = found[0], steps_of(found[1], self._names)
            done = book.done(name)
            if self._patiently(name, steps, done, book) and done + 1 == len(steps):
                yield name

    def _patiently(self, name: str, steps: tuple[Step, ...], done: int, book: Book) -> bool:
        """Run one statement as soon as it gets its lock; return whether it was run here."""
        step, note = steps[done], self._note(name, done + 1, len(steps))
        what = f"{name}, statement {done + 1} of {len(steps)},"
        if step.joins:
            return self._tried(f"{what} needs {step.lock} on {step.table}", partial(self._joined, step, note, book))
        return self._tried(f"{what} makes or drops an index", partial(self._by_itself, step, note), tells=True)

    def _tried(self, what: str, attempt: Callable[[Watch], T], *, tells: bool = False) -> T:
        for pause in (*PAUSES, None):
            with Watch(self._session, what if tells else "") as watch:
                try:
                    return attempt(watch)
                except Exception as error:
                    if self._session.sqlstate(error) not in _IN_THE_WAY:
                        raise
                    failed = error
            if pause is not None:
                _logger.warning("%s; in the way is %s. Trying again in %s s.", what, watch, pause)
                time.sleep(pause)
        raise StoreUnavailable(
            f"{self._where}: {what}; in the way is {watch}. It was tried {len(PAUSES) + 1} times, for {LOCK_SECONDS:g} "
            "s each. End what is in the way, or wait for it; then migrate again: it goes on at this statement."
        ) from failed

    def _joined(self, step: Step, note: str, book: Book, watch: Watch) -> bool:
        with self._transaction():
            ((watch.pid,),) = self._session.run("SELECT pg_backend_pid()")
            if not self._session.is_direct and self._book() != book:
                return False
            self._session.run(step.text)
            self._session.run(note)
        return True

    def _by_itself(self, step: Step, note: str, watch: Watch) -> bool:
        """Run a statement that can't be part of a transaction. Requests don't wait behind it, so it may wait itself."""
        ((watch.pid,),) = self._session.run("SELECT pg_backend_pid()")
        with self._settings(lock_timeout="0"):
            valid = self._session.run(f"SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('{step.index}')")  # noqa: S608 - see Names
            is_made = step.sql.upper().startswith("CREATE")
            if valid and (not is_made or not valid[0][0]):
                self._session.run(f"DROP INDEX CONCURRENTLY {step.index}")
            if is_made and valid != [(True,)]:
                self._session.run(step.text)
            self._session.run(note)
        return True

    def _note(self, name: str, done: int, count: int) -> str:
        noted = name if done == count else half_name(name, done, count)
        return (
            f"DELETE FROM {self._table} WHERE starts_with(name, '{name} ('); "  # noqa: S608 - see Names
            f"INSERT INTO {self._table} (name) VALUES ('{noted}')"
        )

    def _book(self) -> Book:
        ((is_there,),) = self._session.run(f"SELECT to_regclass('{self._table}') IS NOT NULL")
        rows = self._session.run(f"SELECT name FROM {self._table}") if is_there else []  # noqa: S608 - see Names
        return Book.of(name for (name,) in rows)

    def _make_book(self) -> None:
        """Make the table of migrations, if there is none."""
        schema = self._names.schema
        if not schema and self._session.run("SELECT current_schema() IS NULL") == [(True,)]:
            raise ConfigurationError(
                f"{self._where}: there is no schema to make tables in. Of those in this role's search_path, none is "
                "there that it may use. Make one, grant USAGE on it, or add ?schema=NAME to the URL."
            )
        if schema and self._session.run(f"SELECT to_regnamespace('{schema}') IS NULL") == [(True,)]:
            self._session.run(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        if self._session.run(f"SELECT to_regclass('{self._table}') IS NULL") == [(True,)]:
            self._session.run(BOOK.format(self._table))

    def _refuse_pooler(self, book: Book) -> None:
        for name, script in book.pending(self._migrations, with_post=self._with_post):
            if not self._session.is_direct and not all(step.joins for step in steps_of(script, self._names)):
                raise ConfigurationError(
                    f"{self._where} is reached through a pooler, and {name} makes an index CONCURRENTLY, which needs a "
                    "session of its own. Give the server's own address to semel migrate."
                )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only one who migrates. Through a pooler this is for each transaction by itself."""
        if not self._session.is_direct:
            yield
            return
        self._wait(f"SELECT pg_try_advisory_lock({MIGRATION_LOCK})")
        try:
            yield
        finally:
            with suppress(Exception):  # The lock ends with the session.
                self._session.run(f"SELECT pg_advisory_unlock({MIGRATION_LOCK})")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._begin()
        try:
            if not self._session.is_direct:
                self._wait(f"SELECT pg_try_advisory_xact_lock({MIGRATION_LOCK})", between=self._again)
            yield
            self._session.run("COMMIT")
        except BaseException:
            with suppress(Exception):  # It is gone, and what it did with it.
                self._session.run("ROLLBACK")
            raise

    def _begin(self) -> None:
        self._session.run("BEGIN ISOLATION LEVEL READ COMMITTED")
        self._set(_limits(self._names, lock_timeout=_milliseconds(LOCK_SECONDS)), is_local=True)

    def _again(self) -> None:
        self._session.run("ROLLBACK")
        time.sleep(POLL_SECONDS)
        self._begin()

    def _wait(self, lock: str, between: Any = lambda: time.sleep(POLL_SECONDS)) -> None:
        is_told = False
        while self._session.run(lock) != [(True,)]:
            if not is_told:
                _logger.warning("%s is being migrated by another process. Waiting for it.", self._where)
                is_told = True
            between()

    @contextmanager
    def _settings(self, **more: str) -> Iterator[None]:
        """Have other settings of the session, which may be the application's, for a while."""
        wanted = _limits(self._names, **more)
        asked = ", ".join(f"'{name}'" for name in wanted)
        before = self._session.run(f"SELECT name, current_setting(name) FROM pg_settings WHERE name IN ({asked})")  # noqa: S608 - ours
        self._set(wanted, is_local=False)
        try:
            yield
        finally:
            with suppress(Exception):  # They end with the session.
                self._set(dict(before), is_local=False)

    def _set(self, settings: dict[str, str], *, is_local: bool) -> None:
        rows = ", ".join("('{}', '{}')".format(name, value.replace("'", "''")) for name, value in settings.items())
        # A setting that this server does not know is left out.
        self._session.run(
            f"SELECT set_config(name, value, {is_local}) FROM (VALUES {rows}) AS wanted (name, value)"  # noqa: S608 - ours
            "  JOIN pg_settings USING (name)"
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"


def _limits(names: Names, **more: str) -> dict[str, str]:
    # What is dropped is named alone, as what is created is.
    schema = {"search_path": names.schema} if names.schema else {}
    return {"statement_timeout": "0", "transaction_timeout": "0", **more, **schema}


class Watch:
    """A thread that looks who is in the way of a statement, over a connection of its own, from a moment on."""

    def __init__(self, session: Session, what: str) -> None:
        #: Of the server's process that runs the statement.
        self.pid: int | None = None
        self._session = session
        #: A statement that waits without a limit: who is in its way is told meanwhile.
        self._what = what
        self._holders: list[Any] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, name="semel-migrating", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def __str__(self) -> str:
        return "; ".join(_described(*row) for row in self._holders) or "a transaction that has just ended"

    def _look(self) -> None:
        if self._stopping.wait(WATCH_SECONDS):
            return
        with suppress(Exception), self._session.another() as other:  # It is for a message, and for no more.
            while not self._stopping.wait(WATCH_SECONDS):
                holders = other.run(_HOLDERS.format(pid=self.pid)) if self.pid else []
                if holders and self._what and {row[0] for row in holders} != {row[0] for row in self._holders}:
                    told = "; ".join(_described(*row) for row in holders)
                    _logger.warning("%s, waits for the end of %s. Requests go on.", self._what, told)
                self._holders = holders or self._holders


_HOLDERS = """\
SELECT holder, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)::bigint
  FROM unnest(pg_blocking_pids({pid})) AS holder LEFT JOIN pg_stat_activity ON pid = holder
"""


def _described(pid: int, application: str | None, state: str | None, seconds: int | None) -> str:
    if not pid:
        return "a prepared transaction (see pg_prepared_xacts)"
    more = [f"application {application}" if application else "no application name", state or ""]
    more += [f"its transaction is {seconds} s old"] if seconds is not None else []
    return f"pid {pid} ({', '.join(each for each in more if each)})"
