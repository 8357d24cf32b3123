"""Which store a command is about. No URL is repeated in a message, since it may hold a password."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import typer

from semel.errors import ConfigurationError
from semel.stores import AsyncStore, Store, async_store, store, without_driver
from semel.stores.encrypted.value import plain
from semel.stores.sqlite.file import Place, has_table, locate

VARIABLE = "SEMEL_STORE"
#: Where the middleware keeps its keys if it is given no store.
USUAL_FILE = Path("semel.db")

StoreOption = Annotated[
    str | None, typer.Option("--store", metavar="URL", help=f"The store; else {VARIABLE}, else ./{USUAL_FILE}.")
]


class Project(Protocol):
    """A project that has a store: ``manage.py semel`` is about it, where no other store is named."""

    #: What is typed to run these commands.
    program: str

    def opened(self) -> Store:
        """Return a store for threads."""

    def async_opened(self) -> AsyncStore:
        """Return one for an event loop."""

    def application_name(self) -> str | None:
        """Return where the application is, as ``--app`` names it; None: nowhere, and ``application`` makes one."""

    def application(self) -> Any:
        """Return an application."""


#: The project whose program this is, if it is one.
project: Project | None = None

_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


def named(url: str | None) -> str | None:
    """Return the URL that was typed, or else the one in the environment."""
    given = url or os.environ.get(VARIABLE)
    return checked(given) if given else None


def required(url: str | None) -> str:
    """Return the URL that was typed or set; it is an error if there is none."""
    if given := named(url):
        return given
    raise ConfigurationError(f"Which store? Give its URL, or set {VARIABLE}.")


def found(url: str | None) -> str:
    """Return the URL of the store that was typed or set, else of the usual file; it is an error if that is missing."""
    which = named(url)
    if which is None:
        if not USUAL_FILE.exists():
            raise ConfigurationError(f"Which store? Give --store URL or set {VARIABLE}: there is no {USUAL_FILE} here.")
        which = f"sqlite:///{USUAL_FILE}"
    if urlsplit(which).scheme == "sqlite":
        _look_at_file(locate(plain(which)))
    return which


def given(url: str | None) -> str | Store:
    """Return the URL of the store that was typed; else the project's store; else what ``found`` says."""
    return found(url) if project is None or url is not None else project.opened()


def made(url: str | None) -> Store:
    """Return that store for threads. A missing file is not created."""
    which = given(url)
    return which if isinstance(which, Store) else store(which)


def async_made(url: str | None) -> AsyncStore:
    """Return it for an event loop."""
    return async_store(found(url)) if project is None or url is not None else project.async_opened()


@contextmanager
def opened(url: str | None) -> Iterator[Store]:
    """Open the store, and close it afterwards."""
    keys = made(url)
    try:
        yield keys
    finally:
        keys.close()


def _look_at_file(place: Place) -> None:
    if not place.path.exists():
        raise ConfigurationError(
            f"There is no file {place.path}. A path from the root has four slashes: sqlite:////folder/file."
        )
    if not has_table(place):
        raise ConfigurationError(f"{place.path} does not have Semel's table {place.names.table}.")


def checked(url: str) -> str:
    """Refuse a URL that can't be parsed: the libraries would quote it in their message, with its password."""
    try:
        urlsplit(url)
    except ValueError:
        raise _unreadable() from None
    if _STRAY_PERCENT.search(url):
        raise _unreadable()
    return without_driver(url)


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "The store's URL can't be read. In a password, write @ : / [ ] % as %40 %3A %2F %5B %5D %25."
    )
