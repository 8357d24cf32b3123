"""Bad configuration is an error where the middleware is made, and names what is wrong."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from flask import Flask

import semel.asgi
import semel.fastapi
import semel.flask
import semel.wsgi
from semel import SINGLE_TENANT, Policy
from semel.errors import ConfigurationError, UnknownField
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.tiered import Tiered

SECOND = timedelta(seconds=1)

Make = Callable[..., Any]


async def asgi_app(scope: Any, receive: Any, send: Any) -> None: ...


def wsgi_app(environ: Any, start_response: Any) -> list[bytes]:
    return []


GOOD: dict[str, Any] = {"store": "memory://", "scope": SINGLE_TENANT}


def make_asgi(**settings: Any) -> semel.asgi.IdempotencyMiddleware:
    return semel.asgi.IdempotencyMiddleware(asgi_app, **GOOD | settings)


def make_wsgi(**settings: Any) -> semel.wsgi.IdempotencyMiddleware:
    return semel.wsgi.IdempotencyMiddleware(wsgi_app, **GOOD | settings)


BOTH = pytest.mark.parametrize("make", [make_asgi, make_wsgi], ids=["asgi", "wsgi"])


@pytest.mark.parametrize(
    "field, value",
    [
        ("lease", timedelta(0)),
        ("lease", -SECOND),
        ("lease", 30),
        ("retention", -SECOND),
        ("lease", timedelta(days=2)),
        ("methods", {"GET"}),
        ("methods", "POST"),
        ("methods", ()),
        ("header", "Idempotency Key"),
        ("header", ()),
        ("max_key_length", 0),
        ("max_key_length", 5000),
        ("max_request_body", -1),
        ("max_response_body", "1 MB"),
        ("keep", {500}),
        ("keep", "2xx"),
        ("server_errors", "retry"),
        ("on_crash", "ignore"),
        ("late", "maybe"),
        ("scope_by", "ip"),
        ("mode", "phases"),
        ("in_progress", "queue"),
        ("strict", "yes"),
        ("fingerprint", "sha256"),
        ("problem_base", "problems/"),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    """A policy with a bad value can't be made, and the error names the field."""
    with pytest.raises(ConfigurationError, match=rf"Policy\.{field} "):
        Policy.ietf(**{field: value})


@pytest.mark.parametrize("preset", [Policy.ietf, Policy.stripe])
def test_an_unknown_field_names_the_likely_one(preset: Callable[..., Policy]) -> None:
    """A field that does not exist is an error, and a near miss is pointed out."""
    with pytest.raises(UnknownField, match=r"'leese'.*'lease'"):
        preset(leese=SECOND)


@BOTH
@pytest.mark.parametrize("scope", [None, "alice", 5])
def test_scope_must_be_callable(make: Make, scope: object) -> None:
    """A scope that can't be asked is an error that says what a scope is."""
    with pytest.raises(ConfigurationError, match=r"^scope must be a callable.*SINGLE_TENANT"):
        make(scope=scope)


@pytest.mark.parametrize("entry", [semel.asgi.IdempotencyMiddleware, semel.wsgi.IdempotencyMiddleware])
def test_scope_must_be_given(entry: Make) -> None:
    """Nobody shares keys by leaving the scope out."""
    with pytest.raises(TypeError, match="scope"):
        entry(object(), store="memory://")


def test_a_wsgi_scope_is_not_awaited() -> None:
    """Under WSGI nobody could await a scope."""

    async def scope(request: object) -> str:
        return "alice"

    with pytest.raises(ConfigurationError, match=r"^scope must be a plain function"):
        make_wsgi(scope=scope)


@BOTH
@pytest.mark.parametrize("policy", [{}, "ietf", 0, False])
def test_policy_must_be_a_policy(make: Make, policy: object) -> None:
    """A policy of another type is an error, even an empty one."""
    with pytest.raises(ConfigurationError, match=r"^policy must be a Policy"):
        make(policy=policy)


def make_fastapi(**settings: Any) -> None:
    semel.fastapi.install(FastAPI(), **settings)


def make_flask(**settings: Any) -> semel.flask.Semel:
    return semel.flask.Semel(Flask("shop"), scope=SINGLE_TENANT, **settings)


@pytest.mark.parametrize("make", [make_asgi, make_wsgi, make_fastapi, make_flask])
@pytest.mark.parametrize("is_tiered", [False, True])
def test_atomic_mode_without_transactions(make: Make, *, is_tiered: bool) -> None:
    """Atomic mode on a store that has no transactions to share is an error at once: an app that starts, and whose
    health check is fine, would refuse every request.
    """
    store = Tiered(durable="redis://127.0.0.1:9", cache=None) if is_tiered else "redis://127.0.0.1:9"
    with pytest.raises(ConfigurationError, match="no transactions to share"):
        make(store=store, policy=Policy(mode="atomic"))


def test_atomic_mode_of_one_route() -> None:
    """The policy of a single route is looked at when the app starts."""
    app = FastAPI()
    semel.fastapi.install(app, store="redis://127.0.0.1:9")
    guard = semel.fastapi.Idempotent(scope=SINGLE_TENANT, policy=Policy(mode="atomic"))
    app.post("/orders", dependencies=[Depends(guard)])(lambda: "made")
    with pytest.raises(ConfigurationError, match="no transactions to share"), TestClient(app):
        pass


def test_atomic_mode_of_one_path() -> None:
    """So is that of a path."""
    with pytest.raises(ConfigurationError, match="no transactions to share"):
        make_asgi(store="redis://127.0.0.1:9", paths={"/orders": Policy(mode="atomic")})


def test_atomic_mode_of_one_view() -> None:
    """That of a view is an error at the first request of any kind, such as the health check's."""
    app = Flask("shop")
    app.testing = True
    semel.flask.Semel(app, store="redis://127.0.0.1:9", scope=SINGLE_TENANT)
    app.post("/orders")(semel.flask.idempotent(policy=Policy(mode="atomic"))(lambda: "made"))
    with pytest.raises(ConfigurationError, match="no transactions to share"):
        app.test_client().get("/health")


@BOTH
@pytest.mark.parametrize("url", ["mysql://localhost/db", "semel.db", "", "postgresql://host:port/db"])
def test_a_wrong_url_is_an_error(make: Make, url: str) -> None:
    """A URL that names no store of ours is an error at once, not at the first request."""
    with pytest.raises(ConfigurationError):
        make(store=url)


@BOTH
@pytest.mark.parametrize("store", [None, 5, object(), [], {"url": "memory://"}])
def test_store_must_be_a_store(make: Make, store: object) -> None:
    """A store of another type is an error that names the field."""
    with pytest.raises(ConfigurationError, match=r"^store must be a URL or"):
        make(store=store)


def test_each_entry_takes_stores_of_its_own_colour() -> None:
    """A blocking store can't serve an event loop, nor the other way round."""
    with pytest.raises(ConfigurationError, match="AsyncStore, not MemoryStore"):
        make_asgi(store=MemoryStore())
    with pytest.raises(ConfigurationError, match="a Store, not AsyncMemoryStore"):
        make_wsgi(store=AsyncMemoryStore())


@BOTH
@pytest.mark.parametrize("paths", [5, ["orders"], {"/orders": "ietf"}, [b"/orders"], "orders/*"])
def test_paths_must_be_patterns(make: Make, paths: object) -> None:
    """A path pattern that can match no path is an error."""
    with pytest.raises(ConfigurationError, match=r"^paths"):
        make(paths=paths)


@BOTH
def test_an_unknown_argument_is_an_error(make: Make) -> None:
    """A misspelt argument of the middleware is an error, as in any function."""
    with pytest.raises(TypeError, match="polcy"):
        make(polcy=Policy.ietf())
