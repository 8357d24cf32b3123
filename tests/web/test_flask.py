"""Flask behind the WSGI entry point: what it answers by itself, and what it does after an answer."""

from collections.abc import Callable
from typing import Any

import flask
import pytest
from werkzeug.test import EnvironBuilder, TestResponse
from werkzeug.wrappers import Response

import semel
from semel import NoEffect, Policy
from semel.core.commands import Browse, Look
from semel.core.state import State
from semel.stores.memory import MemoryStore
from semel.wsgi import IdempotencyMiddleware
from tests.web.scenarios import multipart


class Shop:
    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.store = MemoryStore()
        self.flask = flask.Flask("shop")
        self.flask.add_url_rule("/pay", view_func=self.pay, methods=["POST"])
        self.flask.add_url_rule("/slash/", view_func=self.pay, methods=["POST"])
        self.behave: Callable[[], Any] = lambda: ("made", 201, {"Location": f"/p/{len(self.runs)}"})
        entry = IdempotencyMiddleware(
            self.flask.wsgi_app, store=self.store, scope=semel.SINGLE_TENANT, policy=Policy.ietf()
        )
        self.flask.wsgi_app = entry  # type: ignore[method-assign]  # as Flask's documentation has it

    def pay(self) -> Any:
        self.runs.append(flask.request.get_data())
        return self.behave()

    def post(self, path: str = "/pay", **request: Any) -> TestResponse:
        """Send a request with a key, and do what a server does: take the whole answer, then close it."""
        return self.flask.test_client().post(path, headers={"Idempotency-Key": "key-1"}, buffered=True, **request)

    @property
    def is_free(self) -> bool:
        return self.store.perform(Browse(limit=1)) == ()


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_a_retry_is_a_replay(shop: Shop) -> None:
    """A view runs once; its retry gets the same answer, and another body is refused."""
    first, again = (shop.post(json={"amount": 5}) for _ in range(2))
    assert (first.status_code, first.data, first.headers["Location"]) == (201, b"made", "/p/1")
    assert (again.status_code, again.data, again.headers["Location"]) == (201, b"made", "/p/1")
    assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.post(json={"amount": 6}).status_code == 422
    assert len(shop.runs) == 1


def test_a_method_in_small_letters_is_guarded(shop: Shop) -> None:
    """Flask takes ``post`` for POST, and some servers leave it as it came: guarded all the same, as one method."""
    for method in ("post", "post", "POST"):
        environ = EnvironBuilder("/pay", headers=[("Idempotency-Key", "key-1")]).get_environ()
        answer = shop.flask.test_client().open(environ | {"REQUEST_METHOD": method}, buffered=True)
        assert (answer.status_code, answer.data) == (201, b"made")
    assert len(shop.runs) == 1


def test_uploads_reach_the_view(shop: Shop) -> None:
    """A view reads forms and files of a guarded request as of any other, whatever boundary a retry has."""
    seen: list[Any] = []

    def view() -> str:
        seen.extend([flask.request.form["note"], flask.request.files["file"].read()])
        return "ok"

    shop.flask.add_url_rule("/upload", view_func=view, methods=["POST"])
    for _ in range(2):
        upload = multipart(b"x" * 400_000)
        response = shop.post("/upload", data=upload["body"], content_type=upload["content_type"])
        assert response.data == b"ok"
    assert seen == ["n", b"x" * 400_000]


@pytest.mark.parametrize("path, status", [("/nowhere", 404), ("/slash", 308)])
def test_what_the_router_answers_frees_the_key(shop: Shop, path: str, status: int) -> None:
    """A path that no view has, or that is spelled otherwise, was seen by no view: the key is free for the right one."""
    assert shop.post(path).status_code == status
    assert shop.is_free
    assert shop.post("/slash/").status_code == 201


def test_what_a_view_answers_is_kept(shop: Shop) -> None:
    """404 of a view is its final answer."""

    def not_found() -> Any:
        flask.abort(404)

    shop.behave = not_found
    assert [shop.post().status_code for _ in range(2)] == [404, 404]
    assert len(shop.runs) == 1


def test_what_comes_after_the_answer_comes_once_and_late(shop: Shop) -> None:
    """call_on_close runs once, when the answer is stored."""
    states: list[State] = []

    def behave() -> Response:
        response = flask.make_response("made", 201)

        @response.call_on_close
        def look() -> None:
            record = shop.store.perform(Look("single-tenant", "key-1"))
            assert record is not None
            states.append(record.state)

        return response

    shop.behave = behave
    for _ in range(2):
        shop.post()
    assert states == [State.COMPLETE]


def test_an_error_is_kept_and_reported(shop: Shop) -> None:
    """Flask answers a view's error with 500; that is kept, since it may have taken effect."""

    def broken() -> Any:
        raise RuntimeError("oops")

    shop.behave = broken
    assert [shop.post().status_code for _ in range(2)] == [500, 500]
    assert len(shop.runs) == 1


def test_no_effect_needs_a_handler_or_a_word(shop: Shop) -> None:
    """Flask turns NoEffect into a 500 before Semel sees it. An error handler that says no_effect() frees the key."""

    def closed(error: NoEffect) -> tuple[str, int]:
        semel.current().no_effect()
        return str(error), 503

    def behave() -> Any:
        raise NoEffect("closed")

    shop.behave = behave
    shop.flask.register_error_handler(NoEffect, closed)
    assert shop.post().status_code == 503
    assert shop.is_free
