"""A real Express app behind the proxy, as in ``examples/express``: retried, raced, killed in the middle."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.kit.servers import NoServerBinary, free_port
from tests.kit.servers.programs import EXPRESS
from tests.proxy.kit import HANG
from tests.proxy.running import ROOT, running

pytestmark = pytest.mark.slow  # It is installed from npm's registry.

INSTALL_SECONDS = 120


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, with what it needs."""
    if not all(map(shutil.which, EXPRESS.names)):
        raise NoServerBinary(EXPRESS)
    folder = tmp_path_factory.mktemp("express") / "app"
    shutil.copytree(ROOT / "examples" / "express", folder)
    quiet = ["--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    installed = subprocess.run(
        ["npm", "install", *quiet],  # noqa: S607 - found above
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"npm install failed, so no Express was tested: {installed.stderr.strip()[:200]}")
    return folder


class Express:
    """The app, and what it has charged."""

    def __init__(self, example: Path, folder: Path) -> None:
        self._example = example
        self.ledger = folder / "ledger.jsonl"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def started(self) -> AsyncIterator[asyncio.subprocess.Process]:
        environment = {**os.environ, "PORT": str(self.port), "LEDGER": str(self.ledger)}
        process = await asyncio.create_subprocess_exec(
            "node", "server.js", cwd=self._example, env=environment, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            assert (await asyncio.wait_for(process.stdout.readline(), HANG)).startswith(b"Express on")
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    @property
    def charges(self) -> list[int]:
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [json.loads(line)["amount"] for line in lines]

    async def has_charged(self, number: int) -> None:
        async with asyncio.timeout(HANG):
            while len(self.charges) < number:  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.02)


def payment(amount: int, slow_ms: int = 0) -> bytes:
    return json.dumps({"amount": amount, "slow_ms": slow_ms}).encode()


async def test_express(example: Path, tmp_path: Path) -> None:
    """One charge for each key: after a retry, a race, and a kill of Express before, in and after its work."""
    express = Express(example, tmp_path)
    json_type = "Content-Type: application/json"
    async with running(tmp_path, express.url, rules='in_progress = "wait"') as proxy:

        async def pay(key: str, body: bytes) -> tuple[int, str | None, bool]:
            got = await proxy.send(f"Idempotency-Key: {key}", "X-User: bob", json_type, target="/payments", body=body)
            return got.status, got.code, got.is_replay

        assert (await pay("a", payment(1)))[:2] == (503, "upstream-unreachable")
        async with express.started() as process:
            assert await pay("a", payment(1)) == (201, None, False)
            assert await pay("a", payment(1)) == (201, None, True)
            raced = await asyncio.gather(*(pay("b", payment(2, slow_ms=100)) for _ in range(8)))
            assert sorted(raced) == [(201, None, False), *[(201, None, True)] * 7]
            cut = asyncio.create_task(pay("c", payment(3, slow_ms=60_000)))
            await express.has_charged(3)
            process.send_signal(signal.SIGKILL)
            assert await cut == (409, "outcome-unknown", False)
        async with express.started():
            assert await pay("c", payment(3, slow_ms=60_000)) == (409, "outcome-unknown", False)
            assert await pay("d", payment(4)) == (201, None, False)
            charged = (await proxy.get("/payments")).json()
    assert express.charges == [1, 2, 3, 4]
    assert [(each["user"], each["attempt"]) for each in charged] == [("bob", 1)] * 4


async def test_spellings(example: Path, tmp_path: Path) -> None:
    """Express takes /Payments/ for /payments, so a key is charged once there, too."""
    express = Express(example, tmp_path)
    async with running(tmp_path, express.url, "--path", "/payments") as proxy, express.started():
        for target in ("/payments/", "/Payments", "/PAYMENTS/"):
            lines = (f"Idempotency-Key: {target}", "X-User: bob", "Content-Type: application/json")
            got = [await proxy.send(*lines, target=target, body=payment(1)) for _ in range(2)]
            assert [(each.status, each.is_replay) for each in got] == [(201, False), (201, True)]
    assert express.charges == [1, 1, 1]


async def test_a_deploy_of_express(example: Path, tmp_path: Path) -> None:
    """On SIGTERM Express finishes what it has begun: its client gets its answer, and no outcome is unknown."""
    express = Express(example, tmp_path)
    lines = ("Idempotency-Key: a", "X-User: bob", "Content-Type: application/json")
    async with running(tmp_path, express.url) as proxy, express.started() as process, asyncio.timeout(HANG):
        paying = asyncio.create_task(proxy.send(*lines, target="/payments", body=payment(1, slow_ms=1000)))
        await express.has_charged(1)
        process.send_signal(signal.SIGTERM)
        assert (await paying).status == 201
        assert await process.wait() == 0
        assert (await proxy.send(*lines, target="/payments", body=payment(1, slow_ms=1000))).is_replay
        other = ("Idempotency-Key: b", *lines[1:])
        assert (await proxy.send(*other, target="/payments", body=payment(2))).code == "upstream-unreachable"
    assert express.charges == [1]
