"""One file under two names: SQLite's log lies beside a name, so each name would be another database."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from semel.client import Journal
from semel.core.commands import Begin, Claim, Command
from semel.core.record import Found, Hold
from semel.doctor import Verdict
from semel.errors import JournalError, StoreNotReady
from semel.stores import store
from tests.doctor.planting import examined
from tests.stores.colours import COLOURS, process

OPEN = "import sys; from semel.stores import store; store(sys.argv[1]).open()"


def claim() -> Claim:
    return Claim("alice", "key", os.urandom(16), b"\x0a" * 32, timedelta(minutes=5), timedelta(days=1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A store's file."""
    made = tmp_path / "semel.db"
    with closing(store(f"sqlite:///{made}")) as keys:
        keys.migrate()
    return made


@pytest.fixture
def other(file: Path, tmp_path: Path) -> Path:
    """Another name of it, in another folder."""
    (tmp_path / "elsewhere").mkdir()
    made = tmp_path / "elsewhere" / "semel.db"
    made.hardlink_to(file)
    return made


@pytest.mark.parametrize("colour", COLOURS)
def test_two_hard_links(file: Path, other: Path, colour: str) -> None:
    """A file with two hard links is refused under both, by the store and by the doctor, until one is removed."""
    for each in (file, other):
        with process(colour, f"sqlite:///{each}") as it, pytest.raises(StoreNotReady, match=r"2 names .* -samefile"):
            it.perform(claim())
        assert examined(f"sqlite:///{each}", "sqlite-one-name").verdict is Verdict.WRONG
    other.unlink()
    with process(colour, f"sqlite:///{file}") as it:
        assert isinstance(it.perform(claim()), Hold)
    assert examined(f"sqlite:///{file}", "sqlite-one-name").verdict is Verdict.OK


def engine(other: Path) -> Command[Hold | Found]:
    made = Begin(claim())
    with closing(store(create_engine(f"sqlite:///{other}"))) as keys:
        keys.transaction().perform(made)
    return made


@pytest.mark.parametrize("use", [engine, Journal])
def test_other_doors(other: Path, use: Callable[[Path], object]) -> None:
    """So is it in atomic mode on an engine of the application's, and as a client's journal."""
    with pytest.raises((StoreNotReady, JournalError), match="2 names"):
        use(other)


def test_mounted_as_a_single_file(file: Path, tmp_path: Path) -> None:
    """A file that is mounted by itself, as into a container, is refused, and its folder is not."""
    (tmp_path / "in a container").mkdir()
    inside = tmp_path / "in a container" / "semel.db"
    inside.touch()

    def opened(what: Path, at: Path) -> subprocess.CompletedProcess[str]:
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        command: list[str | Path] = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            what,
            at,
            sys.executable,
            "-c",
            OPEN,
        ]
        return subprocess.run([*command, f"sqlite:///{inside}"], capture_output=True, text=True, check=False)

    try:
        refused = opened(file, inside)
    except OSError:
        pytest.skip("There is no unshare: a file that is mounted by itself was not tested.")
    if "unshare:" in refused.stderr or "mount:" in refused.stderr:
        pytest.skip("This user may mount nothing: a file that is mounted by itself was not tested.")
    assert "Mount the folder that it is in" in refused.stderr
    assert refused.returncode != 0
    served = opened(file.parent, inside.parent)
    assert served.returncode == 0, served.stderr


def test_symbolic_links_are_one_name(file: Path, tmp_path: Path) -> None:
    """A symbolic link, to the file or to its folder, is another way to spell the one name."""
    (tmp_path / "link.db").symlink_to(file)
    (tmp_path / "folder").symlink_to(tmp_path)
    with closing(store(f"sqlite:///{file}")) as keys:
        assert isinstance(keys.perform(claim()), Hold)
        for way in (tmp_path / "link.db", tmp_path / "folder" / "semel.db", tmp_path / "elsewhere" / ".." / "semel.db"):
            with closing(store(f"sqlite:///{way}")) as same:
                assert isinstance(same.perform(claim()), Found)
                assert same.place == keys.place  # type: ignore[attr-defined]  # a SQLite store has one
