"""The decorator on plain and async views, under WSGI and ASGI: whose requests they are, what is kept of them."""

import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.models import Permission
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.signals import got_request_exception
from django.http import FileResponse, Http404, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

import semel
from semel import NoEffect, Policy
from semel.core.policy import Mode
from semel.core.state import State
from semel.django import guards, idempotent
from semel.errors import ConfigurationError
from tests.django import project
from tests.django.entry import (
    ASGI,
    WSGI,
    Visitor,
    amounts,
    apay,
    assert_kept,
    code,
    everybody,
    is_replay,
    pay,
    records,
)
from tests.django.shop.models import Payment
from tests.web.harness import HANG_SECONDS
from tests.web.scenarios import multipart

COLOURS = {"sync": pay, "async": apay}
SESSIONS = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
CSRF = ["django.middleware.csrf.CsrfViewMiddleware", *SESSIONS]


def serving(*views: Any, **settings: Any) -> Any:
    """Serve the first of *views* at /pay, the second at /pay2, and so on; everybody is one."""
    patterns = [path(f"pay{number + 1 if number else ''}", view) for number, view in enumerate(views)]
    return project.serving(patterns, **{"SEMEL": {"SCOPE": everybody}, **settings})


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("mode", ["guard", "atomic"])
def test_any_view_under_any_server(database: str, under: str, colour: str, mode: Mode) -> None:
    """A plain or async view, under WSGI or ASGI, in either mode, runs once: its retry gets the first answer."""
    view = idempotent(policy=Policy.ietf(mode=mode))(COLOURS[colour])
    with serving(view):
        visitor = Visitor(under)
        first, again = visitor.post(), visitor.post()
        assert first.status_code == 201
        assert_kept(first, again)
        assert code(visitor.post(data={"amount": 6}, content_type="application/json")) == "idempotency-key-reused"
        assert visitor.post(key="key-2").status_code == 201
        assert visitor.post(key=None).status_code == 201
    assert amounts() == [5, 5, 5]


# Whose request it is


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("colour", COLOURS)
def test_the_user_is_the_scope(sqlite: str, under: str, colour: str) -> None:
    """By default a key belongs to whoever is logged in: two users with one key never meet, and nobody is refused."""
    with serving(idempotent(COLOURS[colour]), SEMEL={}):
        jane, joe, nobody = Visitor(under), Visitor(under), Visitor(under)
        jane.log_in("jane")
        joe.log_in("joe")
        assert [is_replay(each.post()) for each in (jane, joe, jane)] == [False, False, True]
        assert code(nobody.post()) == "idempotency-scope-missing"
        assert nobody.post(key=None).status_code == 201
    assert amounts() == [5, 5, 5]


def test_nobodies_share_a_scope_where_it_is_allowed(sqlite: str) -> None:
    """With ALLOW_ANONYMOUS, those who are not logged in share their keys."""
    with serving(idempotent(pay), SEMEL={"ALLOW_ANONYMOUS": True}):
        assert_kept(Visitor().post(), Visitor().post())
    assert [each.scope for each in records()] == ["anonymous"]


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("colour", COLOURS)
def test_a_scope_of_ones_own(sqlite: str, under: str, colour: str) -> None:
    """The decorator's scope is asked with the request; a number will do, as primary keys are."""
    with serving(idempotent(scope=lambda request: int(request.headers["X-Account"]))(COLOURS[colour])):
        sent = [Visitor(under).post(headers={"X-Account": account}) for account in ("7", "8", "7")]
    assert [is_replay(each) for each in sent] == [False, False, True]
    assert {each.scope for each in records()} == {"7", "8"}


def test_an_async_scope(sqlite: str) -> None:
    """An async view's scope may be async; a plain view's may not."""

    async def principal(_request: Any) -> str:
        return "somebody"

    with serving(idempotent(scope=principal)(apay), idempotent(scope=principal)(pay)):
        assert_kept(Visitor().post(), Visitor().post())
        assert Visitor().post("/pay2", key="key-2").status_code == 500
    assert amounts() == [5]


def test_the_apps_own_login_answers_first(sqlite: str) -> None:
    """Whoever is not let in by the application's login gets its answer: no replay, and nothing of ours."""
    with serving(login_required(idempotent(pay)), SEMEL={}, LOGIN_URL="/login"):
        visitor = Visitor()
        assert visitor.post().status_code == 302
        user = visitor.log_in()
        assert visitor.post().status_code == 201
        user.delete()
        assert visitor.post().status_code == 302
    assert amounts() == [5]


def test_a_permission_that_was_taken_away(sqlite: str) -> None:
    """Who may not any more gets 403, and no replay."""
    with serving(permission_required("auth.add_user", raise_exception=True)(idempotent(pay)), SEMEL={}):
        visitor = Visitor()
        user = visitor.log_in()
        user.user_permissions.add(Permission.objects.get(codename="add_user"))
        assert visitor.post().status_code == 201
        assert is_replay(visitor.post())
        user.user_permissions.clear()
        refused = visitor.post()
    assert (refused.status_code, is_replay(refused)) == (403, False)


def test_another_session_of_the_same_user(sqlite: str) -> None:
    """A user who logs in anew between retries gets the replay."""
    with serving(idempotent(pay), SEMEL={}):
        first, second = Visitor(), Visitor()
        first.log_in()
        second.log_in()
        assert_kept(first.post(), second.post())


# Bodies


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("middleware", [SESSIONS, CSRF])
def test_an_upload_with_another_boundary(sqlite: str, under: str, middleware: list[str]) -> None:
    """A form with files is the same whatever its boundary, also where the check for CSRF has read it already."""
    seen: list[Any] = []

    @idempotent
    def upload(request: Any) -> HttpResponse:
        seen.extend([request.POST["note"], request.FILES["file"].read()])
        return HttpResponse("ok")

    with serving(upload, MIDDLEWARE=middleware):
        visitor = Visitor(under)
        for content in (b"x" * 400_000, b"x" * 400_000, b"other"):
            sent = multipart(content)
            last = visitor.post(data=sent["body"], content_type=sent["content_type"])
    assert last.status_code == 422
    assert seen == ["n", b"x" * 400_000]


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("size", [10, 400_000])
def test_the_view_reads_what_it_likes(sqlite: str, under: str, size: int) -> None:
    """request.body, request.read() and request.POST give a guarded view what they give any other."""
    seen: list[Any] = []

    @idempotent
    def whole(request: Any) -> HttpResponse:
        seen.append(len(request.body))
        return HttpResponse(request.POST["note"])

    @idempotent
    def stream(request: Any) -> HttpResponse:
        seen.append(len(request.read(7)) + len(request.read()))
        return HttpResponse("ok")

    sent = multipart(b"x" * size)
    with serving(whole, stream):
        for view in ("/pay", "/pay2"):
            visitor = Visitor(under)
            answer = visitor.post(view, key=view, data=sent["body"], content_type=sent["content_type"])
            assert answer.status_code == 200
    assert seen == [len(sent["body"])] * 2


def test_a_view_may_read_bodies_of_any_size_by_itself(sqlite: str) -> None:
    """What is over Semel's limit is refused; with report mode the view gets it all, what was read of it included."""
    seen: list[bytes] = []
    policy = Policy.ietf(max_request_body=100_000, enforcement="report")

    @idempotent(policy=policy)
    def view(request: Any) -> HttpResponse:
        seen.append(request.read())
        return HttpResponse("ok")

    body = bytes(range(256)) * 1000
    with serving(view):
        # A length that is not declared is found out by reading.
        request = RequestFactory().post("/pay", body, content_type="text/plain", headers={"Idempotency-Key": "k"})
        del request.META["CONTENT_LENGTH"]
        assert view(request).status_code == 200
    assert seen == [body]


def test_djangos_own_limits_stay(sqlite: str) -> None:
    """A body that Django finds too big for memory is 400, as without Semel, and the view's own reading is not."""

    @idempotent
    def whole(request: Any) -> HttpResponse:
        return HttpResponse(request.body)

    @idempotent
    def stream(request: Any) -> HttpResponse:
        return HttpResponse(request.read())

    with serving(whole, stream, DATA_UPLOAD_MAX_MEMORY_SIZE=10):
        text = {"data": "x" * 11, "content_type": "text/plain"}
        assert Visitor().post("/pay", **text).status_code == 400
        assert Visitor().post("/pay2", key="key-2", **text).content == b"x" * 11


def test_a_body_that_somebody_has_used_up(sqlite: str) -> None:
    """Where a middleware has read the body from its stream, nobody can tell what was asked: a clear error."""
    guarded = idempotent(pay)

    def greedy(request: Any) -> Any:
        request.read()
        return guarded(request)

    visitor = Visitor()
    visitor.client.raise_request_exception = True
    with serving(greedy), pytest.raises(ConfigurationError, match=r"use request\.body"):
        visitor.post()


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=b"])
def test_a_body_that_somebody_has_used_up_and_then_looked_for(sqlite: str, content_type: str) -> None:
    """Once its stream is read, request.POST is empty, whatever was sent: no two bodies may pass for the same one."""
    guarded = idempotent(pay)

    def greedy(request: Any) -> Any:
        request.read()
        assert not request.POST
        return guarded(request)

    visitor = Visitor()
    visitor.client.raise_request_exception = True
    with serving(greedy), pytest.raises(ConfigurationError, match=r"use request\.body"):
        visitor.post(data='{"amount": 5, "account": "a"}', content_type=content_type)


def test_a_form_without_fields(sqlite: str) -> None:
    """A form may have nothing in it, also where the check for CSRF has read it already."""
    form: dict[str, Any] = {"data": b"--boundary--\r\n", "content_type": "multipart/form-data; boundary=boundary"}

    @idempotent
    def view(_request: Any) -> HttpResponse:
        return HttpResponse("done")

    def looked_for(request: Any) -> HttpResponse:
        assert not request.POST
        return view(request)

    with serving(looked_for):
        assert_kept(Visitor().post(**form), Visitor().post(**form))


def test_paths_in_any_script(sqlite: str) -> None:
    """A path that is not ASCII is a path like any other."""
    with project.serving([path("päy/☃", idempotent(pay))], SEMEL={"SCOPE": everybody}):
        assert_kept(Visitor().post("/päy/☃"), Visitor().post("/päy/☃"))


# Answers


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize(
    "error, status",
    [
        (Http404("no such account"), 404),
        (PermissionDenied(), 403),
        (BadRequest("what?"), 400),
        (SuspiciousOperation("hm"), 400),
    ],
)
def test_what_django_answers_below_500_is_an_answer(sqlite: str, under: str, error: Exception, status: int) -> None:
    """An exception that Django has an answer for is kept as that answer."""
    runs: list[int] = []

    @idempotent
    def plain(_request: Any) -> HttpResponse:
        runs.append(1)
        raise error

    @idempotent
    async def asynchronous(_request: Any) -> HttpResponse:
        runs.append(1)
        raise error

    with serving(plain, asynchronous):
        for view in ("/pay", "/pay2"):
            first, again = (Visitor(under).post(view, key=view) for _ in range(2))
            assert first.status_code == status
            assert_kept(first, again)
    assert len(runs) == 2


@pytest.mark.parametrize("under", [WSGI, ASGI])
def test_an_error_is_kept_and_told_as_django_tells_it(
    sqlite: str, under: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a view raises is a 500 for it and its retries, sent to those who listen, and logged once."""
    heard: list[Any] = []

    def listen(request: Any, **_: Any) -> None:
        heard.append(request.path)

    @idempotent
    def broken(_request: Any) -> HttpResponse:
        raise RuntimeError("oops")

    got_request_exception.connect(listen)
    try:
        with serving(broken), caplog.at_level(logging.ERROR, "django.request"):
            first, again = (Visitor(under).post() for _ in range(2))
    finally:
        got_request_exception.disconnect(listen)
    assert first.status_code == 500
    assert_kept(first, again)
    assert heard == ["/pay"]
    told = [record for record in caplog.records if record.exc_info]
    assert [(record.getMessage(), str(record.exc_info and record.exc_info[1])) for record in told] == [
        ("Internal Server Error: /pay", "oops")
    ]


def test_a_test_of_the_users_sees_the_exception(sqlite: str) -> None:
    """Django's test client raises what a guarded view raised, as it does for any view."""

    @idempotent
    def broken(_request: Any) -> HttpResponse:
        raise RuntimeError("oops")

    visitor = Visitor()
    visitor.client.raise_request_exception = True
    with serving(broken), pytest.raises(RuntimeError, match="oops"):
        visitor.post()


@pytest.mark.parametrize("colour", COLOURS)
def test_a_template_is_rendered_before_it_is_kept(sqlite: str, colour: str) -> None:
    """A TemplateResponse is kept as what it shows."""
    template = engines["django"].from_string("Paid {{ amount }} once.")

    @idempotent
    def plain(request: Any) -> HttpResponse:
        return TemplateResponse(request, template, {"amount": 5})

    @idempotent
    async def asynchronous(request: Any) -> HttpResponse:
        return TemplateResponse(request, template, {"amount": 5})

    with serving(plain if colour == "sync" else asynchronous):
        first, again = (Visitor().post() for _ in range(2))
    assert first.content == b"Paid 5 once."
    assert_kept(first, again)


def test_a_small_file_is_kept(sqlite: str, tmp_path: Path) -> None:
    """A FileResponse within the limit is kept whole; one beyond it is sent, and leaves a tombstone."""
    file = tmp_path / "receipt.txt"
    file.write_bytes(b"paid\n" * 1000)

    def receipt(_request: Any) -> HttpResponseBase:
        return FileResponse(file.open("rb"), as_attachment=True)

    small, large = idempotent(receipt), idempotent(policy=Policy.ietf(max_response_body=100))(receipt)
    with serving(small, large):
        first, again = (Visitor().post() for _ in range(2))
        assert b"".join(first.streaming_content) == again.content == file.read_bytes()
        assert again["Content-Disposition"] == 'attachment; filename="receipt.txt"'
        sent = Visitor().post("/pay2", key="key-2")
        assert b"".join(sent.streaming_content) == file.read_bytes()
        assert code(Visitor().post("/pay2", key="key-2")) == "response-not-replayable"


async def endless(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield f"{number}\n".encode()


@pytest.mark.parametrize("limit, code_of_retry", [(10_000, None), (10, "response-not-replayable")])
def test_an_async_stream_of_a_plain_view(sqlite: str, limit: int, code_of_retry: str | None) -> None:
    """A plain view may answer with an async stream, under either server."""

    @idempotent(policy=Policy.ietf(max_response_body=limit))
    def view(_request: Any) -> HttpResponseBase:
        return StreamingHttpResponse(endless(20))

    expected = b"".join(f"{number}\n".encode() for number in range(20))
    with serving(view):
        sent = Visitor(WSGI).post()
        assert b"".join(sent.streaming_content) == expected
        again = Visitor(WSGI).post()
        assert code_of_retry == (code(again) if code_of_retry else None)
        assert code_of_retry or again.content == expected

        async def ask() -> bytes:
            # On one loop, as under a server: a stream ends with its loop.
            response = await AsyncClient().post("/pay", headers={"Idempotency-Key": "key-2"})
            return b"".join([part async for part in response])

        assert async_to_sync(ask)() == expected


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-ndjson"])
def test_stream_that_flows_is_still_of_its_operation(sqlite: str, media_type: str) -> None:
    """A stream of which more comes after its answer has begun to flow still finds its operation."""

    def lines() -> Iterator[bytes]:
        for _ in range(4):
            yield semel.current().key.encode()

    async def async_lines() -> AsyncIterator[bytes]:
        for line in lines():
            yield line

    policy = Policy.ietf(max_response_body=10)

    @idempotent(policy=policy)
    def plain(_request: Any) -> HttpResponseBase:
        return StreamingHttpResponse(lines(), content_type=media_type)

    @idempotent(policy=policy)
    async def on_a_loop(_request: Any) -> HttpResponseBase:
        return StreamingHttpResponse(async_lines(), content_type=media_type)

    with serving(plain, on_a_loop):
        assert b"".join(Visitor(WSGI).post().streaming_content) == b"key-1" * 4

        async def ask() -> bytes:
            response = await AsyncClient().post("/pay2", headers={"Idempotency-Key": "key-2"})
            return b"".join([part async for part in response])

        assert async_to_sync(ask)() == b"key-2" * 4


def test_a_stream_that_breaks_was_never_begun(sqlite: str) -> None:
    """A stream that raises within the limit is an error of the view: nothing of it has been sent."""

    def broken() -> Iterator[bytes]:
        yield b"begun"
        raise NoEffect("The file is gone.")

    with serving(idempotent(lambda _request: StreamingHttpResponse(broken()))):
        assert code(Visitor().post()) == "no-effect"
    assert records() == []


def test_what_is_seen_to_be_a_stream_is_refused_at_once() -> None:
    """A view that says that it answers with a stream can't be guarded, and is told so where it is written."""
    with pytest.raises(ConfigurationError, match="can't be replayed"):

        @idempotent
        def stream(_request: Any) -> StreamingHttpResponse: ...

    with pytest.raises(ConfigurationError, match="can't be replayed"):

        @idempotent
        def named(_request: Any) -> "StreamingHttpResponse": ...


@pytest.mark.parametrize("colour", COLOURS)
def test_no_response(sqlite: str, colour: str) -> None:
    """A view that returns no response is told so in the words that Django has for it."""

    @idempotent
    def plain(_request: Any) -> Any: ...

    @idempotent
    async def asynchronous(_request: Any) -> Any: ...

    visitor = Visitor()
    visitor.client.raise_request_exception = True
    with serving(plain if colour == "sync" else asynchronous), pytest.raises(ValueError, match="returned None instead"):
        visitor.post()


# How it is put on


class Payments(View):  # type: ignore[misc]  # Django has no types
    def post(self, request: Any) -> HttpResponse:
        return pay(request)

    def get(self, _request: Any) -> HttpResponse:
        return HttpResponse(f"{Payment.objects.count()}")


class AsyncPayments(View):  # type: ignore[misc]  # Django has no types
    async def post(self, request: Any) -> HttpResponse:
        return await apay(request)


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("kind", [Payments, AsyncPayments])
def test_class_based_views(sqlite: str, under: str, kind: Any) -> None:
    """A class is guarded at dispatch, at one of its methods, or where its URL is; PUT and what it lacks are its own."""
    dispatching: Any = method_decorator(idempotent, name="dispatch")(type("Dispatching", (kind,), {}))
    one_method: Any = method_decorator(idempotent(policy=Policy.ietf()), name="post")(type("OneMethod", (kind,), {}))
    with serving(dispatching.as_view(), one_method.as_view(), idempotent(kind.as_view())):
        for view in ("/pay", "/pay2", "/pay3"):
            assert_kept(Visitor(under).post(view, key=view), Visitor(under).post(view, key=view))
            visitor = Visitor(under)
            put = async_to_sync(visitor.client.put) if under == ASGI else visitor.client.put
            assert put(view).status_code == 405
    assert amounts() == [5, 5, 5]


def test_a_view_that_calls_another(sqlite: str) -> None:
    """A guarded view may call a guarded view: the request is claimed once."""
    inner = idempotent(pay)

    @idempotent
    def outer(request: Any) -> Any:
        return inner(request)

    with serving(outer):
        assert_kept(Visitor().post(), Visitor().post())
    assert len(records()) == 1


@pytest.mark.parametrize("under", [WSGI, ASGI])
def test_csrf(sqlite: str, under: str) -> None:
    """A retry without its CSRF token is refused like any request without one: a replay gets past nobody."""
    with serving(idempotent(pay), csrf_exempt(idempotent(pay)), idempotent(csrf_exempt(pay)), MIDDLEWARE=CSRF):
        visitor = Visitor(under, enforce_csrf_checks=True)
        token = "t" * 32
        visitor.client.cookies["csrftoken"] = token
        assert visitor.post().status_code == 403
        first, again = (visitor.post(headers={"X-CSRFToken": token}) for _ in range(2))
        assert_kept(first, again)
        refused = visitor.post()
        assert (refused.status_code, is_replay(refused)) == (403, False)
        for view in ("/pay2", "/pay3"):
            assert visitor.post(view, key=view).status_code == 201


def test_a_view_can_be_called_without_a_server(sqlite: str) -> None:
    """A test may hand a guarded view a request of RequestFactory's."""
    view = idempotent(scope=everybody)(pay)
    factory = RequestFactory()
    body = {"data": {"amount": 5}, "content_type": "application/json", "headers": {"Idempotency-Key": "k"}}
    assert_kept(*(view(factory.post("/pay", **body)) for _ in range(2)))


def test_what_can_be_seen_to_be_wrong_is_refused_where_it_is_written() -> None:
    """A wrong policy or scope, a class, a second guard: each is an error when the module is imported."""
    with pytest.raises(ConfigurationError, match="policy must be a Policy"):
        idempotent(policy="ietf")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="scope must be a function"):
        idempotent(scope="jane")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="Its arguments have names"):
        idempotent(Policy.ietf())  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="method_decorator"):
        idempotent(Payments)
    with pytest.raises(ConfigurationError, match="guarded already"):
        idempotent(idempotent(pay))


def test_what_django_can_not_do_is_said(sqlite: str) -> None:
    """A kept request, or one to be run later, and atomic mode in a store of its own, are refused with what to do."""
    atomic = idempotent(policy=Policy.ietf(mode="atomic"))(pay)
    for policy in (Policy.ietf(store_request=True), Policy.ietf(in_progress="accept")):
        kept = idempotent(policy=policy)(pay)
        with serving(kept), pytest.raises(ConfigurationError, match=r"semel\.wsgi\.IdempotencyMiddleware"):
            kept(RequestFactory().post("/pay"))
    elsewhere = {"SCOPE": everybody, "STORE": "memory://"}
    with serving(atomic, SEMEL=elsewhere), pytest.raises(ConfigurationError, match="STORE"):
        atomic(RequestFactory().post("/pay"))


def test_a_store_of_its_own(sqlite: str) -> None:
    """SEMEL["STORE"] keeps the records elsewhere; plain views are guarded by it."""
    with serving(idempotent(pay), SEMEL={"SCOPE": everybody, "STORE": "memory://"}):
        assert_kept(Visitor().post(), Visitor().post())
        assert len(records()) == 1


# What a view can say and do


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("colour", COLOURS)
def test_phases(database: str, under: str, colour: str) -> None:
    """A view may take steps, each with its own commit; a retry goes on from the last one."""
    calls: list[str] = []
    failing = [True]

    def create(_connection: Any, amount: int) -> int:
        calls.append("create")
        return int(Payment.objects.create(amount=amount, account="a").pk)

    def charge(number: int, *, idempotency_key: str) -> str:
        calls.append("charge")
        if failing:
            failing.clear()
            raise NoEffect("The provider is closed.")
        return f"{number} {bool(idempotency_key)}"

    @idempotent
    def plain(_request: Any) -> HttpResponse:
        operation = semel.current()
        number = operation.phase("created", create, 5)
        return HttpResponse(operation.effect("charged", charge, number))

    @idempotent
    async def asynchronous(_request: Any) -> HttpResponse:
        operation = semel.current()
        number = await operation.phase("created", semel.in_thread(create), 5)
        return HttpResponse(await operation.effect("charged", semel.in_thread(charge), number))

    with serving(plain if colour == "sync" else asynchronous):
        visitor = Visitor(under)
        assert code(visitor.post()) == "no-effect"
        first, again = visitor.post(), visitor.post()
    assert first.status_code == 200
    assert_kept(first, again)
    assert calls == ["create", "charge", "charge"]
    assert amounts() == [5]


def test_a_plain_function_in_an_async_view(sqlite: str) -> None:
    """A step may be taken in a plain function that an async view calls in the ORM's thread: nobody waits for ever."""

    def steps() -> int:
        operation = semel.current()
        return int(operation.phase("paid", lambda _: Payment.objects.create(amount=7, account="a").pk))

    @idempotent
    async def view(_request: Any) -> HttpResponse:
        return HttpResponse(str(await sync_to_async(steps)()))

    with serving(view):
        for number, under in enumerate((WSGI, ASGI)):
            assert_kept(*(Visitor(under).post(key=f"key-{number}") for _ in range(2)))
    assert amounts() == [7, 7]


class OwnAnswers:
    """Middleware of the project's that answers what views raise, and adds to what they render."""

    def __init__(self, get_response: Any) -> None:
        self._get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self._get_response(request)

    def process_exception(self, _request: Any, error: Exception) -> HttpResponse:
        return HttpResponse(f"our own: {error}", status=404)

    def process_template_response(self, _request: Any, response: Any) -> Any:
        response.context_data["shop"] = "ours"
        return response


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("policy", [Policy.ietf(), Policy.ietf(enforcement="report")], ids=["without a key", "report"])
def test_what_is_not_guarded_is_djangos(sqlite: str, under: str, policy: Policy) -> None:
    """Without a key, and where Semel only reports, what a view raises or renders is its middleware's, as ever."""
    template = engines["django"].from_string("{{ shop }}")
    guard = idempotent(policy=policy)

    def gone(_request: Any) -> HttpResponse:
        raise Http404("gone")

    async def agone(_request: Any) -> HttpResponse:
        raise Http404("gone")

    def show(request: Any) -> HttpResponse:
        return TemplateResponse(request, template, {})

    key = None if policy.enforcement == "enforce" else "key-1"
    with serving(guard(gone), guard(agone), guard(show), MIDDLEWARE=[f"{__name__}.OwnAnswers"]):
        answers = [Visitor(under).post(each, key=key).content for each in ("/pay", "/pay2", "/pay3")]
    assert answers == [b"our own: gone", b"our own: gone", b"ours"]


def test_report_mode_knows_what_django_answers(sqlite: str) -> None:
    """To report mode what Django answers below 500 is an answer, and is no server error that would free the key."""

    def gone(_request: Any) -> HttpResponse:
        raise Http404

    policy = Policy.ietf(enforcement="report", server_errors="release")
    with serving(idempotent(policy=policy)(gone)):
        assert Visitor().post().status_code == 404
        assert [record.state for record in records()] == [State.COMPLETE]


@pytest.mark.parametrize("under", [WSGI, ASGI])
@pytest.mark.parametrize("colour", COLOURS)
def test_report_mode(sqlite: str, under: str, colour: str) -> None:
    """A policy that only reports changes nothing: a retry runs again, and is counted."""
    view = idempotent(policy=Policy.ietf(enforcement="report"))(COLOURS[colour])
    before = guards.TALLY.snapshot().total.get("replay", 0)
    with serving(view):
        assert [is_replay(Visitor(under).post()) for _ in range(2)] == [False, False]
    assert amounts() == [5, 5]
    assert guards.TALLY.snapshot().total["replay"] == before + 1


def test_a_server_that_stops(sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was told to stop takes on nothing new, and says when to come again."""
    with serving(idempotent(pay), idempotent(apay)):
        monkeypatch.setattr(guards.GATE, "is_closed", True)
        for view in ("/pay", "/pay2"):
            answer = Visitor().post(view)
            assert (answer.status_code, code(answer), answer["Retry-After"]) == (503, "shutting-down", "2")
    assert (amounts(), records()) == ([], [])


def test_two_at_once(database: str) -> None:
    """While a view runs, its double gets 409; there is one payment."""
    entered, go_on = threading.Event(), threading.Event()

    @idempotent
    def slow(request: Any) -> HttpResponse:
        entered.set()
        assert go_on.wait(HANG_SECONDS)
        return pay(request)

    answers: list[Any] = []
    with serving(slow):
        thread = threading.Thread(target=lambda: answers.append(Visitor().post()))
        thread.start()
        assert entered.wait(HANG_SECONDS)
        busy = Visitor().post()
        go_on.set()
        thread.join()
    assert code(busy) == "idempotency-key-in-progress"
    assert (answers[0].status_code, json.loads(answers[0].content)["amount"]) == (201, 5)
    assert amounts() == [5]


def test_a_request_that_is_sent_again(sqlite: str) -> None:
    """A test may hand the very same request object to a view twice."""
    view = idempotent(scope=everybody)(pay)
    request = RequestFactory().post(
        "/pay", {"amount": 5}, content_type="application/json", headers={"Idempotency-Key": "k"}
    )
    assert_kept(view(request), view(request))
