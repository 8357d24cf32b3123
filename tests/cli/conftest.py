"""The command line as people run it: a process of its own."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from semel.stores import Store, store
from tests.cli.commands import Job
from tests.warm import Warm

Semel = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def plain_environment() -> dict[str, str]:
    """The environment of the tests, without what a command would look at."""
    return {name: value for name, value in os.environ.items() if name not in {"SEMEL_STORE", "FORCE_COLOR", "COLUMNS"}}


@pytest.fixture
def environment(plain_environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a command: no store is set in it, and its temporary files are the test's."""
    return plain_environment | {"TMPDIR": str(tmp_path)}


@pytest.fixture(scope="session")
def commands(plain_environment: dict[str, str]) -> Iterator[Warm]:
    with Warm("tests.cli.commands", plain_environment) as warm:
        yield warm


@pytest.fixture
def semel(
    commands: Warm, environment: dict[str, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Semel:
    """Run a command in an empty folder."""
    said = tmp_path_factory.mktemp("said")

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        out, err = said / "stdout", said / "stderr"
        job = Job(arguments, str(tmp_path), environment | variables, str(out), str(err))
        status = int(commands.ask(json.dumps(asdict(job))))
        return subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())

    return run


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def keys(url: str) -> Iterator[Store]:
    """The store at the `url` of a file's own fixture, which has made its tables."""
    with closing(store(url)) as opened:
        yield opened
