"""What values mean, where no server on one machine shows them: other vendors, other machines, other clocks."""

from datetime import timedelta
from pathlib import Path

import pytest

from semel.doctor import CHECKS, Limits, Verdict
from semel.doctor.migrations import Applied
from semel.doctor.model import Judgement
from semel.doctor.network import Skew
from semel.doctor.postgres.durability import Setting, Standbys
from semel.doctor.postgres.server import Wire
from semel.doctor.redis.facts import Link, Server
from semel.doctor.sqlite.facts import Files, Owned, Synchronous, mounted_on
from tests.doctor.planting import plants

JUDGES = {each.name: each.judge for each in CHECKS}


def judged(name: str, seen: object) -> Judgement:
    return JUDGES[name](seen, Limits())


LOOK_ALIKES = [
    "CockroachDB CCL v23.1.11 (x86_64-pc-linux-gnu, built 2023/09/27 01:53:43, go1.19.10)",
    "PostgreSQL 11.2-YB-2.18.3.0-b0 on x86_64-pc-linux-gnu, compiled by clang version 15.0.3, 64-bit",
    "PostgreSQL 8.0.2 on i686-pc-linux-gnu, compiled by GCC gcc (GCC) 3.4.2 20041017 (Red Hat), Redshift 1.0.56754",
    "PostgreSQL 9.4.26 (Greenplum Database 6.20.0 build commit:8ad2) on x86_64-unknown-linux-gnu",
    "PostgreSQL 9.5 on x86_64-unknown-linux-gnu (Materialize v0.27.0)",
]


@plants("postgres-genuine")
@pytest.mark.parametrize("said", LOOK_ALIKES)
def test_look_alikes(said: str) -> None:
    """A server that speaks PostgreSQL's protocol and is another one is told by its own words."""
    assert judged("postgres-genuine", said).verdict is Verdict.WRONG


def test_genuine() -> None:
    """PostgreSQL and its own distributions are taken for it; what was never heard of can't be told."""
    assert judged("postgres-genuine", "PostgreSQL 18.1 on aarch64-apple-darwin").verdict is Verdict.OK
    assert judged("postgres-genuine", "SomeDB 1.0").verdict is Verdict.CANNOT_TELL


@plants("postgres-version")
def test_versions_of_postgresql() -> None:
    """A version without corrections is a warning."""
    assert judged("postgres-version", 90624).verdict is Verdict.WRONG
    assert judged("postgres-version", 180000).verdict is Verdict.OK


@plants("postgres-tls", "redis-tls")
def test_unencrypted_connections() -> None:
    """An unencrypted connection is wrong to another machine, and right to this one."""
    assert judged("postgres-tls", Wire("db.example", is_encrypted=False)).verdict is Verdict.WRONG
    for host in ("/run/postgresql", "127.0.0.1", "::1", "localhost", ""):
        assert judged("postgres-tls", Wire(host, is_encrypted=False)).verdict is Verdict.OK
    assert judged("postgres-tls", Wire("db.example", is_encrypted=True)).verdict is Verdict.OK
    assert judged("redis-tls", Link("standalone", ("10.0.0.7",), is_encrypted=False)).verdict is Verdict.WRONG
    assert judged("redis-tls", Link("standalone", ("10.0.0.7",), is_encrypted=True)).verdict is Verdict.OK


@plants("postgres-clock", "redis-clock")
@pytest.mark.parametrize("name", ["postgres-clock", "redis-clock"])
def test_clocks(name: str) -> None:
    """A clock that is minutes off is wrong; a question that took long says little about the clock."""
    assert judged(name, Skew(seconds=-300, took=0.01)).verdict is Verdict.WRONG
    assert judged(name, Skew(seconds=5.5, took=2)).verdict is Verdict.OK


@pytest.mark.parametrize("names, needed", [("a", 1), ("ANY 2 (a, b, c)", 2), ("FIRST 1 (a, b)", 1), ("2 (a, b)", 2)])
def test_standbys(names: str, needed: int) -> None:
    """As many synchronous standbys are needed as the setting says, in each of its forms."""
    there = tuple((f"node {number}", "sync") for number in range(needed))
    assert judged("postgres-synchronous-standbys", Standbys(names, there)).verdict is Verdict.OK
    assert judged("postgres-synchronous-standbys", Standbys(names, there[1:])).verdict is Verdict.WRONG
    hidden = Standbys(names, ((None, None),))
    assert judged("postgres-synchronous-standbys", hidden).verdict is Verdict.CANNOT_TELL


def test_transaction_timeout() -> None:
    """The time limit of whole transactions, which newer servers have, is judged like that of idle ones."""
    usual = {"idle_in_transaction_session_timeout": Setting("0")}
    assert judged("postgres-idle-timeout", usual).verdict is Verdict.OK
    seen = usual | {"transaction_timeout": Setting("1000", "user")}
    assert judged("postgres-idle-timeout", seen).verdict is Verdict.WRONG


def test_migrations() -> None:
    """A migration that stopped on the way is told apart from one that is missing, and one that this version does not
    survive from one that it does.
    """
    known = ("0001_pre_keys", "0002_pre_more", "0003_post_less")
    half = judged("postgres-schema", Applied(("0001_pre_keys", "0002_pre_more (1 of 4)"), known))
    assert half.verdict is Verdict.WRONG
    assert "0002_pre_more stopped after 1 of its statements" in half.evidence
    later = judged("postgres-schema", Applied(known[:2], known))
    assert (later.verdict, "semel migrate --post (0003_post_less)" in later.evidence) == (Verdict.OK, True)
    newer = judged("postgres-schema-newer", Applied((*known, "0004_post_future"), known))
    assert (newer.verdict, "too old for these tables" in newer.evidence) == (Verdict.WRONG, True)
    assert "too old" not in judged("postgres-schema-newer", Applied((*known, "0004_pre_future"), known)).evidence
    assert judged("postgres-schema-newer", Applied(("0002_pre_more (1 of 4)",), known)).verdict is Verdict.OK


def test_managed_redis() -> None:
    """A managed server that won't tell its policy or its settings is neither right nor wrong."""
    silent = [Server("cache:6379", {"role": "master", "maxmemory_policy": "", "connected_slaves": "1"}, None)]
    for name in ("eviction", "evicted", "persistence", "min-replicas", "enough-replicas", "memory", "connections"):
        found = judged(f"redis-{name}", silent)
        assert found.verdict is Verdict.CANNOT_TELL, (name, found)


@plants("redis-version", "redis-loading", "redis-last-save", "redis-connections", "redis-memory", "redis-evicted")
@pytest.mark.parametrize(
    "name, info",
    [
        ("redis-version", {"redis_version": "5.0.14"}),
        ("redis-loading", {"loading": "1", "loading_loaded_perc": "12.5"}),
        ("redis-last-save", {"rdb_last_bgsave_status": "err"}),
        ("redis-last-save", {"aof_last_write_status": "err"}),
        ("redis-connections", {"connected_clients": "9999", "maxclients": "10000"}),
        ("redis-memory", {"used_memory": "95", "maxmemory": "100"}),
        ("redis-memory", {"used_memory": "95", "maxmemory": "0", "total_system_memory": "100"}),
        ("redis-evicted", {"evicted_keys": "7"}),
    ],
)
def test_what_redis_says_of_itself(name: str, info: dict[str, str]) -> None:
    """What INFO says is judged, of every server of a Cluster."""
    well = Server(
        "a:1",
        {"redis_version": "7.2.4", "maxclients": "10", "used_memory": "1", "maxmemory": "9"}
        | {"evicted_keys": "0", "rdb_last_bgsave_status": "ok"},
    )
    assert judged(name, [well]).verdict is Verdict.OK
    assert judged(name, [well, Server("b:2", well.info | info)]).verdict is Verdict.WRONG  # type: ignore[operator]


@plants("redis-kind", "redis-slots")
def test_a_cluster() -> None:
    """A node of a Cluster is no server alone; and a Cluster serves every slot."""
    node = [Server("a:1", {"cluster_enabled": "1"})]
    assert judged("redis-kind", ("standalone", node)).verdict is Verdict.WRONG
    assert judged("redis-kind", ("cluster", node)).verdict is Verdict.OK
    whole = {"cluster_state": "ok", "cluster_slots_ok": "16384"}
    assert judged("redis-slots", whole).verdict is Verdict.OK
    assert judged("redis-slots", whole | {"cluster_slots_ok": "16000"}).verdict is Verdict.WRONG
    assert judged("redis-slots", whole | {"cluster_state": "fail"}).verdict is Verdict.WRONG


MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /srv/shared nfs4 rw,vers=4.2 0 0
tmpfs /srv/shared/local tmpfs rw 0 0
//nas/files /mnt/my\\040share cifs rw 0 0
"""


@plants("sqlite-network")
@pytest.mark.parametrize(
    "path, kind, verdict",
    [
        ("/var/lib/semel.db", "ext4", Verdict.OK),
        ("/srv/shared/semel.db", "nfs4", Verdict.WRONG),
        ("/srv/shared/local/semel.db", "tmpfs", Verdict.OK),
        ("/mnt/my share/semel.db", "cifs", Verdict.WRONG),
    ],
)
def test_network_file_systems(path: str, kind: str, verdict: Verdict) -> None:
    """The file system of a file is that of the deepest mount above it; one of another machine is wrong."""
    assert mounted_on(Path(path), MOUNTS) == kind
    assert judged("sqlite-network", files(file_system=kind)).verdict is verdict


def test_no_proc() -> None:
    """Where the system does not tell its mounts, it can't be told."""
    assert judged("sqlite-network", files(file_system=None)).verdict is Verdict.CANNOT_TELL


@plants("sqlite-owner", "sqlite-writable")
def test_owners() -> None:
    """A file of another user, or one that this user may not write, is wrong; root could write it all the same."""
    theirs = Owned("semel.db", 0o600, "www-data", is_mine=False, is_writable=False)
    assert judged("sqlite-owner", files(file=theirs)).verdict is Verdict.WRONG
    assert judged("sqlite-writable", files(file=theirs)).verdict is Verdict.WRONG
    assert judged("sqlite-owner", files()).verdict is judged("sqlite-writable", files()).verdict is Verdict.OK


def test_a_library_that_syncs_less() -> None:
    """A SQLite that was compiled with another default is told."""
    assert judged("sqlite-synchronous", Synchronous(1)).verdict is Verdict.WRONG
    assert judged("sqlite-synchronous", Synchronous(2)).verdict is Verdict.OK


def files(*, file: Owned | None = None, file_system: str | None = "ext4") -> Files:
    mine = Owned("semel.db", 0o600, "app", is_mine=True, is_writable=True)
    return Files(file or mine, mine, file_system, free=2**40, size=1)


def test_limits_are_times_and_sizes() -> None:
    """What is old or large is a limit that can be set."""
    assert Limits(accepted=timedelta(hours=1)).accepted == timedelta(hours=1)
