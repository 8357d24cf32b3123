"""What is known of a SQLite file, its folder and its disk. What it means is said elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from semel.stores.statement import Names

try:
    import pwd
except ImportError:  # pragma: no cover - Windows, where files have no owner of this kind
    pwd = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Owned:
    """A file or a folder: who may do what with it, and whether it is this process's to write."""

    name: str
    mode: int
    owner: str
    is_mine: bool
    is_writable: bool

    @classmethod
    def of(cls, path: Path) -> Owned:
        """Look at it."""
        stat = path.stat()
        mine = not hasattr(os, "geteuid") or stat.st_uid == os.geteuid()
        return cls(str(path), stat.st_mode & 0o7777, _account(stat.st_uid), mine, os.access(path, os.W_OK))


@dataclass(frozen=True, slots=True)
class Files:
    """The file, its folder, its log and its disk."""

    file: Owned
    folder: Owned
    #: None where the system does not tell.
    file_system: str | None
    free: int
    size: int
    log_size: int = 0
    #: Its hard links, and whether it is mounted by itself.
    links: int = 1
    is_mounted: bool = False


@dataclass(frozen=True, slots=True)
class Synchronous:
    """How far a COMMIT waits on a connection: PRAGMA synchronous, 0 off, 1 normal, 2 full, 3 extra."""

    level: int
    #: Whether it is a connection as the application makes its own; else one without any setting.
    is_apps: bool = False


@dataclass(frozen=True, slots=True)
class Objects:
    """The tables and indexes that should be there, and those that are."""

    wanted: tuple[str, ...]
    there: tuple[str, ...]


def mounted_on(path: Path, mounts: str) -> str | None:
    """Return the type of the file system that *path* is on, by the lines of /proc/mounts; None: it is not there."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        parts = line.split()
        if len(parts) < 3:  # noqa: PLR2004 - device, place, type
            continue
        place = Path(parts[1].replace("\\040", " "))
        if path.is_relative_to(place) and (best is None or len(place.parts) >= best[0]):
            best = len(place.parts), parts[2]
    return best[1] if best else None


def objects_in(schema: str, names: Names) -> tuple[str, ...]:
    """Return the names that ``schema.sql`` creates, as they are called here."""
    lines = [line.split() for line in names.put_into(schema).splitlines() if line.startswith("CREATE ")]
    return tuple(words[2] for words in lines)


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (AttributeError, KeyError):
        return str(uid)
