"""The dependency ``Idempotent``: whose request it is, what it gives the route, what it refuses to be."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, HTTPException, Request, Security, UploadFile
from fastapi.exceptions import RequestValidationError

import semel
from semel import SINGLE_TENANT, Operation, Policy
from semel.asgi import PER_ROUTE, IdempotencyMiddleware
from semel.core.commands import Browse
from semel.errors import ConfigurationError
from semel.fastapi import AlreadyAnswered, Idempotent, install
from semel.guard.request import RequestView
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.work import AsyncCompleter
from tests.test_import import bare
from tests.web.fastapi.shop import KEY, Payment, Shop, bearer, client_of, post, seen

UUID_1 = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")


@pytest.fixture
def shop() -> Shop:
    return Shop()


# Whose request it is


async def test_the_login_is_asked_as_a_dependency(shop: Shop) -> None:
    """The scope is what the app's own login returns; two accounts with one key never meet."""
    shop.pay()
    answers = [seen(await post(shop.app, headers=bearer(token))) for token in ("token-1", "token-b", "token-1")]
    assert answers == [(201, False), (201, False), (201, True)]
    assert {record.scope for record in shop.memory.perform(Browse(limit=9))} == {"alice", "bob"}


async def test_an_anonymous_request_is_refused_by_the_app(shop: Shop) -> None:
    """A request that nobody sends gets the app's own 401, and nothing is stored."""
    shop.pay()
    response = await post(shop.app, headers=bearer("nobody's"))
    assert (response.status_code, response.json()) == (401, {"detail": "Who are you?"})
    assert shop.is_empty


async def test_a_deleted_user_gets_no_replay(shop: Shop) -> None:
    """A user who is deleted between two tries gets 401, whatever is stored."""
    shop.pay()
    assert seen(await post(shop.app)) == (201, False)
    del shop.tokens["token-1"]
    response = await post(shop.app)
    assert (seen(response), response.json()) == ((401, False), {"detail": "Who are you?"})


async def test_a_renewed_token_changes_nothing(shop: Shop) -> None:
    """A token that is renewed between two tries belongs to the same account, and its retry is a replay."""
    shop.pay()
    assert seen(await post(shop.app)) == (201, False)
    assert seen(await post(shop.app, headers=bearer("token-2"))) == (201, True)


def number() -> int:
    return 17


async def numbered() -> UUID:
    return UUID_1


def yielded() -> Iterator[str]:
    yield "alice"


class Login:
    def __call__(self, request: Request) -> str:
        return "alice"


def by_view(request: RequestView) -> str:
    return request.headers["x-account"]


async def by_view_later(request):  # type: ignore[no-untyped-def]  # noqa: ANN001 - what this is about
    return request.headers["x-account"]


@pytest.mark.parametrize(
    "scope, expected",
    [
        (number, "17"),
        (numbered, str(UUID_1)),
        (yielded, "alice"),
        (Login(), "alice"),
        (lambda: (17, UUID_1, "a/b"), f"17/{UUID_1}/a%2Fb"),
        (Depends(number), "17"),
        (Security(number), "17"),
        (SINGLE_TENANT, "single-tenant"),
        (by_view, "carol"),
        (by_view_later, "carol"),
        (lambda request: request.headers["x-account"], "carol"),
    ],
)
async def test_what_a_scope_may_be(shop: Shop, scope: Any, expected: str) -> None:
    """A scope is a dependency of any kind, SINGLE_TENANT, or a function of the request's view."""

    @shop.app.post("/pay")
    async def pay(operation: Annotated[Operation, Depends(Idempotent(scope=scope))]) -> str:
        return operation.scope

    response = await post(shop.app, headers={"X-Account": "carol"})
    assert (response.status_code, response.json()) == (200, expected)


async def test_a_function_of_the_view_is_asked_where_there_is_a_key(shop: Shop) -> None:
    """A request without a key is nobody's concern: a scope function is not called for it."""

    @shop.app.post("/pay")
    async def pay(operation: Annotated[Operation | None, Depends(Idempotent(scope=by_view))]) -> bool:
        return operation is None

    async with client_of(shop.app) as client:
        assert (await client.post("/pay")).json() is True


@pytest.mark.parametrize("scope", [lambda: None, lambda: "", lambda: ("alice", None)])
async def test_nobodys_key_is_refused(shop: Shop, scope: Any) -> None:
    """A login that lets strangers in names nobody: without a key they pass, with one they are refused."""

    @shop.app.post("/pay")
    async def pay(_: Annotated[Operation | None, Depends(Idempotent(scope=scope))]) -> str:
        return "paid"

    async with client_of(shop.app) as client:
        assert (await client.post("/pay")).json() == "paid"
    response = await post(shop.app)
    assert (response.status_code, response.json()["code"]) == (400, "idempotency-scope-missing")


async def test_a_whole_user_is_no_scope(shop: Shop) -> None:
    """A scope that returns an object is a mistake, and the error says what to return."""

    @shop.app.post("/pay")
    async def pay(_: Annotated[Operation, Depends(Idempotent(scope=lambda: Payment(amount=1)))]) -> None: ...

    async with client_of(shop.app) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match=r"not Payment.*account\.id"):
            await client.post("/pay", headers=KEY)


@pytest.mark.parametrize("settings", [{"policy": Policy.ietf()}, {"scope": "alice"}, {"scope": 5}])
def test_a_scope_must_be_given(settings: dict[str, Any]) -> None:
    """A guard that does not know whose request it is can't be made."""
    with pytest.raises(ConfigurationError, match="needs the user of a request"):
        Idempotent(**settings)


def test_a_policy_must_be_one() -> None:
    """A policy that is none is refused where it is written."""
    with pytest.raises(ConfigurationError, match=r"Policy\.ietf"):
        Idempotent(scope=number, policy={"required": True})  # type: ignore[arg-type]


# What the route gets


async def test_the_operation_is_the_value(shop: Shop) -> None:
    """The route gets its operation, or None where there is no key; async and sync alike, and so does current()."""

    @shop.app.post("/async")
    async def pay_async(operation: Annotated[Operation | None, Depends(shop.guard)]) -> bool:
        return operation is None or operation is semel.current()

    @shop.app.post("/sync")
    def pay_sync(operation: Annotated[Operation | None, Depends(shop.guard)]) -> bool:
        return operation is None or operation is semel.current()

    async with client_of(shop.app) as client:
        for path in ("/async", "/sync"):
            assert (await client.post(path)).json() is True
            for is_replay in (False, True):
                response = await client.post(path, headers={"Idempotency-Key": path})
                assert (response.json(), seen(response)) == (True, (200, is_replay))


async def test_a_router_can_be_guarded(shop: Shop) -> None:
    """A guard among a router's dependencies guards its POST routes, and lets GET and WebSockets alone."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(shop.guard)])

    @router.post("/pay")
    def pay(payment: Payment) -> str:
        shop.runs.append(payment.amount)
        return semel.current().key

    @router.get("/pay")
    def payments() -> int:
        return len(shop.runs)

    shop.app.include_router(router)
    for is_replay in (False, True):
        response = await post(shop.app, "/v1/pay")
        assert (seen(response), response.json()) == ((200, is_replay), "key-1")
    async with client_of(shop.app) as client:
        assert [(await client.get("/v1/pay", headers=KEY)).json() for _ in range(2)] == [1, 1]


async def test_one_guard_in_two_places_is_one(shop: Shop) -> None:
    """A router's guard may also be a parameter of its routes, which then have the operation."""
    router = APIRouter(dependencies=[Depends(shop.guard)])

    @router.post("/pay")
    def pay(operation: Annotated[Operation, Depends(shop.guard)]) -> str:
        return operation.key

    shop.app.include_router(router)
    assert [seen(await post(shop.app)) for _ in range(2)] == [(200, False), (200, True)]


async def test_each_route_has_its_policy(shop: Shop) -> None:
    """A guard's own policy counts before that of install()."""
    strict = Idempotent(scope=shop.current_account, policy=Policy.ietf(required=True, methods={"PUT"}))

    @shop.app.put("/pay")
    def pay(_: Annotated[Operation, Depends(strict)]) -> None:
        shop.runs.append(1)

    async with client_of(shop.app) as client:
        missing = await client.put("/pay")
        answers = [seen(await client.put("/pay", headers=KEY)) for _ in range(2)]
    assert missing.json()["code"] == "idempotency-key-missing"
    assert answers == [(200, False), (200, True)]


async def test_a_dependency_can_build_on_the_operation(shop: Shop) -> None:
    """A dependency that asks for the guard, as a session on its connection would, gets the operation, once."""

    def session(operation: Annotated[Operation, Depends(shop.guard)]) -> str:
        return f"session of {operation.key}"

    @shop.app.post("/pay")
    def pay(session: Annotated[str, Depends(session)]) -> str:
        return session

    responses = [await post(shop.app) for _ in range(2)]
    assert [(seen(each), each.json()) for each in responses] == [
        ((200, False), "session of key-1"),
        ((200, True), "session of key-1"),
    ]


# What is kept


async def test_an_upload_is_the_same_whatever_its_boundary(shop: Shop) -> None:
    """A file that is sent again has another boundary, and is a replay; another file is refused."""

    @shop.app.post("/files")
    async def upload(file: UploadFile, _: Annotated[Operation, Depends(shop.guard)]) -> int:
        content = await file.read()
        shop.runs.append(content)
        return len(content)

    contents = [b"hello" * 100_000, b"hello" * 100_000, b"bye"]
    answers = [await post(shop.app, "/files", files={"file": ("a.txt", content)}) for content in contents]
    assert [seen(each) for each in answers] == [(200, False), (200, True), (422, False)]
    assert answers[1].json() == 500_000
    assert shop.runs == contents[:1]


async def test_background_tasks_run_once(shop: Shop) -> None:
    """What a route does after its answer is done once, and not for a replay."""

    @shop.app.post("/pay")
    def pay(tasks: BackgroundTasks, _: Annotated[Operation, Depends(shop.guard)]) -> str:
        tasks.add_task(shop.runs.append, "told")
        return "paid"

    assert [seen(await post(shop.app)) for _ in range(2)] == [(200, False), (200, True)]
    assert shop.runs == ["told"]


async def test_parameters_that_do_not_fit_free_the_key(shop: Shop) -> None:
    """FastAPI's 422 is not kept: the corrected request may have the same key."""
    shop.pay()
    refused = await post(shop.app, json={"amount": "much"})
    assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, ["body", "amount"])
    assert shop.is_empty
    assert seen(await post(shop.app)) == (201, False)


async def test_an_answer_of_the_routes_own_is_kept(shop: Shop) -> None:
    """An HTTPException of the route is its answer, also when it is the error that FastAPI refuses parameters with."""

    @shop.app.post("/{kind}")
    def pay(kind: str, _: Annotated[Operation, Depends(shop.guard)]) -> None:
        shop.runs.append(kind)
        if kind == "conflict":
            raise HTTPException(409, "Sold out.")
        raise RequestValidationError([{"loc": ("body",), "msg": "odd", "type": "odd"}])

    for kind, status in (("conflict", 409), ("odd", 422)):
        answers = [await post(shop.app, f"/{kind}", headers={"Idempotency-Key": kind}) for _ in range(2)]
        assert [seen(each) for each in answers] == [(status, False), (status, True)]
    assert shop.runs == ["conflict", "odd"]


async def test_a_redirect_of_the_router_is_not_kept(shop: Shop) -> None:
    """A missing slash is the router's affair: 307, and the key is free for the right path."""
    shop.pay("/pay/")
    redirect = await post(shop.app, "/pay")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "http://shop.test/pay/")
    assert shop.is_empty
    assert [seen(await post(shop.app, "/pay/")) for _ in range(2)] == [(201, False), (201, True)]


async def test_a_refusal_is_seen_as_what_it_is(shop: Shop) -> None:
    """Whoever looks on, a handler of HTTP errors or a dependency that yields, sees the status of the answer."""
    looked_on: list[int] = []

    def watch() -> Iterator[None]:
        try:
            yield
        except AlreadyAnswered as error:
            looked_on.append(error.status_code)
            raise

    @shop.app.exception_handler(AlreadyAnswered)
    async def handler(_request: Request, error: AlreadyAnswered) -> Any:
        looked_on.append(error.status_code)
        raise RuntimeError("What a handler makes of it is thrown away.")

    @shop.app.post("/pay", status_code=202, dependencies=[Depends(watch)])
    def pay(payment: Payment, _: Annotated[Operation, Depends(shop.guard)]) -> str:
        return "paid"

    answers = [seen(await post(shop.app, json={"amount": amount})) for amount in (5, 5, 6)]
    assert answers == [(202, False), (202, True), (422, False)]
    assert looked_on == [202, 202, 422, 422]


# Where it does not belong


async def test_bare_in_an_app_that_is_guarded_as_a_whole() -> None:
    """Idempotent() hands out the operation where the middleware guards, and None where it does not."""
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store="memory://", scope=SINGLE_TENANT)

    @app.post("/pay")
    def pay(operation: Annotated[Operation | None, Depends(Idempotent())]) -> str | None:
        return None if operation is None else operation.key

    async with client_of(app) as client:
        assert (await client.post("/pay")).json() is None
        assert [(await client.post("/pay", headers=KEY)).json() for _ in range(2)] == ["key-1", "key-1"]


@pytest.mark.parametrize("scope, message", [(PER_ROUTE, "install"), (SINGLE_TENANT, "PER_ROUTE"), (None, "install")])
async def test_a_guard_needs_its_own_middleware(scope: Any, message: str) -> None:
    """A guarded route in an app that Semel was not installed on is an error that says so, never an unguarded run."""
    app = FastAPI()
    if scope is not None:
        app.add_middleware(IdempotencyMiddleware, store="memory://", scope=scope)
    runs: list[int] = []

    @app.post("/pay")
    def pay(_: Annotated[Operation, Depends(Idempotent(scope=number))]) -> None:
        runs.append(1)

    async with client_of(app) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match=message):
            await client.post("/pay", headers=KEY)
    assert runs == []


async def test_bare_where_routes_speak_for_themselves(shop: Shop) -> None:
    """Idempotent() in an app with install() is an error: nobody would guard the route."""

    @shop.app.post("/pay")
    def pay(_: Annotated[Operation, Depends(Idempotent())]) -> None:
        shop.runs.append(1)

    assert (await post(shop.app)).status_code == 500
    assert shop.runs == []


def test_without_fastapi() -> None:
    """Where FastAPI is missing, the error names the command that installs it."""
    done = bare("import semel.fastapi")
    assert "pip install 'semel[fastapi]'" in done.stderr.splitlines()[-1]


def test_install_once() -> None:
    """A second install() on the same app is refused."""
    app = FastAPI()
    install(app, store="memory://")
    with pytest.raises(ConfigurationError, match="already"):
        install(app, store="memory://")


async def test_a_body_may_be_as_large_as_the_app_remembers(shop: Shop) -> None:
    """A route can't take a larger body than the policy of install() allows: its start would be forgotten."""
    large = Idempotent(scope=number, policy=Policy.ietf(max_request_body=2**30))

    @shop.app.post("/pay")
    def pay(_: Annotated[Operation, Depends(large)]) -> None:
        shop.runs.append(1)

    async with client_of(shop.app) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match="max_request_body"):
            await client.post("/pay", headers=KEY)


async def test_overrides_in_tests(shop: Shop) -> None:
    """A login that is overridden for a test is overridden for its guard, too."""
    shop.pay()
    shop.app.dependency_overrides[shop.current_account] = lambda: "tester"
    answers = [seen(await post(shop.app, headers=bearer("nobody's"))) for _ in range(2)]
    assert answers == [(201, False), (201, True)]
    assert [record.scope for record in shop.memory.perform(Browse(limit=9))] == ["tester"]


async def test_a_stored_request_is_finished_without_its_client() -> None:
    """What is run again for nobody is claimed already, and has its owner's name for the login to believe."""
    now = datetime(2025, 1, 1, tzinfo=UTC)
    memory = MemoryStore(clock=lambda: now)
    app = FastAPI()
    install(
        app,
        store=AsyncMemoryStore(memory=memory),
        policy=Policy.ietf(store_request=True, lease=timedelta(seconds=30)),
    )

    def current_account(request: Request) -> str:
        account = request.scope.get("semel.principal") or request.headers.get("x-account")
        if account is None:
            raise HTTPException(401)
        return str(account)

    runs: list[tuple[str, int]] = []

    @app.post("/pay")
    async def pay(operation: Annotated[Operation, Depends(Idempotent(scope=current_account))]) -> None:
        runs.append((operation.scope, operation.attempt))
        await operation.phase("paid", semel.in_thread(lambda _connection: None))
        if operation.attempt == 1:
            raise HTTPException(503)

    assert (await post(app, headers={"X-Account": "alice"})).status_code == 503
    now += timedelta(minutes=1)
    guard = app.middleware_stack
    while not isinstance(guard, IdempotencyMiddleware):
        guard = guard.app  # type: ignore[union-attr]
    report = await AsyncCompleter(AsyncMemoryStore(memory=memory), guard.finish).run_once()
    assert "1 finished" in str(report)
    assert runs == [("alice", 1), ("alice", 2)]
