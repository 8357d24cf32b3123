"""How Semel is set up in a Flask app: settings, factories, and mistakes that are told at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any

import flask
import psycopg
import pytest

import semel
from semel import Policy
from semel.core.commands import Browse
from semel.errors import ConfigurationError, UnknownField
from semel.flask import Semel, idempotent
from semel.stores.memory import MemoryStore
from tests.flask.conftest import Install
from tests.web.harness import wait_until

KEY = {"Idempotency-Key": "key-1"}


def test_an_app_factory_and_its_config(tmp_path: Any) -> None:
    """init_app reads SEMEL_… from the config, and what Semel() was given goes before it."""
    extension = Semel(scope=lambda request: request.headers["X-Account"])

    def create_app(**config: Any) -> flask.Flask:
        app = flask.Flask("made")
        app.config.update(config)
        extension.init_app(app)

        @app.post("/pay")
        @idempotent
        def pay() -> str:
            return semel.current().scope

        return app

    app = create_app(
        SEMEL_STORE=f"sqlite:///{tmp_path / 'made.db'}",
        SEMEL_POLICY={"required": True, "retention": timedelta(hours=1)},
        SEMEL_SCOPE=semel.SINGLE_TENANT,
    )
    other = create_app(SEMEL_STORE="memory://", SEMEL_POLICY="stripe")
    assert app.test_client().post("/pay").status_code == 400
    assert app.test_client().post("/pay", headers=KEY | {"X-Account": "alice"}).data == b"alice"
    assert (tmp_path / "made.db").exists()
    assert other.extensions["semel"].policy == Policy.stripe()
    assert other.extensions["semel"].policy.required is False
    for each in (app, other):
        each.extensions["semel"].close()


def connections_to(url: str) -> int:
    """How many there are to the database, beside this one."""
    with psycopg.connect(url) as connection:
        [(count,)] = connection.execute(
            "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()"
        ).fetchall()
    return int(count)


def test_apps_that_are_never_closed(postgres_url: str) -> None:
    """An app for each test, as fixtures make them, and none is closed: all share the connections of their URL. One that
    is closed takes nothing from the others.
    """
    apps = []
    counts = set()
    for number in range(4):
        app = flask.Flask(f"app {number}")
        Semel(app, store=postgres_url, scope=semel.SINGLE_TENANT)
        app.post("/pay")(idempotent(lambda: semel.current().key))
        apps.append(app)
        answer = app.test_client().post("/pay", headers={"Idempotency-Key": f"key-{number}"})
        assert answer.status_code == 200
        counts.add(connections_to(postgres_url))
    assert len(counts) == 1
    apps[0].extensions["semel"].close()
    for app in apps:
        assert is_replay(app.test_client().post("/pay", headers={"Idempotency-Key": "key-3"}))
        app.extensions["semel"].close()
    wait_until(lambda: connections_to(postgres_url) == 0)


@pytest.mark.parametrize("prefix", ["postgresql://", "postgresql+psycopg://"])
def test_closed_while_another_has_a_request(postgres_url: str, prefix: str) -> None:
    """An app that is closed takes no key from another of the same URL, whose handler runs: it is not run again."""
    entered, go_on = threading.Event(), threading.Event()
    runs = []

    def pay() -> str:
        runs.append(semel.current().key)
        entered.set()
        assert go_on.wait(60)
        return "paid"

    apps = [flask.Flask("closed"), flask.Flask("busy")]
    for app in apps:  # As a factory does, which guards what its module has.
        Semel(app, store=f"{postgres_url}?takeover=instant".replace("postgresql://", prefix), scope=semel.SINGLE_TENANT)
        app.post("/pay")(idempotent(pay))
    closed, busy = apps
    assert closed.extensions["semel"].store is busy.extensions["semel"].store
    answers: list[Any] = []
    request = threading.Thread(target=lambda: answers.append(busy.test_client().post("/pay", headers=KEY)))
    request.start()
    assert entered.wait(60)
    closed.extensions["semel"].close()
    try:
        assert closed.test_client().post("/pay", headers=KEY).status_code == 409
    finally:
        go_on.set()
        request.join()
    assert [answer.status_code for answer in answers] == [200]
    assert runs == ["key-1"]
    busy.extensions["semel"].close()


def is_replay(answer: Any) -> bool:
    return "Idempotent-Replayed" in answer.headers


@pytest.mark.parametrize(
    "config, said",
    [
        ({"SEMEL_STOR": "memory://"}, "SEMEL_STORE"),
        ({"SEMEL_POLICY": "square"}, "stripe"),
        ({"SEMEL_POLICY": {"requird": True}}, "required"),
        ({"SEMEL_POLICY": {"store_request": True}}, "semel.wsgi.IdempotencyMiddleware"),
        ({"SEMEL_POLICY": {"in_progress": "accept"}}, "semel.wsgi.IdempotencyMiddleware"),
        ({"SEMEL_POLICY": {"preferences": {"respond-async"}}}, "semel.wsgi.IdempotencyMiddleware"),
        ({"SEMEL_POLICY": 7}, "Policy"),
        ({"SEMEL_SCOPE": "alice"}, "function of the request"),
        ({"SEMEL_SCOPE": lambda request, user: "alice"}, "function of the request"),
        ({"SEMEL_STORE": "mysql://"}, "mysql"),
        ({"SEMEL_STORE": 7}, "int"),
    ],
)
def test_a_wrong_setting_is_refused_at_start(config: dict[str, Any], said: str) -> None:
    """A setting that can't be right is refused when the app is made, and the message names the right one."""
    app = flask.Flask("wrong")
    app.config.update({"SEMEL_STORE": "memory://", **config})
    with pytest.raises(ConfigurationError, match=said):
        Semel(app)


def test_an_unknown_setting_is_an_unknown_field() -> None:
    """A misspelled setting is not passed over."""
    app = flask.Flask("wrong")
    app.config["SEMEL_SCOPES"] = semel.SINGLE_TENANT
    with pytest.raises(UnknownField):
        Semel(app)


def test_two_in_one_app_are_refused(install: Install) -> None:
    """An app has one Semel."""
    with pytest.raises(ConfigurationError, match="already"):
        Semel(install(), store="memory://", scope=semel.SINGLE_TENANT)


@pytest.mark.parametrize("policy", [Policy.ietf(store_request=True), {"store_request": True}])
def test_a_decorators_policy_is_checked_where_it_is_written(policy: Any) -> None:
    """store_request is refused by the decorator, which says what to use."""
    with pytest.raises(ConfigurationError, match="store_request"):
        idempotent(policy=policy)


def test_settings_of_the_decorator_are_named() -> None:
    """A policy is no view."""
    decorator: Any = idempotent
    with pytest.raises(ConfigurationError, match="policy="):
        decorator(Policy.ietf())


def app_with(view: Callable[..., Any], **options: Any) -> flask.Flask:
    app = flask.Flask("app")
    app.testing = True
    app.add_url_rule("/pay", view_func=view, **{"methods": ["POST"], **options})
    return app


@idempotent
def pay() -> str:
    return "made"


def test_an_app_without_semel_says_so() -> None:
    """A guarded view in an app that has no Semel is never run, not even without a key."""
    with pytest.raises(ConfigurationError, match="init_app"):
        app_with(pay).test_client().post("/pay")


def test_a_scope_is_required(install: Install) -> None:
    """A guarded view without a scope of its own or its app's is refused at the first request, to whatever view."""
    app = install(app_with(pay), scope=None)
    with pytest.raises(ConfigurationError, match="SINGLE_TENANT"):
        app.test_client().get("/elsewhere")


def test_a_view_may_have_its_own_scope_and_policy(install: Install) -> None:
    """@idempotent(scope=…, policy=…) goes before the app's, which may have no scope then."""
    app = install(app_with(idempotent(scope=lambda: "alice", policy={"required": True})(lambda: "made")), scope=None)
    client = app.test_client()
    assert client.post("/pay").status_code == 400
    assert client.post("/pay", headers=KEY).data == b"made"
    (record,) = app.extensions["semel"].store.perform(Browse(limit=2))
    assert record.scope == "alice"


def test_a_method_without_any_scope_says_so(install: Install) -> None:
    """A guard that the app's routes do not show, on a function that a view calls, asks for a scope when called."""
    app = install(app_with(lambda: pay()), scope=None)  # noqa: PLW0108 - a plain function that no guard is seen on
    with pytest.raises(ConfigurationError, match="SINGLE_TENANT"):
        app.test_client().post("/pay", headers=KEY)


def test_a_view_that_takes_no_guarded_method_is_refused(install: Install) -> None:
    """A guard on a view for GET alone does nothing, so the first request says that it is misplaced."""
    app = install(app_with(pay, methods=["GET"]))
    with pytest.raises(ConfigurationError, match="takes none of PATCH, POST"):
        app.test_client().get("/pay")


def test_a_view_that_takes_its_own_policys_method_is_not_refused(install: Install) -> None:
    """A view for PUT is guarded by a policy that says PUT."""
    app = install(app_with(idempotent(policy=Policy.ietf(methods={"PUT"}))(lambda: "made"), methods=["PUT"]))
    answers = [app.test_client().put("/pay", headers=KEY) for _ in range(2)]
    assert ["Idempotent-Replayed" in each.headers for each in answers] == [False, True]


def test_a_decorator_above_the_route_is_refused(install: Install) -> None:
    """@idempotent above @app.post guards nothing, and the first request says where it belongs."""
    app = install()
    app.testing = True

    @idempotent
    @app.post("/pay")
    def charge() -> str:
        return "made"

    with pytest.raises(ConfigurationError, match=r"below @app\.post"):
        app.test_client().post("/pay", headers=KEY)


def test_decorators_outside_do_not_hide_a_guard(install: Install) -> None:
    """A login around the guard is looked through."""

    def login(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def checked(*args: Any, **kwargs: Any) -> Any:
            return view(*args, **kwargs)

        return checked

    app = install(app_with(login(pay), methods=["GET"]))
    with pytest.raises(ConfigurationError, match="takes none of"):
        app.test_client().get("/pay")


@pytest.fixture
def handled_sigterm() -> Iterator[list[int]]:
    """A server's own handler of SIGTERM, and what it was told."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    yield told
    signal.signal(signal.SIGTERM, before)


def test_sigterm_closes_every_apps_gate(install: Install, handled_sigterm: list[int]) -> None:
    """A process that is told to stop takes on nothing new in any of its apps, and the server is told as ever."""
    one, other = install(app_with(pay)), install(app_with(pay))
    signal.raise_signal(signal.SIGTERM)
    for app in (one, other):
        answer = app.test_client().post("/pay", headers=KEY)
        assert (answer.status_code, answer.get_json()["code"]) == (503, "shutting-down")
    assert handled_sigterm == [signal.SIGTERM]


def test_sigterm_is_heard_where_the_app_was_made_before_its_server(install: Install) -> None:
    """A server that forks first and listens for signals later is listened to from its first request on."""
    app = install(app_with(pay))
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        assert app.test_client().post("/pay", headers=KEY).status_code == 200
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert app.test_client().post("/pay", headers=KEY).status_code == 503
    assert told == [signal.SIGTERM]


def test_work_cleans_up_beside_the_requests(install: Install) -> None:
    """With work=True the process reaps what is past its retention, from its first request on."""
    store = MemoryStore()
    brief = Policy.ietf(lease=timedelta(milliseconds=1), retention=timedelta(milliseconds=1))
    early = install(app_with(pay), store=store, policy=brief)
    assert early.test_client().post("/pay", headers=KEY).status_code == 200
    wait_until(lambda: all(each.is_expired for each in store.perform(Browse(limit=2))))
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"semel-sweeper", "semel-reaper"}
    app = install(app_with(pay), store=store, work=True)
    app.test_client().get("/")
    wait_until(lambda: store.perform(Browse(limit=2)) == ())
    assert {"semel-sweeper", "semel-reaper"} <= {thread.name for thread in threading.enumerate()}


def test_report_mode_watches_and_changes_nothing(install: Install) -> None:
    """With enforcement="report" a view runs each time, and its answers are its own."""
    runs: list[int] = []

    def count() -> str:
        runs.append(1)
        return str(len(runs))

    app = install(app_with(idempotent(count)), policy=Policy.ietf(enforcement="report"))
    answers = [app.test_client().post("/pay", headers=KEY) for _ in range(2)]
    assert [each.data for each in answers] == [b"1", b"2"]
    assert ["Idempotent-Replayed" in each.headers for each in answers] == [False, False]
    assert app.extensions["semel"].tally.snapshot().total == {"new": 1, "replay": 1}
