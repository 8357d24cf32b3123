"""The PostgreSQL store for an event loop, on asyncpg. What it says is in ``queries.sql``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from semel.core.commands import Claim, Command, Complete, FindStuck, Renew, Settle
from semel.core.record import Hold
from semel.errors import ConfigurationError, StoreError, StoreNotPermitted, StoreReadOnly, StoreUnavailable
from semel.stores.base import AsyncStore
from semel.stores.batching import AsyncBatcher, refused
from semel.stores.fair_queue import MAX_BATCH_BYTES, size_of
from semel.stores.forks import importing, leave_alone, start_afresh_in_children
from semel.stores.postgres.address import CONNECT_SECONDS, MAX_CONNECTIONS, SESSION, STATEMENT_SECONDS, Address
from semel.stores.postgres.async_listening import AsyncListener
from semel.stores.postgres.async_opening import PsycopgSession, as_given, settle
from semel.stores.postgres.base import SHARES, TRIES, PostgresBase
from semel.stores.postgres.bounds import walks_of
from semel.stores.postgres.durability import FOR_TRANSACTION, is_off_async
from semel.stores.postgres.encoding import ENCODING, check_encoding
from semel.stores.postgres.errors import TRANSIENT, is_too_slow, outlasted, read_only, translated, unreachable
from semel.stores.postgres.pooler import is_direct_async
from semel.stores.postgres.renewals import Renewals
from semel.stores.postgres.statements import (
    MAX_BATCH,
    OTHERS,
    OWNED,
    UPKEEP,
    terms_of_claim,
    terms_of_complete,
)
from semel.stores.postgres.upkeep import MAX_WALKS, advance
from semel.stores.postgres.version import check_version, tells_version
from semel.stores.statement import Statement
from semel.stores.step import Step
from semel.stores.transaction import AsyncConnections, AsyncTransaction

try:
    import asyncpg
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL under an event loop needs asyncpg. Run: pip install 'semel[postgres]'") from error

T = TypeVar("T")

#: The server's own limit comes first: it says what it was, and leaves the connection fit for use.
COMMAND_SECONDS = STATEMENT_SECONDS + 2

_logger = logging.getLogger("semel")

_ON_THE_LOOP = (
    "%s: a connection can be made on the application's event loop only, so leases are renewed on it, and while a "
    "handler blocks it, other operations may lose theirs. Give url=, or an engine or a pool that connects on any loop: "
    "%s"
)


class AsyncPostgresStore(PostgresBase, AsyncStore):
    """Records in one PostgreSQL table. Claims, answers, leases, settlements and upkeep have a connection each, if
    ``?connections=`` does not let all but leases share some.
    """

    def __init__(self, url: str, *, connections: AsyncConnections | None = None) -> None:
        """Use the server and the table that *url* names; *connections* are the application's own, for transactions that
        the handler writes in. Connects on first use.
        """
        super().__init__(url, connections)
        self._listener = AsyncListener(self.address)
        self._given = connections
        self._connections: AsyncConnections | None = connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: list[_Link] = []
        self._renewals = Renewals(_Link(self.address))
        self._has_warned = False
        self._pinging: asyncio.Task[None] | None = None
        self._bind()

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command."""
        if asyncio.get_running_loop() is not self._loop:
            self._bind()
        return self._batchers[type(command)].submit(command)

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Prolong leases, from any thread that is no event loop's."""
        try:
            return self._renewals.run(self._statements.of(command))
        except (StoreUnavailable, ConfigurationError) as error:
            # An engine or a pool may be able to connect on the application's own loop alone: with a token that a
            # session of that loop fetches, or by a connector that was made there.
            if self.address.opener is None or (isinstance(error, StoreUnavailable) and error.was_sent):
                raise
            return self._renew_on_the_loop(command, error)

    def _renew_on_the_loop(self, command: Renew, error: Exception) -> frozenset[Hold]:
        loop = self._loop
        if loop is None or not loop.is_running():
            raise error
        renewal = asyncio.run_coroutine_threadsafe(self._renewed(command), loop)
        try:
            lost = renewal.result(CONNECT_SECONDS)
        except Exception:  # noqa: BLE001 - it is no better there, or the loop is blocked, or has ended
            renewal.cancel()
            raise error from None
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(_ON_THE_LOOP, self.address, error)
        return lost

    async def _renewed(self, command: Renew) -> frozenset[Hold]:
        return await self.perform(command)

    def transaction(self) -> AsyncTransaction:
        """Return a transaction of the application's own, not begun yet."""
        if asyncio.get_running_loop() is not self._loop:
            self._bind()
        if self._liveness is not None:
            self._liveness.start()
        if self._connections is None:
            # Here, because it imports a pool that most stores never need.
            with importing:
                from semel.stores.connections.asyncpg import AsyncpgConnections  # noqa: PLC0415

            self._connections = AsyncpgConnections(self.address)
        return AsyncTransaction(self._connections, self._joined, self._durability)

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Call *on_end* with every hint from now on."""
        if asyncio.get_running_loop() is not self._loop:
            self._bind()
        self._listener.add(on_end)

    async def open(self) -> None:
        """Connect, and see whether the server can serve."""
        if asyncio.get_running_loop() is not self._loop:
            self._bind()
        await self._look(self._links[0])

    async def ping(self) -> None:
        """As in ``AsyncStore``; over a connection of its own, since requests use the others. Those who ask at the same
        time share it: a readiness check is open to all, and the server's connections are few.
        """
        pinging = self._pinging
        if pinging is None or pinging.done() or pinging.get_loop() is not asyncio.get_running_loop():
            pinging = self._pinging = asyncio.ensure_future(self._ping())
            # Those who wait for it may all be cancelled: it is no error then that its own is not read.
            pinging.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(pinging)

    async def _ping(self) -> None:
        link = _Link(self.address)
        try:
            await self._look(link)
        finally:
            await link.close()

    async def _look(self, link: _Link) -> None:
        if await link.run(self._statements.check()):
            raise read_only(str(self.address))
        await self._check(link)

    async def close(self) -> None:
        """Finish what is under way and disconnect."""
        await self.ended.close()
        if asyncio.get_running_loop() is self._loop:
            await self._close()
        if self._renewals.is_used:
            await asyncio.to_thread(self._renewals.close)
        if self._liveness is not None:
            await asyncio.to_thread(self._liveness.close)

    async def _close(self) -> None:
        for batcher in set(self._batchers.values()):
            await batcher.idle()
        await self._listener.close()
        connections, self._connections = self._connections, self._given
        if connections is not None:
            await connections.close()
        for link in self._links:
            await link.close()

    def _bind(self) -> None:
        """Start afresh on the running loop: a connection belongs to the loop that made it."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        for link in self._links:
            link.drop()
        self._listener.drop()
        count = self.address.connections
        self._links = [(_Link if count == MAX_CONNECTIONS else _SharedLink)(self.address) for _ in range(count)]
        claims, answers, settlements, others, upkeep = (self._links[share] for share in SHARES[count])
        claim = AsyncBatcher[Any](partial(self._claim, claims), terms_of_claim, MAX_BATCH)
        complete = AsyncBatcher[Any](partial(self._complete, answers), terms_of_complete, MAX_BATCH)
        # Renewals skip locked rows, and must not wait behind those who don't: however few connections there are, they
        # have one beside them.
        leases = _Link(self.address)
        self._links.append(leases)
        renew = AsyncBatcher[Any](lambda batch: self._each(leases, batch))
        other = AsyncBatcher[Any](lambda batch: self._each(others, batch))
        self._batchers: dict[type[Command[Any]], AsyncBatcher[Any]] = {
            Claim: claim,
            Complete: complete,
            Renew: renew,
            **dict.fromkeys(OTHERS, other),
            # It waits for a transaction that may hang, and none of the others has to.
            Settle: AsyncBatcher[Any](lambda batch: self._each(settlements, batch)),
            # Reaping takes its time, and no request waits for it.
            **dict.fromkeys(UPKEEP, AsyncBatcher[Any](lambda batch: self._each(upkeep, batch))),
        }

    async def _claim(self, link: _Link, batch: list[Claim]) -> list[Any]:
        if self._liveness is not None:
            await self._settle()
        if not self._may_write:
            await self._check(link)
        return await link.run(self._statements.claim(batch), batch)

    async def _check(self, link: _Link) -> None:
        # Once: a role that may claim but not complete, or tables of another version, are told before a handler runs.
        await link.run(self._statements.check_privileges(str(self.address)))
        if await link.run(tells_version(self.address.names)):
            await link.run(check_version(self.address.names, str(self.address)))
        self._may_write = True

    async def _settle(self) -> None:
        if self._liveness is not None and not self._liveness.is_settled:
            await asyncio.to_thread(self._liveness.settle)

    async def _complete(self, link: _Link, batch: list[Complete]) -> list[Any]:
        verdicts: list[Any] = await link.run(self._statements.complete(batch), batch)
        if None not in verdicts:
            return verdicts
        return [
            verdict or await self._caught(link.run(self._statements.completed(command.hold)))
            for command, verdict in zip(batch, verdicts, strict=True)
        ]

    async def _each(self, link: _Link, batch: list[Any]) -> list[Any]:
        return [await self._caught(self._other(link, command)) for command in batch]

    async def _other(self, link: _Link, command: Command[Any]) -> Any:
        if type(command) in OWNED:
            await self._settle()
        if isinstance(command, Settle):
            await link.run(self._statements.wait(command))
        elif isinstance(command, FindStuck):
            await self._advance(link)
        for walk in walks_of(command):
            await link.run(self._statements.bounds.look(self._statements, walk))
        return await link.run(self._statements.of(command))

    async def _advance(self, link: _Link) -> None:
        with suppress(StoreNotPermitted, StoreReadOnly):  # A role that may only read sees what is followed already.
            for _ in range(MAX_WALKS):
                if not await link.run(advance(self._statements)):
                    return

    async def _caught(self, running: Coroutine[Any, Any, T]) -> T | Exception:
        try:
            return await running
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001 - these are no batch: each has its own fate
            return refused(error)


def _is_large(batch: Sequence[Command[Any]]) -> bool:
    return len(batch) == 1 and size_of(batch[0]) > MAX_BATCH_BYTES


#: The last is what the driver says where none of several servers is the primary, as in the middle of a fail-over, and
#: in the moment between the server's last word and the end of the connection.
_FAULTS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, asyncpg.InternalClientError)


class _Link:
    """One connection, opened when it is needed and opened again when it is lost. Used by one task at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        #: asyncpg's, or what has its methods.
        self._connection: Any = None
        #: Whether it is to the server itself, and not to a pooler; None: not known before it is connected.
        self.is_direct: bool | None = None
        #: Whether each COMMIT has to be told to wait for the disk.
        self._is_off = False
        start_afresh_in_children(self)

    async def run(self, statement: Statement[T], batch: Sequence[Command[Any]] = ()) -> T:
        """Run one statement, of one command or of a *batch*, in its own transaction. One that is shared is not sent
        again as a whole when another's transaction was in the way: it was in the way of some, and the rest need not
        wait for it. One that is large is not sent again when it could not be sent in time.
        """
        was_sent = False
        for left in reversed(range(TRIES)):
            try:
                return await self._run_once(statement)
            except StoreUnavailable as error:
                # Sent once is sent, even if the last try got no connection.
                was_sent = error.was_sent = was_sent or error.was_sent
                error.was_too_slow = self._is_too_slow(error, is_large=_is_large(batch))
                if left == 0 or not was_sent or error.was_too_slow:
                    raise
            except asyncpg.PostgresError as error:
                if error.sqlstate not in TRANSIENT or len(batch) > 1:
                    raise
                if left == 0:
                    raise outlasted(error, self._address, was_sent=was_sent) from error
        raise AssertionError  # pragma: no cover - the last round returned or raised

    async def _run_once(self, statement: Statement[T]) -> T:
        connection = self._connection or await self._connect()
        try:
            if self._is_off:
                return statement.read(await self._fetched_durably(connection, statement))
            limit = COMMAND_SECONDS if self.is_direct else STATEMENT_SECONDS
            return statement.read(await connection.fetch(statement.sql, *statement.parameters, timeout=limit))
        except _FAULTS as error:
            known = translated(error, getattr(error, "sqlstate", None), self._address)
            if known is None:
                raise
            # The next statement is better off with a new connection: to a server that is up again, or to the one
            # that is the primary now.
            self.drop()
            raise known from error
        except asyncio.CancelledError:
            # What comes back on this connection next would be the answer to another request.
            self.drop()
            raise

    async def _fetched_durably(self, connection: Any, statement: Statement[Any]) -> Any:
        limit = COMMAND_SECONDS if self.is_direct else STATEMENT_SECONDS
        # A pooler keeps no setting of a session's. Two more round trips, where the role is set to lose commits.
        await connection.execute(f"BEGIN; {FOR_TRANSACTION}", timeout=limit)
        try:
            rows = await connection.fetch(statement.sql, *statement.parameters, timeout=limit)
        except asyncpg.PostgresError:
            await connection.execute("ROLLBACK", timeout=limit)
            raise
        await connection.execute("COMMIT", timeout=limit)
        return rows

    async def close(self) -> None:
        """Disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=CONNECT_SECONDS)
            except _FAULTS:
                connection.terminate()

    async def _connect(self) -> Any:
        try:
            if self._address.opener is not None:
                self._connection = await self._opened_as_given()
            else:
                self._connection = await self._opened_directly() or await self._opened_through_a_pooler()
        except OSError as error:  # first: a certificate that can't be verified is a ValueError, too
            raise unreachable(error, self._address) from error
        except ValueError:
            # The driver's own words may quote the password, so they go no further.
            raise ConfigurationError(f"{self._address} can't be read as the address of a PostgreSQL server.") from None
        except _FAULTS as error:
            raise unreachable(error, self._address) from error
        try:
            check_encoding(self._connection, self._address)
        except BaseException:
            self.drop()
            raise
        return self._connection

    async def _opened_as_given(self) -> Any:
        connection = await as_given(self._address)
        self.is_direct = await is_direct_async(connection)
        if self.is_direct:
            await settle(connection, SESSION)
        elif isinstance(connection, PsycopgSession):
            connection.prepare_nothing()
        self._is_off = not self.is_direct and await is_off_async(connection)
        return connection

    async def _opened_directly(self) -> asyncpg.Connection[Any] | None:
        try:
            connection = await asyncpg.connect(self._address.url, timeout=CONNECT_SECONDS, server_settings=SESSION)
        except asyncpg.ProtocolViolationError:
            return None  # A pooler that passes no session settings on.
        self.is_direct = await is_direct_async(connection)
        if self.is_direct:
            await settle(connection, {})
            self._is_off = False
            return connection
        await connection.close(timeout=CONNECT_SECONDS)
        return None

    async def _opened_through_a_pooler(self) -> asyncpg.Connection[Any]:
        """Connect without what a session would have: no prepared statements, no settings. How long a statement may
        take, only this client limits; and with each statement planned anew, a plan can't grow old.
        """
        self.is_direct = False
        settings = {"client_encoding": ENCODING}
        connection = await asyncpg.connect(
            self._address.url, timeout=CONNECT_SECONDS, statement_cache_size=0, server_settings=settings
        )
        self._is_off = await is_off_async(connection)
        return connection

    def _is_too_slow(self, error: StoreUnavailable, *, is_large: bool) -> bool:
        # Behind a pooler the time limit is ours, and stands for what the server would have said. So it does where it
        # takes as long to send the statement. Otherwise the server is gone without a word, and another may be there.
        is_ours = isinstance(error.__cause__, TimeoutError)
        return is_too_slow(error) or (is_ours and (is_large or not self.is_direct))

    def start_afresh(self) -> None:
        """Have no connection: it is the parent's."""
        leave_alone(self._connection)
        self._connection = None

    def drop(self) -> None:
        """Give the connection up at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(RuntimeError):  # the loop that it was opened on may be closed
                connection.terminate()


class _SharedLink(_Link):
    """One connection for several kinds of statements, which wait for each other."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._turn = asyncio.Lock()

    async def run(self, statement: Statement[T], batch: Sequence[Command[Any]] = ()) -> T:
        async with self._turn:
            return await super().run(statement, batch)
