"""No secret of a client's leaves by telemetry: no key, no body, no scope, no path."""

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, generate_latest
from starlette.testclient import TestClient

from semel import Policy
from semel.asgi import IdempotencyMiddleware
from semel.telemetry.prometheus import Prometheus
from tests.telemetry.conftest import Seen
from tests.telemetry.test_opentelemetry import Sdk

CANARY = "canary7f3a"


@pytest.mark.parametrize("enforcement", ["enforce", "report"])
def test_no_secret_in_any_output(enforcement: Any, used: Callable[[Any], Any], seen: Seen) -> None:
    """Whatever becomes of a request, its key, its body, its user and its path are in no event, log, metric or span."""
    log, registry, sdk = io.StringIO(), CollectorRegistry(), Sdk()
    handler = logging.StreamHandler(log)
    logger = logging.getLogger("semel")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    used(Prometheus(registry))
    used(sdk.sink)
    app = FastAPI()

    @app.post("/pay/{who}")
    async def pay(who: str, request: Request) -> str:
        if b"fail" in await request.body():
            raise RuntimeError(f"{CANARY} in an error")
        return CANARY

    guarded = IdempotencyMiddleware(
        app, store="memory://", scope=lambda _: f"{CANARY}-user", policy=Policy.ietf(enforcement=enforcement)
    )

    async def served(scope: Any, receive: Any, send: Any) -> None:
        # A server may record what an application raises; that is none of ours.
        tracer = sdk.traces.get_tracer("server")
        with tracer.start_as_current_span("server", record_exception=False, set_status_on_exception=False):
            await guarded(scope, receive, send)

    client = TestClient(served, raise_server_exceptions=False)
    try:
        # A personal key is warned of, in the log.
        for key in (f"{CANARY}-key", f"{CANARY}@example.org", "x" * 300 + CANARY, f'"{CANARY}'):
            for body in (f"{CANARY} body", f"{CANARY} body", "fail", "other"):
                client.post(f"/pay/{CANARY}?q={CANARY}", headers={"Idempotency-Key": key}, content=body.encode())
        client.post(f"/nowhere/{CANARY}", headers={"Idempotency-Key": f"{CANARY}-lost"})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    spans = "".join(span.to_json() for span in sdk.exporter.get_finished_spans())
    metrics = generate_latest(registry).decode() + str(sdk.reader.get_metrics_data())
    assert seen
    assert "semel_requests_total" in metrics
    assert "semel.outcome" in spans
    outputs = {"events": repr(seen), "log": log.getvalue(), "metrics": metrics, "spans": spans}
    # In report mode the log names the endpoint by its path, as the page on rolling out says; nothing else may.
    if enforcement == "report":
        outputs["events"] = repr([each for each in seen if type(each).__name__ != "Reported"])
        outputs["log"] = "\n".join(line for line in outputs["log"].splitlines() if not line.startswith("Reported"))
    assert {name: text for name, text in outputs.items() if CANARY in text} == {}
