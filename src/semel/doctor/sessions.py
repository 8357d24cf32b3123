"""Which session a store is examined with: by its URL, or by the store object of an application. It opens none.

Each kind is imported on first use, since its driver is an extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from semel.doctor.memory import Memory
from semel.doctor.session import Session
from semel.errors import ConfigurationError
from semel.stores import without_driver
from semel.stores.dialect import durable_of
from semel.stores.encrypted.value import plain

_SESSIONS = {
    "postgres": ("semel.doctor.postgres.session", "Postgres"),
    "redis": ("semel.doctor.redis.session", "Redis"),
    "sqlite": ("semel.doctor.sqlite.session", "SQLite"),
}
_SCHEMES = {
    "postgres": "postgres",
    "postgresql": "postgres",
    **dict.fromkeys(("redis", "rediss", "redis+cluster", "redis+sentinel"), "redis"),
    "sqlite": "sqlite",
}


def session_at(url: str, seconds: float) -> Session:
    """Return the session for the store at *url*; raise ``ConfigurationError`` where no store is known for it."""
    url = without_driver(url)
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        # Python's own message may quote the password.
        raise ConfigurationError("The store's URL can't be read. Write odd characters in it as %XX.") from None
    if scheme == "memory":
        raise ConfigurationError(
            "memory:// is in the memory of another process: there is nothing to examine from here."
        )
    if scheme not in _SCHEMES:
        what = f"{scheme}://" if scheme else "a name without a scheme"
        raise ConfigurationError(
            f"No store is known for {what}. Write postgresql://user@host/database, redis://host/0 or sqlite:///file.db."
        )
    made: Session = _session(_SCHEMES[scheme]).at(plain(url), seconds)
    return made


def session_of(store: Any, seconds: float) -> Session:
    """Return the session for a *store* object, sync or async. Of one behind a cache, the durable one is examined."""
    durable = durable_of(store)
    kind = type(durable).__module__.removeprefix("semel.stores.").partition(".")[0]
    if kind == "memory":
        return Memory()
    if kind == "django":
        examined: Session = import_module("semel.doctor.django").session_of(durable, seconds)
        return examined
    if kind not in _SESSIONS:
        raise ConfigurationError(
            f"The app's store is {type(durable).__name__}, which tells no address. Give the URL of the store, too."
        )
    made: Session = _session(kind).of(durable, seconds)
    return made


def _session(kind: str) -> Any:
    module, name = _SESSIONS[kind]
    return getattr(import_module(module), name)
