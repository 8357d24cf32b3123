"""`semel work --metrics`."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from semel.cli.metrics import place
from semel.errors import ConfigurationError
from semel.stores import store
from tests.kit import servers

Semel = Callable[..., subprocess.CompletedProcess[str]]


def test_work_serves_gauges_of_its_store(sqlite_url: str, environment: dict[str, str], tmp_path: Path) -> None:
    """`semel work --metrics` serves what it counts and what is in its store, on loopback unless it is told another."""
    with closing(store(sqlite_url)) as keys:
        keys.migrate()
    command = [sys.executable, "-m", "semel", "work", "--store", sqlite_url, "--metrics", "0"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as working:
        assert working.stdout is not None
        where = re.fullmatch(r"Metrics at (http://127\.0\.0\.1:\d+/metrics)\n", working.stdout.readline())
        assert where is not None
        assert "Sweeping every" in working.stdout.readline()
        text = ""
        while "semel_store_surveyed_timestamp_seconds" not in text:
            text = urllib.request.urlopen(where[1], timeout=30).read().decode()  # noqa: S310 - our own process
        working.send_signal(signal.SIGTERM)
        working.communicate()
    assert working.returncode == 0
    for line in ('semel_records{state="stuck"} 0.0', 'semel_outbox_stored{state="dead"} 0.0', "semel_fenced_total 0.0"):
        assert line in text


def test_where_metrics_are_served() -> None:
    """A port alone is on loopback; what is no port is said to be wrong."""
    assert place("9464") == ("127.0.0.1", 9464)
    assert place("0.0.0.0:80") == ("0.0.0.0", 80)
    assert place("[::1]:9464") == ("::1", 9464)
    for wrong in ("", "here", "here:", "host:http", "70000", "1:2:x", "-1"):
        with pytest.raises(ConfigurationError, match="--metrics can't be"):
            place(wrong)


def test_a_port_that_is_taken(semel: Semel, sqlite_url: str) -> None:
    """A port that another process listens on is a clear message, and no traceback."""
    semel("migrate", sqlite_url)
    with socket.create_server(("127.0.0.1", servers.free_port())) as taken:
        ended = semel("work", "--store", sqlite_url, "--metrics", str(taken.getsockname()[1]))
    assert ended.returncode == 2
    assert "in use" in ended.stderr
    assert "Traceback" not in ended.stderr
