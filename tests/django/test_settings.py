"""The setting SEMEL: what it may say, what is found wrong with it, and that it is read again when it changes."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group, User
from django.core.checks import run_checks
from django.db import connections, transaction
from django.test import override_settings
from django.urls import include, path, re_path
from django.utils.functional import SimpleLazyObject
from rest_framework.decorators import api_view
from rest_framework.viewsets import ViewSet

from semel import Policy
from semel.django import conf, idempotent
from semel.errors import ConfigurationError
from semel.stores.django import AsyncDjangoStore, DjangoStore
from semel.stores.sqlite import AsyncSQLiteStore, SQLiteStore
from semel.stores.tiered import Tiered
from semel.stores.tiered.store import AsyncTieredStore, TieredStore
from tests.django import project

OURS = "semel.django.middleware.IdempotencyMiddleware"
SESSIONS = "django.contrib.sessions.middleware.SessionMiddleware"
AUTH = "django.contrib.auth.middleware.AuthenticationMiddleware"


def somebody(pk: object = 7, *, is_authenticated: bool = True) -> Any:
    return SimpleNamespace(user=SimpleNamespace(pk=pk, is_authenticated=is_authenticated))


def by_header(request: Any) -> str | None:
    found: str | None = request.headers.get("x-account")
    return found


async def by_header_later(request: Any) -> str | None:
    return by_header(request)


#: What the setting alone does not show: databases, and what a store of its own rules out.
NOT_BY_THEMSELVES = {f"semel.E0{number}" for number in range(10, 16)}


def problems(semel: dict[Any, Any] | None = None, **more: Any) -> dict[str, str]:
    """Say what ``manage.py check`` finds, by number."""
    with override_settings(SEMEL=(semel or {}) | more):
        return {each.id: f"{each.msg} {each.hint}" for each in run_checks() if str(each.id).startswith("semel")}


class TestReading:
    def test_nothing(self) -> None:
        """Without the setting, everything is as usual."""
        assert conf.settings() == conf.Settings()
        assert conf.settings().policy == Policy.ietf()

    def test_everything(self) -> None:
        """Each part is read into its place."""
        said = {
            "DATABASE": "default",
            "POLICY": {"required": True, "lease": timedelta(seconds=5)},
            "SCOPE": "tests.django.test_settings.by_header",
            "ALLOW_ANONYMOUS": True,
            "PATHS": {"/payments/*": "stripe", "/rides/*": {"required": True}},
            "AUDIT": "replays",
        }
        with override_settings(SEMEL=said):
            found = conf.settings()
            assert found.policy == Policy.ietf(required=True, lease=timedelta(seconds=5))
            assert (found.scope.__name__, found.allow_anonymous, found.audit) == ("by_header", True, "replays")
            assert found.routes.policy_for("POST", "/payments/1") == Policy.stripe()
            assert found.routes.policy_for("PATCH", "/payments/1") is None
            assert found.routes.policy_for("POST", "/other") is None
            assert len(found.policies) == 3

    @pytest.mark.parametrize(
        "given, expected",
        [
            ("ietf", Policy.ietf()),
            ("stripe", Policy.stripe()),
            (Policy.stripe(required=True), Policy.stripe(required=True)),
        ],
    )
    def test_policy(self, given: Any, expected: Policy) -> None:
        """A policy may be one, or a name of one."""
        with override_settings(SEMEL={"POLICY": given}):
            assert conf.settings().policy == expected

    def test_read_again(self) -> None:
        """Overridden settings count at once, and are forgotten after; the stores with them."""
        before = conf.store()
        with override_settings(SEMEL={"AUDIT": "off"}):
            assert conf.settings().audit == "off"
            assert conf.store() is not before
            assert conf.store() is conf.store()
            assert conf.async_store() is conf.async_store()
        assert conf.settings().audit == "on"
        with override_settings(SOMETHING_ELSE=1):
            assert conf.settings() is conf.settings()

    def test_stores(self, tmp_path: Any) -> None:
        """Records are in Django's database, unless a store of its own is named."""
        with override_settings(SEMEL={}):
            assert isinstance(conf.store(), DjangoStore)
            assert isinstance(conf.async_store(), AsyncDjangoStore)
        with override_settings(SEMEL={"STORE": f"sqlite:///{tmp_path}/semel.db"}):
            assert isinstance(conf.store(), SQLiteStore)
            assert isinstance(conf.async_store(), AsyncSQLiteStore)
        with override_settings(SEMEL={"STORE": Tiered(f"sqlite:///{tmp_path}/semel.db")}):
            assert isinstance(conf.store(), TieredStore)
            assert isinstance(conf.async_store(), AsyncTieredStore)


class TestScope:
    def test_user(self) -> None:
        """By default a key belongs to the user who is logged in; a request of nobody's to nobody."""
        principal = conf.Settings().principal
        assert principal(somebody()) == "user:7"
        assert principal(somebody(is_authenticated=False)) is None
        assert principal(SimpleNamespace()) is None

    def test_anonymous(self) -> None:
        """Where the project allows it, requests of nobody's share one scope."""
        principal = conf.Settings(allow_anonymous=True).principal
        assert principal(somebody()) == "user:7"
        assert principal(somebody(is_authenticated=False)) == "anonymous"

    def test_async(self) -> None:
        """In an async view the user is asked for without holding up the loop, in old versions of Django and new."""

        async def auser() -> Any:
            return somebody(8).user

        for request, expected in ((somebody(), "user:7"), (SimpleNamespace(auser=auser), "user:8")):
            assert async_to_sync(conf.Settings().aprincipal)(request) == expected

    def test_a_user_whom_a_middleware_has_set(self) -> None:
        """Whoever logs in by a token sets request.user: that is who counts in an async view, too, not the session's."""

        async def nobody() -> Any:
            return somebody(is_authenticated=False).user

        async def another() -> Any:
            return somebody(8).user

        principal = async_to_sync(conf.Settings(allow_anonymous=True).aprincipal)
        for auser in (nobody, another):
            assert principal(SimpleNamespace(user=somebody().user, auser=auser)) == "user:7"

    @pytest.mark.parametrize("allow_anonymous", [False, True])
    def test_users_who_were_never_saved(self, allow_anonymous: bool) -> None:
        """Users without a primary key can't be told apart: that is an error, and never one scope for all of them."""
        said = conf.Settings(allow_anonymous=allow_anonymous)
        request = SimpleNamespace(user=User(username="jane"))
        with pytest.raises(ConfigurationError, match=r'SEMEL\["SCOPE"\]'):
            said.principal(request)
        with pytest.raises(ConfigurationError, match="primary key"):
            async_to_sync(said.aprincipal)(request)

    def test_those_who_log_in_from_other_tables(self) -> None:
        """Where others than users can log in, the same number in two tables is two principals."""
        group = Group(pk=7)
        group.is_authenticated = True
        principal = conf.Settings().principal
        assert principal(SimpleNamespace(user=group)) == "auth.group:7"
        assert principal(SimpleNamespace(user=SimpleLazyObject(lambda: User(pk=7)))) == "user:7"

    def test_of_the_projects_own(self) -> None:
        """A scope of the project's own may be a plain function, for both colours, or an async one, for one."""
        request = SimpleNamespace(headers={"x-account": "acme"})
        plain, later = conf.Settings(scope=by_header), conf.Settings(scope=by_header_later)
        assert plain.principal(request) == "acme"
        assert async_to_sync(plain.aprincipal)(request) == "acme"
        assert async_to_sync(later.aprincipal)(request) == "acme"
        with pytest.raises(ConfigurationError, match="async def"):
            later.principal(request)


class TestChecks:
    def test_all_is_well(self, database: str) -> None:
        """A project that is set up well hears nothing."""
        assert problems() == {}
        assert problems(POLICY={"mode": "atomic"}) == {}

    @pytest.mark.parametrize(
        "semel, number, says",
        [
            ({"DATABSE": "default"}, "semel.E002", "Did you mean 'DATABASE'"),
            ({"Policy": "ietf"}, "semel.E002", "Did you mean 'POLICY'"),
            ({7: 7}, "semel.E002", "There are DATABASE, POLICY"),
            ({"DATABASE": None}, "semel.E003", "entry of DATABASES"),
            ({"POLICY": {"requird": True}}, "semel.E004", "required"),
            ({"POLICY": {"lease": 5}}, "semel.E004", "lease"),
            ({"POLICY": {7: 7}}, "semel.E004", "string"),
            ({"POLICY": "github"}, "semel.E004", '"ietf" or "stripe"'),
            ({"POLICY": []}, "semel.E004", '"ietf" or "stripe"'),
            ({"SCOPE": "tests.django.nowhere.scope"}, "semel.E005", "No module"),
            ({"SCOPE": 7}, "semel.E005", "function that returns the user"),
            ({"ALLOW_ANONYMOUS": "no"}, "semel.E006", "True or False"),
            ({"PATHS": ["orders"]}, "semel.E007", "orders"),
            ({"PATHS": {"/a": "github"}}, "semel.E007", "stripe"),
            ({"PATHS": iter(["/a"])}, "semel.E007", "Give a list"),
            ({"PATHS": 7}, "semel.E007", "patterns"),
            ({"AUDIT": True}, "semel.E008", "'replays'"),
            ({"STORE": "hunter2"}, "semel.E009", "postgresql://"),
            ({"ENCRYPT": "hunter2"}, "semel.E016", "env:NAME"),
            ({"DATABASE": "archive"}, "semel.E010", "It has 'default'"),
            ({"STORE": "memory://", "POLICY": {"mode": "atomic"}}, "semel.E014", "Leave STORE out"),
            ({"STORE": "memory://", "PATHS": {"/a": {"mode": "atomic"}}}, "semel.E014", "Leave STORE out"),
            ({"STORE": "memory://", "AUDIT": "off"}, "semel.E015", "?audit=off"),
        ],
    )
    def test_mistakes(self, sqlite: str, semel: dict[str, Any], number: str, says: str) -> None:
        """Each mistake has a number, says what is wrong and what to do; the first request finds the same."""
        found = problems(semel)
        assert list(found) == [number]
        assert says in found[number]
        assert "hunter2" not in found[number]
        if number not in NOT_BY_THEMSELVES:
            with override_settings(SEMEL=semel), pytest.raises(ConfigurationError) as error:
                conf.settings()
            assert says in str(error.value)

    def test_not_a_dict(self, sqlite: str) -> None:
        """SEMEL is a dict."""
        with override_settings(SEMEL=["DATABASE"]):
            assert [each.id for each in run_checks()] == ["semel.E001"]

    def test_several_at_once(self, sqlite: str) -> None:
        """All mistakes are told of at once."""
        assert set(problems(AUDIT=1, SCOPE=2, DATABSE=3)) == {"semel.E002", "semel.E005", "semel.E008"}

    def test_vendor(self) -> None:
        """A database in which Semel can't keep records is told of; with a store of its own it is no matter."""
        with project.databases(default={"ENGINE": "django.db.backends.dummy"}):
            assert list(problems()) == ["semel.E011"]
            assert problems(STORE="memory://") == {}

    def test_driver(self, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """So is an old driver."""
        monkeypatch.setattr(type(connections["default"]), "Database", type("psycopg2", (), {}))
        assert "pip install" in problems()["semel.E012"]

    def test_router(self, sqlite: str) -> None:
        """So is a router that keeps the tables from where they are to be."""
        with override_settings(DATABASE_ROUTERS=["tests.django.test_migrations.Elsewhere"]):
            assert list(problems()) == ["semel.E013"]


class ToShop:
    """A router that writes the shop's models to a database of their own."""

    def db_for_write(self, model: Any, **_: Any) -> str | None:
        return "pay" if model.__module__.startswith("tests.") else None


class TestViews:
    """What is found by the URL configuration."""

    @pytest.mark.parametrize(
        "paths, actions, number",
        [
            (None, {"post": "create"}, ["semel.E023"]),
            (["/api/*"], {"post": "create"}, ["semel.E023"]),
            (["/other/*"], {"post": "create"}, []),
            (None, {"get": "list"}, []),
        ],
    )
    def test_that_log_in_inside(self, sqlite: str, paths: Any, actions: Any, number: list[str]) -> None:
        """A view of REST framework's below the middleware is told of, if Django's own login is to name its users."""
        patterns = [re_path("^api/", include([path("orders/<int:pk>/", Orders.as_view(actions))]))]
        with project.serving(patterns, MIDDLEWARE=[SESSIONS, AUTH, OURS]):
            found = problems(PATHS=paths)
            assert list(found) == number
            assert all("/api/orders/<int:pk>/ (Orders)" in each for each in found.values())
            assert problems(PATHS=paths, SCOPE=by_header) == {}
        with project.serving(patterns, MIDDLEWARE=[SESSIONS, AUTH]):
            assert problems(PATHS=paths) == {}

    @pytest.mark.parametrize("is_marked", [False, True])
    def test_atomic_requests_around_a_function(self, django_sqlite_url: str, is_marked: bool) -> None:
        """A guard below @api_view that ATOMIC_REQUESTS opens a transaction around is told of."""
        view = api_view(["POST"])(idempotent(lambda _request: None))
        view = transaction.non_atomic_requests(view) if is_marked else view
        entry = project.settings_of(django_sqlite_url) | {"ATOMIC_REQUESTS": True}
        with project.databases(default=entry), project.serving([path("pay", view)]):
            assert list(problems()) == ([] if is_marked else ["semel.E024"])

    @pytest.mark.parametrize("where", ["settings", "view"])
    def test_atomic_mode_beside_the_models(self, sqlite: str, django_sqlite_url: str, where: str) -> None:
        """In atomic mode records belong into the database that the models are written to."""
        policy = Policy.ietf(mode="atomic")
        patterns = [path("pay", idempotent(policy=policy)(lambda _request: None))] if where == "view" else []
        semel = {"POLICY": policy} if where == "settings" else {}
        with project.databases(default=django_sqlite_url, pay=django_sqlite_url), project.serving(patterns):
            assert problems(semel) == {}
            with override_settings(DATABASE_ROUTERS=[f"{__name__}.ToShop"]):
                assert "'pay'" in problems(semel)["semel.W025"]
                assert problems(semel, DATABASE="pay") == {}
                assert problems() == ({} if where == "settings" else problems(semel))


class Orders(ViewSet):  # type: ignore[misc]  # REST framework has no types
    """Its default logins are by session and by password."""


class TestOrder:
    def test_right(self, sqlite: str) -> None:
        """Below who is logged in, and below what belongs to one request alone, is where the middleware belongs."""
        above = ["django.middleware.gzip.GZipMiddleware", SESSIONS, "django.middleware.csrf.CsrfViewMiddleware", AUTH]
        below = ["django.contrib.messages.middleware.MessageMiddleware"]
        with override_settings(MIDDLEWARE=[*above, OURS, *below]):
            assert problems() == {}

    @pytest.mark.parametrize("ours", [OURS, "semel.django.IdempotencyMiddleware"])
    @pytest.mark.parametrize(
        "other, number",
        [
            (SESSIONS, "semel.E020"),
            (AUTH, "semel.E020"),
            ("django.middleware.csrf.CsrfViewMiddleware", "semel.E021"),
            ("django.contrib.auth.middleware.LoginRequiredMiddleware", "semel.E021"),
            ("django.middleware.gzip.GZipMiddleware", "semel.E022"),
            ("django.middleware.http.ConditionalGetMiddleware", "semel.E022"),
        ],
    )
    def test_wrong(self, sqlite: str, ours: str, other: str, number: str) -> None:
        """Above any of them it is an error that names both, says why, and what to move."""
        rest = [each for each in (SESSIONS, AUTH) if each != other]
        with override_settings(MIDDLEWARE=[*rest, ours, other]):
            found = problems()
        assert f"Move {ours} below {other}." in found[number]
        assert f"{ours} above {other}: " in found[number]

    def test_nobody_logged_in(self, sqlite: str) -> None:
        """Without a login every request is nobody's, which is hardly what is meant."""
        with override_settings(MIDDLEWARE=[OURS]):
            assert "is refused" in problems()["semel.W020"]
            assert "share the scope" in problems(ALLOW_ANONYMOUS=True)["semel.W020"]
            assert problems(SCOPE=by_header) == {}

    def test_no_middleware(self, sqlite: str) -> None:
        """Without the middleware its place is nobody's concern."""
        with override_settings(MIDDLEWARE=[]):
            assert problems() == {}
