"""Metrics of a proxy with several processes, through the command line."""

import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from tests.kit import servers

PATIENCE = 60.0

pytestmark = pytest.mark.slow


def test_processes_are_added_up(tmp_path: Path) -> None:
    """`semel proxy --workers 2 --metrics` adds up what its processes count, in its own process."""
    nowhere, port = servers.free_port(), servers.free_port()
    command = [sys.executable, "-m", "semel", "proxy", "--upstream", f"http://127.0.0.1:{nowhere}", "--scope", "single"]
    command += ["--store", f"sqlite:///{tmp_path}/semel.db", "--listen", f"127.0.0.1:{port}"]
    command += ["--workers", "2", "--metrics", "0"]
    subprocess.run([sys.executable, "-m", "semel", "migrate", f"sqlite:///{tmp_path}/semel.db"], check=True)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            where = re.fullmatch(r"Metrics at (\S+)\n", proxy.stdout.readline())
            assert where is not None
            sent = 20
            for _ in range(sent):
                # No upstream: nothing was sent, and the key is free.
                answer = httpx.post(
                    f"http://127.0.0.1:{port}/pay", headers={"Idempotency-Key": str(uuid4())}, timeout=PATIENCE
                )
                assert answer.status_code == 503
            counted, deadline = 0.0, time.monotonic() + PATIENCE
            while counted != sent:
                assert time.monotonic() < deadline, counted
                text = urllib.request.urlopen(where[1], timeout=PATIENCE).read().decode()  # noqa: S310 - our own
                found = re.findall(r'semel_requests_total\{door="proxy",[^}]*\} (\S+)', text)
                counted = sum(float(each) for each in found)
        finally:
            proxy.send_signal(signal.SIGTERM)
