"""gunicorn's configuration for an app with metrics: gunicorn --config gunicorn_metrics.py metrics_app:app."""

from typing import Any

from prometheus_client import multiprocess

workers = 2


def child_exit(_server: Any, worker: Any) -> None:
    """Forget what the gauges of a worker said that has ended. Its counters stay, since they must not go down."""
    multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
