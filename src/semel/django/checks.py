"""The system checks of ``manage.py check``: the setting ``SEMEL``, its database, and the position of the middleware.
They connect to nothing.

    E001–E009, E016  the setting SEMEL and its parts    E010–E013  the database    E014, E015  what a STORE rules out
    E020–E022, W020  the order of MIDDLEWARE    E023, E024  views, by the URL configuration    W025  atomic mode
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register  # noqa: A004 - Django's own name for it
from django.db import connections, router
from django.urls import get_resolver

from semel.django import atomicity, conf
from semel.django.views import choice_of

OURS = frozenset({"semel.django.middleware.IdempotencyMiddleware", "semel.django.IdempotencyMiddleware"})

_AUTH = "django.contrib.auth.middleware."
_HTTP = "django.middleware."

#: What must be above the middleware, and why; by the number of the check.
_ABOVE = (
    (
        "semel.E020",
        (
            "django.contrib.sessions.middleware.SessionMiddleware",
            f"{_AUTH}AuthenticationMiddleware",
            f"{_AUTH}RemoteUserMiddleware",
            f"{_AUTH}PersistentRemoteUserMiddleware",
        ),
        "it finds the user who is logged in, and a key belongs to a user",
    ),
    (
        "semel.E021",
        (f"{_HTTP}csrf.CsrfViewMiddleware", f"{_AUTH}LoginRequiredMiddleware"),
        "a request that it refuses must not get a stored answer, nor its refusal be stored",
    ),
    (
        "semel.E022",
        (f"{_HTTP}gzip.GZipMiddleware", f"{_HTTP}http.ConditionalGetMiddleware"),
        "it changes an answer for one client and one request, and that must not be stored for the next",
    ),
)


@register(Tags.compatibility)  # type: ignore[untyped-decorator]  # Django has no types
def check(**_: Any) -> list[CheckMessage]:
    """Look at the settings."""
    said, problems = conf.read(getattr(django_settings, conf.NAME, {}))
    found = [Error(each.message, hint=each.hint, id=each.id) for each in problems]
    views = list(_views())
    middleware = list(django_settings.MIDDLEWARE)
    found += [*_database(said), *_store(said), *_order(middleware, said)]
    return [*found, *_logins(said), *_transactions(views, said), *_atomic(views, said)]


def _views() -> Iterator[tuple[str, Any]]:
    """Yield the path of every route, with names in place of what varies, and its view."""
    from django.contrib.admindocs.views import (  # noqa: PLC0415 - it imports the admin, which a server may not need
        extract_views_from_urlpatterns,
        simplify_regex,
    )

    if getattr(django_settings, "ROOT_URLCONF", None):
        for view, route, _, _ in extract_views_from_urlpatterns(get_resolver().url_patterns):
            yield simplify_regex(route), view


def own_logins(said: conf.Settings) -> Iterator[str]:
    """Yield what the middleware guards by Django's own login, and logs in by itself: path and name of each view."""
    if said.scope is not conf.user_scope or OURS.isdisjoint(django_settings.MIDDLEWARE):
        return
    for path, view in _views():
        if choice_of(view) is None and conf.logs_in_inside(view):
            methods = getattr(view, "actions", None) or [
                each for each in view.cls.http_method_names if hasattr(view.cls, each)
            ]
            if any(said.routes.policy_for(each.upper(), path) for each in methods):
                yield f"{path} ({view.cls.__name__})"


def _logins(said: conf.Settings) -> Iterator[CheckMessage]:
    for each in own_logins(said):
        yield Error(
            f"The middleware of Semel guards {each}, and asks Django's own login for the user. Requests with a key are "
            "refused there.",
            hint=f"{conf.LOGS_IN_INSIDE} {conf.OR_SCOPE}",
            id="semel.E023",
        )


def _transactions(views: list[tuple[str, Any]], said: conf.Settings) -> Iterator[CheckMessage]:
    for path, view in views:
        is_function = hasattr(view, "cls") and not hasattr(view.cls, "get_idempotency_policy")
        if (
            is_function
            and choice_of(view) is not None
            and said.database in atomicity.aliases(atomicity.opted_out(view))
        ):
            yield Error(
                f"ATOMIC_REQUESTS opens a transaction around {path} ({view.cls.__name__}), so the guard below "
                "@api_view can't commit what it writes. Requests with a key are refused there.",
                hint="Put @transaction.non_atomic_requests above @api_view.",
                id="semel.E024",
            )


def _atomic(views: list[tuple[str, Any]], said: conf.Settings) -> Iterator[CheckMessage]:
    choices = [choice_of(view) for _, view in views]
    policies = [*said.policies, *(each.policy for each in choices if each is not None and each.policy is not None)]
    if said.store is not None or all(each.mode != "atomic" for each in policies):
        return
    models = [each for each in apps.get_models() if not each.__module__.startswith(("django.contrib.", "semel."))]
    written = {router.db_for_write(each) for each in models}
    if written and said.database not in written:
        yield Warning(
            f'POLICY has mode="atomic", and DATABASE_ROUTERS write no model to SEMEL["DATABASE"], {said.database!r}: '
            "what a view writes is not in the transaction of its record, and a crash between the two runs it again.",
            hint=f'Name the database of the models in SEMEL["DATABASE"]: {", ".join(map(repr, sorted(written)))}.',
            id="semel.W025",
        )


def _database(said: conf.Settings) -> Iterator[CheckMessage]:
    alias = said.database
    if said.store is not None:
        return
    if alias not in connections.settings:
        known = ", ".join(map(repr, connections.settings))
        yield Error(
            f'SEMEL["DATABASE"] is {alias!r}, and DATABASES has no such entry.',
            hint=f"It has {known}.",
            id="semel.E010",
        )
        return
    wrapper = connections[alias]
    if wrapper.vendor not in {"postgresql", "sqlite"}:
        yield Error(
            f"The database {alias!r} is {wrapper.display_name}, in which Semel can't keep its records.",
            hint='Name a PostgreSQL or SQLite one in SEMEL["DATABASE"], or give a store of its own in SEMEL["STORE"].',
            id="semel.E011",
        )
    elif wrapper.vendor == "postgresql" and wrapper.Database.__name__ != "psycopg":
        yield Error(
            f"The database {alias!r} uses {wrapper.Database.__name__}, and Semel needs psycopg 3.",
            hint="Run: pip install 'psycopg[binary]'. Django then uses it.",
            id="semel.E012",
        )
    elif not router.allow_migrate(alias, "semel", model_name="record"):
        yield Error(
            f"DATABASE_ROUTERS keep the app semel from the database {alias!r}, so its tables are not made there.",
            hint=f'Have allow_migrate({alias!r}, "semel") return True, or name another database in SEMEL["DATABASE"].',
            id="semel.E013",
        )


def _store(said: conf.Settings) -> Iterator[CheckMessage]:
    if said.store is None:
        return
    if any(policy.mode == "atomic" for policy in said.policies):
        yield Error(
            'POLICY has mode="atomic", and SEMEL["STORE"] is a store of its own: what the ORM writes is not in its '
            "transactions.",
            hint='Leave STORE out, so that records are kept in Django\'s database; or use mode="guard".',
            id="semel.E014",
        )
    if said.audit != "on":
        yield Error(
            'SEMEL["AUDIT"] is about Django\'s database, and SEMEL["STORE"] is a store of its own.',
            hint=f"Leave AUDIT out, and add ?audit={said.audit} to the URL of the store.",
            id="semel.E015",
        )


def _order(middleware: list[str], said: conf.Settings) -> Iterator[CheckMessage]:
    ours = [place for place, each in enumerate(middleware) if each in OURS]
    if not ours:
        return
    mine, first = middleware[ours[0]], ours[0]
    below = middleware[first + 1 :]
    for number, names, why in _ABOVE:
        for each in names:
            if each in below:
                yield Error(
                    f"MIDDLEWARE has {mine} above {each}: {why}.",
                    hint=f"Move {mine} below {each}.",
                    id=number,
                )
    if said.scope is conf.user_scope and not any("auth" in each.lower() for each in middleware):
        yield Warning(
            f"MIDDLEWARE has {mine} and nothing that finds the user, so every guarded request has no user"
            + (f", and all share the scope {conf.ANONYMOUS!r}." if said.allow_anonymous else " and is refused."),
            hint='Add AuthenticationMiddleware above it, or give a function that returns the user in SEMEL["SCOPE"].',
            id="semel.W020",
        )
