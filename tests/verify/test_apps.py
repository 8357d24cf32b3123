"""Real applications: with Semel nothing is found, without it a great deal."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI, Header, HTTPException
from flask import Flask, Response, jsonify, request
from werkzeug.serving import make_server

from semel import Policy
from semel.asgi import IdempotencyMiddleware
from semel.fastapi import Idempotent, install
from semel.verify.model import Verdict
from semel.verify.request_file import parse
from tests.docs.served import ROOT, load
from tests.kit.servers import NoServerBinary
from tests.kit.servers.programs import EXPRESS
from tests.verify.asking import told, verdicts, verified
from tests.verify.planted import served

INSTALL_SECONDS = 90
#: What an API that ignores keys does wrong, whatever it is written in.
IGNORED = {"replay-one-effect", "replay-body", "race-2", "race-8", "race-32", "other-body-refused", "client-hangs-up"}


def payments(policy: Policy, store: str) -> FastAPI:
    """An API with the middleware around it."""
    app, paid = FastAPI(), list[int]()
    scope = lambda request: request.headers.get("x-account")  # noqa: E731 - as the docs show it
    app.add_middleware(IdempotencyMiddleware, store=store, scope=scope, policy=policy)

    @app.post("/payments", status_code=201)
    async def pay(order: dict[str, int]) -> dict[str, int]:
        paid.append(order["amount"])
        return {"payment": len(paid), "amount": order["amount"]}

    @app.get("/count")
    async def count() -> dict[str, int]:
        return {"n": len(paid)}

    return app


@pytest.mark.parametrize("preset", ["ietf", "stripe"])
async def test_semel(preset: str, tmp_path: Path) -> None:
    """An API with Semel passes every check, in the profile of its preset."""
    policy = Policy.ietf() if preset == "ietf" else Policy.stripe()
    with served(payments(policy, f"sqlite:///{tmp_path}/semel.db")) as url:
        report = await verified(url, profile=preset, is_strict=True)
    assert told(report, Verdict.FAIL) == {}
    assert told(report, Verdict.INCONCLUSIVE) == {}
    assert len(report.findings) > 50


async def test_semel_per_route(tmp_path: Path) -> None:
    """An API that requires keys on its routes passes, and so does one that lets duplicates wait."""
    app, paid = FastAPI(), list[int]()
    policy = Policy.ietf(required=True, in_progress="wait")
    install(app, store=f"sqlite:///{tmp_path}/semel.db", policy=policy)

    def current_account(x_account: Annotated[str | None, Header()] = None) -> str:
        if x_account is None:
            raise HTTPException(401)
        return x_account

    @app.post("/payments", dependencies=[Depends(Idempotent(scope=current_account))])
    async def pay(order: dict[str, int]) -> dict[str, int]:
        paid.append(order["amount"])
        return {"id": len(paid)}

    with served(app) as url:
        report = await verified(url, count=None, skip=["replay-date"])
    assert told(report, Verdict.FAIL) == {}


async def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of the page on verifying is read, and the first program of the README passes with it."""
    page = (ROOT / "docs" / "how-to" / "verify-an-api.md").read_text()
    shown = page.partition("```http\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    with served(load("quickstart").app) as url:
        given = parse(shown.encode(), {})
        report = await verified(url, "replay-*", "race-*", "key-*", count=None, skip=["replay-date"], request=given)
    assert report.verdict is Verdict.PASS, report.findings
    assert "$.payment compared" in report.evidence


async def test_flask_without_semel() -> None:
    """A Flask app that ignores keys fails, by the checks of replays, races and bodies."""
    app, paid = Flask(__name__), list[int]()

    @app.post("/payments")
    def pay() -> tuple[Response, int]:
        paid.append(request.get_json()["amount"])
        return jsonify(id=len(paid)), 201

    @app.get("/count")
    def count() -> Response:
        return jsonify(n=len(paid))

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        report = await verified(f"http://127.0.0.1:{server.port}", skip=["replay-date"])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert told(report, Verdict.FAIL).keys() >= IGNORED
    assert report.verdict is Verdict.FAIL


@pytest.fixture
def express(tmp_path: Path) -> Iterator[str]:
    """The URL of an Express app; its package is installed by npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise NoServerBinary(EXPRESS)
    install = [npm, "install", "--prefer-offline", "--no-audit", "--no-fund", "--ignore-scripts", "express@5"]
    try:
        subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=INSTALL_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        raise NoServerBinary(EXPRESS) from None
    shutil.copy(Path(__file__).with_name("express.js"), tmp_path)
    with subprocess.Popen([node, "express.js"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.kill()


@pytest.mark.slow
async def test_express(express: str) -> None:
    """A real Express app fails without a guard; with a guard that looks first and claims later, the races find it."""
    plain = await verified(f"{express}/plain", count=f"{express}/count#$.n", skip=["replay-date"])
    assert told(plain, Verdict.FAIL).keys() >= IGNORED
    guarded = await verified(f"{express}/guarded", count=f"{express}/count#$.n", skip=["replay-date"])
    found = verdicts(guarded)
    assert {found[each] for each in ("replay-one-effect", "other-body-refused", "replay-headers")} == {"pass"}
    assert {found[each] for each in ("race-2", "race-8", "other-principal")} == {"fail"}
