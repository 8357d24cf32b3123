"""The command line as people run it: a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Semel = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a command: no store is set in it, and its temporary files are the test's."""
    ours = {name: value for name, value in os.environ.items() if name not in {"SEMEL_STORE", "FORCE_COLOR", "COLUMNS"}}
    return ours | {"TMPDIR": str(tmp_path)}


@pytest.fixture
def semel(environment: dict[str, str], tmp_path: Path) -> Semel:
    """Run a command in an empty folder."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "semel", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, check=False
        )

    return run
