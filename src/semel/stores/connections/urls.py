"""Where a pool or an engine of the application's connects to, as a URL of a store. It connects to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from semel.errors import ConfigurationError

_GIVE_URL = "Give it as url=, as in store(engine, url='postgresql://user@host/database')."


def postgres_url(parts: Mapping[str, Any]) -> str:
    """Write the parts of an address, in libpq's names, as a URL to be read in messages. There is no password in it."""
    rest = {name: str(value) for name, value in parts.items() if value not in {None, ""} and name in _NAMED}
    user, database = rest.pop("user", ""), rest.pop("dbname", "")
    # A socket's folder, or several hosts, fit into the query only.
    is_plain = "host" in rest and not set("/,@") & set(rest["host"])
    host, port = (rest.pop("host"), rest.pop("port", "")) if is_plain else ("", "")
    where = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    who = f"{quote(user, safe='')}@" if user else ""
    query = f"?{urlencode(rest, quote_via=quote)}" if rest else ""
    return f"postgresql://{who}{where}/{quote(database, safe='')}{query}"


#: What says where a connection leads.
_NAMED = frozenset({"dbname", "host", "hostaddr", "port", "user"})


def sqlite_url(database: str | None) -> str:
    """Write the path of a file as a URL."""
    if not database or database == ":memory:" or database.startswith("file:"):
        raise ConfigurationError(f"This engine's database, {database!r}, is no plain file, so others can't open it.")
    return f"sqlite:///{quote(database)}"


def unknown_address(what: str) -> ConfigurationError:
    """Say that *what* does not tell where it connects to."""
    return ConfigurationError(f"How {what} connects can't be known. {_GIVE_URL}")
