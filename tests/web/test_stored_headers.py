"""What of a request is stored to be run again: all that a handler needs, and no credentials."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI

import semel.asgi
import semel.fastapi
import semel.wsgi
from semel import Policy, stores
from semel.core.commands import Browse, ReadRequest
from semel.core.record import Hold
from semel.work import AsyncCompleter, Completer
from tests.web.harness import Request, call_asgi, call_wsgi

SECRETS = {
    "Authorization": "Bearer s3cret",
    "Cookie": "sid=s3cret",
    "Proxy-Authorization": "Basic s3cret",
    "X-API-Key": "s3cret",
    "X-Auth-Token": "s3cret",
    "Api-Key": "s3cret",
    "X-Amz-Security-Token": "s3cret",
    "X-Client-Secret": "s3cret",
    "Stripe-Signature": "t=1,v1=s3cret",
    "X-Hub-Signature-256": "sha256=s3cret",
    "Signature-Input": "sig=s3cret",
    "X-CSRFToken": "s3cret",
    "X-Goog-IAP-JWT-Assertion": "s3cret",
    "DPoP": "s3cret",
}
NEEDED = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Language": "de",
    "Idempotency-Key": "key-1",
    "X-Currency": "EUR",
    "X-Tenant": "shop",
}
#: Looks like a secret, and is none.
ODD = {"X-Partition-Key": "7", "X-Weather": "s3cret"}
POLICY = Policy.ietf(in_progress="accept", store_headers={"X-Partition-Key"}, omit_headers=["X-Weather"])

SENT = tuple((name, value.encode()) for name, value in {**SECRETS, **NEEDED, **ODD}.items())
REQUEST = Request("POST", "/pay", SENT, b'{"amount": 5}', "")


class Seen:
    """What the handler was given, each time."""

    def __init__(self) -> None:
        self.runs: list[dict[str, str]] = []

    async def asgi(self, scope: Any, _receive: Any, send: Any) -> None:
        self.runs.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"paid"})

    def wsgi(self, environ: Any, start: Any) -> list[bytes]:
        given = {name.removeprefix("HTTP_"): value for name, value in environ.items() if isinstance(value, str)}
        self.runs.append({name.replace("_", "-").lower(): value for name, value in given.items()})
        start("201 Created", [])
        return [b"paid"]


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    match request.param:
        case "memory":
            yield "memory://"
        case "sqlite":
            yield f"sqlite:///{tmp_path / 'semel.db'}"
        case "postgres":
            url: str = request.getfixturevalue("postgres_url")
            stores.store(url).migrate()
            yield url
        case _:
            yield request.getfixturevalue("redis_url")


def assert_stored(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    names = {name.decode() for name, _ in headers} - {"content-length"}
    assert names == {name.lower() for name in NEEDED} | {"x-partition-key"}


def assert_run(run: dict[str, str]) -> None:
    assert "s3cret" not in "".join(run.values())
    wanted = {name.lower(): value for name, value in {**NEEDED, "X-Partition-Key": "7"}.items()}
    assert {name: run.get(name) for name in wanted} == wanted


def test_wsgi(where: str) -> None:
    """A WSGI handler that a worker runs sees every header that it needs, and no credentials."""
    seen, keys = Seen(), stores.store(where)
    app = semel.wsgi.IdempotencyMiddleware(seen.wsgi, store=keys, scope=lambda _: "alice", policy=POLICY)
    assert call_wsgi(app, REQUEST).status == 202
    (record,) = keys.perform(Browse(limit=9))
    stored = keys.perform(ReadRequest(Hold(record.scope, record.key, record.attempt, record.token)))
    assert stored is not None
    assert_stored(stored.head.headers)
    assert "1 finished" in str(Completer(keys, app.finish).run_once())
    keys.close()
    (run,) = seen.runs
    assert_run(run)


async def test_asgi(where: str) -> None:
    """So does an ASGI handler."""
    seen, keys = Seen(), stores.async_store(where)
    app = semel.asgi.IdempotencyMiddleware(seen.asgi, store=keys, scope=lambda _: "alice", policy=POLICY)
    assert (await call_asgi(app, REQUEST)).status == 202
    (record,) = await keys.perform(Browse(limit=9))
    stored = await keys.perform(ReadRequest(Hold(record.scope, record.key, record.attempt, record.token)))
    assert stored is not None
    assert_stored(stored.head.headers)
    assert "1 finished" in str(await AsyncCompleter(keys, app.finish).run_once())
    await keys.close()
    (run,) = seen.runs
    assert_run(run)


async def test_fastapi() -> None:
    """So it is on a FastAPI route, where the claim is made after the login has run."""
    keys = stores.async_store("memory://")
    app = FastAPI()
    semel.fastapi.install(app, store=keys, policy=replace(POLICY, in_progress="conflict", store_request=True))
    stored: list[Any] = []

    @app.post("/pay", dependencies=[Depends(semel.fastapi.Idempotent(scope=lambda: "alice"))])
    async def pay() -> str:
        (record,) = await keys.perform(Browse(limit=9))
        stored.append(await keys.perform(ReadRequest(Hold(record.scope, record.key, record.attempt, record.token))))
        return "paid"

    assert (await call_asgi(app, REQUEST)).status == 200
    assert_stored(stored[0].head.headers)


def test_nothing_secret_is_in_the_file(tmp_path: Path) -> None:
    """No byte of a credential is on the disk: not in the file, and not in its log."""
    keys = stores.store(f"sqlite:///{tmp_path / 'semel.db'}")
    app = semel.wsgi.IdempotencyMiddleware(Seen().wsgi, store=keys, scope=lambda _: "alice", policy=POLICY)
    assert call_wsgi(app, REQUEST).status == 202
    written = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    keys.close()
    assert b"key-1" in written
    assert b"s3cret" not in written


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes.")
@pytest.mark.parametrize("make", [stores.store, stores.async_store])
def test_the_file_is_its_owners(make: Any, tmp_path: Path) -> None:
    """A SQLite file that Semel makes can be read by its own user alone, and so can its log, whatever the umask is."""
    before = os.umask(0)
    try:
        _used(make(f"sqlite:///{tmp_path / 'semel.db'}"), tmp_path)
    finally:
        os.umask(before)


def _used(keys: Any, folder: Path) -> None:
    async def used() -> None:
        async with keys:
            _check_modes(folder)

    if isinstance(keys, stores.AsyncStore):
        asyncio.run(used())
    else:
        with keys:
            _check_modes(folder)


def _check_modes(folder: Path) -> None:
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}
    assert {"semel.db", "semel.db-shm", "semel.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes.")
def test_a_file_behind_a_link_is_for_one_user(tmp_path: Path) -> None:
    """A file that is made where a symbolic link leads, as a deployment has it, is this user's alone, too."""
    (shared := tmp_path / "shared").mkdir()
    (link := tmp_path / "semel.db").symlink_to(shared / "semel.db")
    with stores.store(f"sqlite:///{link}"):
        _check_modes(shared)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes.")
def test_a_file_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    """A file that was there before keeps its mode: others may have been let in on purpose."""
    file = tmp_path / "shop.db"
    file.touch(0o664)
    file.chmod(0o664)
    stores.store(f"sqlite:///{file}").migrate()
    assert stat.S_IMODE(file.stat().st_mode) == 0o664
