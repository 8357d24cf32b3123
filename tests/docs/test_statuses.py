"""The table of statuses, row by row: each situation is brought about, in both dialects, and the answer compared."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import httpx
import pytest

from semel import SINGLE_TENANT, NoEffect, Policy, current, errors
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Claim, Command, Complete
from semel.flows import handle
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.step import Step
from semel.wsgi import IdempotencyMiddleware as WSGIMiddleware
from tools.docs import SITUATIONS

T = TypeVar("T")
Preset = Callable[..., Policy]
Ending = Callable[[], Awaitable[bytes]]
PRESETS = [Policy.ietf, Policy.stripe]
KEY = {"Idempotency-Key": "k"}


class World:
    """One guarded app, its store and its clock."""

    def __init__(self, policy: Policy, *, ending: Ending | None = None, scope: Any = SINGLE_TENANT) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.memory = MemoryStore(clock=lambda: self.now)
        self.policy = policy
        self.runs = 0
        self._ending = ending
        self.guard = IdempotencyMiddleware(
            self._app, store=AsyncMemoryStore(memory=self.memory), scope=scope, policy=policy
        )

    async def post(self, body: bytes = b"{}", headers: dict[str, str] = KEY) -> httpx.Response:
        transport = httpx.ASGITransport(self.guard, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/", content=body, headers=headers)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.guard), base_url="http://here") as client:
            return await client.get(path)

    async def _app(self, _scope: Any, _receive: Any, send: Any) -> None:
        self.runs += 1
        body = await self._ending() if self._ending else b"done"
        await send({"type": "http.response.start", "status": 201, "headers": [(b"location", b"/1")]})
        await send({"type": "http.response.body", "body": body})


class Forgetful(AsyncMemoryStore):
    """A store that is gone when an answer is to be stored."""

    def perform(self, command: Command[T]) -> Step[T]:
        if isinstance(command, Complete):
            raise errors.StoreUnavailable
        return super().perform(command)


def check(answer: httpx.Response, error: type[errors.Refusal], policy: Policy) -> None:
    if policy.dialect == "stripe":
        body = answer.json()["error"]
        assert answer.status_code == (error.stripe_status or error.status)
        assert (body["type"], body.get("code")) == (error.stripe_type, error.stripe_code)
        assert answer.headers["content-type"] == "application/json"
    else:
        body = answer.json()
        assert answer.status_code == body["status"] == error.status
        assert (body["type"], body["retryable"]) == (policy.problem_base + error.slug, error.retryable)
        assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"


async def key_missing(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(required=True))
    return world, await world.post(headers={})


async def key_invalid(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset())
    return world, await world.post(headers={"Idempotency-Key": '"half'})


async def scope_missing(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(), scope=lambda _: None)
    return world, await world.post()


async def body_too_large(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(max_request_body=1))
    return world, await world.post()


async def body_incomplete(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset())
    guard = WSGIMiddleware(lambda *_: [], store=world.memory, scope=SINGLE_TENANT, policy=world.policy)
    with httpx.Client(transport=httpx.WSGITransport(guard), base_url="http://here") as client:
        send = client.post  # in this process, so nothing waits
        return world, send("/", content=b"{}", headers=KEY | {"Content-Length": "9"})


async def shutting_down(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset())
    world.guard.drain()
    answer = await world.post()
    assert answer.headers["retry-after"] == "2"
    return world, answer


async def store_unavailable(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset())
    world.guard = IdempotencyMiddleware(
        world.guard.app, store="sqlite:///no/such/folder/semel.db", scope=SINGLE_TENANT, policy=world.policy
    )
    answer = await world.post()
    await world.guard.store.close()
    assert answer.headers["retry-after"] == "2"
    return world, answer


async def key_reused(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset())
    await world.post(b"one")
    world.runs = 0
    return world, await world.post(b"two")


async def in_progress(preset: Preset) -> tuple[World, httpx.Response]:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def ending() -> bytes:
        begun.set()
        await may_end.wait()
        return b""

    world = World(preset(), ending=ending)
    first = asyncio.ensure_future(world.post())
    await begun.wait()
    world.runs = 0
    answer = await world.post()
    may_end.set()
    await first
    assert answer.headers["retry-after"] == "1"
    return world, answer


async def not_replayable(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(max_response_body=1))
    assert (await world.post()).content == b"done"
    world.runs = 0
    answer = await world.post()
    assert answer.headers["location"] == "/1"
    return world, answer


async def outcome_unknown(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(on_crash="refuse", fingerprint=None))
    world.memory.perform(
        Claim("single-tenant", "k", b"0" * 16, b"", world.policy.lease, world.policy.retention)
    )  # by a worker that dies
    world.now += world.policy.lease
    return world, await world.post()


async def key_expired(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(late="refuse"))
    await world.post()
    world.runs = 0
    world.now += world.policy.retention
    return world, await world.post()


async def operation_not_found(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(in_progress="accept"))
    return world, await world.get("/semel/operations/of-nobody")


async def operation_expired(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(in_progress="accept"))
    accepted = await world.post()
    world.now += world.policy.retention
    return world, await world.get(accepted.headers["location"])


async def operation_failed(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(), ending=failing(ZeroDivisionError()))
    first = await world.post()
    again = await world.post()
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    return world, first


async def charge(*, idempotency_key: str) -> int:
    return 1


async def operation_unfinished(preset: Preset) -> tuple[World, httpx.Response]:
    async def ending() -> bytes:
        await current().effect("charged", charge)
        raise ZeroDivisionError

    world = World(preset(server_errors="auto"), ending=ending)
    answer = await world.post()
    assert answer.headers["retry-after"] == "2"
    await world.post()
    assert world.runs == 2
    return world, answer


async def no_effect(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset(server_errors="auto"), ending=failing(NoEffect()))
    answer = await world.post()
    await world.post()
    assert world.runs == 2
    world.runs = 1
    return world, answer


async def answer_not_stored(preset: Preset) -> tuple[World, httpx.Response]:
    world = World(preset())
    world.guard = IdempotencyMiddleware(
        world.guard.app, store=Forgetful(memory=world.memory), scope=SINGLE_TENANT, policy=world.policy
    )
    return world, await world.post()


SCENARIOS: dict[type[errors.Refusal], Callable[[Preset], Awaitable[tuple[World, httpx.Response]]]] = {
    errors.KeyMissing: key_missing,
    errors.KeyInvalid: key_invalid,
    errors.ScopeMissing: scope_missing,
    errors.BodyTooLarge: body_too_large,
    errors.BodyIncomplete: body_incomplete,
    errors.ShuttingDown: shutting_down,
    errors.StoreUnavailable: store_unavailable,
    errors.KeyReused: key_reused,
    errors.InProgress: in_progress,
    errors.NotReplayable: not_replayable,
    errors.OutcomeUnknown: outcome_unknown,
    errors.KeyExpired: key_expired,
    errors.OperationNotFound: operation_not_found,
    errors.OperationExpired: operation_expired,
    errors.OperationFailed: operation_failed,
    errors.OperationUnfinished: operation_unfinished,
    errors.NoEffect: no_effect,
    errors.AnswerNotStored: answer_not_stored,
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("error", SITUATIONS, ids=lambda error: error.slug)
async def test_row(error: type[errors.Refusal], preset: Preset, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table says of a situation is what a client gets, and whether the handler ran is true."""
    monkeypatch.setattr(handle, "COMPLETE_PAUSES", (timedelta(0),))
    world, answer = await SCENARIOS[error](preset)
    check(answer, error, world.policy)
    assert bool(world.runs) == SITUATIONS[error][1].startswith("yes")


def failing(error: Exception) -> Ending:
    async def ending() -> bytes:
        raise error

    return ending
