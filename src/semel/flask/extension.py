"""The extension: what the guarded views of one app share, from settings to background services."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from semel.core.policy import Policy
from semel.errors import ConfigurationError, UnknownField
from semel.flask.decorator import EXTENSION, GivenPolicy, Scope, asked, check_routes, policy_of
from semel.flask.view import BODY
from semel.guard.ports import Guard
from semel.guard.request import check_modes, switch
from semel.stores import Store, close_shared, shared_store
from semel.stores.tiered import Tiered
from semel.work import Plan, Workers

try:
    from flask import Flask, request
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("semel.flask needs Flask 3. Run: pip install 'semel[flask]'") from error

_PREFIX = "SEMEL_"
_DEFAULTS: dict[str, Any] = {"STORE": "sqlite:///semel.db", "SCOPE": None, "POLICY": None, "WORK": False}


class Semel:
    """The extension for one app, or, by ``init_app``, for several."""

    def __init__(
        self,
        app: Flask | None = None,
        *,
        store: str | Store | Any = None,
        scope: Scope | None = None,
        policy: GivenPolicy | None = None,
        work: bool | None = None,
    ) -> None:
        """Guard the views of *app* that have ``@idempotent``. Arguments that are left out come from the app's config:
        ``SEMEL_STORE``, ``SEMEL_SCOPE``, ``SEMEL_POLICY`` and ``SEMEL_WORK``.

        *store* is a URL, a store, or what the application already has: Flask-SQLAlchemy's ``db``, an engine, a pool.
        *scope* returns the user of a request; it is called with the request, or with nothing if it takes nothing. With
        *work*, this process also sweeps and reaps, as ``semel work`` does.
        """
        self._given = {"STORE": store, "SCOPE": scope, "POLICY": policy, "WORK": work}
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Read the app's config, and prepare to guard its views. No connection is opened yet."""
        if EXTENSION in app.extensions:
            raise ConfigurationError("This app has a Semel already. Use Semel(app), or semel.init_app(app) once.")
        settings = self._settings(app)
        installed = Installed(app, policy_of(settings["POLICY"]), settings["SCOPE"], settings["STORE"])
        if settings["WORK"]:
            store = installed.store
            installed.workers = Workers(Plan().services(store))
        app.extensions[EXTENSION] = installed
        app.before_request(installed.start)
        app.teardown_request(_let_go)

    def _settings(self, app: Flask) -> dict[str, Any]:
        configured = {name: value for name, value in app.config.items() if name.startswith(_PREFIX)}
        for name in configured:
            if name.removeprefix(_PREFIX) not in _DEFAULTS:
                known = [_PREFIX + each for each in _DEFAULTS]
                close = difflib.get_close_matches(name, known, n=1) or known
                raise UnknownField(f"There is no setting {name}. There is: {', '.join(close)}.")
        return {
            name: next(
                (each for each in (self._given[name], configured.get(_PREFIX + name)) if each is not None), default
            )
            for name, default in _DEFAULTS.items()
        }


class Installed:
    """What the guarded views of one app share: ``app.extensions["semel"]``."""

    def __init__(self, app: Flask, policy: Policy, scope: Scope | None, store: Any) -> None:
        """Guard the marked views of *app* by *store*."""
        switch()
        self.policy = policy
        self.scope = asked(scope)
        self.store, self.undo = _opened(app, store, self)
        check_modes(self.store, [policy])
        self.guard = Guard.of(self.store)
        #: What a policy with enforcement="report" has seen in this process: ``tally.snapshot()``.
        self.tally = self.guard.tally
        self.workers: Workers | None = None
        self._app = app
        self._is_checked = False
        # Here, and not only at the first request, since signal handlers can be set in the main thread only.
        self.guard.gate.close_on_sigterm()

    def start(self) -> None:
        """Prepare for the first request. Not before it, since routes are still added, and servers may fork."""
        if not self._is_checked:
            check_routes(self._app, self.policy, self.scope, self.store)
            self.guard.gate.close_on_sigterm()
            self._is_checked = True
        if self.workers is not None:
            self.workers.start()

    def drain(self) -> None:
        """Refuse new guarded requests (503), and let those under way end. SIGTERM does this, too."""
        self.guard.gate.close()

    def close(self) -> None:
        """Stop the background services, and close every connection of the store that no other app shares."""
        if self.workers is not None:
            self.workers.stop()
        self.guard.close()
        close_shared(self.store, self)


def _opened(app: Flask, given: Any, user: Installed) -> tuple[Store, Callable[[], None]]:
    """Return the store, and a function that rolls back what a view has not committed."""
    if isinstance(given, Store):
        return given, _nothing
    db = app.extensions.get("sqlalchemy")
    durable = given.durable if isinstance(given, Tiered) else given
    with app.app_context():
        if db is not None and (durable is db or durable is getattr(db, "engines", {}).get(None)):
            lending: Any = import_module("semel.stores.connections.flask_sqlalchemy")
            given = replace(given, durable=db) if isinstance(given, Tiered) else db
            return shared_store(given), lending.undo_uncommitted
        return shared_store(given, user), _nothing


def _nothing() -> None:
    """Do nothing: the view has its own connection."""


def _let_go(_error: BaseException | None) -> None:
    body = request.environ.pop(BODY, None)
    if body is not None:
        body.close()
