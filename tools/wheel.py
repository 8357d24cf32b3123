"""Builds the wheel and the sdist, installs the wheel into empty environments, alone and with each extra, opens what
the extra is for, and runs the README's first program from there. What works in a checkout may be missing from a wheel.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: What can be imported with each extra alone; "" is no extra.
IMPORTS = {
    "": ("semel", "semel.asgi", "semel.wsgi", "semel.functions", "semel.testing", "semel.stores.sqlite"),
    "postgres": ("semel.stores.postgres.store", "semel.stores.postgres.async_store"),
    "redis": ("semel.stores.redis.store", "semel.publishers.redis"),
    "sqlalchemy": ("semel.stores.connections.sqlalchemy", "semel.natural.sqlalchemy"),
    "rabbitmq": ("semel.publishers.rabbitmq", "semel.inbox.rabbitmq"),
    "nats": ("semel.publishers.nats", "semel.inbox.nats"),
    "kafka": ("semel.publishers.kafka",),
    "celery": ("semel.publishers.celery", "semel.inbox.celery"),
    "faststream": ("semel.inbox.faststream",),
    "webhooks": ("semel.webhooks", "semel.publishers.webhook", "semel.work.webhooks"),
    "encryption": ("semel.stores.encrypted",),
    "fastapi": ("semel.fastapi",),
    "django": ("semel.django",),
    "flask": ("semel.flask",),
    "cli": ("semel.cli.main", "semel.cli.app"),
    "prometheus": ("semel.telemetry.prometheus",),
    "opentelemetry": ("semel.telemetry.opentelemetry",),
    "console": ("semel.console", "semel.console.wsgi", "semel.cli.console"),
    "proxy": ("semel.cli.proxy", "semel.proxy.server"),
    "demo": ("semel.cli.main", "semel.cli.demo.command"),
}
#: What can be opened with each. Nothing listens there: what is missing shows before that does.
OPENS = {
    "postgres": ("store postgresql://u@127.0.0.1:1/x",),
    "redis": ("store redis://127.0.0.1:1/0", "destination redis://127.0.0.1:1/0"),
    "rabbitmq": ("destination amqp://127.0.0.1:1/",),
    "nats": ("destination nats://127.0.0.1:1?timeout=1",),
    "kafka": ("destination kafka://127.0.0.1:1?timeout=1",),
    "celery": ("destination celery+amqp://127.0.0.1:1/", "destination celery+redis://127.0.0.1:1/0"),
    "webhooks": ("destination https://127.0.0.1:1/#secret=env:HOOK",),
    "encryption": ("store sqlite:///semel.db?encrypt=env:SECRETS",),
}
#: Run with one of the above: a connection that is refused is what is expected.
OPEN = """
import asyncio, base64, os, sys, tempfile
from semel.errors import StoreUnavailable
from semel.publishers import publisher
from semel.stores import async_store, store

os.environ["SECRETS"] = base64.b64encode(b"s" * 32).decode()
os.environ["HOOK"] = "whsec_" + base64.b64encode(b"s" * 32).decode()

async def open_both(kind, url):
    if kind == "destination":
        return await publisher("x", url).open()
    try:
        store(url).migrate()
    except StoreUnavailable:
        pass
    async with async_store(url):
        pass

with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    try:
        asyncio.run(open_both(*sys.argv[1].split(" ")))
    except (OSError, StoreUnavailable):
        pass
    os.chdir("/")
"""
#: Files that are no Python.
NEEDED = (
    "semel/py.typed",
    "semel/stores/postgres/queries.sql",
    "semel/stores/redis/scripts/claim.lua",
    "semel/console/templates/base.html",
    "semel/console/static/console.js",
    "semel/console/static/console.css",
)
#: What only a checkout has.
NOT_IN_THE_WHEEL = ("tests/", "bench/", "torture/", "semel/testing/servers", "semel/testing/crash.py")
#: Of a server that is about to start.
TRIES = 100
PAUSE_SECONDS = 0.1


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(sys.executable, "-m", "build", "--outdir", str(place / "dist"), str(ROOT))
        (wheel,) = (place / "dist").glob("*.whl")
        check_contents(wheel)
        check_extras(wheel)
        for extra, modules in IMPORTS.items():
            python = environment(place / f"env-{extra or 'alone'}", wheel, extra)
            try_extra(python, modules, OPENS.get(extra, ()))
            print(f"wheel[{extra}]: imports {', '.join(modules)}", flush=True)
        python = environment(place / "env-all", wheel, "all")
        try_extra(python, sum(IMPORTS.values(), ()), sum(OPENS.values(), ()))
        print("wheel[all]: all of these", flush=True)
        python = environment(place / "env-readme", wheel, "fastapi", "uvicorn")
        check_quickstart(python, place)
    print("The wheel holds what it says.")
    return 0


def run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=tempfile.gettempdir(), stdout=subprocess.DEVNULL)


def check_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    strays = [name for name in names if name.startswith(NOT_IN_THE_WHEEL)]
    if strays:
        raise SystemExit(f"The wheel has what only a checkout needs: {strays[:3]}")
    for needed in NEEDED:
        if needed not in names:
            raise SystemExit(f"The wheel lacks {needed}.")


def check_extras(wheel: Path) -> None:
    """Compare the extras that there are with those that are tried here."""
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    there = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    if untried := there - {*IMPORTS, "all", "dev", "failover"}:
        raise SystemExit(f"Nothing is known of the extra {untried}: say in tools/wheel.py what it is for.")


def try_extra(python: Path, modules: Sequence[str], opens: Sequence[str]) -> None:
    """Import what an extra is for, and open it: some packages are imported only then."""
    run(str(python), "-c", "; ".join(f"import {module}" for module in modules))
    for each in opens:
        run(str(python), "-c", OPEN, each)


def environment(place: Path, wheel: Path, extra: str, *more: str) -> Path:
    """Make an environment with nothing but the wheel, an extra and what that asks for; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", str(place))
    python = place / "bin" / "python"
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check")
    run(*pip, wanted, *more, "-c", str(ROOT / "constraints.txt"))
    return python


def check_quickstart(python: Path, place: Path) -> None:
    """Start the README's first program, pay twice with one key, and once more with another body."""
    (place / "app.py").write_text((ROOT / "docs" / "examples" / "quickstart.py").read_text())
    with subprocess.Popen(
        [str(python), "-m", "uvicorn", "app:app", "--port", "0", "--log-level", "info"],
        cwd=place,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            port = port_of(server)
            seen = [pay(port, amount) for amount in (50, 50, 60)]
        finally:
            server.terminate()
    paid = {"payment": 1, "amount": 50}
    if [status for status, _, _ in seen] != [201, 201, 422] or [body for _, body, _ in seen[:2]] != [paid, paid]:
        raise SystemExit(f"The README's first program answered {seen}.")
    if seen[1][2] != "true":
        raise SystemExit("Its second answer was no replay.")
    print("wheel[fastapi]: the README's first program pays once", flush=True)


def port_of(server: subprocess.Popen[str]) -> int:
    assert server.stderr is not None  # noqa: S101 - it is a pipe
    for _ in range(TRIES):
        line = server.stderr.readline()
        if "running on http://127.0.0.1:" in line:
            return int(line.split("http://127.0.0.1:")[1].split()[0])
        if not line:
            time.sleep(PAUSE_SECONDS)
    raise SystemExit("The README's first program did not start.")


def pay(port: int, amount: int) -> tuple[int, object, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {"Idempotency-Key": '"order-17"', "Content-Type": "application/json"}
    connection.request("POST", "/payments", json.dumps({"amount": amount}), headers)
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body, response.getheader("idempotent-replayed")


if __name__ == "__main__":
    sys.exit(main())
