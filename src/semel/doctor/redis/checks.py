"""What can be wrong with a Redis store. Each judge takes what the servers said of themselves, and asks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.doctor.model import MEBIBYTE, Group, Judgement, Kind, Limits, Severity, cannot_tell, ok, wrong
from semel.doctor.network import Skew, is_local, judge_skew
from semel.doctor.redis.facts import Keys, Link, Server

if TYPE_CHECKING:
    from semel.doctor.redis.session import Redis

_PAGE = "how-to/redis.md#set-the-server-up"
GROUP = Group(Kind.REDIS, "Redis", _PAGE, ("redis-reachable",))

#: For SCAN with TYPE, and for what the scripts use.
OLDEST = (6, 2)
SLOTS = 16384

Servers = list[Server]


def _reach(session: Redis) -> tuple[float, str | None]:
    return session.reach()


def _servers(session: Redis) -> Servers:
    return session.servers()


@GROUP.check(
    "reachable",
    Severity.ERROR,
    title="The server answers",
    why="A store that can't be reached refuses every guarded request with 503.",
    mend="redis-cli PING   # correct host, port, user or password until this answers PONG",
    look=_reach,
    after=(),
)
def reachable(seen: tuple[float, str | None], _limits: Limits) -> Judgement:
    """Judge whether an answer came."""
    took, trouble = seen
    return wrong(trouble) if trouble else ok(f"It answered in {took * 1000:.0f} ms.")


def _kind(session: Redis) -> tuple[str, Servers]:
    return session.address.kind, session.servers()


@GROUP.check(
    "kind",
    Severity.ERROR,
    title="The URL names the kind of server that is there",
    why="A node of a Cluster redirects most keys to other nodes, and a store that does not follow refuses them.",
    mend="Write redis+cluster://host:port as the store's address.",
    look=_kind,
    page="how-to/redis.md#settings",
)
def kind(seen: tuple[str, Servers], _limits: Limits) -> Judgement:
    """Judge whether a node of a Cluster is taken for a server alone."""
    said, servers = seen
    bad = [each.name for each in servers if each.info.get("cluster_enabled") == "1"]
    if bad and said != "cluster":
        return wrong(f"{bad[0]} belongs to a Cluster, and the URL is of a server alone.")
    return ok(f"The URL is for: {said}.")


@GROUP.check(
    "version",
    Severity.ERROR,
    title="The server is new enough",
    why="Semel is tested on Redis 6.2 and 7.0. Older ones lack what its statements use.",
    mend="Upgrade to Redis 6.2 or newer.",
    look=_servers,
)
def version(seen: Servers, _limits: Limits) -> Judgement:
    """Judge the versions."""
    said = ", ".join(f"{each.name}: {each.info.get('redis_version', '?')}" for each in seen)
    unknown = [each.name for each in seen if not each.info.get("redis_version", "")[:1].isdigit()]
    if unknown:
        return cannot_tell(f"{', '.join(unknown)} does not tell its version.")
    return wrong(said) if any(_numbers(each) < OLDEST for each in seen) else ok(said)


def _numbers(server: Server) -> tuple[int, ...]:
    return tuple(int(part) for part in server.info["redis_version"].split(".")[:2] if part.isdigit())


@GROUP.check(
    "eviction",
    Severity.ERROR,
    title="The server evicts nothing",
    why="When its memory is full it would delete the records of operations that were done, and they would run again. "
    "volatile-* does so too: records have a time to live.",
    mend="redis-cli CONFIG SET maxmemory-policy noeviction   # and in redis.conf",
    look=_servers,
)
def eviction(seen: Servers, _limits: Limits) -> Judgement:
    """Judge the policy. A managed server that does not tell it may still not evict."""
    policies = {each.name: each.info.get("maxmemory_policy", "") for each in seen}
    bad = [
        f"{name}: maxmemory-policy {policy}" for name, policy in policies.items() if policy not in {"", "noeviction"}
    ]
    if bad:
        return wrong("; ".join(bad) + ".")
    silent = [name for name, policy in policies.items() if not policy]
    if silent:
        return cannot_tell(f"{', '.join(silent)} does not tell its maxmemory-policy. Look it up where you rent it.")
    return ok("maxmemory-policy noeviction.")


@GROUP.check(
    "evicted",
    Severity.ERROR,
    title="Nothing was evicted since the server started",
    why="Keys were deleted because memory was full. If records were among them, their operations can run again.",
    mend="Give Semel a Redis of its own, with maxmemory-policy noeviction.",
    look=_servers,
)
def evicted(seen: Servers, _limits: Limits) -> Judgement:
    """Judge the count of evicted keys."""
    if not all("evicted_keys" in each.info for each in seen):
        return cannot_tell("The server does not tell how many keys it has evicted.")
    bad = [f"{each.name}: evicted_keys {each.number('evicted_keys')}" for each in seen if each.number("evicted_keys")]
    return wrong("; ".join(bad) + ".") if bad else ok("evicted_keys 0.")


@GROUP.check(
    "persistence",
    Severity.ERROR,
    title="Records are kept on disk",
    why="After a restart every key is new, and a retry of a payment runs again.",
    mend="redis-cli CONFIG SET appendonly yes   # and in redis.conf",
    look=_servers,
)
def persistence(seen: Servers, _limits: Limits) -> Judgement:
    """Judge whether anything is written to disk."""
    for each in seen:
        if each.info.get("aof_enabled") == "1":
            continue
        if each.settings is None or "save" not in each.settings:
            return cannot_tell(f"{each.name}: appendonly no, and CONFIG is forbidden, so snapshots are not known.")
        if not each.settings["save"]:
            return wrong(f"{each.name}: appendonly no, and save is empty: nothing is kept on disk.")
    return ok("; ".join(f"appendonly {_yes(each)}" for each in seen) + ".")


def _yes(server: Server) -> str:
    return "yes" if server.info.get("aof_enabled") == "1" else f"no, save {(server.settings or {}).get('save', '?')}"


@GROUP.check(
    "appendfsync",
    Severity.WARNING,
    title="An answer is on disk before it is sent",
    why="With everysec, a crash of the machine loses up to a second of claims and answers; with snapshots alone, "
    "minutes.",
    mend="redis-cli CONFIG SET appendfsync always   # with appendonly yes, and in redis.conf",
    look=_servers,
)
def appendfsync(seen: Servers, _limits: Limits) -> Judgement:
    """Judge how soon a write is on disk."""
    for each in seen:
        if each.info.get("aof_enabled") != "1":
            return wrong(f"{each.name}: appendonly no.")
        if each.settings is None or "appendfsync" not in each.settings:
            return cannot_tell(f"{each.name}: CONFIG is forbidden.")
        if each.settings["appendfsync"] != "always":
            return wrong(f"{each.name}: appendfsync {each.settings['appendfsync']}.")
    return ok("appendonly yes, appendfsync always.")


@GROUP.check(
    "master",
    Severity.ERROR,
    title="It is no replica",
    why="A replica takes no writes, so no key can be claimed.",
    mend="Give the address of the master, or of the sentinels: redis+sentinel://host/NAME/0",
    look=_servers,
)
def master(seen: Servers, _limits: Limits) -> Judgement:
    """Judge the roles."""
    bad = [
        f"{each.name} is a replica of {each.info.get('master_host', '?')}:{each.info.get('master_port', '?')}"
        for each in seen
        if each.info.get("role") in {"slave", "replica"}
    ]
    if bad:
        return wrong("; ".join(bad) + ".")
    silent = [each.name for each in seen if "role" not in each.info]
    return cannot_tell(f"{silent[0]} does not tell its role.") if silent else ok("role:master.")


@GROUP.check(
    "min-replicas",
    Severity.WARNING,
    title="A master with replicas stops when it is cut off from them",
    why="A master that is cut off goes on taking claims, which are lost when a replica takes its place.",
    mend="redis-cli CONFIG SET min-replicas-to-write 1   # and in redis.conf",
    look=_servers,
)
def min_replicas(seen: Servers, _limits: Limits) -> Judgement:
    """Judge the setting, where there are replicas."""
    for each in seen:
        replicas = each.number("connected_slaves")
        if not replicas:
            continue
        if each.settings is None or "min-replicas-to-write" not in each.settings:
            return cannot_tell(f"{each.name} has {replicas} replicas, and CONFIG is forbidden.")
        if each.settings["min-replicas-to-write"] == "0":
            return wrong(f"{each.name} has {replicas} replicas, and min-replicas-to-write 0.")
    return ok("; ".join(f"{each.number('connected_slaves')} replicas" for each in seen) + ".")


@GROUP.check(
    "enough-replicas",
    Severity.ERROR,
    title="As many replicas are there as writes need",
    why="A master with fewer replicas than min-replicas-to-write refuses every write, so no key can be claimed.",
    mend="Start the replica that is missing, or: redis-cli CONFIG SET min-replicas-to-write 0",
    look=_servers,
)
def enough_replicas(seen: Servers, _limits: Limits) -> Judgement:
    """Judge whether writes are refused now."""
    for each in seen:
        needed = (each.settings or {}).get("min-replicas-to-write")
        if each.settings is None:
            return cannot_tell(f"{each.name}: CONFIG is forbidden.")
        good = each.number("min_slaves_good_slaves")
        if needed and int(needed) > good:
            return wrong(f"{each.name}: min-replicas-to-write {needed}, and {good} good replicas.")
    return ok("Writes wait for no replica that is missing.")


def _slots(session: Redis) -> dict[str, str]:
    return session.slots()


@GROUP.check(
    "slots",
    Severity.ERROR,
    title="Every slot of a Cluster is served",
    why="Keys of a slot without a master can't be claimed; by default the whole Cluster refuses.",
    mend="redis-cli --cluster fix HOST:PORT",
    look=_slots,
)
def slots(seen: dict[str, str], _limits: Limits) -> Judgement:
    """Judge a Cluster's state."""
    if not seen:
        return ok("It is no Cluster.")
    said = f"cluster_state:{seen.get('cluster_state', '?')}, cluster_slots_ok:{seen.get('cluster_slots_ok', '?')}."
    is_whole = seen.get("cluster_state") == "ok" and seen.get("cluster_slots_ok") == str(SLOTS)
    return ok(said) if is_whole else wrong(said)


@GROUP.check(
    "memory",
    Severity.WARNING,
    title="There is room in memory",
    why="When memory is full, new requests get 503 and run nothing.",
    mend="Raise maxmemory, shorten the retention, or keep smaller answers.",
    look=_servers,
)
def memory(seen: Servers, limits: Limits) -> Judgement:
    """Judge how much is used of what may be."""
    said: list[str] = []
    full: list[str] = []
    for each in seen:
        used, most = each.number("used_memory"), each.number("maxmemory")
        name = "maxmemory"
        if not most:
            most, name = each.number("total_system_memory"), "the machine's memory"
        if not used or not most:
            return cannot_tell(f"{each.name} does not tell how much memory it has.")
        words = f"{each.name}: {used / MEBIBYTE:.0f} MiB used of {most / MEBIBYTE:.0f} MiB, {name}"
        (full if used > limits.memory * most else said).append(words)
    return wrong("; ".join(full) + ".") if full else ok("; ".join(said) + ".")


def _keys(session: Redis) -> Keys:
    return session.keys()


@GROUP.check(
    "shared",
    Severity.WARNING,
    title="No other program's keys are in this database",
    why="A cache fills the memory that claims need; and a FLUSHDB that empties it deletes every record.",
    mend="Give Semel a database of its own: redis://host/1; better, a server of its own.",
    look=_keys,
)
def shared(seen: Keys, _limits: Limits) -> Judgement:
    """Judge whether there are keys of others."""
    if seen.others:
        heads = ", ".join(f"{head}…" for head in seen.heads)
        return wrong(f"{seen.others} of {seen.others + seen.ours} keys that were seen are not Semel's: {heads}")
    if not seen.is_all:
        return ok(f"The {seen.ours} keys that were seen are Semel's; there are more.")
    return ok(f"All {seen.ours} keys are Semel's.")


@GROUP.check(
    "last-save",
    Severity.ERROR,
    title="Writing to disk works",
    why="A server that could not save refuses every write (MISCONF), so no key can be claimed.",
    mend="Look at the disk and the server's log; then: redis-cli BGSAVE",
    look=_servers,
)
def last_save(seen: Servers, _limits: Limits) -> Judgement:
    """Judge how the last writes to disk ended."""
    names = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    if not any(name in each.info for each in seen for name in names):
        return cannot_tell("The server does not tell how its last save ended.")
    bad = [
        f"{each.name}: {name} {each.info[name]}"
        for each in seen
        for name in names
        if each.info.get(name, "ok") not in {"ok", ""}
    ]
    return wrong("; ".join(bad) + ".") if bad else ok("The last save ended well.")


@GROUP.check(
    "loading",
    Severity.ERROR,
    title="The server has read its data",
    why="While it reads its data it answers nothing: every guarded request is refused with 503.",
    mend="Wait: it ends by itself.",
    look=_servers,
)
def loading(seen: Servers, _limits: Limits) -> Judgement:
    """Judge whether it is ready."""
    bad = [
        f"{each.name}: loading, {each.info.get('loading_loaded_perc', '?')} %"
        for each in seen
        if each.info.get("loading", "0") == "1"
    ]
    return wrong("; ".join(bad) + ".") if bad else ok("loading:0.")


@GROUP.check(
    "connections",
    Severity.WARNING,
    title="There is room for more connections",
    why="A process that gets no connection refuses guarded requests with 503.",
    mend="redis-cli CONFIG SET maxclients 10000   # and in redis.conf",
    look=_servers,
)
def connections(seen: Servers, limits: Limits) -> Judgement:
    """Judge how many are used."""
    said = []
    for each in seen:
        used, most = each.number("connected_clients"), each.number("maxclients")
        if not most:
            return cannot_tell(f"{each.name} does not tell maxclients.")
        said.append(f"{each.name}: {used} of {most} connections")
        if used >= limits.connections * most:
            return wrong(f"{said[-1]} are in use.")
    return ok("; ".join(said) + ".")


def _clock(session: Redis) -> Skew:
    return Skew(*session.clock())


@GROUP.check(
    "clock",
    Severity.WARNING,
    title="The server's clock and this machine's agree",
    why="Leases and retention go by the server's clock alone; but logs of both are hard to read together.",
    mend="timedatectl set-ntp true   # on the machine that is wrong",
    look=_clock,
    after=("redis-reachable", "redis-loading"),
)
def clock(seen: Skew, limits: Limits) -> Judgement:
    """Judge how far they are apart."""
    return judge_skew(seen, limits)


def _link(session: Redis) -> Link:
    address = session.address
    return Link(address.kind, tuple(node.host for node in address.nodes), address.tls is not None)


@GROUP.check(
    "tls",
    Severity.WARNING,
    title="A server on another machine is reached through TLS",
    why="Stored answers and the password pass every machine in between, to be read and changed.",
    mend="Write rediss:// in the store's address, or add ?tls=on.",
    look=_link,
    page="how-to/redis.md#settings",
)
def encrypted(seen: Link, _limits: Limits) -> Judgement:
    """Judge whether others can read along."""
    if seen.is_encrypted:
        return ok("The connection is encrypted.")
    remote = [host for host in seen.hosts if not is_local(host)]
    return wrong(f"The connection to {', '.join(remote)} is not encrypted.") if remote else ok("It is this machine.")
