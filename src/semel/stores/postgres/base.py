"""What the PostgreSQL store is in both colours: its address, its statements, and the lock that shows that it lives.

It connects to nothing: ``store.py`` and ``async_store.py`` do, each through its driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from semel.errors import StoreUnavailable
from semel.stores.base import this_process
from semel.stores.dialect import Dialect
from semel.stores.postgres.address import Address
from semel.stores.postgres.builder import no_owner
from semel.stores.postgres.durability import Durability
from semel.stores.postgres.errors import TRANSIENT, is_too_slow, outlasted
from semel.stores.postgres.joined import JoinedStatements
from semel.stores.postgres.statements import Statements

if TYPE_CHECKING:
    from semel.stores.postgres.liveness import Liveness

T = TypeVar("T")

#: How often a statement is sent: a lost connection or a deadlock is not the caller's affair, if it ends there.
TRIES = 3


def retried(
    once: Callable[[], T], address: Address, *, is_shared: bool = False, connect: Callable[[], None] = lambda: None
) -> T:
    """Return what *once* does, in a thread, as often as it takes; *connect* goes before each further time.

    A statement that is shared is not sent again as a whole when another's transaction was in the way: it was in the way
    of some, and the rest need not wait for it.
    """
    was_sent = False
    for left in reversed(range(TRIES)):
        try:
            return once()
        except StoreUnavailable as error:
            # Sent once is sent, even if the last try got no connection.
            was_sent = error.was_sent = was_sent or error.was_sent
            error.was_too_slow = is_too_slow(error)
            if left == 0 or not was_sent or error.was_too_slow:
                raise
        except Exception as error:
            if getattr(error, "sqlstate", None) not in TRANSIENT or is_shared:
                raise
            if left == 0:
                raise outlasted(error, address, was_sent=was_sent) from error
        connect()
    raise AssertionError  # pragma: no cover - the last round returned or raised


#: Which connection each kind of statement has, by how many there are: claims, answers, settlements, others, upkeep.
#: What a client waits for comes first; settlements wait for others' transactions, and reaping takes its time. Leases
#: are not among them: a renewal that waits for any of these, and for the rows that they wait for, comes too late, and
#: an operation that is under way is taken over.
SHARES = {
    1: (0, 0, 0, 0, 0),
    2: (0, 0, 1, 0, 1),
    3: (0, 1, 2, 0, 2),
    4: (0, 1, 2, 3, 2),
    5: (0, 1, 2, 3, 4),
}


class Link(Protocol):
    """One connection of the store's own."""

    #: Whether it is to the server itself, and not to a pooler; None: not known before it is connected.
    is_direct: bool | None


class PostgresBase:
    """Records in one PostgreSQL table."""

    actor: str | None
    _links: Sequence[Link]

    def __init__(self, url: str, given: Any) -> None:
        """Use the server and the table that *url* names; *given* are the application's own connections, if any."""
        self.address = Address.of(url, given.opener if given else None)
        self.notes_replays = self.address.audit == "replays"
        self._liveness = _liveness(self.address)
        self._statements = Statements(
            self.address.names,
            audit=self.address.audit,
            actor=lambda: self.actor or this_process(),
            owner=self._liveness.owner if self._liveness else no_owner,
        )
        self._joined = JoinedStatements(self._statements, str(self.address))
        #: Asked only of connections that are the application's: the store sees to its own.
        self._durability = Durability(self.address) if given else None
        #: Whether the role was seen to have every privilege.
        self._may_write = False

    @property
    def dialect(self) -> Dialect:
        """PostgreSQL, with these tables."""
        return self._joined.dialect

    @property
    def is_direct(self) -> bool | None:
        """Whether the server is reached itself, and not through a pooler; None: not known before the first command."""
        return next((link.is_direct for link in self._links if link.is_direct is not None), None)

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Call *on_loss* when the lock is lost that shows that this process lives, if there is one."""
        if self._liveness is not None:
            self._liveness.watch(on_loss)


def _liveness(address: Address) -> Liveness | None:
    if address.takeover == "lease":
        return None
    # Here, because it has a thread of its own, and with it the driver for threads.
    from semel.stores.postgres.liveness import Liveness  # noqa: PLC0415

    return Liveness(address)
