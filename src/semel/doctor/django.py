"""A Django project's own database, examined over a connection that is made as Django makes its own."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from semel.doctor.session import Session
from semel.stores.connections.urls import postgres_url
from semel.stores.django.wrapper import Wrapper, wrapper_of


def session_of(store: Any, seconds: float) -> Session:
    """Return the session for the database of *store*."""
    wrapper = wrapper_of(store.alias)
    session = _sqlite(wrapper, seconds) if wrapper.vendor == "sqlite" else _postgres(wrapper, seconds)
    session.migrate = f"python manage.py migrate semel --database={store.alias}"
    return session


def _sqlite(wrapper: Wrapper, seconds: float) -> Session:
    from semel.doctor.sqlite.session import SQLite  # noqa: PLC0415 - each kind where it is used

    return SQLite.at(f"sqlite:///{quote(str(wrapper.settings_dict['NAME']))}", seconds)


def _postgres(wrapper: Wrapper, seconds: float) -> Session:
    from semel.doctor.postgres.session import Postgres  # noqa: PLC0415 - its driver is an extra
    from semel.stores.postgres.address import Address  # noqa: PLC0415 - as above

    said = wrapper.settings_dict
    # Without its pool: what is lent to us would be missing there.
    options = {name: value for name, value in said.get("OPTIONS", {}).items() if name != "pool"}
    own = type(wrapper)({**said, "OPTIONS": options}, wrapper.alias)
    names = {"host": "HOST", "port": "PORT", "user": "USER", "dbname": "NAME"}
    url = postgres_url({name: said.get(key) for name, key in names.items()})
    return Postgres(Address.of(url, lambda: own.get_new_connection(own.get_connection_params())), seconds)
