"""Faults of an application, planted in real ones."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.security import OAuth2PasswordBearer
from flask import Flask
from flask import request as flask_request
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.sessions import SessionMiddleware

from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware, RequestView
from semel.core.policy import Mode
from semel.doctor import Finding, Limits, Verdict, examine
from semel.doctor.app.checks import Places, same_store
from semel.errors import ConfigurationError
from semel.fastapi import Idempotent, install
from semel.flask import Semel, idempotent
from semel.operation import Operation
from semel.wsgi import IdempotencyMiddleware as WSGIMiddleware
from tests.conftest import migrate
from tests.doctor.planting import finding, not_ok, plants
from tests.kit import servers

DOCS = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which an application is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def url(sqlite_url: str, tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return sqlite_url


def account(request: RequestView) -> str | None:
    return request.headers.get("x-account")


def guarded(url: Any, *, scope: Any = account, policy: Policy | None = None, work: bool = False) -> Starlette:
    ours = Middleware(IdempotencyMiddleware, store=url, scope=scope, policy=policy, work=work)
    return Starlette(middleware=[Middleware(GZipMiddleware), ours])


def examined(app: Any, name: str, url: str | None = None) -> Finding:
    return finding(examine(url, app=app, only=[name]), name)


def test_a_healthy_app(url: str) -> None:
    """Nothing is wrong with an app as the docs write it; the store that it uses is examined with it."""
    app = guarded(url)
    report = examine(app=app)
    assert report.where == url
    assert not_ok(report) == []
    assert app.middleware_stack is None, "More may be added to it."


@plants("app-guard")
def test_no_guard(url: str) -> None:
    """An app without a guard is told so, and nothing else is asked of it."""
    report = examine(url, app=Starlette())
    assert finding(report, "app-guard").verdict is Verdict.WRONG
    assert finding(report, "app-order").is_skipped


def test_a_function_around_a_guard(url: str) -> None:
    """Into a function nothing can look: whether there is a guard inside can't be told."""
    inner = guarded(url)

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, send)

    found = examined(outer, "app-guard", url)
    assert found.verdict is Verdict.CANNOT_TELL
    assert "outer" in found.evidence


@plants("app-order")
@pytest.mark.parametrize(
    "inner", [GZipMiddleware, CORSMiddleware, (SessionMiddleware, {"secret_key": "x"}), (AuthenticationMiddleware, {})]
)
def test_order(url: str, inner: Any) -> None:
    """What has to be outside of the guard is found inside of it."""
    kind, options = inner if isinstance(inner, tuple) else (inner, {})
    if kind is AuthenticationMiddleware:
        options = {"backend": object()}
    ours = Middleware(IdempotencyMiddleware, store=url, scope=account)
    right = Starlette(middleware=[Middleware(kind, **options), ours])
    assert examined(right, "app-order").verdict is Verdict.OK
    found = examined(Starlette(middleware=[ours, Middleware(kind, **options)]), "app-order")
    assert found.verdict is Verdict.WRONG
    assert kind.__name__ in found.evidence


def test_order_where_routes_log_in(url: str) -> None:
    """Where each route names its own user, a login may be inside; compression may not."""
    app = FastAPI()
    app.add_middleware(SessionMiddleware, secret_key="x")
    install(app, store=url)
    route(app, account)
    assert examined(app, "app-order").verdict is Verdict.OK
    compressed = FastAPI()
    compressed.add_middleware(GZipMiddleware)
    install(compressed, store=url)
    route(compressed, account)
    assert examined(compressed, "app-order").verdict is Verdict.WRONG


def route(app: FastAPI, scope: Any) -> None:
    @app.post("/payments")
    def pay(operation: Annotated[Operation, Depends(Idempotent(scope=scope))]) -> None: ...


def by_address(request: RequestView) -> str:
    return str(request.raw["client"][0])


def by_header(request: RequestView) -> str | None:
    return request.headers.get("X-Forwarded-For")


def everyone(request: RequestView) -> str:
    return "everyone"


class Callable:
    """A scope that is an object."""

    def __call__(self, request: RequestView) -> str:
        return "all"


@plants("app-scope-constant")
@pytest.mark.parametrize("scope", [everyone, lambda _: "x", Callable()])
def test_one_scope_for_all(url: str, scope: Any) -> None:
    """A scope that reads nothing gives every user the same one; said aloud, that is right."""
    assert examined(guarded(url, scope=scope), "app-scope-constant").verdict is Verdict.WRONG
    assert examined(guarded(url, scope=SINGLE_TENANT), "app-scope-constant").verdict is Verdict.OK
    assert examined(guarded(url), "app-scope-constant").verdict is Verdict.OK


def test_a_scope_that_cannot_be_read(url: str) -> None:
    """A function without Python code can't be told about."""
    assert examined(guarded(url, scope=str), "app-scope-constant").verdict is Verdict.CANNOT_TELL


def by_client(request: Request) -> str:
    assert request.client
    return request.client.host


@plants("app-scope-address")
@pytest.mark.parametrize("scope", [by_address, by_header])
def test_scope_by_address(url: str, scope: Any) -> None:
    """A scope that reads the address of the client is found, and what it reads is told."""
    assert examined(guarded(url, scope=scope), "app-scope-address").verdict is Verdict.WRONG
    assert examined(guarded(url), "app-scope-address").verdict is Verdict.OK


def test_scopes_of_routes(url: str) -> None:
    """The dependency that names the user of a route is read, too; and the function of a view in Flask."""
    app = FastAPI()
    install(app, store=url)
    route(app, by_client)
    assert examined(app, "app-scope-address").verdict is Verdict.WRONG
    flask = Flask(__name__)
    Semel(flask, store=url, scope=lambda: flask_request.remote_addr)
    flask.post("/payments")(idempotent(lambda: "paid"))
    assert examined(flask, "app-scope-address").verdict is Verdict.WRONG
    assert examined(flask, "app-order").verdict is Verdict.OK


def test_a_view_without_a_scope(url: str) -> None:
    """A guarded view in Flask that has no scope is told of: each request to it would fail."""
    flask = Flask(__name__)
    Semel(flask, store=url)
    flask.post("/payments", endpoint="pay")(idempotent(lambda: "paid"))
    with pytest.raises(ConfigurationError, match="Each request to pay fails: it has no scope"):
        examine(url, app=flask, only=["app-*"])


@plants("app-enforcement", "app-retention", "app-body-limits")
@pytest.mark.parametrize(
    "name, policy",
    [
        ("app-enforcement", Policy.ietf(enforcement="report")),
        ("app-retention", Policy.ietf(retention=timedelta(minutes=1))),
        ("app-body-limits", Policy.ietf(max_response_body=2**31)),
    ],
)
def test_policies(url: str, name: str, policy: Policy) -> None:
    """A policy that guards less than it seems to is found."""
    assert examined(guarded(url), name).verdict is Verdict.OK
    assert examined(guarded(url, policy=policy), name).verdict is Verdict.WRONG


INSERT = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at, completed_at,
                        expires_at, request_line)
VALUES ('s', 'k', 'complete', 1, decode(md5(''), 'hex'), '', 200, '[]', '', now() - interval '10 minutes', now(),
        now() + interval '1 day', 'POST /slow')
"""


@plants("app-lease", "app-worker")
def test_what_the_records_tell(postgres_url: str) -> None:
    """The slowest handler is compared with the lease; and a store shows whether a service was ever at work."""
    policy = Policy.ietf(lease=timedelta(seconds=5), store_request=True)
    app = guarded(postgres_url, policy=policy)
    assert examined(app, "app-lease").verdict is Verdict.OK
    assert examined(app, "app-worker").verdict is Verdict.WRONG
    assert examined(guarded(postgres_url, policy=policy, work=True), "app-worker").verdict is Verdict.OK
    with psycopg.connect(postgres_url) as connection:
        connection.execute(INSERT)
        connection.execute("INSERT INTO semel_keys_watermark (swept_to) VALUES (clock_timestamp())")
    slow = examined(app, "app-lease")
    assert slow.verdict is Verdict.WRONG
    assert "POST /slow" in slow.evidence
    with psycopg.connect(postgres_url) as connection:
        connection.execute("UPDATE semel_keys SET created_at = completed_at, request_line = 'POST /atomic'")
    atomic = examined(app, "app-lease")
    assert (atomic.verdict, atomic.evidence) == (
        Verdict.OK,
        "1 finished records, and none tells how long its handler ran: those of atomic mode are made at its end.",
    )
    assert examined(app, "app-worker").verdict is Verdict.OK


def test_a_worker_that_leaves_no_mark(url: str) -> None:
    """On SQLite it can't be told whether a worker runs, while nothing waits."""
    app = guarded(url, policy=Policy.ietf(in_progress="accept"))
    assert examined(app, "app-worker").verdict is Verdict.CANNOT_TELL
    assert examined(guarded(url), "app-worker").verdict is Verdict.OK


@plants("app-memory")
def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in memory is for tests; how many processes the app is told to have is a part of the evidence."""
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    found = finding(examine(app=guarded("memory://")), "app-memory")
    assert found.verdict is Verdict.WRONG
    assert "WEB_CONCURRENCY = 4" in found.evidence


@plants("app-alembic")
def test_alembic(url: str, elsewhere: Path) -> None:
    """An env.py that would drop Semel's tables is found; that of the docs is not."""
    (elsewhere / "alembic.ini").write_text("[alembic]\nscript_location = %(here)s/db\n")
    (elsewhere / "db").mkdir()
    example = (DOCS / "alembic_env.py").read_text()
    env = elsewhere / "db" / "env.py"
    env.write_text("\n".join(line for line in example.splitlines() if "semel" not in line and "include_" not in line))
    alone = examined(guarded(url), "app-alembic")
    assert (alone.verdict, alone.evidence) == (Verdict.OK, "Semel's tables have a database of their own.")
    with closing(sqlite3.connect(elsewhere / "semel.db")) as connection:
        connection.execute("CREATE TABLE orders (id)")
    assert examined(guarded(url), "app-alembic").verdict is Verdict.WRONG
    env.write_text(example)
    assert examined(guarded(url), "app-alembic").verdict is Verdict.OK


@plants("app-same-store")
def test_another_store(url: str, elsewhere: Path) -> None:
    """A store that is not the app's is told to be another."""
    other = f"sqlite:///{elsewhere}/other.db"
    migrate(other)
    assert examined(guarded(url), "app-same-store", other).verdict is Verdict.WRONG
    assert examined(guarded(url), "app-same-store", url).verdict is Verdict.OK
    seen = Places("postgresql://db/shop", "postgresql://127.0.0.1/shop")
    assert same_store(seen, Limits()).verdict is Verdict.CANNOT_TELL


@plants("sqlite-synchronous")
def test_an_engine_that_does_not_wait(url: str) -> None:
    """Connections of the application's own that commit without waiting for the disk are found."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(url)
    app = WSGIMiddleware(Flask(__name__), store=engine, scope=account)
    assert finding(examine(app=app), "sqlite-synchronous").verdict is Verdict.OK
    engine.dispose()

    def hurry(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA synchronous = NORMAL")

    sqlalchemy.event.listen(engine, "connect", hurry)
    found = finding(examine(app=app), "sqlite-synchronous")
    assert found.verdict is Verdict.WRONG
    assert "NORMAL" in found.evidence
    engine.dispose()


DJANGO = """
from django.conf import settings
from django.core.wsgi import get_wsgi_application

OURS, USER = "semel.django.IdempotencyMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware"
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}},
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "semel.django"],
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware", ORDER],
    SEMEL={"POLICY": {"required": True}},
)
application = get_wsgi_application()
"""


REST = """
settings.INSTALLED_APPS.append("rest_framework")
settings.ROOT_URLCONF = __name__
from django.urls import path
from rest_framework.generics import CreateAPIView
urlpatterns = [path("orders/", CreateAPIView.as_view())]
"""


@pytest.mark.slow
def test_a_login_of_rest_frameworks(elsewhere: Path) -> None:
    """A view of REST framework below Django's middleware is found: its own login is inside of the guard."""
    (elsewhere / "site_of_ours.py").write_text(DJANGO.replace("ORDER", "USER, OURS") + REST)
    command = [
        sys.executable,
        "-m",
        "semel",
        "doctor",
        "--app",
        "site_of_ours:application",
        "--only",
        "app-*",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert "semel.E023" in found["app-django"]["evidence"], done
    assert found["app-order"]["verdict"] == "wrong"
    assert "/orders/ (CreateAPIView)" in found["app-order"]["evidence"]
    for each in found["app-order"]["mend"], found["app-django"]["evidence"]:
        assert 'SEMEL["PATHS"]' in each


@plants("app-django")
@pytest.mark.parametrize(
    "order, verdict", [pytest.param("USER, OURS", "ok", marks=pytest.mark.slow), ("OURS, USER", "wrong")]
)
def test_django(elsewhere: Path, order: str, verdict: str) -> None:
    """What Django's own checks say of Semel is told, without a database."""
    (elsewhere / "site_of_ours.py").write_text(DJANGO.replace("ORDER", order))
    command = [
        sys.executable,
        "-m",
        "semel",
        "doctor",
        "--app",
        "site_of_ours:application",
        "--only",
        "app-*",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert "inside of all middleware" not in found["app-order"]["evidence"]
    assert found["app-django"]["verdict"] == verdict, done
    assert (done.returncode == 1) == (verdict == "wrong")
    assert ("semel.E020" in found["app-django"]["evidence"]) == (verdict == "wrong")


def test_an_engine_of_an_event_loop(postgres_url: str) -> None:
    """The database of an async engine is examined by its address, if that is all it takes; else it can't be told."""
    asyncio = pytest.importorskip("sqlalchemy.ext.asyncio")
    there = asyncio.create_async_engine(postgres_url.replace("postgresql:", "postgresql+asyncpg:"))
    assert [name for name, *_ in not_ok(examine(app=guarded(there)))] == ["postgres-fsync"]
    port = servers.free_port()
    away = asyncio.create_async_engine(f"postgresql+asyncpg://shop:secret@127.0.0.1:{port}/shop")
    found = finding(examine(app=guarded(away)), "postgres-reachable")
    assert found.verdict is Verdict.CANNOT_TELL
    assert "Give the store's URL, too" in found.evidence


def test_no_app(url: str) -> None:
    """What can't be called is no application, and that is said before anything is examined."""
    with pytest.raises(ConfigurationError, match="no application"):
        examine(url, app="shop.main:app")


@pytest.fixture
def wrapped_around_itself() -> Any:
    class Loop:
        app: Any = None

        def __call__(self) -> None: ...

    loop, other = Loop(), Loop()
    loop.app, other.app = other, loop
    return loop


def test_an_app_around_itself(wrapped_around_itself: Any, url: str) -> None:
    """An app that is wrapped around itself is looked into only so far."""
    assert examined(wrapped_around_itself, "app-guard", url).verdict is Verdict.WRONG


@pytest.mark.parametrize("scope, verdict", [(SINGLE_TENANT, Verdict.WRONG), (account, Verdict.OK)])
def test_a_login_inside_of_the_guard(url: str, scope: Any, verdict: Verdict) -> None:
    """A route that logs in inside of a guard which knows no users is found: a replay would not ask that login."""
    app, shop = FastAPI(), FastAPI()
    app.add_middleware(IdempotencyMiddleware, store=url, scope=scope)
    app.mount("/shop", shop)

    @shop.post("/orders")
    @app.post("/payments")
    def pay(token: Annotated[str, Depends(OAuth2PasswordBearer("/token"))]) -> None: ...

    found = examined(app, "app-order")
    assert found.verdict is verdict
    assert ("/payments, /shop/orders" in found.evidence) == (verdict is Verdict.WRONG)


@plants("app-session")
@pytest.mark.parametrize("mode", ["atomic", "guard"])
@pytest.mark.parametrize("way", ["login yields", "its object", "route opens", "login closes", "of the operation"])
def test_sessions_beside_the_operations(url: str, mode: Mode, way: str) -> None:
    """In atomic mode, a login that keeps a session of the store's engine is found, and a route that opens one."""
    sessions = async_sessionmaker(create_async_engine(url.replace(":", "+aiosqlite:", 1)))
    app = FastAPI()
    install(app, store=sessions, policy=Policy.ietf(mode=mode))

    async def get_db() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            yield session

    class Database:
        async def __call__(self) -> AsyncIterator[AsyncSession]:
            async with sessions() as session:
                yield session

    async def kept(db: Annotated[AsyncSession, Depends(Database() if way == "its object" else get_db)]) -> str:
        return str(db)

    async def closed() -> str:
        async with sessions() as session:
            return str(session)

    guard = Idempotent(scope=kept if way in {"login yields", "its object"} else closed)

    async def lent(operation: Annotated[Operation, Depends(guard)]) -> AsyncIterator[Any]:
        yield operation.connection

    async def opens() -> None:
        async with sessions() as session:
            await session.commit()

    async def plain(session: Annotated[Any, Depends(lent)]) -> None: ...

    too = [Depends(kept)] if way == "login yields" else []
    app.post("/payments", dependencies=[Depends(guard), *too])(opens if way == "route opens" else plain)
    found = examined(app, "app-session")
    seen = {"login yields": "get_db", "its object": "Database.__call__", "route opens": "opens"}
    is_wrong = mode == "atomic" and way in seen
    assert found.verdict is (Verdict.WRONG if is_wrong else Verdict.OK), found.evidence
    assert (seen.get(way, "opens") in found.evidence) == is_wrong
    assert found.evidence.count("get_db") <= 1, "named once, though a login and a route have it in common"
