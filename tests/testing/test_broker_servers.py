"""The brokers of the tests end with the process that started them, and one can be shared by several processes. What is
published to them is tested elsewhere.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from semel.testing.process import START_SECONDS
from tests.kit.servers.base import until
from tests.kit.shared import shared

#: Starts a server, says its address, and waits to be killed.
STARTER = """
import sys
from tests.kit import servers
with getattr(servers, sys.argv[1])() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def state(process: Path) -> list[str]:
    """Return the letter of its state, and the id of its parent."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["gone", ""]


def is_alive(process: Path) -> bool:
    return state(process)[0] not in {"gone", "Z"}


@pytest.mark.slow
@pytest.mark.parametrize("kind, programs", [("rabbitmq", {"beam.smp", "epmd"}), ("nats", {"nats-server"})])
def test_nothing_is_left_behind(kind: str, programs: set[str]) -> None:
    """A test run that is killed leaves no broker behind, nor RabbitMQ's register of names."""
    command = [sys.executable, "-c", STARTER, kind]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline()
        children = [each for each in Path("/proc").glob("[0-9]*") if state(each)[1] == str(tests.pid)]
        assert programs <= {(each / "comm").read_text().strip() for each in children}
        tests.kill()
    until("they have ended", lambda: not any(is_alive(each) for each in children))


def test_one_for_all(tmp_path: Path) -> None:
    """The first who asks starts it; it ends after the last, and who comes then starts another."""
    events: list[str] = []

    @contextmanager
    def start() -> Iterator[str]:
        events.append("started")
        yield f"url-{events.count('started')}"
        events.append("ended")

    first = shared(tmp_path, "broker", start)
    assert first.__enter__() == "url-1"
    second = shared(tmp_path, "broker", start)
    assert second.__enter__() == "url-1"
    leaving = Thread(target=first.__exit__, args=(None, None, None))
    leaving.start()
    assert events == ["started"]
    second.__exit__(None, None, None)
    leaving.join(START_SECONDS)
    assert events == ["started", "ended"]
    with shared(tmp_path, "broker", start) as url:
        assert url == "url-2"
    assert events == ["started", "ended", "started", "ended"]
