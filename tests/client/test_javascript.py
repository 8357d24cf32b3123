"""The client in JavaScript: its own tests, which read the same vectors, run by Node."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.servers.programs import EXPRESS, NODE, NoServerBinary, find

PACKAGE = Path(__file__).parents[2] / "clients" / "js"
INSTALL_SECONDS = 120


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


@pytest.mark.parametrize(
    "program", ["const client = require('semel-client');", "import * as client from 'semel-client';"]
)
def test_installed_from_a_checkout(tmp_path: Path, program: str) -> None:
    """As README says, it is packed, installed, and loaded by a CommonJS program as by an ES module."""
    npm = _npm()
    node = find(NODE, tmp_path) / "node"
    packed = subprocess.run([npm, "pack", PACKAGE], cwd=tmp_path, check=True, capture_output=True, text=True)
    install = [npm, "install", "--offline", "--no-audit", "--no-fund", f"./{packed.stdout.strip()}"]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "node_modules" / "semel-client").is_symlink()
    file = tmp_path / ("program.cjs" if "require" in program else "program.mjs")
    file.write_text(f"{program} console.log(typeof client.idempotentFetch());")
    done = subprocess.run([node, file], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("function\n", "")


def _npm() -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise NoServerBinary(EXPRESS)
    return npm


@pytest.fixture(scope="module")
def typescript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TypeScript in it, and the package as its users install it."""
    npm = _npm()
    folder = tmp_path_factory.mktemp("typescript")
    wanted = ["typescript@5", "@types/node@20"]
    install = [npm, "install", "--prefer-offline", "--no-audit", "--no-fund", "--ignore-scripts", *wanted]
    try:
        subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=INSTALL_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        raise NoServerBinary(EXPRESS) from None
    shutil.copytree(PACKAGE, folder / "node_modules" / "semel-client")
    shutil.copy(PACKAGE / "test" / "types.ts", folder)
    return folder


@pytest.mark.slow  # TypeScript comes from npm.
@pytest.mark.parametrize(
    "where",
    [
        pytest.param(["--lib", "es2022", "--types", "node", "--module", "nodenext"], id="node"),
        pytest.param(
            ["--lib", "es2022,dom,dom.iterable", "--typeRoots", "nothing", "--module", "esnext"], id="browser"
        ),
        pytest.param(["--lib", "es2022,dom", "--types", "node", "--module", "nodenext"], id="both"),
    ],
)
def test_types(typescript: Path, where: list[str]) -> None:
    """A type checker takes programs that use the package rightly, and no others, for Node and for browsers."""
    resolution = "nodenext" if "nodenext" in where else "bundler"
    compiler = typescript / "node_modules" / ".bin" / "tsc"
    strict = ["--noEmit", "--strict", "--exactOptionalPropertyTypes", "--target", "es2022"]
    checked = subprocess.run(
        [compiler, *strict, *where, "--moduleResolution", resolution, "types.ts"],
        cwd=typescript,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
