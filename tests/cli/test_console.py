"""The command line of the console. What its pages show is in ``tests/console``."""

import http.client
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from semel import stores
from semel.cli.console import address_of, name_of
from semel.errors import ConfigurationError

Semel = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "options, word",
    [
        (("--listen", "nowhere"), "--listen"),
        (("--listen", "127.0.0.1:99999"), "--listen"),
        (("--listen", "192.0.2.1:80"), "Can't listen"),
        (("--store", "sqlite:///absent.db"), "absent.db"),
        (("--store", "nosuch://x"), "nosuch"),
        (("--store", "postgresql://u:p%ss@h/d"), "can't be read"),
    ],
)
def test_mistakes(semel: Semel, options: tuple[str, ...], word: str) -> None:
    """A mistake is one line, and the status of a wrong command line."""
    given = options if "--store" in options else ("--store", "memory://", *options)
    ran = semel("console", *given)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert word in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_serving(tmp_path: Path) -> None:
    """It prints one link with a random token, serves below a path, tells the token to no log, and ends by a signal."""
    url = f"sqlite:///{tmp_path}/semel.db"
    keys = stores.store(url)
    keys.migrate()
    keys.close()
    command = [sys.executable, "-m", "semel", "console", "--store", url, "--listen", "127.0.0.1:0", "--path", "//ops/"]
    command += ["--metrics", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        metrics = ran.stdout.readline().split()[-1]
        assert b"semel_requests_total" in urllib.request.urlopen(metrics, timeout=60).read()  # noqa: S310 - ours
        link = ran.stdout.readline().split()[-1]
        place, _, token = link.partition("#")
        assert place.startswith("http://127.0.0.1:")
        assert place.endswith("/ops/")
        assert len(token) >= 32
        connection = http.client.HTTPConnection("127.0.0.1", int(place.split(":")[2].split("/")[0]), timeout=60)
        connection.request("GET", "/ops/")
        answer = connection.getresponse()
        page = answer.read().decode()
        assert answer.status == 401
        assert 'action="/ops/login"' in page
        assert answer.getheader("server") is None
        connection.request("GET", "/ops/", headers={"host": "evil.example:8900"})
        refused = connection.getresponse()
        assert refused.status == 421
        assert b"--host NAME" in refused.read()
        connection.close()
        ran.send_signal(signal.SIGTERM)
        said, errors = ran.communicate(timeout=60)
        assert token not in said + errors
        assert ran.returncode == 0


@pytest.mark.parametrize(
    "host, name",
    [("127.0.0.1:8900", "127.0.0.1"), ("[::1]:8900", "::1"), ("[::1]", "::1"), ("LocalHost", "localhost")],
)
def test_names_of_hosts(host: str, name: str) -> None:
    """A host is known by its name, at any port."""
    assert name_of(host) == name


def test_other_addresses(semel: Semel) -> None:
    """An address of IPv6 is written in brackets."""
    assert address_of("[::1]:8900") == ("::1", 8900)
    assert address_of("127.0.0.1:0") == ("127.0.0.1", 0)
    with pytest.raises(ConfigurationError):
        address_of(":80")


def test_newer_schemas(tmp_path: Path) -> None:
    """A store that a newer version of Semel has changed is one line on the console's error output."""
    path = tmp_path / "semel.db"
    with stores.store(f"sqlite:///{path}") as keys:
        keys.migrate()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO semel_keys_migrations (name, applied_at) VALUES ('9999_pre_future', 0)")
    command = [sys.executable, "-m", "semel", "console", "--store", f"sqlite:///{path}", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stderr is not None
        line = ran.stderr.readline()
        ran.send_signal(signal.SIGINT)
        assert ran.wait(timeout=60) == 0
    assert line.startswith("semel: A newer version of Semel has changed this store's tables (9999_pre_future)")
