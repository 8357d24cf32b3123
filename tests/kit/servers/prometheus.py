"""A Prometheus server for tests, on loopback: it scrapes what it is told to, four times a second. It has no alerts to
send anywhere.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from semel.testing.process import POLL_SECONDS, START_SECONDS, Process
from tests.kit.servers.base import LOOPBACK, Server, free_port, give, own_folder
from tests.kit.servers.programs import PROMETHEUS, find

_CONFIGURATION = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}


class PrometheusServer(Server):
    """A Prometheus."""

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that *expression* has now."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def scraped(self, target: str, times: int) -> None:
        """Wait until *target* was scraped so many times."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = self.query(f'count_over_time(up{{instance="{target}"}}[5m])')
            if found and int(found[0]["value"][1]) >= times:
                return
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"{target} was not scraped: {self._get('targets')}")

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules, as they were last evaluated."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - it is our own server
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            raise AssertionError(f"{parameters}: {refused.read().decode()}") from None


@contextmanager
def prometheus(targets: Sequence[str], rules: Path) -> Iterator[PrometheusServer]:
    """Lend a Prometheus that scrapes *targets* (``127.0.0.1:9464``) and evaluates *rules*."""
    with own_folder() as folder:
        program = find(PROMETHEUS, folder) / "prometheus"
        port = free_port()
        copy, configuration = folder / "rules.yml", folder / "prometheus.yml"
        copy.write_text(rules.read_text())
        scrape = {"job_name": "semel", "static_configs": [{"targets": list(targets)}]}
        # JSON is YAML.
        said = {"global": _CONFIGURATION, "rule_files": [str(copy)], "scrape_configs": [scrape]}
        configuration.write_text(json.dumps(said))
        for each in (copy, configuration):
            give(each)
        command: list[str | Path] = [
            program,
            f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={LOOPBACK}:{port}",
            "--log.level=warn",
        ]
        url = f"http://{LOOPBACK}:{port}"
        with Process(command, folder, lambda _: _is_ready(url), signal.SIGTERM) as process:
            yield PrometheusServer(url, process)


def _is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=1) as answer:  # noqa: S310 - as above
        return bool(answer.status == 200)
    return False
