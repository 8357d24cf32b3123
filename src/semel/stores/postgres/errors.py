"""PostgreSQL's errors in Semel's words, by SQLSTATE, for every driver. Nothing here connects or retries."""

from __future__ import annotations

from collections.abc import Sequence

from semel.errors import StoreError, StoreNotPermitted, StoreNotReady, StoreReadOnly, StoreUnavailable
from semel.stores.postgres.address import Address

#: Another transaction was in the way; the same statement succeeds when it is sent again.
TRANSIENT = frozenset({"40001", "40P01", "55P03"})
#: The server cut the statement short, and would again.
TOO_SLOW = frozenset({"57014"})
#: Disk, memory, or a limit that was configured is used up. (53300, too many connections, is of the same class.)
NO_SPACE = frozenset({"53000", "53100", "53200", "53400"})
#: PgBouncer had no connection to give in all that time. It has one SQLSTATE for this and for much else.
_NONE_TO_GIVE = "query_wait_timeout"

_NO_TABLE = frozenset({"42P01", "42703", "3F000"})
_READ_ONLY = frozenset({"25006"})
_NO_PRIVILEGE = frozenset({"42501"})
_WHOLE = ", with the URL of that store in SEMEL_STORE, password and all"
_GRANTS = "What a role needs to serve, to look, to work and to migrate: docs/how-to/postgresql.md, Roles."
#: Classes of errors that speak of the server rather than of the statement: connection, authorisation, database name,
#: resources, intervention by an operator (a shutdown, a time-out), system, internal.
_SERVER_CLASSES = ("08", "28", "3D", "53", "57", "58", "XX")


def translated(error: Exception, sqlstate: str | None, address: Address) -> StoreError | None:
    """Return what a driver's *error* means, or None when it is about one statement's own data."""
    if sqlstate in _NO_TABLE:
        return StoreNotReady(
            f"{address} has no table {address.names.table!r} of Semel's, or an old one. "
            f"Run: semel migrate {address.typed}" + (_WHOLE if address.typed.startswith('"') else "")
        )
    if sqlstate in _READ_ONLY:
        return read_only(str(address))
    if sqlstate in _NO_PRIVILEGE:
        return StoreNotPermitted(f"{address}: {_direct(error)}. {_GRANTS}")
    if sqlstate is None or sqlstate.startswith(_SERVER_CLASSES):
        told = StoreUnavailable(f"{address} can't be used: {_direct(error)}", was_sent=True)
        told.has_no_space = sqlstate in NO_SPACE
        return told
    return None


def read_only(where: str) -> StoreReadOnly:
    """Say that a server takes no writes. Whether it was made so on purpose can't be known, so nothing is forced."""
    return StoreReadOnly(
        f"{where} takes no writes: it is a replica, or default_transaction_read_only is on for the server, the "
        "database or the role. Give the address of the primary, or let it be written."
    )


def lacking(where: str, role: str, missing: Sequence[tuple[str, str]]) -> StoreNotPermitted:
    """Say which privileges a role lacks, by table, and what to type."""
    tables: dict[str, list[str]] = {}
    for table, privilege in missing:
        tables.setdefault(table, []).append(privilege)
    what = "; ".join(f"{', '.join(privileges)} on {table}" for table, privileges in tables.items())
    who = '"' + role.replace('"', '""') + '"'
    grants = " ".join(f"GRANT {', '.join(privileges)} ON {table} TO {who};" for table, privileges in tables.items())
    return StoreNotPermitted(f"{where}: the role {role} needs {what}. Run: {grants}")


def outlasted(error: BaseException, address: Address, *, was_sent: bool) -> StoreUnavailable:
    """Say that others were in the way, each time that the statement was sent."""
    return StoreUnavailable(f"{address} is busy: {_direct(error)}", was_sent=was_sent)


def is_too_slow(error: StoreUnavailable) -> bool:
    """Tell whether the statement took longer than it may: sending it again would only add to the load."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) in TOO_SLOW or _NONE_TO_GIVE in str(cause)


def unreachable(error: BaseException, address: Address) -> StoreUnavailable:
    """Say that no connection could be made."""
    return StoreUnavailable(f"{address} can't be reached: {_direct(error)}")


def _direct(error: BaseException) -> str:
    # Drivers add hints over several lines; a log wants one.
    text = " ".join(str(error).split())
    return text or type(error).__name__
