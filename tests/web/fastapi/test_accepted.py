"""Routes whose requests are accepted and run later: the route that tells of them, after the app's own login."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from starlette.types import ASGIApp

from semel import SINGLE_TENANT, Operation, Policy
from semel.asgi import PER_ROUTE, IdempotencyMiddleware, claim
from semel.cli.application import middleware_of
from semel.errors import ConfigurationError
from semel.fastapi import Idempotent, install
from semel.flows.finish import FinishReport
from semel.guard.request import PRINCIPAL, RequestView
from semel.stores.memory import AsyncMemoryStore
from semel.work import AsyncCompleter

ACCEPT = Policy.ietf(in_progress="accept")
KEY = {"Idempotency-Key": "key-1", "Authorization": "alice"}


def current_account(request: Request, authorization: Annotated[str, Header()] = "") -> str | None:
    """Believe what was stored with a request that is run without its client."""
    account: str | None = request.scope.get(PRINCIPAL) or authorization
    if account == "mallory":
        raise HTTPException(401, "Who are you?")
    return account


@dataclass
class Backlog:
    """An app that makes reports."""

    app: FastAPI = field(default_factory=FastAPI)
    runs: list[str] = field(default_factory=list)

    def report(self, guard: Any, app: FastAPI | None = None) -> None:
        @(app or self.app).post("/reports", status_code=201)
        async def report(operation: Annotated[Operation, Depends(guard)]) -> dict[str, Any]:
            await operation.progress(0.5, "half-way")
            self.runs.append(operation.scope)
            return {"report": len(self.runs)}

    async def work(self, app: Any = None) -> FinishReport:
        middleware: Any = middleware_of(app or self.app)
        return await AsyncCompleter(middleware.store, middleware.finish).run_once()


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://backlog") as client:
        yield client


@pytest.mark.parametrize(
    "scope", [current_account, Depends(current_account), lambda request: request.headers["authorization"]]
)
async def test_from_the_202_to_the_answer(scope: Any) -> None:
    """A guarded route is accepted, run by a worker with the stored principal, and told of at the status route."""
    backlog = Backlog()
    install(backlog.app, store=AsyncMemoryStore(), policy=ACCEPT, status_scope=scope)
    backlog.report(Idempotent(scope=current_account))
    async with client_of(backlog.app) as client:
        first = await client.post("/reports", headers=KEY)
        where = first.headers["location"]
        assert (first.status_code, where.startswith("/semel/operations/"), backlog.runs) == (202, True, [])
        told = await client.get(where, headers=KEY)
        assert (told.status_code, told.json()["state"], told.headers["retry-after"]) == (202, "pending", "1")
        assert await backlog.work() == FinishReport(finished=1)
        told = await client.get(where, headers=KEY)
        assert (told.status_code, told.json(), backlog.runs) == (201, {"report": 1}, ["alice"])
        head = await client.head(where, headers=KEY)
        assert (head.status_code, head.headers, head.content) == (201, told.headers, b"")
        again = await client.post("/reports", headers=KEY)
        assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")


async def test_who_is_told() -> None:
    """Whom the app's login refuses is refused by it; anybody else who does not own the operation finds none."""
    backlog = Backlog()
    install(backlog.app, store=AsyncMemoryStore(), policy=ACCEPT, status_scope=current_account)
    backlog.report(Idempotent(scope=current_account))
    async with client_of(backlog.app) as client:
        where = (await client.post("/reports", headers=KEY)).headers["location"]
        refused = await client.get(where, headers={"Authorization": "mallory"})
        assert (refused.status_code, refused.json()) == (401, {"detail": "Who are you?"})
        for authorization in ("bob", ""):
            told = await client.get(where, headers={"Authorization": authorization})
            assert (told.status_code, told.json()["code"]) == (404, "operation-not-found")
        assert (await client.get("/semel/operations/x", headers=KEY)).json()["code"] == "operation-not-found"


async def test_a_routes_own_policy_counts_for_the_worker() -> None:
    """A worker guards by the route's own policy: by whatever method, how large an answer is kept, what an error is."""
    app = FastAPI()
    install(app, store=AsyncMemoryStore(), status_scope=current_account)
    policy = Policy.ietf(in_progress="accept", methods={"PUT"}, max_response_body=3_000_000, server_errors="release")
    guard = Depends(Idempotent(scope=current_account, policy=policy))

    @app.put("/archive", dependencies=[guard])
    async def archive() -> str:
        return "x" * 2_000_000

    @app.put("/broken", dependencies=[guard])
    async def broken() -> None:
        raise HTTPException(500)

    async with client_of(app) as client:
        large = await client.put("/archive", headers=KEY)
        assert await Backlog(app).work() == FinishReport(finished=1)
        told = await client.get(large.headers["location"], headers=KEY)
        assert (told.status_code, len(told.json())) == (200, 2_000_000)
        failed = await client.put("/broken", headers=KEY | {"Idempotency-Key": "key-2"})
        assert await Backlog(app).work() == FinishReport(failed=1)
        told = await client.get(failed.headers["location"], headers=KEY)
        assert (told.status_code, told.json()["state"]) == (202, "processing")


async def test_one_user_only() -> None:
    """An API with one user says so there, too."""
    backlog = Backlog()
    install(backlog.app, store=AsyncMemoryStore(), status_scope=SINGLE_TENANT, status_path="/jobs")
    backlog.report(Idempotent(scope=SINGLE_TENANT, policy=ACCEPT))
    async with client_of(backlog.app) as client:
        first = await client.post("/reports", headers=KEY)
        assert first.headers["location"].startswith("/jobs/")
        assert await backlog.work() == FinishReport(finished=1)
        assert (await client.get(first.headers["location"])).status_code == 201


async def test_a_mounted_app() -> None:
    """An app with an install of its own is asked where it is mounted, and its requests are run from there."""
    backlog, outer = Backlog(), FastAPI()
    inner = FastAPI()
    install(inner, store=AsyncMemoryStore(), policy=ACCEPT, status_scope=current_account)
    backlog.report(Idempotent(scope=current_account), inner)
    outer.mount("/v2", inner)
    async with client_of(outer) as client:
        first = await client.post("/v2/reports", headers=KEY)
        assert first.headers["location"].startswith("/v2/semel/operations/")
        assert (await client.get(first.headers["location"], headers=KEY)).status_code == 202
        assert await backlog.work(inner) == FinishReport(finished=1)
        assert (await client.get(first.headers["location"], headers=KEY)).json() == {"report": 1}


async def test_a_mounted_app_behind_the_outer_install() -> None:
    """An app without an install of its own is part of the outer one: the address is the outer app's."""
    backlog, outer, inner = Backlog(), FastAPI(), FastAPI()
    install(outer, store=AsyncMemoryStore(), policy=ACCEPT, status_scope=current_account)
    backlog.report(Idempotent(scope=current_account), inner)
    outer.mount("/v2", inner)
    async with client_of(outer) as client:
        first = await client.post("/v2/reports", headers=KEY)
        assert first.headers["location"].startswith("/semel/operations/")
        assert await backlog.work(outer) == FinishReport(finished=1)
        assert (await client.get(first.headers["location"], headers=KEY)).json() == {"report": 1}


def test_refused_without_a_status_scope() -> None:
    """A policy that accepts, where nobody could ask, is refused at install, with what to do."""
    with pytest.raises(ConfigurationError, match=r"status_scope=current_account"):
        install(FastAPI(), store="memory://", policy=ACCEPT)
    with pytest.raises(ConfigurationError, match=r"status_scope=current_account"):
        IdempotencyMiddleware(FastAPI(), store="memory://", policy=ACCEPT, scope=PER_ROUTE)
    with pytest.raises(ConfigurationError, match="status_scope must return the user"):
        install(FastAPI(), store="memory://", policy=ACCEPT, status_scope="alice")


async def test_a_routes_own_policy_is_refused_without_a_status_scope() -> None:
    """Where a single route accepts, the app does not start."""
    backlog = Backlog()
    install(backlog.app, store="memory://")
    backlog.report(Idempotent(scope=current_account, policy=ACCEPT))
    async with client_of(backlog.app) as client:
        with pytest.raises(ConfigurationError, match=r"POST /reports: .*status_scope=current_account"):
            await client.post("/reports", headers=KEY)


async def test_a_plain_route_can_not_accept() -> None:
    """A route that claims by itself, in an app where none tells the status, is refused when it does."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await claim(scope, "alice", ACCEPT)

    guarded = IdempotencyMiddleware(app, store="memory://", scope=PER_ROUTE)
    async with client_of(guarded) as client:
        with pytest.raises(ConfigurationError, match="nowhere to ask"):
            await client.post("/", headers=KEY)


def named(request: RequestView) -> str:
    return request.headers["authorization"]


def test_the_status_route_in_the_schema() -> None:
    """The schema shows the status route with what it may answer, and what a route that accepts may answer."""
    backlog = Backlog()
    policy = Policy.ietf(in_progress="accept", preferences={"wait", "respond-async"})
    install(backlog.app, store="memory://", policy=policy, status_scope=named)
    backlog.report(Idempotent(scope=current_account))
    paths = backlog.app.openapi()["paths"]
    status = paths["/semel/operations/{operation_name}"]
    assert set(status) == {"get"}
    assert set(status["get"]["responses"]) >= {"200", "202", "404", "409", "410"}
    post = paths["/reports"]["post"]
    assert set(post["responses"]["202"]["headers"]) == {"Location", "Retry-After"}
    (prefer,) = [each for each in post["parameters"] if each["name"] == "Prefer"]
    assert "respond-async" in prefer["description"]
    assert "wait=5" in prefer["description"]
