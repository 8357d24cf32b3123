"""The one Django project of these tests: Django can be set up once in a process. Databases come and go with the tests.

set_up()                                      # before anything of Django's models is imported; safe to repeat
with databases(default=url):                  # the alias means this database, in every thread, inside the block
    make_tables()                             # as `manage.py migrate` does, Payment's table too
with serving(urlpatterns):                    # ROOT_URLCONF, inside the block
    Client().post("/payments")
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import django
import psycopg.conninfo
import pytest
from asgiref.local import Local
from asgiref.sync import SyncToAsync
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.postgresql.base import DatabaseWrapper as PostgresWrapper
from django.db.backends.signals import connection_created
from django.test import override_settings
from django.urls import clear_url_caches

ROOT = Path(__file__).parents[2]

#: Of Django: pools of PostgreSQL connections, and ``transaction_mode`` of SQLite.
since_5_1 = pytest.mark.skipif(django.VERSION < (5, 1), reason="Django has this from 5.1 on.")

#: What an alias means while no test says otherwise: nothing that could be opened by mistake.
NOWHERE = {"ENGINE": "django.db.backends.dummy"}

#: Every connection that was opened since the databases were last changed, in whatever thread.
_opened: list[Any] = []


def set_up() -> None:
    """Set Django up for this process, once."""
    if settings.configured:
        return
    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": NOWHERE},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "django.contrib.auth",
            "django.contrib.sessions",
            "django.contrib.messages",
            "django.contrib.admin",
            "rest_framework",
            "drf_spectacular",
            "semel.django",
            "tests.django.shop.apps.ShopConfig",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],  # Tests log in often.
        REST_FRAMEWORK={"DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema"},
        ROOT_URLCONF="tests.django.urls",
        SECRET_KEY="for tests only",
        SPECTACULAR_SETTINGS={"TITLE": "Shop", "VERSION": "1"},
        STATIC_URL="/static/",
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        USE_TZ=True,
    )
    connection_created.connect(_note)
    django.setup()


def settings_of(url: str, **options: Any) -> dict[str, Any]:
    """Return a database URL as an entry of ``DATABASES``, with *options* for its ``OPTIONS``."""
    if url.startswith("sqlite:///"):
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": urlsplit(url).path[1:], "OPTIONS": options}
    parts: dict[str, Any] = dict(psycopg.conninfo.conninfo_to_dict(url))
    known = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    rest = {name: value for name, value in parts.items() if name not in known}
    named = {django_name: str(parts.get(name) or "") for name, django_name in known.items()}
    return {"ENGINE": "django.db.backends.postgresql", **named, "OPTIONS": rest | options}


@contextmanager
def databases(**given: str | Mapping[str, Any]) -> Iterator[None]:
    """Have each alias mean a database (a URL, or an entry of ``DATABASES``), in every thread, inside the block."""
    entries = {alias: settings_of(each) if isinstance(each, str) else dict(each) for alias, each in given.items()}
    before = dict(connections.settings)
    _forget_connections()
    connections.settings.update(connections.configure_settings({"default": NOWHERE} | entries))
    try:
        yield
    finally:
        _forget_connections()
        connections.settings.clear()
        connections.settings.update(before)


def make_tables(alias: str = "default") -> None:
    """Do what ``manage.py migrate`` does."""
    call_command("migrate", database=alias, run_syncdb=True, verbosity=0)


@contextmanager
def serving(urlpatterns: Sequence[Any], **more: Any) -> Iterator[None]:
    """Have the project serve *urlpatterns*, with *more* settings (``MIDDLEWARE``, ``SEMEL``), inside the block."""
    module: Any = ModuleType(f"urls_{uuid4().hex}")
    module.urlpatterns = urlpatterns
    sys.modules[module.__name__] = module
    try:
        with override_settings(ROOT_URLCONF=module.__name__, **more):
            yield
    finally:
        clear_url_caches()
        del sys.modules[module.__name__]


def close_connections() -> None:
    """Close what threads that have ended, or that nobody asks to, have left open."""
    # To close what a thread is using would crash the interpreter. This one may have something left to do.
    SyncToAsync.single_thread_executor.submit(lambda: None).result()
    while _opened:
        wrapper = _opened.pop()
        # From another thread than its own, which Django allows to those who say so.
        wrapper.inc_thread_sharing()
        try:
            # Not its own close(), which leaves an in-memory database open.
            BaseDatabaseWrapper.close(wrapper)
        finally:
            wrapper.dec_thread_sharing()


def _note(*, connection: Any, **_: Any) -> None:
    _opened.append(connection)


def _forget_connections() -> None:
    close_connections()
    pools = getattr(PostgresWrapper, "_connection_pools", {})  # Django has none before 5.1.
    while pools:
        pools.popitem()[1].close()
    # Threads outlive tests, and each has its own wrapper for an alias.
    connections._connections = Local(connections.thread_critical)
