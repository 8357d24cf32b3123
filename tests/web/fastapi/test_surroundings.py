"""A guarded FastAPI app among other things: middleware on both sides, mounted apps, WebSockets, databases."""

import gzip
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import flask
import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import PlainTextResponse
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.testclient import TestClient

from semel import SINGLE_TENANT, Operation, Policy, current
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Browse, Look
from semel.errors import ConfigurationError
from semel.fastapi import Idempotent, install
from semel.stores.memory import AsyncMemoryStore
from semel.wsgi import IdempotencyMiddleware as WSGIMiddleware
from tests.docs.served import asgi
from tests.web.fastapi.shop import KEY, Payment, Shop, bearer, client_of, post, seen


def with_middleware(middleware: Any, *, is_inside: bool, **settings: Any) -> Shop:
    """A shop with one more middleware, on the one side of Semel or the other."""
    app = FastAPI()
    if is_inside:
        app.add_middleware(middleware, **settings)
    shop = Shop(app)
    if not is_inside:
        app.add_middleware(middleware, **settings)
    shop.pay()
    return shop


class Watching(BaseHTTPMiddleware):
    """What most people write: it looks at every answer, and adds a header."""

    def __init__(self, app: Any, statuses: list[int]) -> None:
        super().__init__(app)
        self.statuses = statuses

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        self.statuses.append(response.status_code)
        response.headers["x-watched"] = "yes"
        return response


@pytest.mark.parametrize("is_inside", [True, False])
async def test_a_base_http_middleware(*, is_inside: bool) -> None:
    """A BaseHTTPMiddleware on either side sees the status of every answer; outside, it can also add to a replay."""
    statuses: list[int] = []
    shop = with_middleware(Watching, is_inside=is_inside, statuses=statuses)
    answers = [await post(shop.app, json={"amount": amount}) for amount in (5, 5, 6)]
    assert [seen(each) for each in answers] == [(201, False), (201, True), (422, False)]
    assert statuses == [201, 201, 422]
    assert ["x-watched" in each.headers for each in answers] == [True, not is_inside, not is_inside]
    assert shop.runs == [("key-1", 5)]


@pytest.mark.parametrize("is_inside", [True, False])
async def test_a_refusal_of_fastapis_is_not_kept_behind_a_base_http_middleware(*, is_inside: bool) -> None:
    """Parameters that don't fit free the key, also where a middleware in between hides the error from Semel."""
    shop = with_middleware(Watching, is_inside=is_inside, statuses=[])
    assert seen(await post(shop.app, json={"amount": "much"})) == (422, False)
    assert shop.is_empty
    assert seen(await post(shop.app)) == (201, False)


@pytest.mark.parametrize("is_inside", [True, False])
async def test_compression(*, is_inside: bool) -> None:
    """Outside, compression is each client's own; inside, what was stored is compressed, and says so."""
    shop = with_middleware(GZipMiddleware, is_inside=is_inside, minimum_size=1)
    first, again = [await post(shop.app, headers={"Accept-Encoding": "gzip"}) for _ in range(2)]
    assert (first.json(), again.json()) == ({"payment": 1}, {"payment": 1})
    assert [each.headers["content-encoding"] for each in (first, again)] == ["gzip", "gzip"]
    (found,) = shop.memory.perform(Browse(limit=9))
    record = shop.memory.perform(Look(found.scope, found.key))
    assert record is not None
    assert record.answer is not None
    assert record.answer.body is not None
    body = gzip.decompress(record.answer.body) if is_inside else record.answer.body
    assert body == b'{"payment":1}'


async def test_cors_outside() -> None:
    """With CORS outside, replays and refusals have their CORS headers, and a preflight is answered."""
    shop = with_middleware(CORSMiddleware, is_inside=False, allow_origins=["https://a.test"], allow_methods=["POST"])
    origin = {"Origin": "https://a.test"}
    answers = [await post(shop.app, headers=origin, json={"amount": amount}) for amount in (5, 5, 6)]
    assert [seen(each) for each in answers] == [(201, False), (201, True), (422, False)]
    assert {each.headers["access-control-allow-origin"] for each in answers} == {"https://a.test"}
    async with client_of(shop.app) as client:
        preflight = await client.options("/pay", headers=origin | {"Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 200


async def test_mounted_apps_are_told_apart() -> None:
    """A mounted app is guarded by the outer app's install, and known by its whole path."""
    shop = Shop()
    for version in ("/v1", "/v2"):
        inner = FastAPI()

        @inner.post("/pay")
        async def pay(operation: Annotated[Operation, Depends(shop.guard)]) -> str:
            return operation.key

        shop.app.mount(version, inner)
    answers = [seen(await post(shop.app, path)) for path in ("/v1/pay", "/v1/pay", "/v2/pay")]
    assert answers == [(200, False), (200, True), (422, False)]


async def test_a_mounted_app_with_an_install_of_its_own() -> None:
    """A mounted app that has an install of its own is guarded by that one's policy, and not by the outer app's."""
    shop, inner = Shop(), FastAPI()
    install(inner, store=AsyncMemoryStore(memory=shop.memory), policy=Policy(methods={"PUT"}))

    @inner.put("/pay")
    async def pay(operation: Annotated[Operation, Depends(shop.guard)]) -> str:
        return operation.key

    shop.app.mount("/v1", inner)
    async with client_of(shop.app) as client:
        assert [seen(await client.put("/v1/pay", headers=KEY)) for _ in range(2)] == [(200, False), (200, True)]


async def test_a_mounted_app_with_an_install_of_its_own_that_is_wrong() -> None:
    """What a mounted app's own policy would never guard is refused, whatever the outer app's says."""
    shop, inner = Shop(methods={"PUT"}), FastAPI()
    install(inner, store=AsyncMemoryStore(memory=shop.memory))

    @inner.put("/pay")
    async def pay(operation: Annotated[Operation, Depends(shop.guard)]) -> str:
        return operation.key

    shop.app.mount("/v1", inner)
    with pytest.raises(ConfigurationError, match="PATCH and POST only"):
        await httpx.ASGITransport(shop.app).handle_async_request(httpx.Request("GET", "http://shop.test/"))


async def test_a_middleware_around_the_whole_app_and_its_routes_both_guard() -> None:
    """A request is guarded once: with a second claim, its own first would refuse it as in progress, for good."""
    shop = Shop()
    shop.pay()
    shop.app.add_middleware(
        IdempotencyMiddleware, store=AsyncMemoryStore(memory=shop.memory), scope=lambda _request: "alice"
    )
    transport = httpx.ASGITransport(shop.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
        with pytest.raises(ConfigurationError, match="and so does the middleware around the whole app"):
            await client.post("/pay", json={"amount": 5}, headers=KEY | bearer("token-1"))
    assert shop.runs == []


async def test_a_root_path() -> None:
    """Behind a proxy and under its root path, a retry is a replay, and another root path another request."""
    shop = Shop()
    shop.pay()
    answers = []
    for root in ("/api", "/api", "/other"):
        transport = httpx.ASGITransport(shop.app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
            request: dict[str, Any] = {"json": {"amount": 5}, "headers": KEY | bearer("token-1")}
            answers.append(seen(await client.post(f"{root}/pay", **request)))
    assert answers == [(201, False), (201, True), (422, False)]


def test_websockets_pass() -> None:
    """A WebSocket of a guarded router is let alone, login and all."""
    shop = Shop()
    router = APIRouter(dependencies=[Depends(shop.guard)])

    @router.websocket("/live")
    async def live(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    shop.app.include_router(router)
    with TestClient(shop.app).websocket_connect("/live", headers=bearer("token-1")) as websocket:
        assert websocket.receive_text() == "hello"


async def test_routes_without_a_guard_are_let_alone() -> None:
    """A route that has no guard runs every time, key or not, and may stream."""
    shop = Shop()

    @shop.app.post("/note")
    async def note(request: Request) -> PlainTextResponse:
        shop.runs.append(await request.body())
        return PlainTextResponse("noted")

    assert [seen(await post(shop.app, "/note", content=b"x" * 100)) for _ in range(2)] == [(200, False)] * 2
    assert shop.runs == [b"x" * 100] * 2
    assert shop.is_empty


async def test_a_session_that_commits_before_the_answer() -> None:
    """A dependency of scope "function" ends before the answer is stored: its failure is what a retry is told."""
    shop = Shop()

    def session() -> Iterator[None]:
        yield
        shop.runs.append("commit")
        raise RuntimeError("The commit failed.")

    @shop.app.post("/pay")
    def pay(
        _: Annotated[Operation, Depends(shop.guard)], session: Annotated[None, Depends(session, scope="function")]
    ) -> str:
        return "paid"

    first, again = [await post(shop.app) for _ in range(2)]
    assert (first.status_code, first.json()["code"]) == (500, "operation-failed")
    assert seen(again) == (500, True)
    assert shop.runs == ["commit"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_an_atomic_session(kind: str, request: pytest.FixtureRequest) -> None:
    """A session on the operation's connection commits with the answer; an error leaves neither rows nor a record."""
    url: str = request.getfixturevalue("sqlite_url" if kind == "sqlite" else "migrated_postgres_url")
    driver = "sqlite+aiosqlite" if kind == "sqlite" else "postgresql+asyncpg"
    engine = create_async_engine(driver + url[url.index(":") :])
    app = FastAPI()
    install(app, store=async_sessionmaker(engine), policy=Policy.ietf(mode="atomic"))
    guard = Idempotent(scope=lambda: "alice")

    async def session_of(operation: Annotated[Operation, Depends(guard)]) -> AsyncSession:
        session: AsyncSession = operation.connection
        return session

    @app.post("/pay", status_code=201)
    async def pay(payment: Payment, session: Annotated[AsyncSession, Depends(session_of)]) -> int:
        await session.execute(text("INSERT INTO payments VALUES (:amount)"), {"amount": payment.amount})
        if payment.amount > 10:
            raise HTTPException(500, "Too much.")
        return payment.amount

    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE payments (amount INTEGER)"))
    async with asgi(app) as client:
        answers = [
            await client.post("/pay", json={"amount": amount}, headers={"Idempotency-Key": key})
            for key, amount in (("a", 5), ("a", 5), ("b", 50), ("b", 50))
        ]
    assert [seen(each) for each in answers] == [(201, False), (201, True), (500, False), (500, False)]
    async with engine.connect() as connection:
        rows = (await connection.execute(text("SELECT amount FROM payments"))).scalars().all()
    await engine.dispose()
    assert list(rows) == [5]


@pytest.mark.parametrize("closes, pool", [(True, None), (False, None), (False, NullPool)])
async def test_a_login_on_the_pool_of_atomic_mode(
    migrated_postgres_url: str, caplog: pytest.LogCaptureFixture, *, closes: bool, pool: Any
) -> None:
    """A login that keeps a connection of the pool while its request waits for another is told of once in the log; not
    where there are as many connections as are asked for.
    """
    engine = create_async_engine(migrated_postgres_url.replace(":", "+asyncpg:", 1), poolclass=pool)
    sessions = async_sessionmaker(engine)
    app = FastAPI()
    install(app, store=sessions, policy=Policy.ietf(mode="atomic"))

    async def get_db() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            yield session

    async def account(db: Annotated[AsyncSession, Depends(get_db)]) -> str:
        found = str((await db.execute(text("SELECT 'alice'"))).scalar_one())
        if closes:
            await db.close()
        return found

    @app.post("/pay", status_code=201)
    async def pay(operation: Annotated[Operation, Depends(Idempotent(scope=account))]) -> int:
        return int((await operation.connection.execute(text("SELECT 1"))).scalar_one())

    async with asgi(app) as client:
        answers = [(await client.post("/pay", headers={"Idempotency-Key": f"{n}"})).status_code for n in range(4)]
    await engine.dispose()
    assert answers == [201] * 4
    assert len([each for each in caplog.messages if "two connections of this pool" in each]) == (
        not closes and pool is None
    )


@pytest.mark.parametrize("entry", ["route", "app", "wsgi"])
@pytest.mark.parametrize("is_beside", [True, False])
async def test_a_write_beside_the_transaction(
    migrated_postgres_url: str, caplog: pytest.LogCaptureFixture, entry: str, *, is_beside: bool
) -> None:
    """In atomic mode, what a handler writes over another connection of the engine is told of once in the log."""
    url, policy = migrated_postgres_url, Policy.ietf(mode="atomic")
    plain = create_engine(url.replace(":", "+psycopg:", 1))
    engine = create_async_engine(url.replace(":", "+asyncpg:", 1))
    sessions = async_sessionmaker(engine)
    insert = text("INSERT INTO payments VALUES (5)")
    with plain.begin() as connection:
        connection.execute(text("CREATE TABLE payments (amount INTEGER)"))
    app = FastAPI()
    flask_app = flask.Flask("shop")
    if entry == "route":
        install(app, store=sessions, policy=policy)
    guard = [Depends(Idempotent(scope=SINGLE_TENANT))] if entry == "route" else []

    @app.post("/pay", status_code=201, dependencies=guard)
    async def pay() -> int:
        if is_beside:
            async with sessions.begin() as session:
                await session.execute(text("SELECT 1"))
                await session.execute(insert)
        else:
            await current().connection.execute(insert)
            await current().connection.commit()
        return 5

    @flask_app.post("/pay")
    def pay_in_flask() -> tuple[str, int]:
        if is_beside:
            with plain.begin() as connection:
                connection.execute(insert)
        else:
            current().connection.execute(insert)
        return "5", 201

    served: Any = app
    if entry == "app":
        served = IdempotencyMiddleware(app, store=sessions, scope=SINGLE_TENANT, policy=policy)
    if entry == "wsgi":
        wsgi = WSGIMiddleware(flask_app.wsgi_app, store=plain, scope=SINGLE_TENANT, policy=policy)
        flask_app.wsgi_app = wsgi  # type: ignore[method-assign]  # Flask's own way to add WSGI middleware
        visitor = flask_app.test_client()
        answers = [visitor.post("/pay", headers={"Idempotency-Key": f"{n}"}).status_code for n in range(3)]
    else:
        async with asgi(served) as client:
            answers = [(await client.post("/pay", headers={"Idempotency-Key": f"{n}"})).status_code for n in range(3)]
    with plain.begin() as connection:
        connection.execute(insert)  # outside of any operation
    plain.dispose()
    await engine.dispose()
    assert answers == [201] * 3
    told = [each for each in caplog.messages if "wrote beside" in each]
    assert len([each for each in caplog.messages if "two connections of this pool" in each]) == is_beside
    assert len(told) == is_beside
    assert all("INSERT INTO payments" in each for each in told)
