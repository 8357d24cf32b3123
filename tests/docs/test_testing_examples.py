"""The test suites that the page on testing shows are run as their readers would: by pytest, and by Django's runner."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.served import EXAMPLES


@pytest.mark.parametrize("name, passed", [("testing/test_fastapi", 2), ("testing/test_flask", 2)])
def test_pytest(name: str, passed: int, tmp_path: Path) -> None:
    """A suite with the fixtures of the plug-in passes, in a pytest of its own."""
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    said = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert f"{passed} passed" in said, said


def test_django(tmp_path: Path) -> None:
    """A suite of TestCases passes, and its crashes are in the test database."""
    said = run(tmp_path, str(EXAMPLES / ("testing/drf_tests" + ".py")))
    assert "Ran 2 tests" in said, said
    assert said.rstrip().endswith("Destroying test database for alias 'default'..."), said
    assert "\nOK\n" in said, said


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
