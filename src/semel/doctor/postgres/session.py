"""A connection to PostgreSQL over which nothing is written: each question is a read-only transaction of its own. What
the answers mean, the checks say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from inspect import iscoroutinefunction
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

from semel.doctor.model import Kind
from semel.doctor.session import Handled, Session, Some, Unavailable
from semel.errors import ConfigurationError
from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.postgres.encoding import ENCODING
from semel.stores.postgres.errors import unreachable
from semel.stores.postgres.opening import as_given
from semel.stores.statement import Query

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL needs psycopg. Run: pip install 'semel[postgres]'") from error

Rows = list[tuple[Any, ...]]

#: More of them are not counted: a person knows what to do by then, and a count reads every row.
MAX_COUNTED = 1000
#: How many of the newest records tell how long handlers take.
NEWEST = 1000

#: How many there are of what a statement finds, and how old the oldest is.
_SOME = "SELECT count(*), max(clock_timestamp() - at) FROM ({} LIMIT {}) AS found WHERE at IS NOT NULL"

#: Nothing is waited for: a table that an operator has locked can't be told about.
_BEFORE = "SET LOCAL statement_timeout = '{}ms'; SET LOCAL lock_timeout = '1s'"


class Postgres(Session):
    """A PostgreSQL database."""

    kind: ClassVar = Kind.POSTGRES

    def __init__(self, address: Address, seconds: float) -> None:
        """Connect on first use; a question takes *seconds* at most."""
        self.address = address
        self.names = address.names
        self.where = str(address)
        self.seconds = seconds
        self._connection: psycopg.Connection[Any] | None = None

    @classmethod
    def at(cls, url: str, seconds: float) -> Self:
        """Use the database at *url*."""
        address = Address.of(url)
        try:
            conninfo_to_dict(address.url)
        except psycopg.ProgrammingError:
            # The driver's own words may quote the password, so they go no further.
            raise ConfigurationError(
                "The URL of the PostgreSQL store can't be read: a setting after the question mark is not known, or a "
                "character is not escaped."
            ) from None
        return cls(address, seconds)

    @classmethod
    def of(cls, store: Any, seconds: float) -> Self:
        """Use the database of *store*."""
        return cls(store.address, seconds)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The password, as it is and as it stands in the URL."""
        password = urlsplit(self.address.url).password
        return (password, unquote(password)) if password else ()

    @property
    def words(self) -> dict[str, str]:
        """What stands in commands for the role and the database, once there is a connection."""
        words = {"URL": self.address.typed}
        if self._connection is not None and not self._connection.closed:
            info = self._connection.info
            words |= {"ROLE_NAME": _identifier(info.user), "DATABASE_NAME": _identifier(info.dbname)}
        return words

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection, opened if it is not."""
        if self._connection is None or self._connection.closed:
            self._connection = self._opened()
            self._connection.read_only = True
            self._connection.prepare_threshold = (
                None  # Behind a pooler, the next transaction may be on another session.
            )
        return self._connection

    def _opened(self) -> psycopg.Connection[Any]:
        wait = max(1, min(CONNECT_SECONDS, int(self.seconds)))
        opener = self.address.opener
        if opener is not None and not iscoroutinefunction(opener):
            given = as_given(self.address, {})
            given.autocommit = False
            return given
        try:
            return psycopg.connect(
                self.address.url,
                connect_timeout=wait,
                application_name="semel doctor",
                client_encoding=ENCODING,
            )
        except psycopg.Error as error:
            if opener is None:
                raise
            # Its address has no password and no certificates.
            raise Unavailable(
                f"The application's engine belongs to an event loop, and its address alone does not connect: "
                f"{_said(error)}. Give the store's URL, too."
            ) from error

    def reach(self) -> tuple[float, str | None]:
        """Return how long it took to get an answer; and, if none came, what was said instead."""
        begun = time.monotonic()
        try:
            self.rows("SELECT 1")
        except psycopg.Error as error:
            return time.monotonic() - begun, str(unreachable(error, self.address))
        return time.monotonic() - begun, None

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None, *, before: str = _BEFORE) -> Rows:
        """Return what *sql* returns, with Semel's own table names put in; *before* it the session's limits are set."""
        with self._reading(before) as connection:
            return connection.execute(self.names.put_into(sql).encode(), parameters).fetchall()

    def explain(self, query: Query, settings: Mapping[str, str]) -> dict[str, Any]:
        """Return the plan of *query* for any values, as a session with *settings* would make it."""
        values = ", ".join(["NULL"] * len(query.parameters))
        with self._reading(_BEFORE) as connection:
            connection.execute("; ".join(f"SET LOCAL {name} = '{value}'" for name, value in settings.items()).encode())
            connection.execute(f"PREPARE semel_doctor AS {query.numbered}".encode())
            connection.execute("SAVEPOINT planning")
            try:
                rows = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE semel_doctor ({values})".encode()).fetchall()
            except psycopg.Error:
                connection.execute("ROLLBACK TO planning")
                raise
            finally:
                # It outlives the transaction; and behind a pooler, the session is another's by then.
                connection.execute("DEALLOCATE semel_doctor")
        plan: dict[str, Any] = rows[0][0][0]["Plan"]
        return plan

    @contextmanager
    def _reading(self, before: str) -> Iterator[psycopg.Connection[Any]]:
        connection = self.connection
        try:
            connection.execute(before.format(int(self.seconds * 1000)).encode())
            yield connection
        except psycopg.errors.InsufficientPrivilege as error:
            raise Unavailable(f"This role may not: {_said(error)}.") from error
        finally:
            if not connection.closed:
                connection.rollback()

    def settings(self, names: Sequence[str]) -> Rows:
        """Return settings as a new session has them: their names, values and sources. No time limit is set before."""
        sql = "SELECT name, reset_val, source FROM pg_settings WHERE name = ANY (%(names)s)"
        return self.rows(sql, {"names": list(names)}, before="SELECT")

    def value(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Any:
        """Return the one value that *sql* returns."""
        return self.rows(sql, parameters)[0][0]

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abandon(self) -> None:
        """Leave the connection to the thread that waits for it."""
        self._connection = None

    def has_neighbours(self) -> bool:
        """Whether the schema of its tables has tables of others."""
        return bool(
            self.value(
                "SELECT EXISTS (SELECT FROM pg_class WHERE relkind IN ('r', 'p')"
                " AND NOT relispartition AND relname <> ALL (%(names)s)"
                " AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('semel_keys')))",
                {"names": [*sorted(self.names.tables), self.names.answers]},
            )
        )

    def parked(self) -> Some:
        """Operations that wait for a person: the few of an index."""
        return self._some("SELECT created_at AS at FROM semel_keys WHERE upkeep = 'parked' ORDER BY created_at")

    def stuck(self) -> Some:
        """Operations under a lease that is over: those that are followed, and those that are too young to be."""
        return self._some(
            "SELECT lease_expires_at AS at FROM ("
            " (SELECT state, lease_expires_at FROM semel_keys WHERE upkeep = 'open' ORDER BY created_at LIMIT 5000)"
            " UNION ALL"
            " (SELECT state, lease_expires_at FROM semel_keys WHERE upkeep IS NULL AND created_at >="
            "  coalesce((SELECT swept_to FROM semel_keys_watermark WHERE one), '-infinity') ORDER BY created_at"
            "  LIMIT 5000)"
            ") AS unfinished WHERE state = 'processing' AND lease_expires_at < clock_timestamp()"
        )

    def pending(self) -> Some:
        """Operations that were accepted: each is followed from the start."""
        return self._some(
            "SELECT created_at AS at FROM semel_keys WHERE upkeep = 'open' AND state = 'pending'"
            " AND expires_at > clock_timestamp() ORDER BY created_at"
        )

    def expired(self) -> Some:
        """What the reaper would remove: its own condition, along its own index."""
        return self._some(
            "SELECT expires_at AS at FROM semel_keys"
            " WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked'"
            " AND expires_at <= (SELECT clock_timestamp())"
            " AND (state IN ('complete', 'failed', 'pending')"
            "      OR (state = 'processing' AND lease_expires_at <= (SELECT clock_timestamp()))) ORDER BY expires_at"
        )

    def waiting_messages(self) -> Some:
        """Messages that are ready, or due again, and that no relay has."""
        return self._some(
            "SELECT at FROM ("
            " SELECT created_at AS at FROM semel_outbox WHERE state = 'ready'"
            "  AND (lease_until IS NULL OR lease_until < clock_timestamp())"
            " UNION ALL"
            " SELECT due_at FROM semel_outbox WHERE state = 'waiting' AND due_at < clock_timestamp()"
            "  AND (lease_until IS NULL OR lease_until < clock_timestamp())) AS waiting"
        )

    def dead_letters(self) -> Some:
        """Messages that no relay tries any more."""
        return self._some("SELECT ended_at AS at FROM semel_outbox WHERE state = 'dead' ORDER BY ended_at")

    def parked_messages(self) -> Some:
        """Messages that a consumer has given up."""
        return self._some("SELECT changed_at AS at FROM semel_inbox WHERE state <> 'done' AND state = 'parked'")

    def closed_endpoints(self) -> list[tuple[str, str]]:
        """Endpoints that are off."""
        rows = self.rows(
            "SELECT name, coalesce(reason, '') FROM semel_webhooks WHERE state = 'off' ORDER BY name LIMIT 20"
        )
        return [(name, reason) for name, reason in rows]

    def handled(self) -> Handled:
        """The newest records, along the index of their age. One without headers and request line was erased;
        one of atomic mode is made when its handler has run, and has one time.
        """
        rows = self.rows(
            "SELECT count(*), max(took), (array_agg(request_line ORDER BY took DESC NULLS LAST))[1],"
            " count(*) FILTER (WHERE is_unkept)"
            " FROM (SELECT CASE WHEN attempt = 1 AND NOT accepted"
            "                   THEN nullif(completed_at - created_at, interval '0') END AS took,"
            "              request_line, state,"
            "              body IS NULL AND answer_day IS NULL AND NOT (headers = '[]' AND request_line IS NULL)"
            "              AS is_unkept"
            "         FROM semel_keys ORDER BY created_at DESC LIMIT %(newest)s) AS newest"
            " WHERE state IN ('complete', 'failed')",
            {"newest": NEWEST},
        )
        return Handled(*rows[0])

    def last_upkeep(self) -> timedelta | None:
        """How far the watermark is behind the clock, which it follows where a service runs."""
        rows = self.rows("SELECT clock_timestamp() - swept_to FROM semel_keys_watermark WHERE one")
        return rows[0][0] if rows else None

    def _some(self, sql: str) -> Some:
        count, age = self.rows(_SOME.format(sql, MAX_COUNTED + 1))[0]
        return Some(min(count, MAX_COUNTED), age, is_more=count > MAX_COUNTED)


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _said(error: psycopg.Error) -> str:
    return " ".join((error.diag.message_primary or str(error)).split())
