"""Django's connection of the calling thread: in what transaction it is, and when it is closed. The statements on it are
in ``postgres.py`` and ``sqlite.py``.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from semel.errors import ConfigurationError

try:
    from django.core.signals import request_finished, request_started
    from django.db import connections
    from django.db.transaction import Atomic
    from django.utils.connection import ConnectionDoesNotExist
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("This store needs Django. Run: pip install 'semel[django]'") from error

#: A ``django.db.backends.base.base.BaseDatabaseWrapper``. Django has no types.
Wrapper = Any


class Standing(Enum):
    """In which transaction a thread's connection is when a command comes."""

    #: In none: each statement is its own transaction.
    FREE = auto()
    #: In the transaction that ``django.test.TestCase`` rolls back after each test, and in no other.
    IN_TEST = auto()
    #: In a transaction that Semel has begun for a handler.
    LENT = auto()


class Block(Atomic):  # type: ignore[misc]  # Django has no types
    """The ``atomic`` block of a transaction that Semel has begun."""


def wrapper_of(alias: str) -> Wrapper:
    """Return the calling thread's own connection to the database *alias*."""
    try:
        return connections[alias]
    except ConnectionDoesNotExist:
        known = ", ".join(map(repr, connections))
        raise ConfigurationError(f"DATABASES has no {alias!r} for the records. It has {known}.") from None


def name_of(wrapper: Wrapper) -> str:
    """Return the database's name in the settings, for messages."""
    return f'DATABASES["{wrapper.alias}"]'


def standing_of(wrapper: Wrapper) -> Standing:
    """Return its transaction state; raise if no command may be carried out. It must be connected."""
    if not wrapper.in_atomic_block:
        if not wrapper.get_autocommit():
            raise ConfigurationError(
                f"{name_of(wrapper)} is not in autocommit mode, so what Semel writes would not be committed. Remove "
                '"AUTOCOMMIT": False, or set_autocommit(False).'
            )
        return Standing.FREE
    others = [block for block in wrapper.atomic_blocks if not block._from_testcase]  # noqa: SLF001 - Django's own mark
    if not others:
        return Standing.IN_TEST
    if isinstance(others[0], Block):
        return Standing.LENT
    raise ConfigurationError(
        f"A transaction is open on {name_of(wrapper)} around this guard. What Semel writes in it would be invisible "
        "to others until it ends, and a retry could run meanwhile. Put transaction.atomic() inside the guard; "
        "under ATOMIC_REQUESTS, mark the view with transaction.non_atomic_requests."
    )


def is_test_run() -> bool:
    """Whether Django's test environment is set up, by its own runner or by another."""
    testing = sys.modules.get("django.test.utils")
    return hasattr(getattr(testing, "_TestState", None), "saved_data")


class _Serving(threading.local):
    """Whether this thread serves a request: then Django closes its connections when the request has ended."""

    is_so = False


_serving = _Serving()


def _on_start(**_: Any) -> None:
    _serving.is_so = True


def _on_end(**_: Any) -> None:
    _serving.is_so = False


request_started.connect(_on_start, dispatch_uid="semel.stores.django")
request_finished.connect(_on_end, dispatch_uid="semel.stores.django")


class Opened:
    """Closes connections that were opened for Semel in threads which serve no request: Django would not close them. A
    connection that the thread had before stays open: the thread may be reading from it.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        """Note whether it is open, before it is used."""
        self._wrapper = wrapper
        self._was_open = wrapper.connection is not None

    def tidy(self) -> None:
        """Close it after use, if it is past its CONN_MAX_AGE."""
        wrapper = self._wrapper
        if not self._was_open:
            wrapper.semel_opened = wrapper.connection
        is_ours = wrapper.connection is not None and getattr(wrapper, "semel_opened", None) is wrapper.connection
        if is_ours and not _serving.is_so and not wrapper.in_atomic_block:
            with suppress(Exception):  # If it can't be closed, its next use will find it broken.
                wrapper.close_if_unusable_or_obsolete()


def close(wrapper: Wrapper) -> None:
    """Close it by Django's own method: the next use opens another. Never raises."""
    with suppress(Exception):
        wrapper.close()
