"""Faults of a SQLite store, planted in a real file."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from semel.doctor import Limits, Verdict, examine
from semel.doctor.sqlite import checks
from semel.stores import store
from tests.doctor.planting import examined, finding, not_ok, plants


@pytest.fixture
def file(sqlite_url: str, tmp_path: Path) -> Path:
    """The file itself, in a folder of this user alone."""
    tmp_path.chmod(0o700)
    return tmp_path / "semel.db"


def execute(file: Path, *statements: str) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for each in statements:
            connection.execute(each)


def test_a_healthy_file(sqlite_url: str, file: Path) -> None:
    """Nothing is wrong with a file as Semel makes it, and every check can tell so."""
    assert not_ok(examine(sqlite_url)) == []


def test_a_file_in_use(sqlite_url: str, file: Path) -> None:
    """A file that a server has open is examined beside it."""
    with store(sqlite_url):
        assert not_ok(examine(sqlite_url)) == []


def test_nothing_is_written(sqlite_url: str, file: Path) -> None:
    """An examination leaves no log beside the file: it would belong to the user that examines."""
    before = file.read_bytes()
    examine(sqlite_url)
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == ["semel.db"]


@plants("sqlite-file")
def test_no_file(tmp_path: Path) -> None:
    """A file that is not there is told, and not made."""
    report = examine(f"sqlite:///{tmp_path}/other.db")
    assert finding(report, "sqlite-file").verdict is Verdict.WRONG
    assert finding(report, "sqlite-tables").is_skipped
    assert not (tmp_path / "other.db").exists()


def test_no_database(tmp_path: Path) -> None:
    """A file that is no database is told to be none."""
    (tmp_path / "notes.txt").write_text("Dear diary, " * 100)
    assert "is not a SQLite database" in examined(f"sqlite:///{tmp_path}/notes.txt", "sqlite-file").evidence


#: By check: statements that plant its fault.
FAULTS = {
    "sqlite-tables": ["DROP INDEX semel_keys_reap"],
    "sqlite-schema": ["DELETE FROM semel_keys_migrations WHERE name LIKE '0005%'"],
    "sqlite-schema-newer": ["INSERT INTO semel_keys_migrations VALUES ('9999_pre_future', 0)"],
    "sqlite-journal": ["PRAGMA journal_mode = DELETE"],
}


@plants(*FAULTS)
@pytest.mark.parametrize("name", FAULTS)
def test_in_the_file(sqlite_url: str, file: Path, name: str) -> None:
    """A fault in the file is found."""
    assert examined(sqlite_url, name).verdict is Verdict.OK
    execute(file, *FAULTS[name])
    assert examined(sqlite_url, name).verdict is Verdict.WRONG


@plants("sqlite-private", "sqlite-folder")
def test_permissions(sqlite_url: str, file: Path) -> None:
    """A file that all may read, in a folder that all may write to, is found; and what is typed then mends it."""
    file.chmod(0o644)
    file.parent.chmod(0o777)
    report = examine(sqlite_url, only=["sqlite-private", "sqlite-folder"])
    private, folder = report.findings
    assert private.verdict is folder.verdict is Verdict.WRONG
    assert private.mend == f"chmod o-rw {file}*"
    file.chmod(file.stat().st_mode & ~0o006)
    file.parent.chmod(0o777 | stat.S_ISVTX)
    assert not_ok(examine(sqlite_url, only=["sqlite-private", "sqlite-folder"])) == []


@plants("sqlite-one-name")
def test_two_names(sqlite_url: str, file: Path, tmp_path: Path) -> None:
    """A file with another hard link is found."""
    (tmp_path / "other.db").hardlink_to(file)
    assert "2 hard links" in examined(sqlite_url, "sqlite-one-name").evidence


@plants("sqlite-disk")
def test_disk(sqlite_url: str, file: Path) -> None:
    """A disk with little room is found."""
    assert examined(sqlite_url, "sqlite-disk", limits=Limits(free_bytes=2**60)).verdict is Verdict.WRONG


@plants("sqlite-integrity")
def test_damage(sqlite_url: str, file: Path) -> None:
    """A page that was overwritten is found."""
    with file.open("r+b") as opened:
        opened.seek(4096 * 5)
        opened.write(b"\xff" * 4096)
    assert examined(sqlite_url, "sqlite-integrity").verdict is Verdict.WRONG


@plants("sqlite-log")
def test_a_reader_that_holds_the_log_back(sqlite_url: str, file: Path) -> None:
    """A log that a reader keeps from starting anew is found by its size."""
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM semel_keys").fetchall()
        execute(file, *["UPDATE semel_keys_migrations SET applied_at = applied_at + 1"] * 20)
        assert examined(sqlite_url, "sqlite-log", limits=Limits(wal_bytes=50_000)).verdict is Verdict.WRONG
        assert examined(sqlite_url, "sqlite-log").verdict is Verdict.OK


def test_a_large_file() -> None:
    """A file that takes too long to read through can't be told about, and is not taken for whole."""
    assert checks.integrity((2**34, None), Limits()).verdict is Verdict.CANNOT_TELL


def test_another_table(sqlite_url: str, file: Path) -> None:
    """A store with a table name of its own is examined there."""
    url = f"{sqlite_url}?table=shop_keys"
    assert examined(url, "sqlite-tables").verdict is Verdict.WRONG
    keys = store(url)
    keys.migrate()
    keys.close()
    assert not_ok(examine(url)) == []
