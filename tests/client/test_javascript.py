"""The client in JavaScript: its own tests, which read the same vectors, run by Node."""

import json
import re
import subprocess
from pathlib import Path

from tests.kit.servers.programs import NODE, find

PACKAGE = Path(__file__).parents[2] / "clients" / "js"


def test_package(tmp_path: Path) -> None:
    """The tests of the package pass, and they have every case of the vectors."""
    node = find(NODE, tmp_path) / "node"
    done = subprocess.run(
        [node, "--test", "--test-reporter=tap", *sorted(PACKAGE.glob("test/*.test.js"))],
        cwd=PACKAGE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    vectors = json.loads((PACKAGE.parent / "vectors.json").read_text())
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) > sum(map(len, vectors.values()))


def test_what_is_published() -> None:
    """The package needs nothing, and every file that it names is there."""
    package = json.loads((PACKAGE / "package.json").read_text())
    assert not {"dependencies", "peerDependencies", "optionalDependencies"} & package.keys()
    entry = package["exports"]["."]
    for file in (entry["types"], entry["default"], *package["files"]):
        assert (PACKAGE / file).exists()
    said = (PACKAGE / "src" / "index.d.ts").read_text()
    exported = re.findall(r"^export (?:function|class) (\w+)", (PACKAGE / "src" / "index.js").read_text(), re.MULTILINE)
    assert exported
    assert all(re.search(rf"^export (?:function|class) {name}\b", said, re.MULTILINE) for name in exported)
