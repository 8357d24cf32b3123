"""Consumers that are killed (SIGKILL) in the handler, before COMMIT, and after COMMIT before their ack: one parcel."""

import signal
import subprocess
import sys

import pytest

from tests.inbox.consumers import parcels, receipts

PLACES = ("in the handler", "before COMMIT", "before the ack")


def consume(colour: str, url: str, place: str = "nowhere") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.inbox.dying", colour, url, place],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["psycopg", "asyncpg", "sqlite", "async sqlite"])
def test_killed(kind: str, url: str, place: str) -> None:
    """A killed consumer has acked nothing; its redelivery makes the parcel, or finds it: there is one."""
    colour = "async" if "async" in kind else "sync"
    killed = consume(colour, url, place)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr
    is_committed = place == "before the ack"
    assert (parcels(url), receipts(url)) == ((["m-1"], {"m-1": ("done", 0)}) if is_committed else ([], {}))
    again = consume(colour, url)
    assert again.stdout.split() == ["Duplicate" if is_committed else "Ran", "True"], again.stderr
    assert parcels(url) == ["m-1"]
    assert consume(colour, url).stdout.split() == ["Duplicate", "True"]
