"""A guarded Flask app with metrics at /metrics, in one process or in many."""

import os

from flask import Flask
from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app, multiprocess
from werkzeug.middleware.dispatcher import DispatcherMiddleware

import semel.telemetry
from semel import SINGLE_TENANT
from semel.flask import Semel, idempotent
from semel.telemetry.prometheus import Prometheus

semel.telemetry.use(Prometheus())

app = Flask(__name__)
Semel(app, store=os.environ.get("SEMEL_STORE", "sqlite:///semel.db"), scope=SINGLE_TENANT)


@app.post("/orders/<int:number>")
@idempotent
def order(number: int) -> tuple[dict[str, int], int]:
    return {"order": number}, 201


def registry() -> CollectorRegistry:
    """What /metrics shows: this process, or all those that share a folder."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    shared = CollectorRegistry()
    multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
    return shared


metrics = make_wsgi_app(registry())
app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/metrics": metrics})  # type: ignore[method-assign]
