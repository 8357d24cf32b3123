"""Where a pool or an engine of the application's connects to, as a URL of a store. It connects to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from semel.errors import ConfigurationError

#: What both libpq and asyncpg understand in the query of a URL. The rest are settings of one driver's.
_COMMON = frozenset(
    {
        "application_name",
        "host",
        "options",
        "passfile",
        "port",
        "sslcert",
        "sslcrl",
        "sslkey",
        "sslmode",
        "sslpassword",
        "sslrootcert",
        "target_session_attrs",
    }
)

_GIVE_URL = "Give it as url=, as in store(engine, url='postgresql://user@host/database')."


def postgres_url(parts: Mapping[str, Any], *, only_common: bool = False) -> str:
    """Write connection settings in libpq's names as a URL."""
    rest = {name: str(value) for name, value in parts.items() if value not in {None, ""}}
    odd = [name for name, value in parts.items() if not isinstance(value, str | int | None)]
    if odd:
        raise ConfigurationError(
            f"The address of this pool can't be known: {min(odd)} is made anew each time. {_GIVE_URL}"
        )
    user, password, database = (rest.pop(name, "") for name in ("user", "password", "dbname"))
    # A socket's folder, or several hosts, fit into the query only.
    is_plain = "host" in rest and not set("/,@") & set(rest["host"])
    host, port = (rest.pop("host"), rest.pop("port", "")) if is_plain else ("", "")
    who = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    where = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    query = urlencode({name: value for name, value in rest.items() if not only_common or name in _COMMON})
    return f"postgresql://{who}{'@' if who else ''}{where}/{quote(database, safe='')}" + (f"?{query}" if query else "")


def sqlite_url(database: str | None) -> str:
    """Write the path of a file as a URL."""
    if not database or database == ":memory:" or database.startswith("file:"):
        raise ConfigurationError(f"This engine's database, {database!r}, is no plain file, so others can't open it.")
    return f"sqlite:///{quote(database)}"


def unknown_address(what: str) -> ConfigurationError:
    """Say that *what* does not tell where it connects to."""
    return ConfigurationError(f"Where {what} connects to can't be known. {_GIVE_URL}")
