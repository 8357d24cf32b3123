"""The programs of the pages on webhooks run, and do what the pages say."""

import hashlib
import hmac
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import standardwebhooks
import stripe

from semel.core.webhook import new_secret, read_secret, signatures
from tests.docs.served import BASE_URL, EXAMPLES, ROOT, asgi, load
from tests.webhooks.endpoint import serving

SECRET = new_secret(b"s" * 32)

DJANGO = """
import httpx
from tests.docs.served import BASE_URL, load
example = load("webhooks_django")
headers = {"X-Hub-Signature-256": "sha256=%s", "X-GitHub-Delivery": "d1", "X-GitHub-Event": "push"}
with httpx.Client(transport=httpx.WSGITransport(app=example.application), base_url=BASE_URL) as client:
    print([client.post("/github", content=body, headers=headers).status_code for body in (b'%s', b"forged")])
print(example.pushes)
"""


async def test_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signed webhook gets to the handler, and another does not."""
    monkeypatch.setenv("SHOP_HOOK_SECRET", SECRET)
    example = load("webhooks_fastapi")
    body = b'{"type": "order.paid", "data": {"order": 17}}'
    at = int(time.time())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(at),
        "webhook-signature": signatures([read_secret(SECRET)], "msg_1", at, body),
    }
    async with asgi(example.app) as client:
        answers = [await client.post("/webhooks", content=each, headers=headers) for each in (body, b"{}")]
    assert [each.status_code for each in answers] == [200, 401]
    assert example.paid == [17]


def test_without_a_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is delivered twice is handled once; another under its id, and what is not signed, is not."""
    monkeypatch.setenv("SHOP_HOOK_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shop.db")) as shop, shop:
        shop.execute("CREATE TABLE paid (number INTEGER NOT NULL)")
    example = load("webhooks_plain")
    body, other = b'{"type": "order.paid", "data": {"order": 17}}', b'{"type": "order.paid", "data": {"order": 18}}'
    at = int(time.time())
    secrets = [read_secret(SECRET)]
    headers, others = (
        {
            "Webhook-Id": "msg_1",
            "Webhook-Timestamp": str(at),
            "Webhook-Signature": signatures(secrets, "msg_1", at, each),
        }
        for each in (body, other)
    )
    sent = [(body, headers), (body, headers), (other, others), (b"forged", headers)]
    with example.HTTPServer(("127.0.0.1", 0), example.Receiver) as server, example.inbox:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        answers = [httpx.post(url, content=each, headers=signed).status_code for each, signed in sent]
        server.shutdown()
    assert answers == [200, 200, 422, 401]
    with closing(sqlite3.connect("shop.db")) as shop:
        assert shop.execute("SELECT number FROM paid").fetchall() == [(17,)]


def test_flask(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that Stripe's library signs gets to the handler."""
    monkeypatch.setenv("STRIPE_HOOK_SECRET", "whsec_stripe")
    example = load("webhooks_flask")
    event = json.dumps({"id": "evt_1", "type": "charge.succeeded", "data": {"object": {"id": "ch_1"}}})
    sign: Any = stripe.WebhookSignature.generate_signature_header
    with httpx.Client(transport=httpx.WSGITransport(app=example.app), base_url=BASE_URL) as client:
        signed = [sign(event, secret) for secret in ("whsec_stripe", "whsec_other")]
        answers = [client.post("/stripe", content=event, headers={"Stripe-Signature": each}) for each in signed]
    assert [each.status_code for each in answers] == [200, 401]
    assert example.charges == {"evt_1": "ch_1"}


def test_django(tmp_path: Path) -> None:
    """A delivery that is signed as GitHub signs gets to the handler. Django can be set up once in a process."""
    assert (EXAMPLES / ("webhooks_django" + ".py")).exists()
    body = '{"ref": "refs/heads/main"}'
    signature = hmac.new(b"chosen", body.encode(), hashlib.sha256).hexdigest()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-W", "error", "-c", DJANGO % (signature, body)]
    environment = os.environ | {"PYTHONPATH": paths, "GITHUB_HOOK_SECRET": "chosen"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[200, 401]", "['refs/heads/main']"]


async def test_send(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The program that tries an endpoint out sends a signed webhook, and says what came of it."""
    monkeypatch.setenv("ACME_HOOK_SECRET", SECRET)
    example = load("webhooks_send")
    async with serving() as server:
        await example.main(server.url())
        refused = capsys.readouterr().out
        await example.main(server.url(), allow_private=True)
    assert "loopback" in refused
    assert capsys.readouterr().out == "Delivered()\n"
    (got,) = server.requests
    assert standardwebhooks.Webhook(SECRET).verify(got.body, got.headers)["type"] == "order.paid"
