"""A function that can't be called as a step calls it is a mistake in the program: it is found before anything is
recorded, so that the retry of the corrected program runs as if nothing had happened.
"""

import asyncio
import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from wsgiref.types import StartResponse, WSGIEnvironment

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
import semel.asgi
import semel.wsgi
from semel import NOT_APPLIED, Operation
from semel.core.commands import Look, ReadTrail
from semel.errors import ConfigurationError
from semel.stores import store

KEY = {"Idempotency-Key": "k"}

Take = Callable[[Operation], Any]


#: What a server makes of an exception that goes on, and what stands for it where a handler has steps.
FAILED = {500, 503}


class Api:
    """One endpoint in both colours; *take* is what it does with its operation."""

    def __init__(self, url: str, colour: str) -> None:
        self.url = url
        self.colour = colour
        self.take: Take = lambda _operation: None
        self.errors: list[Exception] = []

    def post(self) -> int:
        return asyncio.run(self._post_async()) if self.colour == "async" else self._post()

    def _post(self) -> int:
        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            with self._noting():
                self.take(semel.current())
            start_response("201 Created", [("Content-Length", "0")])
            return [b""]

        guarded = semel.wsgi.IdempotencyMiddleware(app, store=self.url, scope=lambda _: "alice")
        transport = httpx.WSGITransport(guarded, raise_app_exceptions=False)
        try:
            with httpx.Client(transport=transport, base_url="http://test") as client:
                return client.post("/", headers=KEY).status_code
        except ConfigurationError:
            return 500
        finally:
            guarded.guard.leases.close()
            guarded.store.close()

    async def _post_async(self) -> int:
        async def endpoint(_request: Request) -> JSONResponse:
            with self._noting():
                await self.take(semel.current())
            return JSONResponse({}, 201)

        app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
        guarded = semel.asgi.IdempotencyMiddleware(app, store=self.url, scope=lambda _: "alice")
        transport = httpx.ASGITransport(guarded, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            status = (await client.post("/", headers=KEY)).status_code
        await guarded.store.close()
        return status

    @contextmanager
    def fresh(self) -> Iterator["Api"]:
        """The same with a store that knows nothing."""
        with tempfile.TemporaryDirectory() as folder:
            yield Api(f"sqlite:///{folder}/semel.db", self.colour)

    def _noting(self) -> Any:
        return _Noting(self.errors)

    @property
    def steps(self) -> str | None:
        """What is recorded of the steps of the operation."""
        with store(self.url) as opened:
            record = opened.perform(Look("alice", "k"))
            return record.steps if record else None

    @property
    def trail(self) -> list[str]:
        """What the audit trail has of it."""
        with store(self.url) as opened:
            return [entry.event for entry in opened.perform(ReadTrail("alice", "k"))]


class _Noting:
    def __init__(self, errors: list[Exception]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            self._errors.append(error)


@pytest.fixture(params=["sync", "async"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Api:
    return Api(f"sqlite:///{tmp_path}/semel.db", request.param)


def keyless(amount: int) -> int:
    return amount


def keyed(amount: int, *, idempotency_key: str) -> int:
    return amount


def lonely() -> None:
    """Take not even a connection."""


def keyless_verify(amount: int) -> Any:
    return NOT_APPLIED


WRONG: dict[str, tuple[Any, str]] = {
    "no key": (lambda operation: operation.effect("charged", keyless, 5), "idempotency_key"),
    "too few": (lambda operation: operation.effect("charged", keyed), "amount"),
    "too many": (lambda operation: operation.effect("charged", keyed, 5, 6), "too many"),
    "other name": (lambda operation: operation.effect("charged", keyed, 5, to="me"), "to"),
    "partial": (lambda operation: operation.effect("charged", functools.partial(keyless, 5)), "idempotency_key"),
    "verify": (lambda operation: operation.effect("charged", keyed, 5, verify=keyless_verify), "verify"),
    "not callable": (lambda operation: operation.effect("charged", "keyed", 5), "called"),
    "phase without a connection": (lambda operation: operation.phase("made", lonely), "connection"),
    "phase with too few": (lambda operation: operation.phase("made", keyed), "idempotency_key"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_function_is_found_before_anything_is_recorded(api: Api, wrong: str) -> None:
    """It raises a ConfigurationError that names the step; nothing is recorded, and the corrected program goes on."""
    api.take, said = WRONG[wrong]
    assert api.post() in FAILED
    [error] = api.errors
    assert isinstance(error, ConfigurationError)
    assert said in str(error)
    assert repr("made" if "phase" in wrong else "charged") in str(error)
    assert api.steps is None
    assert not {"parked", "saved"} & set(api.trail)
    api.take = lambda operation: operation.effect("charged", keyed, 5)
    assert api.post() == 201


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, idempotency_key: str, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def test_a_function_is_looked_at_for_each_way_of_calling_it(api: Api) -> None:
    """That a function could be called once, in one way, says nothing of another way, or of another default."""
    api.take = lambda operation: operation.effect("charged", keyed, 5)
    assert api.post() == 201

    def made(*defaults: int) -> Any:
        def function(amount: int, *, idempotency_key: str) -> int:
            return amount

        function.__defaults__ = defaults
        return function

    with api.fresh() as again:
        again.take = lambda operation: operation.effect("charged", made(1))
        assert again.post() == 201, again.errors
    with api.fresh() as again:
        again.take = lambda operation: operation.effect("charged", made())
        assert again.post() in FAILED
        again.take = lambda operation: operation.effect("charged", keyed, amount=5)  # type: ignore[arg-type]  # by name
        assert again.post() == 201


class Charging:
    def __call__(self, amount: int, idempotency_key: str) -> int:
        return amount


RIGHT: dict[str, Take] = {
    "key anywhere": lambda operation: operation.effect("charged", lambda idempotency_key, amount=1: amount, amount=5),
    "partial": lambda operation: operation.effect("charged", functools.partial(keyed, 5)),
    "partial with a key": lambda operation: operation.effect(
        "charged", functools.partial(keyed, idempotency_key="a"), 5
    ),
    "wrapped": lambda operation: operation.effect("charged", around(keyless), 5),
    "object": lambda operation: operation.effect("charged", Charging(), 5),
    "mock": lambda operation: operation.effect("charged", Mock(return_value=1), 5),
    "builtin": lambda operation: operation.effect("charged", dict, amount=5),
    "builtin in a phase": lambda operation: operation.phase(
        "asked", functools.partial(lambda call, _: call(), time.time)
    ),
}


@pytest.mark.parametrize("right", RIGHT)
def test_whatever_can_be_called_is_called(api: Api, right: str) -> None:
    """Partials, wrappers, objects, mocks and builtins that tell no signature are no mistake."""
    api.take = RIGHT[right]
    assert api.post() == 201, api.errors
    assert api.steps is not None
