"""The command line of the proxy. What it does once it runs is in ``tests/proxy``."""

import subprocess
from collections.abc import Callable

import pytest

Semel = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "options, word",
    [
        ((), "upstream"),
        (("--upstream", "x", "--scope", "single"), "--upstream"),
        (("--upstream", "http://127.0.0.1:3000"), "scope"),
        (("--upstream", "http://127.0.0.1:3000", "--scope", "ip"), "--scope"),
        (("--upstream", "http://127.0.0.1:3000", "--scope", "single", "--listen", "nowhere"), "--listen"),
        (("--upstream", "http://127.0.0.1:3000", "--scope", "single", "--listen", "192.0.2.1:80"), "--listen"),
        (("--upstream", "http://127.0.0.1:3000", "--scope", "single", "--config", "absent.toml"), "absent.toml"),
    ],
)
def test_mistakes(semel: Semel, options: tuple[str, ...], word: str) -> None:
    """A mistake is one line, and the status of a wrong command line."""
    ran = semel("proxy", "--store", "memory://", *options)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert word in ran.stderr
    assert ran.stderr.count("\n") == 1
