"""What can be wrong with a SQLite store. Each judge takes what was seen of the file, and opens nothing."""

from __future__ import annotations

import sqlite3
import stat
from importlib.resources import files as resources
from typing import TYPE_CHECKING

from semel.doctor.migrations import Applied, judge_newer, judge_older, known_migrations
from semel.doctor.model import MEBIBYTE, Group, Judgement, Kind, Limits, Severity, cannot_tell, ok, wrong
from semel.doctor.session import Unavailable
from semel.doctor.sqlite.facts import Files, Objects, Synchronous, objects_in
from semel.stores.sqlite.statements import PACKAGE

if TYPE_CHECKING:
    from semel.doctor.sqlite.session import SQLite

GROUP = Group(Kind.SQLITE, "SQLite", "how-to/sqlite.md", ("sqlite-file",))

#: File systems of other machines, on which SQLite's locks and shared memory do not work.
NETWORK = frozenset(
    {
        *("nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "9p", "ncpfs", "ceph", "lustre"),
        *("fuse.sshfs", "fuse.glusterfs", "glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "gfs2", "ocfs2"),
        *("fuse.juicefs", "fuse.ceph", "efs", "davfs", "fuse.davfs2", "virtiofs", "prl_fs", "vboxsf"),
    }
)
FULL = 2
#: A larger file takes longer to read through than a check may.
MAX_READ = 1024 * MEBIBYTE
SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")


def _trouble(session: SQLite) -> str | None:
    return session.trouble()


def _files(session: SQLite) -> Files:
    return session.files()


@GROUP.check(
    "file",
    Severity.ERROR,
    title="The file is there, and is a database",
    why="A store that can't be opened refuses every guarded request with 503. A wrong path makes a new, empty "
    "file: every "
    "key is free again.",
    mend="semel migrate URL   # makes the file; or correct the path in the store's address",
    look=_trouble,
    after=(),
)
def file(seen: str | None, _limits: Limits) -> Judgement:
    """Judge whether it can be read."""
    return wrong(seen) if seen else ok("It can be read.")


def _applied(session: SQLite) -> Applied:
    rows = session.rows("SELECT name FROM semel_keys_migrations ORDER BY name")
    return Applied(tuple(name for (name,) in rows), known_migrations(PACKAGE, session.place.names))


def _objects(session: SQLite) -> Objects:
    text = (resources(PACKAGE) / "schema.sql").read_text("utf-8")
    rows = session.rows("SELECT name FROM sqlite_master")
    return Objects(objects_in(text, session.place.names), tuple(name for (name,) in rows))


@GROUP.check(
    "tables",
    Severity.ERROR,
    title="Every table and index of Semel's is there",
    why="Without a table every guarded request is refused with 503; without an index, services read whole tables.",
    mend="semel migrate URL",
    look=_objects,
)
def tables(seen: Objects, _limits: Limits) -> Judgement:
    """Judge whether all are there."""
    missing = [name for name in seen.wanted if name not in seen.there]
    return wrong(f"Missing: {', '.join(missing)}.") if missing else ok(f"{len(seen.wanted)} tables and indexes.")


@GROUP.check(
    "schema",
    Severity.ERROR,
    title="The tables are as this version of Semel needs them",
    why="Statements name columns that an older schema lacks. A process that serves brings its file up to date by "
    "itself; "
    "one that may only read does not.",
    mend="semel migrate URL",
    look=_applied,
    page="how-to/upgrade.md",
)
def schema(seen: Applied, _limits: Limits) -> Judgement:
    """Judge whether a migration is missing."""
    return judge_older(seen)


@GROUP.check(
    "schema-newer",
    Severity.WARNING,
    title="No newer version of Semel has changed the tables",
    why="A newer version has been here, and may rely on what this one does not write.",
    mend="pip install --upgrade semel",
    look=_applied,
    page="how-to/upgrade.md",
)
def schema_newer(seen: Applied, _limits: Limits) -> Judgement:
    """Judge whether there is a migration that is not known."""
    return judge_newer(seen)


def _journal(session: SQLite) -> str:
    return session.journal


def _synchronous(session: SQLite) -> Synchronous:
    if session.engine is not None:
        return Synchronous(_of_engine(session.engine), is_apps=True)
    return Synchronous(session.rows("PRAGMA synchronous")[0][0])


def _of_engine(engine: object) -> int:
    if hasattr(engine, "sync_engine"):
        raise Unavailable("The application's engine belongs to an event loop, and is not asked.")
    connection = engine.connect()  # type: ignore[attr-defined]  # an engine of SQLAlchemy's, which is an extra
    try:
        return int(connection.exec_driver_sql("PRAGMA synchronous").scalar())
    finally:
        connection.close()


@GROUP.check(
    "journal",
    Severity.WARNING,
    title="The file has a write-ahead log",
    why="With another journal, readers and writers shut each other out, and requests wait until they fail. Semel turns "
    "the log on when it opens the file; in a file of Django's, or one that another program has changed, it is off.",
    mend="sqlite3 FILE 'PRAGMA journal_mode = WAL'",
    look=_journal,
)
def journal(seen: str, _limits: Limits) -> Judgement:
    """Judge the journal."""
    said = f"journal_mode = {seen}."
    return ok(said) if seen == "wal" else wrong(said)


@GROUP.check(
    "synchronous",
    Severity.ERROR,
    title="A COMMIT is answered when it is on the disk",
    why="Semel's own connections have FULL. A handler that writes through the application's own connections has what "
    "those have: a power cut then loses commits that were answered.",
    mend="Have each connection of the application's say PRAGMA synchronous = FULL.",
    look=_synchronous,
)
def synchronous(seen: Synchronous, _limits: Limits) -> Judgement:
    """Judge how far a COMMIT waits."""
    name = SYNCHRONOUS[seen.level] if seen.level < len(SYNCHRONOUS) else str(seen.level)
    if seen.is_apps:
        said = f"The application's connections have synchronous = {name}."
        return ok(said) if seen.level >= FULL else wrong(said)
    if seen.level >= FULL:
        return ok(f"Semel's own connections have FULL, and so has a new one ({name}).")
    return wrong(f"A new connection of this SQLite has synchronous = {name}.")


@GROUP.check(
    "network",
    Severity.ERROR,
    title="The file is on a disk of this machine",
    why="On a network file system SQLite's locks do not hold: two machines win the same key, and the file gets "
    "damaged.",
    mend="Move the file to a local disk; or use PostgreSQL for several machines.",
    look=_files,
    page="explanation/choosing-a-store.md",
)
def network(seen: Files, _limits: Limits) -> Judgement:
    """Judge the file system."""
    if seen.file_system is None:
        return cannot_tell("This system does not tell file systems in /proc/mounts.")
    said = f"{seen.folder.name} is on {seen.file_system}."
    return wrong(said) if seen.file_system in NETWORK else ok(said)


@GROUP.check(
    "one-name",
    Severity.ERROR,
    title="The file has one name",
    why="SQLite's log lies beside the name by which the file was opened: by another hard link, or in another container "
    "that was given the file alone, a key that was claimed is free, and what is in a log can be lost. The store "
    "refuses such a file.",
    mend="find FOLDER -samefile FILE   # keep one of them; or mount the folder, and not the file",
    look=_files,
)
def one_name(seen: Files, _limits: Limits) -> Judgement:
    """Judge the names of the file."""
    if seen.links > 1:
        return wrong(f"{seen.file.name} has {seen.links} hard links.")
    return wrong(f"{seen.file.name} is mounted by itself.") if seen.is_mounted else ok("One name, in its own folder.")


@GROUP.check(
    "private",
    Severity.ERROR,
    title="Other users of this machine can't read the file",
    why="It holds requests and answers of your clients.",
    mend="chmod 600 FILE FILE-wal FILE-shm",
    look=_files,
)
def private(seen: Files, _limits: Limits) -> Judgement:
    """Judge the permissions of the file."""
    said = f"{seen.file.name} has mode {seen.file.mode:04o}."
    if seen.file.mode & (stat.S_IROTH | stat.S_IWOTH):
        return wrong(said, f"chmod o-rw {seen.file.name}*")
    return ok(said)


@GROUP.check(
    "folder",
    Severity.ERROR,
    title="Other users of this machine can't replace the file",
    why="In a folder that all may write to, another user can put an empty file in its place: every key is free again.",
    mend="chmod o-w FOLDER",
    look=_files,
)
def folder(seen: Files, _limits: Limits) -> Judgement:
    """Judge the permissions of the folder. In one with the sticky bit, such as /tmp, only owners may replace files."""
    said = f"{seen.folder.name} has mode {seen.folder.mode:04o}."
    is_open = seen.folder.mode & stat.S_IWOTH and not seen.folder.mode & stat.S_ISVTX
    return wrong(said, f"chmod o-w {seen.folder.name}") if is_open else ok(said)


@GROUP.check(
    "owner",
    Severity.WARNING,
    title="The file belongs to this user",
    why="The server and the services have to be one user, or each makes logs that the other can't write.",
    mend="Run this, and semel work, as the user of the server; or: chown USER FILE",
    look=_files,
)
def owner(seen: Files, _limits: Limits) -> Judgement:
    """Judge the owner."""
    said = f"{seen.file.name} belongs to {seen.file.owner}."
    return ok(said) if seen.file.is_mine else wrong(said)


@GROUP.check(
    "writable",
    Severity.ERROR,
    title="This user may write the file and its folder",
    why="The log lies beside the file. Without both, no key can be claimed.",
    mend="chmod u+w FILE FOLDER",
    look=_files,
)
def writable(seen: Files, _limits: Limits) -> Judgement:
    """Judge whether both can be written."""
    shut = [each.name for each in (seen.file, seen.folder) if not each.is_writable]
    return wrong(f"This user may not write {' and '.join(shut)}.") if shut else ok("Both can be written.")


@GROUP.check(
    "disk",
    Severity.WARNING,
    title="There is room on the disk",
    why="On a full disk nothing is claimed: every guarded request is refused with 503.",
    mend="semel reap; df -h   # then remove what is not needed, or move the file",
    look=_files,
)
def disk(seen: Files, limits: Limits) -> Judgement:
    """Judge how much is free."""
    said = f"{seen.free / MEBIBYTE:,.0f} MiB are free; the file has {seen.size / MEBIBYTE:,.1f} MiB."
    return wrong(said) if seen.free < limits.free_bytes else ok(said)


def _integrity(session: SQLite) -> tuple[int, str | None]:
    size = session.path.stat().st_size
    if size > MAX_READ:
        return size, None
    try:
        return size, str(session.rows("PRAGMA quick_check(1)")[0][0])
    except sqlite3.DatabaseError as error:
        return size, str(error)


@GROUP.check(
    "integrity",
    Severity.ERROR,
    title="The file is not damaged",
    why="A record that can't be read is refused, or found missing: its operation may run again.",
    mend="sqlite3 FILE .recover | sqlite3 NEW_FILE   # or restore a backup",
    look=_integrity,
    page="how-to/backup.md",
)
def integrity(seen: tuple[int, str | None], _limits: Limits) -> Judgement:
    """Judge what quick_check says."""
    size, said = seen
    if said is None:
        return cannot_tell(f"The file has {size / MEBIBYTE:,.0f} MiB: too large to read in a few seconds.")
    return ok("quick_check: ok.") if said == "ok" else wrong(f"quick_check: {' '.join(said.split())}")


@GROUP.check(
    "log",
    Severity.WARNING,
    title="The log starts anew from time to time",
    why="A reader that never ends its transaction keeps the log from starting anew. It grows until the disk is "
    "full, and "
    "each read gets slower.",
    mend="lsof FILE   # and end the process that reads for so long",
    look=_files,
)
def log(seen: Files, limits: Limits) -> Judgement:
    """Judge the size of the log."""
    said = f"The log has {seen.log_size / MEBIBYTE:,.1f} MiB."
    return wrong(said) if seen.log_size > limits.wal_bytes else ok(said)
