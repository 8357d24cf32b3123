"""PostgreSQL fails over, under Patroni, while many pay: the primary is killed, its node is, it is swapped with its
standby, cut off from it, or goes on without knowing that it is none any more; two of three nodes die, one after the
other; a standby is away that no COMMIT may do without.

There are two sides of the network, with clients on each, and the clients of both pay with the same keys. While the
network is cut, one side reaches the old primary only and the other the new one. With a synchronous standby nothing that
was acknowledged may be lost. With an asynchronous one it may: what is lost is counted, and must be lost as a whole.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import psycopg

from tests.kit import servers
from tests.kit.servers.forwarder import Forwarder
from torture.checker import CHANGED, Violation
from torture.clients import Crowd, Order
from torture.job import Entry
from torture.restarts import ENTRIES, PATIENCE_SECONDS, PAYMENTS, POLL_SECONDS, is_under_way, wait_for_payments
from torture.scenario import Outcome, Plan, World, Worlds, _world
from torture.witness import History

FORMS = ("atomic", "phase", "steps")
#: Who pays: the entry point, the side of the network, and the first key. Each key is paid with from both sides.
CROWDS: tuple[tuple[Entry, int, int], ...] = (
    ("wsgi", 0, 0),
    ("asgi", 1, 0),
    ("asgi", 0, 100_000),
    ("wsgi", 1, 100_000),
)
#: On each side, one for each form.
CLIENTS = len(FORMS)
LEASE_SECONDS = 2.0
#: Of one side; the other waits for leases. Under a lock, a dead worker is replaced at once.
INSTANT = "takeover=instant"

#: How often each fault is brought about with a synchronous standby. A postmaster's death is followed by a fail-over
#: within seconds, a node's only when its lock has expired.
FAULTS = {"postmaster killed": 10, "node killed": 1, "switched over": 2, "cut": 1, "cut off": 1, "unaware": 1}
#: With an asynchronous one.
LOSSY_FAULTS = {"postmaster killed": 2, "behind, then killed": 3, "unaware": 1}
#: With two standbys, of which one is synchronous.
CHAINED_FAULTS = {"two of three killed": 1}
#: With a standby that no COMMIT does without.
STRICT_FAULTS = {"standby away": 1, "postmaster killed": 1}
#: Of these it can't be said when the old primary was gone, or there is none.
UNTIMED = frozenset({"cut", "unaware", "standby away"})
#: How long an old primary is left unaware, or a standby is away: longer than any time limit of a statement or a COMMIT.
UNAWARE_SECONDS = 45.0
#: After a standby was killed, how long a client may take to read what it had confirmed.
CONFIRMED_SECONDS = 3.0
#: How long a COMMIT works before it commits: longer than it takes to kill the postmaster meanwhile.
LATE_SECONDS = 3.0

#: A trigger that is deferred runs as a part of COMMIT, and this one waits for nothing: so its backend does not notice
#: that its postmaster has died.
_LATE = f"""
CREATE FUNCTION be_late() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE ends timestamptz := clock_timestamp() + interval '{LATE_SECONDS} seconds';
BEGIN
    WHILE clock_timestamp() < ends LOOP END LOOP;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (right(NEW.key, 5) = '-late' AND NEW.attempt = 1) EXECUTE FUNCTION be_late();
"""
_IS_LATE = f"""
SELECT count(*) FROM pg_stat_activity
 WHERE state = 'active' AND backend_type = 'client backend'
   AND query_start < clock_timestamp() - interval '{LATE_SECONDS / 6} seconds'
"""  # noqa: S608 - a number


class Network(Protocol):
    """How clients reach a cluster."""

    @property
    def cluster(self) -> servers.PatroniCluster:
        """What is reached."""

    def url(self, side: int) -> str:
        """Return the store's URL for the clients of one side."""

    def routes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return, by the name of a way, an address, and the sides that take that way."""

    def strike(self, fault: str) -> Callable[[], None]:
        """Bring about a fault of its own; return how to undo it."""


@dataclass
class Sides:
    """The ways from each side's clients to each node."""

    cluster: servers.PatroniCluster
    wires: dict[tuple[int, str], Forwarder] = field(default_factory=dict)

    def url(self, side: int) -> str:
        """Return the address of all nodes, as this side reaches them."""
        hosts = ",".join(f"127.0.0.1:{self.wires[side, node.name].port}" for node in self.cluster.nodes)
        address = urlsplit(self.cluster.url)._replace(netloc=f"semel@{hosts}").geturl()
        return f"{address}&{INSTANT}" if side else address

    def routes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return the one way that is timed."""
        return {"": (self.cluster.url, (0, 1))}

    def strike(self, fault: str) -> Callable[[], None]:
        """Cut the primary off, which its clients on one side still reach."""
        cluster = self.cluster
        old = cluster.primary()
        if fault == "unaware":
            os.kill(old.patroni, signal.SIGSTOP)  # it can't tell its PostgreSQL
        self.part(old)
        cluster.cut(isolated=old)
        if fault == "unaware":
            time.sleep(UNAWARE_SECONDS)  # how long is what is tried here

        def undo() -> None:
            os.kill(old.patroni, signal.SIGCONT)
            cluster.heal()
            self.heal()

        return undo

    def part(self, old: servers.Node) -> None:
        """Leave the old primary to one side, and the new one to the other."""
        self.wires[0, self.cluster.other(old).name].cut(is_silent=False)
        self.wires[1, old.name].cut(is_silent=False)

    def heal(self) -> None:
        """Let every side reach both."""
        for wire in self.wires.values():
            wire.heal()


@contextmanager
def sides(cluster: servers.PatroniCluster) -> Iterator[Sides]:
    """Lend the network between clients and *cluster*."""
    with ExitStack() as ends:
        made = Sides(cluster)
        for side in (0, 1):
            for node in cluster.nodes:
                made.wires[side, node.name] = ends.enter_context(Forwarder(servers.free_port(), node.port))
        yield made


class Run:
    """One cluster, its faults, and how long each took."""

    def __init__(self, world: World, network: Network, plan: Plan, name: str) -> None:
        """Judge by *world*, and tell *plan* of it."""
        self.world = world
        self._network = network
        self.cluster = network.cluster
        self._plan = plan
        self._name = name
        self._began = 0.0
        #: The process ids of the clients of each side.
        self._payers: dict[int, list[int]] = {}
        self.reached: Counter[str] = Counter()

    def bring_about(self, faults: Mapping[str, int], crowds: int = len(CROWDS)) -> None:
        """Bring so many of each fault about while clients on both sides pay."""
        with ExitStack() as stack:
            for entry, side, first in CROWDS[:crowds]:
                job = self.world.job(lease_seconds=LEASE_SECONDS, entry=entry, url=self._network.url(side))
                crowd = stack.enter_context(Crowd(Order(job, FORMS, first, CLIENTS)))
                self._payers.setdefault(side, []).append(crowd.pid)
            for fault, times in faults.items():
                for _ in range(self._plan.share(times)):
                    self.cluster.until_whole()
                    self.pay()
                    is_reached = is_under_way(self.world)
                    self._bring_about(fault)
                    self.reached[fault] += is_reached

    def judged(self, *, may_lose: bool = False) -> Outcome:
        """Let the checker judge. *may_lose*: what was acknowledged and lost is counted, and is no violation."""
        self.world.database.close()  # Its connection was to a server that is gone.
        outcome = self.world.outcome(self.reached, ("replay",))
        # These requests were told to wait for the lease of an earlier one: no worker was stopped here.
        del outcome.seen["fenced zombie"]
        if not may_lose:
            return outcome
        lost = [each for each in outcome.violations if _is_of_loss(each)]
        seen = outcome.seen + Counter({"acknowledged and lost": len({each.key for each in lost})})
        return replace(outcome, violations=tuple(each for each in outcome.violations if each not in lost), seen=seen)

    def _bring_about(self, fault: str) -> None:
        routes = self._network.routes()
        # One for each thread. It is long: later, what is new is read quickly.
        histories = [History(self.world.history.path) for _ in routes]
        for history in histories:
            history.read()
        undo = self._strike(fault)
        if fault not in UNTIMED:
            with ThreadPoolExecutor() as threads:
                for name, times in zip(routes, threads.map(self._timed, routes.values(), histories), strict=True):
                    outage, later = times
                    route = f", through {name}" if name else ""
                    self.tell(f"{fault}{route}: {outage:.1f} s, and answered {later:.1f} s later")
        self.pay()
        undo()
        self.cluster.until_whole()
        self.pay()

    def _timed(self, route: tuple[str, tuple[int, ...]], history: History) -> tuple[float, float]:
        """Return for how long nothing could be written on this way, and how much later a client was answered."""
        url, sides_of_it = route
        payers = [pid for side in sides_of_it for pid in self._payers[side]]
        written = _until_writable(url)
        before = len(history.read())
        ends = time.monotonic() + PATIENCE_SECONDS
        while not any(event.is_success and event.pid in payers for event in history.read()[before:]):
            if time.monotonic() > ends:
                raise AssertionError(f"No client pays through {url}.")
            time.sleep(POLL_SECONDS)
        return written - self._began, time.monotonic() - written

    def _strike(self, fault: str) -> Callable[[], None]:
        """Return how to undo it."""
        old = self.cluster.primary()
        self.begin()
        return _STRIKES[fault](self, old) if fault in _STRIKES else self._network.strike(fault)

    def begin(self) -> None:
        """Count the outage from now on."""
        self._began = time.monotonic()

    def pay(self) -> None:
        """Wait until some more payments are made."""
        wait_for_payments(self.world, PAYMENTS)

    def tell(self, what: str) -> None:
        """Tell of progress."""
        self._plan.tell(f"  {self._name}: {what}")


def _kill_postmaster(_run: Run, old: servers.Node) -> Callable[[], None]:
    old.kill_postmaster()
    return _nothing


def _kill_node(_run: Run, old: servers.Node) -> Callable[[], None]:
    old.kill()
    return old.start


def _kill_two(run: Run, old: servers.Node) -> Callable[[], None]:
    old.kill()
    run.cluster.until_whole_without(old)
    run.pay()
    second = run.cluster.primary()
    run.begin()
    second.kill()

    def undo() -> None:
        old.start()
        second.start()

    return undo


def _switch_over(run: Run, _old: servers.Node) -> Callable[[], None]:
    run.cluster.switch_over()
    return _nothing


def _cut(run: Run, _old: servers.Node) -> Callable[[], None]:
    run.cluster.cut()  # Both see etcd: the primary goes on alone.
    return run.cluster.heal


def _kill_in_front(run: Run, old: servers.Node) -> Callable[[], None]:
    """Kill the node of a primary that its standby is behind."""
    run.cluster.cut()
    run.pay()
    run.begin()
    old.kill()
    run.cluster.heal()
    return old.start


def _do_without(run: Run, primary: servers.Node) -> Callable[[], None]:
    """Take the standby away for a while, and see that no client is told of a payment meanwhile."""
    standby, history = run.cluster.other(primary), run.world.history
    standby.kill()
    time.sleep(CONFIRMED_SECONDS)
    before = len(history.read())
    time.sleep(UNAWARE_SECONDS)  # how long is what is tried here
    answers = [event for event in history.read()[before:] if event.what == "answer" and not event.is_replay]
    run.tell(f"standby away: clients were told {dict(Counter(event.status for event in answers))}")
    if any(event.is_success for event in answers):
        raise AssertionError("A payment was acknowledged that one server alone had.")
    standby.start()
    return _nothing


def _nothing() -> None:
    """Patroni sees to it by itself."""


#: Each returns how to undo it.
_STRIKES: dict[str, Callable[[Run, servers.Node], Callable[[], None]]] = {
    "postmaster killed": _kill_postmaster,
    "node killed": _kill_node,
    "two of three killed": _kill_two,
    "switched over": _switch_over,
    "cut": _cut,
    "behind, then killed": _kill_in_front,
    "standby away": _do_without,
}


class FailOvers:
    """The standby is synchronous: what was acknowledged is there, whichever is the primary."""

    name = "PostgreSQL fails over, synchronous"
    minimum = sum(FAULTS.values())

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:  # noqa: ARG002 - a server that others use stays up
        """Fail over while workers at both entry points, on both sides, serve the same payments."""
        with failing_over(self.name, plan, synchronous=True) as run:
            run.bring_about(FAULTS)
            return run.judged()


class LossyFailOvers:
    """The standby is asynchronous: what it did not have is gone, record and effect together."""

    name = "PostgreSQL fails over, asynchronous"
    minimum = sum(LOSSY_FAULTS.values())

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:  # noqa: ARG002 - as above
        """As above; and kill a primary that its standby could not follow."""
        with failing_over(self.name, plan, synchronous=False) as run:
            run.bring_about(LOSSY_FAULTS)
            return run.judged(may_lose=True)


class ChainedFailOvers:
    """There are two standbys, and one of them is synchronous: the one that is left has everything."""

    name = "PostgreSQL fails over twice, two standbys"
    minimum = sum(CHAINED_FAULTS.values())

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:  # noqa: ARG002 - as above
        """Kill the primary's node, and once the next has a synchronous standby, that one's."""
        with failing_over(self.name, plan, synchronous=True, standbys=2) as run:
            run.bring_about(CHAINED_FAULTS)
            return run.judged()


class StrictFailOvers:
    """No COMMIT is acknowledged without a standby."""

    name = "standby away, strict"
    minimum = sum(STRICT_FAULTS.values())

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:  # noqa: ARG002 - as above
        """Take the standby away and bring it back; then fail over to it."""
        with failing_over(self.name, plan, synchronous=True, strict=True) as run:
            run.bring_about(STRICT_FAULTS)
            return run.judged()


class Outliving:
    """A backend goes on without its postmaster, in the middle of a COMMIT, while another node becomes the primary."""

    name = "backend outlives its postmaster"
    minimum = 4

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:  # noqa: ARG002 - as above
        """Kill the postmaster during a COMMIT; then insist, on the new primary."""
        outcome = Outcome(0)
        for synchronous in (True, False):
            word = "synchronous" if synchronous else "asynchronous"
            with failing_over(self.name, plan, synchronous=synchronous) as run:
                run.world.database.execute(_LATE)
                for entry in ENTRIES:
                    run.cluster.until_whole()
                    told = _outlived(run, entry)
                    plan.tell(f"  {self.name}: {word}, {entry}: the client was told {told}")
                    outcome.seen[f"{word}: acknowledged by such a backend"] += told in range(200, 300)
                outcome += run.judged(may_lose=not synchronous)
        return outcome


def _outlived(run: Run, entry: Entry) -> int:
    """Let one payment be in its COMMIT as the postmaster dies; return the status of its answer."""
    world, old = run.world, run.cluster.primary()
    payment = "atomic", world.key(entry, "late")
    child = world.start([payment], entry=entry, lease_seconds=LEASE_SECONDS)
    with psycopg.connect(old.url, autocommit=True) as looking:
        ends = time.monotonic() + PATIENCE_SECONDS
        while not looking.execute(_IS_LATE).fetchall()[0][0]:
            if time.monotonic() > ends:
                raise AssertionError("No COMMIT is late.")
            time.sleep(POLL_SECONDS)
        old.kill_postmaster()
    world.wait(child, [payment])
    told = [event.status for event in world.history.read() if event.key == payment[1] and event.what == "answer"]
    run.cluster.until_whole()
    world.insist([payment, payment], entry=entry)
    run.reached[entry] += 1
    return told[-1] if told else 0


@contextmanager
def failing_over(
    name: str,
    plan: Plan,
    *,
    through: Callable[[servers.PatroniCluster], AbstractContextManager[Network]] = sides,
    **settings: Any,
) -> Iterator[Run]:
    """Lend a cluster with a world on it, and with clients that reach it *through* a network. The settings are those of
    ``servers.patroni``. Without `fsync` it does not wait for the disk, which no fault here reaches.
    """
    with (
        servers.patroni(**settings) as cluster,
        through(cluster) as network,
        _world(cluster.url, cluster.url) as world,
    ):
        world.database.execute("CREATE TABLE writable (at timestamptz DEFAULT now())")
        yield Run(world, network, plan, name)


def _until_writable(url: str) -> float:
    """Wait until a COMMIT is acknowledged; return when that was. Semel has no part in it."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < ends:
        with suppress(psycopg.Error), psycopg.connect(url, autocommit=True, connect_timeout=2) as connection:
            connection.execute("INSERT INTO writable DEFAULT VALUES")
            return time.monotonic()
        time.sleep(POLL_SECONDS)
    raise AssertionError("There is no primary any more.")


def _is_of_loss(violation: Violation) -> bool:
    return violation.kind == "lost" or CHANGED in violation.why
