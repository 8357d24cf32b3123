"""PostgreSQL's errors in Semel's words, by SQLSTATE, for every driver. Nothing here connects or retries."""

from __future__ import annotations

from semel.errors import StoreError, StoreNotReady, StoreReadOnly, StoreUnavailable
from semel.stores.postgres.address import Address

#: Another transaction was in the way; the same statement succeeds when it is sent again.
TRANSIENT = frozenset({"40001", "40P01", "55P03"})
#: The server cut the statement short, and would again.
TOO_SLOW = frozenset({"57014"})
#: PgBouncer had no connection to give in all that time. It has one SQLSTATE for this and for much else.
_NONE_TO_GIVE = "query_wait_timeout"

_NO_TABLE = frozenset({"42P01", "42703", "3F000"})
_READ_ONLY = frozenset({"25006"})
#: Classes of errors that speak of the server rather than of the statement: connection, authorisation, database name,
#: resources, intervention by an operator (a shutdown, a time-out), system, internal.
_SERVER_CLASSES = ("08", "28", "3D", "53", "57", "58", "XX")


def translated(error: Exception, sqlstate: str | None, address: Address) -> StoreError | None:
    """Return what a driver's *error* means, or None when it is about one statement's own data."""
    if sqlstate in _NO_TABLE:
        return StoreNotReady(
            f"{address} has no table {address.names.table!r} of Semel's, or an old one. Run: semel migrate {address}"
        )
    if sqlstate in _READ_ONLY:
        return StoreReadOnly(f"{address} is a read-only replica. Give the address of the primary.")
    if sqlstate is None or sqlstate.startswith(_SERVER_CLASSES):
        return StoreUnavailable(f"{address} can't be used: {_line(error)}", was_sent=True)
    return None


def outlasted(error: BaseException, address: Address, *, was_sent: bool) -> StoreUnavailable:
    """Say that others were in the way, each time that the statement was sent."""
    return StoreUnavailable(f"{address} is busy: {_line(error)}", was_sent=was_sent)


def is_too_slow(error: StoreUnavailable) -> bool:
    """Tell whether the statement took longer than it may: sending it again would only add to the load."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) in TOO_SLOW or _NONE_TO_GIVE in str(cause)


def unreachable(error: BaseException, address: Address) -> StoreUnavailable:
    """Say that no connection could be made."""
    return StoreUnavailable(f"{address} can't be reached: {_line(error)}")


def _line(error: BaseException) -> str:
    # Drivers add hints over several lines; a log wants one.
    text = " ".join(str(error).split())
    return text or type(error).__name__
