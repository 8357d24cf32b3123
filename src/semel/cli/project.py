"""``manage.py semel``: these commands, about the store that a Django project's ``SEMEL`` names."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from django.conf import settings as django_settings
from django.core.wsgi import get_wsgi_application

from semel.cli import address
from semel.cli.main import main
from semel.django import conf
from semel.stores import AsyncStore, Store


class DjangoProject:
    """The project whose ``manage.py`` this is."""

    program = "python manage.py semel"

    def opened(self) -> Store:
        """Return its store, for threads."""
        return conf.settings().opened()

    def async_opened(self) -> AsyncStore:
        """Return its store, for an event loop."""
        return conf.settings().async_opened()

    def application_name(self) -> str | None:
        """Return where its server finds it, with what is around Django there; None: its settings do not say."""
        module, _, name = (django_settings.WSGI_APPLICATION or "").rpartition(".")
        return f"{module}:{name}" if module else None

    def application(self) -> Any:
        """Return Django alone."""
        return get_wsgi_application()


def run(arguments: Sequence[str]) -> None:
    """Run a command. It ends with ``SystemExit``, unless its status is 0."""
    # Django has read these two, wherever they stand.
    djangos = ArgumentParser(add_help=False, allow_abbrev=False)
    djangos.add_argument("--settings")
    djangos.add_argument("--pythonpath")
    _, typed = djangos.parse_known_args(arguments)
    address.project = DjangoProject()
    try:
        with redirect_stdout(sys.stdout):  # The command line puts another in its place.
            main(typed, DjangoProject.program)
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        address.project = None
