"""The checker of the documentation finds what it is there to find, and leaves the rest alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.served import ROOT
from tools import docs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository without faults."""
    write(tmp_path, "docs/README.md", "# Docs\n\n[page](page.md), [its part](page.md#a-part)\n")
    write(tmp_path, "docs/page.md", "# Page\n\n## A part\n\n[back](README.md) `[no](link.md)`\n")
    assert docs.faults(tmp_path) == []
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_documentation_is_true() -> None:
    """`make check` finds nothing, and says nothing."""
    command = [sys.executable, str(ROOT / "tools" / "docs.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.stderr, checked.stdout, checked.returncode) == ("", "", 0)


def test_stale_block(root: Path) -> None:
    """A generated block that was edited, or whose code has changed, is named; refreshing it mends it."""
    stale = "# Page\n\n## A part\n\n<!-- generated: states -->\nold\n<!-- end -->\n"
    write(root, "docs/page.md", stale)
    assert docs.faults(root) == ["docs/page.md: stale block states: run python tools/docs.py"]
    write(root, "docs/page.md", docs.refreshed(stale, root))
    assert docs.faults(root) == []


def test_stale_example(root: Path) -> None:
    """An example that has changed since it was included is named."""
    write(root, "docs/examples/x.py", "print(1)\n")
    page = docs.refreshed("# Page\n\n## A part\n\n<!-- include: docs/examples/x.py -->\n<!-- end -->\n", root)
    assert "```python\nprint(1)\n```" in page
    write(root, "docs/page.md", page)
    assert docs.faults(root) == []
    write(root, "docs/examples/x.py", "print(2)\n")
    assert docs.faults(root) == ["docs/page.md: stale block docs/examples/x.py: run python tools/docs.py"]


@pytest.mark.parametrize("block", ["generated: nonsense", "include: docs/examples/nowhere.py"])
def test_unknown_block(root: Path, block: str) -> None:
    """A block that names nothing is a fault, not a crash."""
    write(root, "docs/page.md", f"# Page\n\n## A part\n\n<!-- {block} -->\n<!-- end -->\n")
    (fault,) = docs.faults(root)
    assert fault.startswith("docs/page.md: a block names what is not there")


@pytest.mark.parametrize(
    "link, fault",
    [
        ("nowhere.md", "dead link nowhere.md"),
        ("page.md#b-part", "dead anchor page.md#b-part"),
        ("#b-part", "dead anchor #b-part"),
    ],
)
def test_dead_link(root: Path, link: str, fault: str) -> None:
    """A link to no file, or to no heading, is named; links to the web are not followed."""
    write(root, "docs/page.md", f"# Page\n\n## A part\n\n[gone]({link}) [web](https://nowhere.invalid/x)\n")
    assert docs.faults(root) == [f"docs/page.md: {fault}"]


def test_unlisted_page(root: Path) -> None:
    """A page that the index does not link to is named."""
    write(root, "docs/how-to/lost.md", "# Lost\n")
    assert docs.faults(root) == ["docs/how-to/lost.md: not linked from docs/README.md"]


def test_anchors() -> None:
    """Headings get the anchors that GitHub gives them."""
    text = "# A `b` c!\n\n```\n# not this\n```\n\n## On_e, two\n\n## Twice\n\n## Twice\n\n## [Linked](x.md)\n"
    assert docs.anchors(text) == {"a-b-c", "on_e-two", "twice", "twice-1", "linked"}
