"""The plug-in for pytest, in a pytest of its own: a store that is new for each test, and its clock."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis

from semel import SINGLE_TENANT
from semel.testing.fresh import fresh_store
from semel.wsgi import IdempotencyMiddleware
from tests.web.harness import wait_until

SUITE = """
from datetime import timedelta

import httpx
import pytest

from semel import SINGLE_TENANT
from semel.wsgi import IdempotencyMiddleware

KEY = {"Idempotency-Key": "k"}
seen = []


@pytest.fixture
def post(semel_store):
    runs = []

    def app(environ, start_response):
        runs.append(1)
        start_response("201 Created", [])
        return [str(len(runs)).encode()]

    guarded = IdempotencyMiddleware(app, store=semel_store, scope=SINGLE_TENANT)
    with httpx.Client(transport=httpx.WSGITransport(guarded), base_url="http://test") as client:
        yield lambda: client.post("/", headers=KEY).text
    guarded.guard.leases.close()
    guarded.store.close()


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_has_its_own(post, semel_store, number):
    assert [post(), post()] == ["1", "1"]
    assert semel_store not in seen
    seen.append(semel_store)
    assert semel_store.startswith(KIND)


def test_time_passes(post, semel_clock):
    assert post() == "1"
    semel_clock.advance(timedelta(hours=23))
    assert post() == "1"
    semel_clock.advance(timedelta(hours=2))
    assert post() == "2"
"""

ON_A_LOOP = """
from datetime import timedelta

import httpx
import pytest

from semel import SINGLE_TENANT
from semel.asgi import IdempotencyMiddleware


MARK
async def test_time_passes(semel_store, semel_clock):
    runs = []

    async def app(scope, receive, send):
        runs.append(1)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded = IdempotencyMiddleware(app, store=semel_store, scope=SINGLE_TENANT)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
        for hours in (23, 2):
            await client.post("/", headers={"Idempotency-Key": "k"})
            await semel_clock.aadvance(timedelta(hours=hours))
        await client.post("/", headers={"Idempotency-Key": "k"})
    await guarded.store.close()
    assert len(runs) == 2
"""


def run(folder: Path, suite: str, *options: str, ini: str = "") -> str:
    (folder / "test_suite.py").write_text(suite)
    (folder / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_sqlite_without_a_word(tmp_path: Path) -> None:
    """By default it is a SQLite file, a new one for each test; no other plug-in is needed."""
    said = run(tmp_path, f"KIND = 'sqlite:///'{SUITE}", "-p", "no:asyncio", "-p", "no:anyio")
    assert "3 passed" in said, said


@pytest.mark.slow
def test_postgresql(tmp_path: Path, postgres_url: str) -> None:
    """On PostgreSQL each test has a table of its own, which is gone afterwards."""
    said = run(tmp_path, f"KIND = 'postgresql://'{SUITE}", f"--semel-store={postgres_url}")
    assert "3 passed" in said, said
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall() == []


@pytest.mark.slow
def test_redis(tmp_path: Path, redis_url: str) -> None:
    """On Redis each test has a prefix of its own, and what is under it is gone afterwards; the ini file can say so."""
    said = run(tmp_path, f"KIND = 'redis://'{SUITE}", ini=f"semel_store = {redis_url}")
    assert "3 passed" in said, said
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("semel_test_*") == []


@pytest.mark.parametrize(
    "mark, options",
    [("@pytest.mark.asyncio", ()), ("@pytest.mark.anyio", ("-p", "no:asyncio", "-p", "anyio"))],
    ids=["asyncio", "anyio"],
)
def test_async_tests(tmp_path: Path, mark: str, options: tuple[str, ...]) -> None:
    """Async tests, of whatever plug-in, use the same fixtures, and await the clock."""
    fixture = "\n\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
    said = run(tmp_path, ON_A_LOOP.replace("MARK", mark) + fixture, *options)
    assert "1 passed" in said, said


def test_memory_is_refused(tmp_path: Path) -> None:
    """Each store in memory has records of its own, so a URL of it could not be shared with a clock."""
    said = run(tmp_path, f"KIND = ''{SUITE}", "--semel-store=memory://", "-k", "time")
    assert "1 error" in said
    assert "each store in memory has its own records" in said


def test_the_fixture_can_be_overridden(tmp_path: Path) -> None:
    """A suite may say in code where its stores are."""
    override = "import pytest\n@pytest.fixture\ndef semel_store_url():\n    return 'sqlite'\n"
    said = run(tmp_path, f"{override}KIND = 'sqlite:///'{SUITE}", "--semel-store=memory://")
    assert "3 passed" in said, said


def test_what_an_app_leaves_open(tmp_path: Path, postgres_url: str) -> None:
    """The connections of an app that no test closes end with the store of its test."""

    def app(_environ: Any, start_response: Any) -> list[bytes]:
        start_response("201 Created", [])
        return [b"made"]

    for _ in range(2):
        with fresh_store(postgres_url, tmp_path) as url:
            guarded = IdempotencyMiddleware(app, store=url, scope=SINGLE_TENANT)
            with httpx.Client(transport=httpx.WSGITransport(guarded), base_url="http://test") as client:
                assert client.post("/", headers={"Idempotency-Key": "k"}).status_code == 201
        wait_until(lambda: others_connected_to(postgres_url) == 0)


def test_what_an_app_leaves_in_redis(tmp_path: Path, redis_url: str) -> None:
    """What an app that no test closes has counted goes with the keys of its test, and not in after them."""

    def app(_environ: Any, start_response: Any) -> list[bytes]:
        start_response("201 Created", [])
        return [b"made"]

    with fresh_store(redis_url, tmp_path) as url:
        guarded = IdempotencyMiddleware(app, store=url, scope=SINGLE_TENANT)
        with httpx.Client(transport=httpx.WSGITransport(guarded), base_url="http://test") as client:
            assert client.post("/", headers={"Idempotency-Key": "k"}).status_code == 201
    guarded.store.close()  # What is counted by then is added, as at the end of the process.
    with redis.Redis.from_url(redis_url) as server:
        assert server.keys("semel_test_*") == []


def others_connected_to(url: str) -> int:
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(url) as connection:
        [(count,)] = connection.execute(asked).fetchall()
    return int(count)


def test_nothing_is_imported_for_others() -> None:
    """A pytest that uses nothing of it imports nothing of Semel's."""
    program = "import sys, pytest_semel; print([name for name in sys.modules if name.split('.')[0] == 'semel'])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == "[]\n"
