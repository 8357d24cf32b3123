"""The conformance suite finds what it is there to find: every planted bug, and none where there is none."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from semel.testing.conformance import StoreConformance

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def test_no_test_hides_another() -> None:
    """The parts of the suite are put together by inheritance, and no two of their tests have one name."""
    names = Counter(name for part in StoreConformance.__mro__ for name in vars(part) if name.startswith("test_"))
    assert {name for name, count in names.items() if count > 1} == set()


def test_every_planted_bug_is_found() -> None:
    """Each broken store fails the suite; the one that is not broken passes."""
    # The search by Hypothesis finds most of them too; here each must be found by a test that says what is wrong.
    options = ["-q", "--tb=no", "-rf", "-p", "no:cacheprovider", "-k", "not likeness"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "planted.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parent.parent)
    found = Counter(re.findall(r"^FAILED \S+::Test(\w+)::", done.stdout, re.MULTILINE))
    planted = set(re.findall(r"^class (\w+)\(Broken\)", (HERE / "planted.py").read_text(), re.MULTILINE))
    assert len(planted) > 10
    assert set(found) == planted, done.stdout
