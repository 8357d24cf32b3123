"""A Flask app whose view is guarded by the decorator, below a login of its own, as a world for the scenarios."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import wraps
from typing import Any

import flask

from semel import Policy
from semel.core.commands import Command
from semel.flask import Semel, idempotent
from semel.guard.request import Paths, RequestView
from semel.stores.base import Store
from tests.web.harness import METHODS, Request, Response, Send, Shop, call_wsgi


class FlaskWorld:
    """The decorator's entry point, on a few threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._threads = ThreadPoolExecutor(12)

    def guard(self, shop: Shop, scope: Callable[[RequestView], str | None], policy: Policy, paths: Paths) -> Send:
        assert paths is None, "Here every view says for itself that it is guarded."
        app = shop_app(shop)
        Semel(app, store=self.store, scope=scope, policy=policy)
        return lambda request: self._threads.submit(call_flask, app, request)

    def perform(self, command: Command[Any]) -> Any:
        return self.store.perform(command)

    def close(self) -> None:
        self._threads.shutdown()
        self.store.close()


def shop_app(shop: Shop) -> flask.Flask:
    """The scenarios' shop as a Flask app: a login, then the guard, then the view."""
    app = flask.Flask("shop")

    def login_required(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def checked(*args: Any, **kwargs: Any) -> Any:
            return flask.Response("Who are you?", 401) if shop.is_locked else view(*args, **kwargs)

        return checked

    @login_required
    @idempotent
    def pay(rest: str = "") -> flask.Response:
        request = flask.request
        reply = shop(request.method, request.root_path + request.path, request.get_data())
        response = flask.Response(reply.body, reply.status)
        response.headers.clear()
        for name, value in reply.headers:
            response.headers.add(name, value)
        return response

    for path in ("/pay", "/pay/<path:rest>"):
        # Flask would answer OPTIONS by itself.
        app.add_url_rule(path, view_func=pay, methods=METHODS, provide_automatic_options=False)
    return app


def call_flask(app: flask.Flask, request: Request) -> Response:
    """Do what a WSGI server does, and note what Flask reported meanwhile."""
    reported: list[Exception] = []

    def note(sender: flask.Flask, exception: Exception, **_: Any) -> None:
        if flask.request.environ["REMOTE_PORT"] == port:
            reported.append(exception)

    def with_port(environ: Any, start_response: Any) -> Any:
        environ["REMOTE_PORT"] = port
        return app(environ, start_response)

    port = str(id(reported))  # Others call the same app at the same time.
    with flask.got_request_exception.connected_to(note, app):
        response = call_wsgi(with_port, request)
    return replace(response, error=reported[0] if reported else response.error)
