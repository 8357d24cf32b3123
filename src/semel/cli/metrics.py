"""``--metrics``: serves what a command counts, for Prometheus. What is counted is in ``telemetry/``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from semel.errors import ConfigurationError
from semel.telemetry import drop, sinks, use

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus at /metrics: 9464, or HOST:9464. Without a host: on loopback.",
    ),
]

LOOPBACK = "127.0.0.1"
_SHARED = "PROMETHEUS_MULTIPROC_DIR"
_NEEDED = "--metrics needs prometheus-client. Run: pip install 'semel[prometheus]'"
_MAX_PORT = 65_535


@contextmanager
def served(where: str | None, *, has_workers: bool = False) -> Iterator[bool]:
    """Count what happens in this process and serve it *where*, until the block ends; return whether it is asked for.

    With *has_workers* other processes count, and this one adds them up.
    """
    if where is None:
        yield False
        return
    host, port = place(where)
    with _folder(is_wanted=has_workers) as folder:
        sink, registry = _sink(folder)
        server = _server(host, port, registry, where)
        try:
            yield True
        finally:
            server.shutdown()
            server.server_close()
            if sink is not None:
                drop(sink)


def place(where: str) -> tuple[str, int]:
    """Return the host and the port that were typed."""
    host, _, port = where.rpartition(":")
    if not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= _MAX_PORT:
        raise ConfigurationError(f"--metrics can't be {where!r}: it is PORT or HOST:PORT, as in 127.0.0.1:9464.")
    return host.strip("[]") or LOOPBACK, int(port)


@contextmanager
def _folder(*, is_wanted: bool) -> Iterator[str | None]:
    """Have a folder in which processes share what they count; prometheus_client finds it in the environment."""
    if not is_wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="semel-metrics-") as folder:
        os.environ[_SHARED] = folder
        try:
            yield folder
        finally:
            del os.environ[_SHARED]


def _sink(folder: str | None) -> tuple[Any, Any]:
    """Return the sink that this process counts by, if it is ours to take away, and what is served."""
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415 - an extra
        from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415 - as above

        from semel.telemetry.prometheus import Prometheus  # noqa: PLC0415 - as above
    except ImportError:
        raise ConfigurationError(_NEEDED) from None
    registry = CollectorRegistry()
    if folder is not None:
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]  # it has no types
        return None, registry
    # An application that was loaded may have asked for metrics by itself.
    own = next((each for each in sinks() if isinstance(each, Prometheus)), None)
    if own is not None:
        return None, own.registry
    ProcessCollector(registry=registry)
    return use(Prometheus(registry)), registry


def _server(host: str, port: int, registry: Any, where: str) -> Any:
    from prometheus_client import start_http_server  # noqa: PLC0415 - as above

    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(f"--metrics: {where}: {error.strerror or error}.") from None
    shown = f"[{host}]" if ":" in host else host
    print(f"Metrics at http://{shown}:{server.server_port}/metrics", flush=True)
    return server
