"""The programs of docs/how-to/functions.md run, and do what the page says."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from semel import functions
from semel.errors import KeyReused
from tests.docs.served import EXAMPLES, ROOT, asgi, load


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Examples keep their store where they are started."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    functions.close()


def test_job(folder: Path) -> None:
    """The job mails each invoice once, however often it is started; a failure that is kept is told again."""
    program = EXAMPLES / ("functions_job" + ".py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "always::ResourceWarning", str(program), "2026-11"]
    runs = [
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stderr for run in runs] == ["", ""]
    first, again = (run.stdout.splitlines() for run in runs)
    assert first[1] == "8 nobody has no address."
    assert again[1].endswith("It was functions_job.NoAddressError: nobody has no address.")
    assert (first[0], first[2]) == (again[0], again[2])
    assert (folder / "outbox.txt").read_text() == "acme: 100.00\nglobex: 11.50\n"


async def test_webhook() -> None:
    """An event that is delivered twice is acted on once; while it is acted on, the sender is asked to come back."""
    example = load("functions_webhook")
    event = {"id": "evt_1", "order": "A17"}

    async def deliver(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/webhooks", json=event)

    async with asgi(example.app) as client:
        both = await asyncio.gather(deliver(client), deliver(client))
        again = await deliver(client)
    assert sorted(each.status_code for each in both) == [200, 503]
    assert [each.headers["retry-after"] for each in both if each.status_code == 503] == ["1"]
    assert (again.status_code, again.json()) == (200, {"parcel": 1})
    assert example.shipped == ["A17"]


def test_celery() -> None:
    """A task that is delivered twice is done once; by another key, or by the delivery's own, it is another."""
    example = load("functions_celery")
    assert [example.pay.apply((7, 50), throw=True).get() for _ in range(2)] == ["ch_7", "ch_7"]
    assert list(example.charges.values()) == [50]
    with pytest.raises(KeyReused):
        example.pay.apply((7, 60), throw=True)
    greeted = [example.greet.apply(("a@b",), task_id=delivery, throw=True).get() for delivery in ("d1", "d1", "d2")]
    assert greeted == [f"Greeted a@b in delivery {delivery}." for delivery in ("d1", "d1", "d2")]
