"""The alerts and the dashboard, against a real Prometheus that scrapes a real guarded app and a real `semel work`."""

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, start_http_server
from starlette.testclient import TestClient

import semel.telemetry
from semel import SINGLE_TENANT
from semel.asgi import IdempotencyMiddleware
from semel.inbox import Inbox
from semel.outbox import Outbox
from semel.publishers.discard import Discard
from semel.stores import store
from semel.telemetry.metrics import METRICS
from semel.telemetry.prometheus import Prometheus
from semel.work import Reaper, Relay, Surveyor
from tests.kit import servers
from tools.docs import anchors

ROOT = Path(__file__).parents[2]
RULES = ROOT / "ops/prometheus/rules.yml"
DASHBOARD = ROOT / "ops/grafana/semel.json"
RUNBOOK = ROOT / "docs/how-to/at-3-am.md"

#: An alert's condition holds seldom, and that is well: what it looks at must always be there.
_LIMIT = re.compile(r"\s*(>=|>|<|==)\s*[\d.]+\s*$")
_ALERT = re.compile(r"- alert: (\w+)\n\s+expr: (?:>-\n)?(.*?)\n\s+(?:for|labels):", re.DOTALL)


def alerts() -> dict[str, str]:
    return {name: " ".join(text.split()) for name, text in _ALERT.findall(RULES.read_text())}


def queries() -> list[str]:
    """Every query of the dashboard, as Grafana would send it."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [each.replace("$__rate_interval", "1m") for each in found]


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[str]:
    """Where the metrics of an app are served that has done a little of everything."""
    url = f"sqlite:///{tmp_path}/shop.db"
    registry = CollectorRegistry()
    sink = semel.telemetry.use(Prometheus(registry))
    server, thread = start_http_server(0, "127.0.0.1", registry)
    keys = store(url)
    keys.migrate()
    try:
        app = FastAPI()
        app.post("/orders/{number}")(lambda number: number)
        client = TestClient(IdempotencyMiddleware(app, store=url, scope=SINGLE_TENANT))
        with client:
            for _ in range(2):
                client.post("/orders/3", headers={"Idempotency-Key": "order-17"})
        inbox = Inbox(keys, consumer="billing")
        inbox.receive("1", lambda connection: None)
        with sqlite3.connect(tmp_path / "shop.db") as connection:
            Outbox(keys).add(connection, "order.paid", {"id": 3}, to="events")
        Relay(keys, "events", Discard("events", "discard:")).run_once()
        Reaper(keys).run_once()
        Surveyor(keys).run_once()
        yield f"127.0.0.1:{server.server_port}"
    finally:
        semel.telemetry.drop(sink)
        server.shutdown()
        server.server_close()
        thread.join()
        keys.close()


def test_every_query_has_a_series(scraped: str) -> None:
    """Each query of the alerts and of the dashboard names metrics that exist, and finds a series."""
    with servers.prometheus([scraped], RULES) as prometheus:
        prometheus.scraped(scraped, 3)
        asked: list[Any] = [*(_LIMIT.sub("", each) for each in alerts().values()), *queries()]
        assert len(asked) > 40
        assert [each for each in asked if not prometheus.query(each)] == []
        rules = prometheus.rules()
        assert {rule["name"] for rule in rules} == set(alerts())
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        assert {rule["name"]: rule["state"] for rule in rules if rule["state"] != "inactive"} == {}


def test_every_alert_leads_to_the_runbook() -> None:
    """Each alert says what is wrong in a sentence, and links to a heading of the runbook that exists."""
    text, headings = RULES.read_text(), anchors(RUNBOOK.read_text())
    links = re.findall(r"runbook_url: docs/how-to/at-3-am\.md#(\S+)", text)
    assert len(links) == len(alerts()) == text.count("summary:")
    assert set(links) <= headings


def test_nothing_is_asked_for_that_does_not_exist() -> None:
    """The alerts and the dashboard name no metric that Semel does not have; the dashboard shows every one of them."""
    known = {metric.prometheus for metric in METRICS}
    pattern = re.compile(r"\bsemel_\w+")
    for each in (*alerts().values(), *queries()):
        assert {name.removesuffix("_bucket") for name in pattern.findall(each)} <= known
    shown = {name.removesuffix("_bucket") for each in queries() for name in pattern.findall(each)}
    assert shown == known
