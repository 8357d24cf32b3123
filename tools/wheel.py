"""Builds the wheel and the sdist, installs the wheel into empty environments, alone and with each extra, and runs the
README's first program from there. What works in a checkout may be missing from a wheel.
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
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: What can be imported with each extra alone; "" is no extra.
IMPORTS = {
    "": ("semel", "semel.asgi", "semel.wsgi", "semel.functions", "semel.testing", "semel.stores.sqlite"),
    "fastapi": ("semel.fastapi",),
    "django": ("semel.django",),
    "flask": ("semel.flask",),
    "postgres": ("semel.stores.postgres.store", "semel.stores.postgres.async_store"),
    "redis": ("semel.stores.redis.store",),
    "sqlalchemy": ("semel.stores.connections.sqlalchemy",),
    "cli": ("semel.cli.main",),
    "console": ("semel.console", "semel.console.wsgi", "semel.cli.console"),
    "demo": ("semel.cli.main", "semel.cli.demo.command"),
}
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
        for extra, modules in IMPORTS.items():
            python = environment(place / f"env-{extra or 'alone'}", wheel, extra)
            run(str(python), "-c", "; ".join(f"import {module}" for module in modules))
            print(f"wheel[{extra}]: imports {', '.join(modules)}", flush=True)
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
