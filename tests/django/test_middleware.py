"""The middleware: a whole project is guarded, but for what guards itself; a replay gets past nobody."""

import asyncio
import contextvars
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.core.handlers.asgi import ASGIHandler
from django.db import connection
from django.http import Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import RequestFactory, override_settings
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View

import semel
from semel import NoEffect, Policy
from semel.core.policy import Mode
from semel.core.state import State
from semel.django import IdempotencyMiddleware, guards, idempotent
from semel.operation import current
from tests.django import project
from tests.django.entry import ASGI, WSGI, Visitor, amounts, apay, assert_kept, code, everybody, is_replay, pay, records
from tests.django.shop.models import Payment
from tests.web.harness import AsgiClient, Request, asgi_scope

OURS = "semel.django.IdempotencyMiddleware"
SESSIONS = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
COLOURS = {"sync": pay, "async": apay}


@pytest.fixture(params=[WSGI, ASGI])
def under(request: pytest.FixtureRequest) -> str:
    """Either kind of server."""
    return str(request.param)


def serving(*views: Any, middleware: Any = (OURS,), **settings: Any) -> Any:
    patterns = [path(f"pay{number + 1 if number else ''}", view) for number, view in enumerate(views)]
    return project.serving(patterns, MIDDLEWARE=list(middleware), **({"SEMEL": {"SCOPE": everybody}} | settings))


def only_sync(get_response: Any) -> Any:
    """Middleware that knows nothing of event loops."""

    def pass_on(request: Any) -> Any:
        return get_response(request)

    return pass_on


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("mode", ["guard", "atomic"])
@pytest.mark.parametrize(
    "middleware",
    [[OURS], [f"{__name__}.only_sync", OURS], [OURS, f"{__name__}.only_sync"]],
    ids=["", "behind", "before"],
)
def test_views_that_know_of_nothing(sqlite: str, under: str, colour: str, mode: str, middleware: list[str]) -> None:
    """Any view is guarded, in either mode, under any server, whatever other middleware there is."""
    said = {"SCOPE": everybody, "POLICY": {"mode": mode}}
    with serving(COLOURS[colour], middleware=middleware, SEMEL=said):
        first, again = (Visitor(under).post() for _ in range(2))
        assert first.status_code == 201
        assert_kept(first, again)
        assert code(Visitor(under).post(data={}, content_type="application/json")) == "idempotency-key-reused"
        assert [Visitor(under).post(key=None).status_code for _ in range(2)] == [201, 201]
    assert amounts() == [5, 5, 5]


@pytest.mark.parametrize("allow", [False, True])
def test_a_credential_that_no_login_has_read(
    sqlite: str, under: str, allow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A request with a token that a view reads by itself is not anonymous: it is refused, and the log says why."""
    with serving(pay, middleware=[*SESSIONS, OURS], SEMEL={"ALLOW_ANONYMOUS": allow}):
        for name, value in (("Authorization", "Bearer ann"), ("X-Api-Key", "bob"), ("Cookie", "access_token=ann")):
            refused = Visitor(under).post(headers={name: value})
            assert (refused.status_code, code(refused)) == (400, "idempotency-scope-missing")
            assert "Authenticate" not in refused.content.decode()
        assert amounts() == []
        harmless = {"Cookie": "sessionid=old; csrftoken=x; ai_session=y; cookie_consent=all"}
        first, again = (Visitor(under).post(headers=harmless) for _ in range(2))
        assert first.status_code == (201 if allow else 400)
        assert is_replay(again) is allow
    (told,) = [each for each in caplog.messages if "logs in by itself" in each]
    assert told.startswith("/pay: ")


def test_only_the_paths_that_are_named(sqlite: str, under: str) -> None:
    """PATHS says what is guarded, and by which policy."""
    said = {"SCOPE": everybody, "PATHS": {"/pay2": {"required": True}}}
    with serving(pay, pay, SEMEL=said):
        assert [is_replay(Visitor(under).post()) for _ in range(2)] == [False, False]
        assert code(Visitor(under).post("/pay2", key=None)) == "idempotency-key-missing"


def test_the_user_is_the_scope(sqlite: str, under: str) -> None:
    """The middleware knows who is logged in; nobody's key is refused, and no view runs."""
    with serving(pay, middleware=[*SESSIONS, OURS], SEMEL={}):
        jane, joe = Visitor(under), Visitor(under)
        jane.log_in("jane")
        joe.log_in("joe")
        assert [is_replay(each.post()) for each in (jane, joe, jane)] == [False, False, True]
        assert code(Visitor(under).post()) == "idempotency-scope-missing"
        User.objects.all().delete()
        assert code(jane.post()) == "idempotency-scope-missing"
    assert amounts() == [5, 5]


@pytest.mark.parametrize("kind", ["function", "async function", "class", "URL"])
def test_what_guards_itself_is_left_alone(sqlite: str, under: str, kind: str) -> None:
    """A decorated view is guarded once, by its own policy and scope."""

    class Payments(View):  # type: ignore[misc]  # Django has no types
        def post(self, request: Any) -> HttpResponse:
            return pay(request)

    class Guarded(Payments): ...

    own = idempotent(policy=Policy.ietf(required=True), scope=lambda _: "own")
    views = {
        "function": own(pay),
        "async function": own(apay),
        "class": method_decorator(own, name="dispatch")(Guarded).as_view(),
        "URL": own(Payments.as_view()),
    }
    with serving(views[kind]):
        assert_kept(*(Visitor(under).post() for _ in range(2)))
        assert code(Visitor(under).post(key=None)) == "idempotency-key-missing"
    assert [each.scope for each in records()] == ["own"]


def test_a_view_whose_mark_was_lost_is_guarded_once(sqlite: str, under: str) -> None:
    """Where a decorator hides that a view guards itself, the middleware does, and the view does not do it again."""
    guarded = idempotent(pay)

    def careless(request: Any) -> Any:
        return guarded(request)

    with serving(careless):
        assert_kept(*(Visitor(under).post() for _ in range(2)))
    assert len(records()) == 1


# Who is in front


def test_csrf(sqlite: str, under: str) -> None:
    """A retry without its CSRF token is refused like any request without one."""
    with serving(pay, middleware=[*SESSIONS, OURS]):
        visitor = Visitor(under, enforce_csrf_checks=True)
        token = "t" * 32
        visitor.client.cookies["csrftoken"] = token
        assert visitor.post().status_code == 403
        assert_kept(*(visitor.post(headers={"X-CSRFToken": token}) for _ in range(2)))
        refused = visitor.post()
        assert (refused.status_code, is_replay(refused)) == (403, False)


class Doorman:
    """Lets nobody in, once the view is known; as a middleware for logins does."""

    is_strict = False

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self.get_response(request)

    def process_view(self, *_: Any) -> HttpResponse | None:
        return HttpResponse("Not today.", status=403) if self.is_strict else None


def test_a_replay_gets_past_nobody(sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever decides in process_view, in front of the guard, decides about a replay, too."""
    with serving(pay, middleware=[f"{__name__}.Doorman", OURS]):
        assert Visitor().post().status_code == 201
        monkeypatch.setattr(Doorman, "is_strict", True)
        assert Visitor().post().content == b"Not today."


@pytest.mark.parametrize("where", ["/nowhere", "/slash"])
def test_what_no_view_answers_is_not_kept(sqlite: str, under: str, where: str) -> None:
    """A URL that nobody has, or that lacks its slash, leaves the key free for the right one."""
    middleware = ["django.middleware.common.CommonMiddleware", OURS]
    with project.serving([path("slash/", pay)], MIDDLEWARE=middleware, SEMEL={"SCOPE": everybody}):
        assert Visitor(under).post(where).status_code in {301, 404}
        assert records() == []
        assert Visitor(under).post("/slash/").status_code == 201


def test_another_middleware_that_answers_for_errors(sqlite: str, under: str) -> None:
    """What another middleware's process_exception makes of an exception is the answer, and is kept."""
    with serving(broken, middleware=[f"{__name__}.Apologist", OURS]):
        first, again = (Visitor(under).post() for _ in range(2))
    assert (first.status_code, json.loads(first.content)) == (409, {"sorry": "oops"})
    assert_kept(first, again)


class Apologist(Doorman):
    def process_exception(self, _request: Any, error: Exception) -> HttpResponse:
        return JsonResponse({"sorry": str(error)}, status=409)


def broken(_request: Any) -> HttpResponse:
    raise RuntimeError("oops")


# What is kept


def test_an_error_is_kept_and_told_once(sqlite: str, under: str, caplog: pytest.LogCaptureFixture) -> None:
    """What a view raises is a 500 for it and its retries; Django logs it once."""
    with serving(broken), caplog.at_level(logging.ERROR, "django.request"):
        first, again = (Visitor(under).post() for _ in range(2))
    assert first.status_code == 500
    assert_kept(first, again)
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_no_effect_frees_the_key(sqlite: str, under: str) -> None:
    """NoEffect is a 503 that frees the key, although Django has made a 500 of it."""

    def closed(_request: Any) -> HttpResponse:
        raise NoEffect("closed")

    with serving(closed):
        assert code(Visitor(under).post()) == "no-effect"
    assert records() == []


@pytest.mark.parametrize("error, left", [(Http404(), 1), (RuntimeError("oops"), 0)])
def test_atomic_mode(database: str, under: str, error: Exception, left: int) -> None:
    """In atomic mode what a view raises takes its writes back; what Django answers below 500 is kept without them."""

    def failing(request: Any) -> HttpResponse:
        pay(request)
        raise error

    async def async_failing(request: Any) -> HttpResponse:
        await apay(request)
        raise error

    with serving(failing, async_failing, SEMEL={"SCOPE": everybody, "POLICY": {"mode": "atomic"}}):
        for view in ("/pay", "/pay2"):
            first, again = (Visitor(under).post(view, key=view) for _ in range(2))
            assert is_replay(again) == bool(left)
            assert first.status_code == again.status_code
    assert (amounts(), len(records())) == ([], left * 2)


@pytest.mark.parametrize("mode", ["guard", "atomic"])
def test_atomic_requests(database: str, mode: str) -> None:
    """ATOMIC_REQUESTS stays where Django puts it: around the view, inside of the guard."""
    seen: list[bool] = []

    def view(request: Any) -> HttpResponse:
        seen.append(connection.in_atomic_block)
        return pay(request)

    said = {"SCOPE": everybody, "POLICY": {"mode": mode}}
    entry = {**project.settings_of(database), "ATOMIC_REQUESTS": True}
    with project.databases(default=entry), serving(view, SEMEL=said):
        assert_kept(*(Visitor().post() for _ in range(2)))
        assert amounts() == [5]
    assert seen == [True]


def test_steps(sqlite: str, under: str) -> None:
    """A view behind the middleware may take steps, plain or async."""

    def create(_connection: Any) -> int:
        return int(Payment.objects.create(amount=9, account="a").pk)

    def plain(_request: Any) -> HttpResponse:
        return HttpResponse(str(semel.current().phase("created", create)))

    async def asynchronous(_request: Any) -> HttpResponse:
        return HttpResponse(str(await semel.current().phase("created", semel.in_thread(create))))

    with serving(plain, asynchronous):
        for view in ("/pay", "/pay2"):
            assert_kept(*(Visitor(under).post(view, key=view) for _ in range(2)))
    assert amounts() == [9, 9]


def test_the_operation_ends_with_the_request(sqlite: str, under: str) -> None:
    """What comes next in the same thread is part of no operation."""

    def view(_request: Any) -> HttpResponse:
        try:
            return HttpResponse(current().key)
        except LookupError:
            return HttpResponse("none")

    with serving(view):
        assert [Visitor(under).post(key=key).content for key in ("a", None)] == [b"a", b"none"]


@pytest.mark.parametrize("mode", ["guard", "atomic"])
def test_what_ends_a_thread_leaves_nothing_open(sqlite: str, mode: str) -> None:
    """A view that ends its thread leaves no transaction, and no lease that somebody renews."""

    def exiting(request: Any) -> HttpResponse:
        pay(request)
        raise SystemExit

    with serving(exiting, SEMEL={"SCOPE": everybody, "POLICY": {"mode": mode}}):
        with pytest.raises(SystemExit):
            Visitor().post()
        assert not connection.in_atomic_block
        assert guards.guard().leases._leases == {}
    assert amounts() == ([5] if mode == "guard" else [])


def test_report_mode(sqlite: str, under: str) -> None:
    """A policy that only reports changes nothing: a retry runs again, errors are Django's."""
    before = guards.TALLY.snapshot().total.get("replay", 0)
    with serving(pay, broken, SEMEL={"SCOPE": everybody, "POLICY": {"enforcement": "report"}}):
        assert [is_replay(Visitor(under).post()) for _ in range(2)] == [False, False]
        assert Visitor(under).post("/pay2", key="key-2").status_code == 500
    assert amounts() == [5, 5]
    assert guards.TALLY.snapshot().total["replay"] == before + 1


def test_a_server_that_stops(sqlite: str, under: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was told to stop takes on nothing new."""
    with serving(pay):
        monkeypatch.setattr(guards.GATE, "is_closed", True)
        assert code(Visitor(under).post()) == "shutting-down"
    assert (amounts(), records()) == ([], [])


def test_included_urls(sqlite: str) -> None:
    """The whole path counts, as the server has it."""
    urls = [path("v1/", include([path("pay", pay)]))]
    with project.serving(urls, MIDDLEWARE=[OURS], SEMEL={"SCOPE": everybody, "PATHS": "/v1/*"}):
        assert_kept(*(Visitor().post("/v1/pay") for _ in range(2)))


class Envelope:
    """Middleware that changes every answer which comes from behind it."""

    def __init__(self, get_response: Any) -> None:
        self._get_response = get_response

    def __call__(self, request: Any) -> Any:
        response = self._get_response(request)
        return HttpResponse(b"<%b>" % response.content, status=response.status_code)


def test_middleware_between_the_guard_and_the_view(sqlite: str, under: str) -> None:
    """What the middleware behind the guard makes of an answer is kept with it, and is not made of a replay again."""
    with serving(lambda _request: HttpResponse("paid"), middleware=[OURS, f"{__name__}.Envelope"]):
        first, again = Visitor(under).post(), Visitor(under).post()
        assert (
            code(Visitor(under).post(data={"amount": 6}, content_type="application/json")) == "idempotency-key-reused"
        )
    assert first.content == b"<paid>"
    assert_kept(first, again)


# Clients that hang up


@pytest.mark.parametrize("entry", ["decorator", "middleware"])
@pytest.mark.parametrize("mode", ["guard", "atomic"])
async def test_a_client_that_hangs_up(postgres: str, entry: str, mode: Mode) -> None:
    """A client that hangs up does not stop a guarded async view: its retry gets the answer."""
    entered, go_on = asyncio.Event(), asyncio.Event()
    policy = Policy.ietf(mode=mode)

    async def slow(request: Any) -> HttpResponse:
        entered.set()
        await go_on.wait()
        return await apay(request)

    lines = (("Idempotency-Key", b"k"), ("Content-Type", b"application/json"))
    request = Request("POST", "/pay", lines, b'{"amount": 5}')
    view, middleware = (idempotent(policy=policy)(slow), ()) if entry == "decorator" else (slow, (OURS,))
    with serving(view, middleware=middleware, SEMEL={"SCOPE": everybody, "POLICY": policy}):
        handler = ASGIHandler()
        client = AsgiClient(request)
        serve = asyncio.create_task(handler(asgi_scope(request), client.receive, client.send))
        await entered.wait()
        client.gone.set()
        await asyncio.sleep(0)
        go_on.set()
        await serve
        again = AsgiClient(request)
        await handler(asgi_scope(request), again.receive, again.send)
        response = again.response()
    assert (response.status, response.is_replay) == (201, True)


async def test_a_client_of_an_unguarded_view_that_hangs_up(postgres: str) -> None:
    """What is not guarded is cancelled as ever."""
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(_request: Any) -> HttpResponse:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    with serving(slow):
        handler = ASGIHandler()
        request = Request("POST", "/pay")
        client = AsgiClient(request)
        serve = asyncio.create_task(handler(asgi_scope(request), client.receive, client.send))
        await entered.wait()
        client.gone.set()
        await serve
    assert cancelled.is_set()


def test_the_middleware_is_of_both_colours() -> None:
    """Django may give it a plain or an async next one."""

    async def following(_request: Any) -> None: ...

    assert asyncio.iscoroutinefunction(IdempotencyMiddleware(following))
    assert not asyncio.iscoroutinefunction(IdempotencyMiddleware(lambda _: None))
    with override_settings(SEMEL={}):
        assert IdempotencyMiddleware.sync_capable
        assert IdempotencyMiddleware.async_capable


def note_variable(get_response: Any) -> Any:
    """Middleware that looks, on the way back, at what the view has set."""

    async def look(request: Any) -> Any:
        response = await get_response(request)
        response["X-Seen"] = VARIABLE.get("nothing")
        return response

    return look


note_variable.async_capable = True  # type: ignore[attr-defined]  # as Django wants it
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


def test_what_an_async_view_sets_is_seen_around_it(sqlite: str) -> None:
    """A context variable that a view sets is seen by the middleware around the guard, as without it."""

    async def view(_request: Any) -> HttpResponse:
        VARIABLE.set("something")
        return HttpResponse("ok")

    with serving(view, middleware=[f"{__name__}.note_variable", OURS]):
        assert Visitor(ASGI).post()["X-Seen"] == "something"


# Odd endings


@pytest.mark.parametrize("mode", ["guard", "atomic"])
def test_a_client_that_hangs_up_before_the_view(sqlite: str, mode: str) -> None:
    """A request that is cancelled while its key is being claimed leaves the key free: its view was not reached."""

    async def hang_up(request: Any) -> None:
        task: Any = asyncio.current_task()
        asyncio.get_running_loop().call_soon(task.cancel)
        await middleware.process_view(request, pay, (), {})

    async def serve() -> None:
        with pytest.raises(asyncio.CancelledError):
            await middleware(RequestFactory().post("/pay", headers={"Idempotency-Key": "k"}))

    with serving(pay, SEMEL={"SCOPE": everybody, "POLICY": {"mode": mode}}):
        middleware = IdempotencyMiddleware(hang_up)
        async_to_sync(serve)()
        assert records() == []
        assert guards.guard().leases._leases == {}
        assert not connection.in_atomic_block


@pytest.mark.parametrize("entry", ["decorator", "middleware"])
@pytest.mark.parametrize("mode", ["guard", "atomic"])
async def test_a_view_that_is_cancelled_in_the_middle(postgres: str, entry: str, mode: Mode) -> None:
    """What a view did before it was cancelled nobody knows, so its key is not freed; in atomic mode it did nothing."""
    runs: list[str] = []
    policy = Policy.ietf(mode=mode)

    async def cancelled(request: Any) -> None:
        await apay(request)
        runs.append("ran")
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    lines = (("Idempotency-Key", b"k"), ("Content-Type", b"application/json"))
    request = Request("POST", "/pay", lines, b'{"amount": 5}')
    view, middleware = (idempotent(policy=policy)(cancelled), ()) if entry == "decorator" else (cancelled, (OURS,))
    with serving(view, middleware=middleware, SEMEL={"SCOPE": everybody, "POLICY": policy}):
        handler = ASGIHandler()
        client = AsgiClient(request)
        with pytest.raises(asyncio.CancelledError):
            await handler(asgi_scope(request), client.receive, client.send)
        found = await sync_to_async(records)()
        paid = await sync_to_async(amounts)()
        assert guards.guard().leases._leases == {}
    kept = ([State.PROCESSING], [5]) if mode == "guard" else ([], [])
    assert ([record.state for record in found], paid, runs) == (*kept, ["ran"])


def test_a_stream_that_breaks_was_never_begun(sqlite: str, under: str) -> None:
    """A stream that raises within the limit is an error like any other, and is kept as one."""

    async def broken_stream() -> AsyncIterator[bytes]:
        yield b"begun"
        raise RuntimeError("gone")

    with serving(lambda _request: StreamingHttpResponse(broken_stream())):
        first, again = (Visitor(under).post() for _ in range(2))
    assert first.status_code == 500
    assert_kept(first, again)


def test_exceptions_that_django_lets_through(sqlite: str) -> None:
    """Under DEBUG_PROPAGATE_EXCEPTIONS what a view raises goes on, and is kept as ever."""
    with serving(broken, DEBUG_PROPAGATE_EXCEPTIONS=True):
        with pytest.raises(RuntimeError, match="oops"):
            Visitor().post()
        assert Visitor().post().status_code == 500


def test_no_effect_in_report_mode(sqlite: str) -> None:
    """Where nothing is enforced, NoEffect is the error that it would be without Semel."""

    def closed(_request: Any) -> HttpResponse:
        raise NoEffect("closed")

    with serving(closed, SEMEL={"SCOPE": everybody, "POLICY": {"enforcement": "report"}}):
        answer = Visitor().post()
    assert (answer.status_code, answer["Content-Type"]) == (500, "text/html; charset=utf-8")


def test_no_effect_that_is_kept_is_told(sqlite: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the policy keeps every server error, NoEffect is one, and is logged as one."""

    def closed(_request: Any) -> HttpResponse:
        raise NoEffect("closed")

    with serving(closed, SEMEL={"SCOPE": everybody, "POLICY": {"server_errors": "keep"}}):
        assert_kept(*(Visitor().post() for _ in range(2)))
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["Internal Server Error: /pay"]
