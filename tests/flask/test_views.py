"""Guarded Flask views: what they may return, raise and read, and what stays outside the guard."""

import io
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any

import flask
import pytest
from flask.views import MethodView, View
from werkzeug.exceptions import Forbidden, TooManyRequests
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client, TestResponse

import semel
from semel import BodyHash, NoEffect, Policy
from semel.core.commands import Browse
from semel.core.policy import Enforcement
from semel.core.record import Record
from semel.errors import ConfigurationError
from semel.flask import idempotent
from semel.stores.memory import MemoryStore
from tests.flask.conftest import Install
from tests.web.scenarios import multipart

KEY = {"Idempotency-Key": "key-1"}


class Shop:
    """One guarded view that does what the test says."""

    def __init__(self, install: Install, **settings: Any) -> None:
        self.app = install(**settings)
        self.runs = 0
        self.behave: Callable[[], Any] = lambda: ("made", 201)
        self.app.add_url_rule("/pay", view_func=idempotent(self.pay), methods=["POST", "PATCH", "GET"])

    def pay(self) -> Any:
        self.runs += 1
        return self.behave()

    def post(self, path: str = "/pay", **request: Any) -> TestResponse:
        """Send a request with a key, and do what a server does: take the whole answer, then close it."""
        return self.app.test_client().post(path, headers=KEY | request.pop("headers", {}), buffered=True, **request)

    @property
    def records(self) -> tuple[Record, ...]:
        found: tuple[Record, ...] = self.app.extensions["semel"].store.perform(Browse(limit=9))
        return found


@pytest.fixture
def shop(install: Install) -> Shop:
    return Shop(install)


def is_replay(response: TestResponse) -> bool:
    return response.headers.get("Idempotent-Replayed") == "true"


RESULTS: dict[str, Callable[[], Any]] = {
    "str": lambda: "made",
    "bytes": lambda: b"made",
    "dict": lambda: {"made": 1},
    "list": lambda: [1, 2],
    "status": lambda: ("made", 202),
    "headers": lambda: ({"made": 1}, 201, {"Location": "/p/1"}),
    "Response": lambda: flask.Response("<made/>", 201, mimetype="text/xml"),
    "jsonify": lambda: (flask.jsonify(made=1), 201),
    "generator": lambda: (each for each in ("ma", "de")),
    "with context": lambda: flask.Response(flask.stream_with_context(iter([flask.request.path, "!"]))),
    "redirect": lambda: flask.redirect("/elsewhere/é", 303),
    "file": lambda: flask.send_file(io.BytesIO(b"made"), mimetype="text/plain"),
    "callable": lambda: flask.Response("made").make_conditional(flask.request.environ),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_whatever_flask_takes_is_replayed(shop: Shop, kind: str) -> None:
    """A view may return whatever Flask takes: a retry gets the same status, type, place and bytes."""
    shop.behave = RESULTS[kind]
    first, again = shop.post(), shop.post()
    assert (is_replay(first), is_replay(again)) == (False, True)
    assert first.status_code == again.status_code
    assert first.data == again.data
    for name in ("Content-Type", "Location"):
        assert again.headers.get(name) == first.headers.get(name)
    assert again.headers["Content-Length"] == str(len(first.data))
    assert shop.runs == 1


def test_a_generator_is_closed_once_and_by_the_server(shop: Shop) -> None:
    """What a streaming view has open is closed, and call_on_close runs, once and after the answer is kept."""
    events: list[str] = []

    class Stream:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"ma", b"de"])

        def close(self) -> None:
            events.append(f"closed, {shop.records[0].state}")

    def behave() -> flask.Response:
        response = flask.Response(Stream())
        response.call_on_close(lambda: events.append("on close"))
        return response

    shop.behave = behave
    shop.post()
    shop.post()
    assert sorted(events) == ["closed, complete", "on close"]


def test_events_flow_as_they_come(shop: Shop) -> None:
    """Server-sent events are not held back; their retry is told that they can't be repeated."""
    more = threading.Event()

    def events() -> Iterator[str]:
        yield "data: 1\n\n"
        assert more.is_set(), "The first event has not left before the second is made."
        yield "data: 2\n\n"

    shop.behave = lambda: flask.Response(events(), mimetype="text/event-stream")
    response = shop.app.test_client().post("/pay", headers=KEY)
    parts = iter(response.response)
    assert next(parts) == b"data: 1\n\n"
    more.set()
    assert next(parts) == b"data: 2\n\n"
    response.close()
    again = shop.post()
    assert (again.status_code, again.get_json()["code"]) == (409, "response-not-replayable")


# Exceptions


@pytest.mark.parametrize("status, is_kept", [(404, True), (409, True), (429, False), (401, False)])
def test_abort_is_an_answer(shop: Shop, status: int, is_kept: bool) -> None:
    """abort() in a view is its answer, and kept or not by its status, as if it had been returned."""
    shop.behave = lambda: flask.abort(status)
    first, again = shop.post(), shop.post()
    assert (first.status_code, again.status_code) == (status, status)
    assert first.data == again.data
    assert shop.runs == (1 if is_kept else 2)


class OutOfStock(Exception):
    pass


def test_an_error_handler_gives_the_answer(shop: Shop) -> None:
    """What a registered error handler answers is kept like what a view returns."""
    shop.app.register_error_handler(OutOfStock, lambda _: ({"error": "out of stock"}, 409))

    def behave() -> Any:
        raise OutOfStock

    shop.behave = behave
    first, again = shop.post(), shop.post()
    assert (first.status_code, again.status_code, is_replay(again)) == (409, 409, True)
    assert first.data == again.data
    assert shop.runs == 1


def test_a_blueprints_error_handler_counts(install: Install) -> None:
    """A blueprint's views are guarded like an app's, and its own error handlers give their answers."""
    app = install()
    blueprint = flask.Blueprint("orders", __name__, url_prefix="/orders")
    runs: list[int] = []

    @blueprint.post("/")
    @idempotent
    def order() -> Any:
        runs.append(1)
        raise OutOfStock

    blueprint.register_error_handler(OutOfStock, lambda _: ("none left", 410))
    app.register_blueprint(blueprint)
    answers = [app.test_client().post("/orders/", headers=KEY) for _ in range(2)]
    assert [each.status_code for each in answers] == [410, 410]
    assert is_replay(answers[1])
    assert runs == [1]


def test_an_unhandled_error_is_kept_and_reported(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody handles is kept as a 500, logged as Flask logs errors, and signalled once."""
    signalled: list[Exception] = []

    def note(sender: Any, exception: Exception, **_: Any) -> None:
        signalled.append(exception)

    error = RuntimeError("oops")

    def behave() -> Any:
        raise error

    shop.behave = behave
    with flask.got_request_exception.connected_to(note, shop.app):
        answers = [shop.post(), shop.post()]
    assert [each.status_code for each in answers] == [500, 500]
    assert is_replay(answers[1])
    assert signalled == [error]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
    assert shop.runs == 1


@pytest.mark.parametrize("setting", ["TESTING", "DEBUG", "PROPAGATE_EXCEPTIONS"])
def test_an_unhandled_error_goes_on_to_a_test(shop: Shop, setting: str) -> None:
    """Where Flask raises what a view raises, to a test or to its debugger, a guarded one does, too; it is kept all the
    same, and signalled once.
    """
    signalled: list[Exception] = []

    def note(sender: Any, exception: Exception, **_: Any) -> None:
        signalled.append(exception)

    def behave() -> Any:
        raise RuntimeError("oops")

    shop.behave = behave
    shop.app.config[setting] = True
    with flask.got_request_exception.connected_to(note, shop.app), pytest.raises(RuntimeError, match="oops"):
        shop.post()
    retry = shop.post()
    assert (retry.status_code, is_replay(retry), shop.runs, len(signalled)) == (500, True, 1, 1)


def test_an_unhandled_error_that_frees_the_key_goes_on(install: Install) -> None:
    """Where the policy frees the key, an error goes on to Flask: its 500 handler answers, or a test sees it."""
    shop = Shop(install, policy=Policy.ietf(server_errors="release"))
    shop.app.register_error_handler(500, lambda error: (f"sorry: {error.original_exception}", 500))

    def behave() -> Any:
        raise RuntimeError("oops")

    shop.behave = behave
    assert shop.post().data == b"sorry: oops"
    assert shop.records == ()
    shop.app.testing = True
    with pytest.raises(RuntimeError, match="oops"):
        shop.post()


def test_no_effect_is_judged_before_any_handler(install: Install) -> None:
    """NoEffect frees the key as 503, though the app handles every Exception by itself."""
    shop = Shop(install)
    shop.app.register_error_handler(Exception, lambda _: ("handled", 500))

    def behave() -> Any:
        raise NoEffect("closed")

    shop.behave = behave
    response = shop.post()
    assert (response.status_code, response.mimetype) == (503, "application/problem+json")
    assert shop.records == ()


# Bodies


def test_the_view_reads_json_forms_and_files(shop: Shop) -> None:
    """The body is there for the view in every form, small or large, though it was read before."""
    seen: list[Any] = []

    def behave() -> str:
        request = flask.request
        upload = request.files.get("file")
        seen.append(request.get_json(silent=True) or request.form.get("note") or request.get_data())
        seen.append(upload.read() if upload else None)
        return "ok"

    shop.behave = behave
    large = b"x" * 700_000
    upload = multipart(large)
    shop.post(json={"amount": 5})
    shop.post(data={"note": "hello"}, headers={"Idempotency-Key": "form"})
    shop.post(data=upload["body"], content_type=upload["content_type"], headers={"Idempotency-Key": "upload"})
    shop.post(data=large, headers={"Idempotency-Key": "raw"})
    assert seen == [{"amount": 5}, None, "hello", None, "n", large, large, None]


@pytest.mark.parametrize("reads", ["form", "get_data", "get_json", "both"])
def test_a_body_that_was_read_before_the_view(shop: Shop, reads: str) -> None:
    """A before_request function may parse the form, or read the data: a retry with a new boundary is still a replay,
    and another file is another request.
    """

    def read() -> None:
        request = flask.request
        if reads in {"form", "both"}:
            assert request.form["note"] == "n"
        if reads in {"get_data", "both"}:
            request.get_data()
        if reads == "get_json":
            request.get_json(silent=True)

    shop.app.before_request(read)

    def behave() -> Any:
        return flask.request.files["file"].read()

    shop.behave = behave

    def upload(content: bytes, **more: str) -> TestResponse:
        form = multipart(content, **more)
        return shop.post(data=form["body"], content_type=form["content_type"])

    first, again = upload(b"hello"), upload(b"hello")
    assert first.data == again.data == b"hello"
    assert is_replay(again)
    assert upload(b"bye").status_code == 422
    assert upload(b"hello", filename="b.txt").status_code == 422
    assert shop.runs == 1


def parse_the_form() -> None:
    assert flask.request.form or flask.request.files


@pytest.mark.parametrize("reads_early", [False, True])
def test_a_form_that_was_read_before_the_view(shop: Shop, reads_early: bool) -> None:
    """A form is told from another by its fields, also where a check for CSRF has read it: ``A%2BB`` is not ``A+B``."""
    if reads_early:
        shop.app.before_request(parse_the_form)
    shop.behave = lambda: flask.request.form["a"]

    def send(body: str) -> TestResponse:
        return shop.post(data=body, content_type="application/x-www-form-urlencoded")

    assert send("a=A%2BB&b=%26c%3D1").data == b"A+B"
    for same in ("a=A%2BB&b=%26c%3D1", "a=%41%2bB&b=%26c%3d1"):
        assert is_replay(send(same))
    for other in ("a=A+B&b=%26c%3D1", "a=A%20B&b=%26c%3D1", "a=A%2BB&b=&c=1", "a=A%2BB", "b=%26c%3D1&a=A%2BB&d="):
        assert send(other).status_code == 422
    assert shop.runs == 1


def test_a_file_of_another_type_that_was_read_before_the_view(shop: Shop) -> None:
    """What a part says of its type counts, also where the form was parsed before the guard."""
    shop.app.before_request(parse_the_form)

    def send(kind: str) -> TestResponse:
        return shop.post(data={"file": (io.BytesIO(b"1,2"), "a.csv", kind)})

    assert [send(kind).status_code for kind in ("text/csv", "text/csv", "text/plain")] == [201, 201, 422]


@pytest.mark.parametrize("reads_early", [False, True])
def test_a_key_of_a_form_that_was_read_before_the_view(install: Install, reads_early: bool) -> None:
    """A key is made of the fields of a form, whoever has read it before."""
    recipe = BodyHash(fields=["amount"], window=timedelta(minutes=1))
    shop = Shop(install, policy=Policy(key_from=recipe))
    if reads_early:
        shop.app.before_request(parse_the_form)
    client = shop.app.test_client()
    answers = [client.post("/pay", data={"amount": amount}) for amount in ("5", "5", "6")]
    assert [(each.status_code, is_replay(each)) for each in answers] == [(201, False), (201, True), (201, False)]


def test_json_that_was_read_before_the_view(shop: Shop) -> None:
    """Whoever reads JSON before the guard leaves it there for the guard and the view."""

    def read() -> None:
        assert flask.request.get_json()["amount"]
        assert not flask.request.form

    def behave() -> Any:
        return flask.request.get_json()

    shop.app.before_request(read)
    shop.behave = behave
    answers = [shop.post(json={"amount": amount}) for amount in (5, 5, 6)]
    assert [each.status_code for each in answers] == [200, 200, 422]
    assert answers[1].get_json() == {"amount": 5}


def test_a_body_that_is_gone_is_a_loud_error(shop: Shop) -> None:
    """A body that was read and thrown away can't be compared: the request is not run."""
    shop.app.testing = True

    def throw_away() -> None:
        flask.request.stream.read()

    shop.app.before_request(throw_away)
    with pytest.raises(ConfigurationError, match="get_data"):
        shop.post(json={"amount": 5})
    assert shop.runs == 0


def test_a_chunked_body_that_is_gone_is_a_loud_error(shop: Shop) -> None:
    """The same where nobody has said how long it was, so that nothing seems to be missing."""
    shop.app.testing = True

    def throw_away() -> None:
        flask.request.stream.read()

    shop.app.before_request(throw_away)
    with pytest.raises(ConfigurationError, match="get_data"):
        chunked(shop, b"amount=5")
    assert shop.runs == 0
    assert shop.post().status_code == 201


@pytest.mark.parametrize("enforcement", ["enforce", "report"])
def test_an_answer_that_streams_the_request(install: Install, enforcement: Enforcement) -> None:
    """A stream that is too large to be kept may read from a large body when its request has ended."""
    shop = Shop(install, policy=Policy.ietf(enforcement=enforcement, max_response_body=10))

    def echo() -> flask.Response:
        stream = flask.request.stream
        return flask.Response(iter(lambda: stream.read(65536), b""))

    shop.behave = echo
    assert shop.post(data=b"x" * 700_000).data == b"x" * 700_000


@pytest.mark.parametrize("is_read_before", [False, True])
def test_a_body_over_the_limit_is_refused(install: Install, is_read_before: bool) -> None:
    """413, whether or not somebody has read it before."""
    shop = Shop(install, policy=Policy.ietf(max_request_body=100))
    if is_read_before:
        shop.app.before_request(lambda: flask.request.get_data() and None)
    assert shop.post(data=b"x" * 101).status_code == 413
    assert shop.post(data=b"x" * 100).status_code == 201
    assert shop.runs == 1


def chunked(shop: Shop, body: bytes, key: str = "key-1") -> TestResponse:
    """Send a body whose length nobody says, as servers give it that undo the chunks."""
    environ = {"wsgi.input": io.BytesIO(body), "wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    headers = {"Idempotency-Key": key}
    return shop.app.test_client().post("/pay", headers=headers, environ_overrides=environ, content_type="text/plain")


@pytest.mark.parametrize("size", [0, 10, 700_000])
def test_a_chunked_body(shop: Shop, size: int) -> None:
    """A body of unknown length is read whole, compared, and there for the view."""
    shop.behave = lambda: str(len(flask.request.get_data()))
    answers = [chunked(shop, b"x" * size), chunked(shop, b"x" * size), chunked(shop, b"y" * (size + 1))]
    assert [each.status_code for each in answers] == [200, 200, 422]
    assert answers[0].data == answers[1].data == str(size).encode()


def test_report_mode_gives_back_what_it_has_read(install: Install) -> None:
    """In report mode a body of unknown length that is over the limit still comes whole to the view."""
    shop = Shop(install, policy=Policy.ietf(enforcement="report", max_request_body=1000))
    shop.behave = lambda: str(len(flask.request.get_data()))
    assert [chunked(shop, b"x" * size, f"key-{size}").data for size in (999, 200_000)] == [b"999", b"200000"]


def test_a_client_that_hangs_up_half_way(shop: Shop) -> None:
    """A body that ends before its declared length is refused, and the view does not run."""
    response = shop.post(data=b"four", environ_overrides={"CONTENT_LENGTH": "5"})
    assert response.get_json()["code"] == "request-body-incomplete"
    assert shop.runs == 0


def test_a_key_that_is_made_of_the_body(install: Install) -> None:
    """Where keys may be made of the body, a request without one is guarded by what it asks for."""
    shop = Shop(install, policy=Policy.ietf(key_from=BodyHash(fields=("order",), window=timedelta(minutes=5))))
    client = shop.app.test_client()
    answers = [client.post("/pay", json={"order": order}) for order in (1, 1, 2)]
    assert [is_replay(each) for each in answers] == [False, True, False]
    assert shop.runs == 2


# Around the guard


class Login:
    """A login by token, and a permission, as an app has them: outside the guard."""

    def __init__(self) -> None:
        self.tokens = {"token-1": "alice", "token-2": "bob"}
        self.may_pay = {"alice", "bob"}

    def __call__(self, view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def checked(*args: Any, **kwargs: Any) -> Any:
            flask.g.user = self.tokens.get(flask.request.headers.get("Authorization", ""))
            if flask.g.user is None:
                flask.abort(401)
            if flask.g.user not in self.may_pay:
                raise Forbidden
            return view(*args, **kwargs)

        return checked


@pytest.fixture
def login() -> Login:
    return Login()


@pytest.fixture
def bank(install: Install, login: Login) -> Callable[[str], TestResponse]:
    app = install(scope=lambda: flask.g.user)
    payments: list[str] = []

    @app.post("/pay")
    @login
    @idempotent
    def pay() -> Any:
        payments.append(flask.g.user)
        return {"payer": flask.g.user, "payment": len(payments)}, 201

    return lambda token: app.test_client().post("/pay", headers=KEY | {"Authorization": token}, json={"amount": 5})


def test_the_login_runs_first(bank: Callable[[str], TestResponse], login: Login) -> None:
    """Nobody is 401 and leaves no record; two users with one key never meet; a renewed token changes nothing."""
    assert bank("nobody's").status_code == 401
    first, bobs = bank("token-1"), bank("token-2")
    assert (first.get_json()["payer"], bobs.get_json()["payer"]) == ("alice", "bob")
    login.tokens = {"token-3": "alice"}
    again = bank("token-3")
    assert is_replay(again)
    assert again.data == first.data


def test_a_user_who_is_gone_or_may_no_longer_gets_no_replay(bank: Callable[[str], TestResponse], login: Login) -> None:
    """A deleted user gets 401 and one without the permission 403, not the answer that was given before."""
    assert bank("token-1").status_code == 201
    login.may_pay = set()
    assert bank("token-1").status_code == 403
    login.tokens = {}
    assert bank("token-1").status_code == 401


def test_anonymous_requests_are_refused(install: Install) -> None:
    """Where no login is in front and the scope is nobody, a request with a key is refused and one without one runs."""
    shop = Shop(install, scope=lambda: None)
    assert shop.post().get_json()["code"] == "idempotency-scope-missing"
    assert shop.app.test_client().post("/pay").status_code == 201
    assert shop.runs == 1


def test_a_scope_may_abort(install: Install) -> None:
    """What the scope raises is Flask's to answer, and nothing is kept."""
    shop = Shop(install, scope=lambda: flask.abort(TooManyRequests.code))
    assert shop.post().status_code == 429
    assert shop.records == ()


def test_what_comes_after_the_view_is_not_kept(shop: Shop) -> None:
    """after_request functions and the session's cookie belong to each answer of their own."""
    count = iter(range(9))

    def stamp(response: flask.Response) -> flask.Response:
        response.headers["X-Stamp"] = str(next(count))
        return response

    def behave() -> str:
        flask.session["cart"] = "empty"
        return "made"

    shop.app.after_request(stamp)
    shop.behave = behave
    first, again = shop.post(), shop.post()
    assert (first.headers["X-Stamp"], again.headers["X-Stamp"]) == ("0", "1")
    assert ("Set-Cookie" in first.headers, "Set-Cookie" in again.headers) == (True, False)
    assert is_replay(again)


def test_a_redirect_to_the_right_spelling_is_not_kept(install: Install) -> None:
    """Without its trailing slash a path is redirected (308) and the key is free; followed, the request runs once."""
    app = install()
    runs: list[int] = []

    @app.post("/orders/")
    @idempotent
    def order() -> str:
        runs.append(1)
        return "made"

    client = app.test_client()
    assert client.post("/orders", headers=KEY).status_code == 308
    answers = [client.post("/orders", headers=KEY, follow_redirects=True) for _ in range(2)]
    assert [each.data for each in answers] == [b"made", b"made"]
    assert is_replay(answers[1])
    assert runs == [1]


def test_a_mounted_app_is_known_by_its_whole_path(install: Install) -> None:
    """Two apps under one dispatcher and on one store: the same key under both is a mistake, and refused."""
    store = MemoryStore()
    apps: dict[str, Any] = {path: Shop(install, store=store).app for path in ("/v1", "/v2")}
    client = Client(DispatcherMiddleware(flask.Flask("none"), apps))
    assert client.post("/v1/pay", headers=KEY).status_code == 201
    assert is_replay(client.post("/v1/pay", headers=KEY))
    assert client.post("/v2/pay", headers=KEY).status_code == 422


def test_two_apps_in_one_process_do_not_meet(install: Install) -> None:
    """Each app has its own store, policy and scope, though they share a view."""
    runs: list[str] = []

    @idempotent
    def pay() -> str:
        runs.append(flask.current_app.name)
        return flask.current_app.name

    one, other = install(), install(policy="stripe")
    for app in (one, other):
        app.add_url_rule("/pay", view_func=pay, methods=["POST"])
    answers = [app.test_client().post("/pay", headers=KEY) for app in (one, other, one, other)]
    assert [is_replay(each) for each in answers] == [False, False, True, True]
    assert runs == [one.name, other.name]
    wrong = [app.test_client().post("/pay", headers=KEY, json=1).status_code for app in (one, other)]
    assert wrong == [422, 400]


# Other kinds of views


def test_an_async_view(install: Install) -> None:
    """An async view is guarded, knows its operation, and takes steps without awaiting them."""
    app = install(store=MemoryStore())
    charges: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        charges.append(idempotency_key)
        return "charged"

    @app.post("/pay")
    @idempotent
    async def pay() -> Any:
        operation = semel.current()
        return {"key": operation.key, "charge": operation.effect("charge", charge)}

    first, again = (app.test_client().post("/pay", headers=KEY) for _ in range(2))
    assert first.get_json() == again.get_json() == {"key": "key-1", "charge": "charged"}
    assert is_replay(again)
    assert len(charges) == 1


def test_an_async_scope(install: Install) -> None:
    """The scope may be async, as a view may."""

    async def principal(request: flask.Request) -> str:
        return request.headers["X-Account"]

    shop = Shop(install, scope=principal)
    answers = [shop.post(headers={"X-Account": name}) for name in ("alice", "bob", "alice")]
    assert [is_replay(each) for each in answers] == [False, False, True]


@pytest.mark.parametrize("how", ["decorators", "method"])
def test_a_method_view(install: Install, how: str) -> None:
    """A MethodView is guarded whole, by its decorators, or by the method; its GET passes."""
    runs: list[str] = []

    class Payments(MethodView):
        decorators = [idempotent] if how == "decorators" else []

        def get(self, number: int) -> str:
            runs.append("get")
            return str(len(runs))

        def post(self, number: int) -> str:
            runs.append("post")
            return f"made {number}"

    if how == "method":
        Payments.post = idempotent(Payments.post)  # type: ignore[method-assign]  # as the decorator there does
    app = install()
    app.add_url_rule("/pay/<int:number>", view_func=Payments.as_view("payments"))
    client = app.test_client()
    posts = [client.post("/pay/7", headers=KEY) for _ in range(2)]
    gets = [client.get("/pay/7", headers=KEY) for _ in range(2)]
    assert [each.data for each in posts] == [b"made 7", b"made 7"]
    assert [is_replay(each) for each in (*posts, *gets)] == [False, True, False, False]
    assert runs == ["post", "get", "get"]


def test_a_class_based_view(install: Install) -> None:
    """A View with decorators is guarded, too."""
    runs: list[int] = []

    class Pay(View):
        methods = ["POST"]  # noqa: RUF012 - as Flask has it
        decorators = [idempotent(policy=Policy.ietf(required=True))]  # noqa: RUF012 - the same

        def dispatch_request(self) -> str:
            runs.append(1)
            return "made"

    app = install()
    app.add_url_rule("/pay", view_func=Pay.as_view("pay"))
    client = app.test_client()
    assert [client.post("/pay", headers=KEY).data for _ in range(2)] == [b"made", b"made"]
    assert client.post("/pay").status_code == 400
    assert runs == [1]


def test_a_guarded_view_that_calls_another_is_one_operation(install: Install) -> None:
    """A guarded view may call another one: the outer one's answer is kept, under one key."""
    app = install()

    @idempotent
    def inner() -> str:
        return semel.current().key

    @app.post("/pay")
    @idempotent
    def outer() -> str:
        return f"outer {inner()}"

    assert [app.test_client().post("/pay", headers=KEY).data for _ in range(2)] == [b"outer key-1"] * 2


def test_two_guarded_views_for_one_request_are_refused(install: Install) -> None:
    """A view that is not guarded may not call two that are: one key can't answer for both."""
    app = install()
    app.testing = True
    runs: list[str] = []

    @idempotent
    def called(name: str) -> str:
        runs.append(name)
        return name

    app.add_url_rule("/both", view_func=lambda: [called("first"), called("second")], methods=["POST"])
    with pytest.raises(ConfigurationError, match="calls them both"):
        app.test_client().post("/both", headers=KEY)
    assert runs == ["first"]


def test_what_a_view_returns_unguarded_is_untouched(install: Install) -> None:
    """By a method that is not guarded, a decorator outside gets what the view returned."""
    app = install()
    seen: list[Any] = []

    def outside(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def called() -> Any:
            seen.append(view())
            return "ok"

        return called

    app.add_url_rule("/pay", view_func=outside(idempotent(lambda: {"a": 1})), methods=["GET", "POST"])
    app.test_client().get("/pay")
    assert seen == [{"a": 1}]


def test_draining_refuses_new_operations(shop: Shop) -> None:
    """An app that is told to drain refuses guarded requests, also those with an answer, and serves the others."""
    assert shop.post().status_code == 201
    shop.app.extensions["semel"].drain()
    assert shop.post().get_json()["code"] == "shutting-down"
    assert shop.app.test_client().get("/pay").status_code == 201
