"""A type checker knows the arguments and the result of a step. It reads this file with unused ignores as errors.

Running it proves that a plain function in an async handler runs in a thread, whether or not that is said.
"""

import asyncio
import threading
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, assert_type

import httpx
import pytest

import semel
from semel import SINGLE_TENANT, Operation, in_thread
from semel.asgi import IdempotencyMiddleware
from semel.errors import ConfigurationError
from semel.wsgi import IdempotencyMiddleware as WSGIMiddleware

KEY = {"Idempotency-Key": "k"}


def create(connection: Any, amount: int, *, note: str = "") -> dict[str, int]:
    return {"thread": threading.get_ident()}


async def create_async(connection: Any, amount: int, *, note: str = "") -> dict[str, int]:
    return {"thread": threading.get_ident()}


def charge(ride: dict[str, int], *, idempotency_key: str) -> str:
    return idempotency_key


async def charge_async(ride: dict[str, int], currency: str = "eur", *, idempotency_key: str) -> str:
    return idempotency_key


def keyless(ride: dict[str, int]) -> str:
    return ""


def ping(*, idempotency_key: str) -> int:
    return 1


def three(a: int, b: str, c: bytes, idempotency_key: str) -> float:
    return 1.0


def four(a: int, b: str, c: bytes, d: bool, idempotency_key: str) -> float:
    return 1.0


def six(a: int, b: str, c: bytes, d: bool, e: int, f: int, idempotency_key: str) -> float:  # noqa: PLR0917 - so many
    return 1.0


def in_a_sync_handler(operation: Operation) -> None:
    ride = operation.phase("ride", create, 5, note="x")
    assert_type(ride, dict[str, int])
    operation.phase("ride", create)  # type: ignore[call-arg]
    operation.phase("ride", create, "5")  # type: ignore[arg-type]
    operation.phase("ride", create, 5, notes="x")  # type: ignore[call-arg]
    assert_type(operation.effect("charge", charge, ride), str)
    assert_type(operation.effect("charge", charge, ride, on_unknown="park"), str)
    assert_type(operation.effect("ping", ping), int)
    assert_type(operation.effect("three", three, 1, "b", b"c"), float)
    assert_type(operation.effect("four", four, 1, "b", b"c", True), float)
    assert_type(operation.effect("six", six, 1, "b", b"c", True, 5, 6), float)
    # An argument that the function must have can't be given by name here: ``partial`` can give it.
    operation.effect("four", four, 1, "b", b"c", d=True)  # type: ignore[arg-type]
    assert_type(operation.effect("four", partial(four, d=True), 1, "b", b"c"), float)
    operation.effect("charge", charge, 5)  # type: ignore[misc]
    operation.effect("charge", charge)  # type: ignore[arg-type]
    operation.effect("charge", keyless, ride)  # type: ignore[arg-type]
    operation.effect("charge", charge, ride, on_unknown="parked")  # type: ignore[call-overload]


async def in_an_async_handler(operation: Operation) -> None:
    ride = await operation.phase("ride", create_async, 5, note="x")
    assert_type(ride, dict[str, int])
    await operation.phase("ride", create_async, "5")  # type: ignore[arg-type]
    operation.phase("ride", create_async, 5)  # type: ignore[unused-coroutine]
    assert_type(await operation.effect("charge", charge_async, ride), str)
    assert_type(await operation.effect("charge", charge_async, ride, currency="usd"), str)
    assert_type(await operation.effect("charge", partial(charge_async, ride), "usd"), str)
    await operation.effect("charge", charge_async, 5)  # type: ignore[misc]
    # What is not async is awaited, too; its type says so where it is said.
    assert_type(operation.phase("ride", in_thread(create), 5), Coroutine[Any, Any, dict[str, int]]).close()
    await operation.phase("ride", in_thread(create), "5")  # type: ignore[arg-type]


def test_types_are_checked() -> None:
    """What is wrong above is an error to mypy, and what is right is not."""
    assert all(map(callable, (in_a_sync_handler, in_an_async_handler)))


async def test_a_plain_function_runs_in_a_thread(tmp_path: Path) -> None:
    """In an async handler `in_thread` and a bare function do the same; called by itself it can be awaited as well."""

    def twice(number: int, idempotency_key: str) -> list[int]:
        return [number, threading.get_ident()]

    results: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        operation = semel.current()
        results.append(await operation.phase("a", in_thread(create), 5))
        results.append(await operation.effect("b", in_thread(twice), 2))
        bare: Any = operation.phase("c", create, 5)
        results.append(await bare)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    guarded = IdempotencyMiddleware(app, store=f"sqlite:///{tmp_path}/semel.db", scope=SINGLE_TENANT)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
        assert (await client.post("/", headers=KEY)).status_code == 204
    await guarded.store.close()
    threads = {results[0]["thread"], results[1][1], results[2]["thread"]}
    assert threading.get_ident() not in threads
    assert (await in_thread(twice)(3, ""))[0] == 3


def test_in_thread_is_for_async_handlers(tmp_path: Path) -> None:
    """A sync handler can't await: the step is refused, and says so."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        semel.current().phase("a", in_thread(create), 5)  # type: ignore[unused-coroutine]
        return []

    guarded = WSGIMiddleware(app, store=f"sqlite:///{tmp_path}/semel.db", scope=SINGLE_TENANT)
    with (
        httpx.Client(transport=httpx.WSGITransport(guarded), base_url="http://test") as client,
        pytest.raises(ConfigurationError, match="this handler is not"),
    ):
        client.post("/", headers=KEY)
    guarded.guard.leases.close()
    guarded.store.close()


def test_a_thread_of_an_async_app_waits_for_it() -> None:
    """`in_thread` names the function that it runs, and passes its arguments on."""
    assert asyncio.run(in_thread(create)(None, 5))["thread"] != threading.get_ident()
