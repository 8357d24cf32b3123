"""PostgreSQL fails over behind HAProxy, and behind PgBouncer in front of HAProxy, while many pay. A client knows one
address with one host; the proxies find the primary. They are restarted and killed, too.

The clients of one side go through HAProxy alone, with instant take-over; those of the other through PgBouncer, in
transaction mode, where no lock outlives a transaction. Both pay with the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tests.kit import servers
from torture.failover import INSTANT, failing_over
from torture.scenario import Outcome, Plan, Worlds

FAULTS = {
    "postmaster killed": 4,
    "node killed": 1,
    "switched over": 2,
    "HAProxy restarted": 3,
    "PgBouncer killed": 3,
}
#: So many server connections has PgBouncer, for all.
POOL_SIZE = 12


@dataclass
class Proxies:
    """The two ways to a cluster."""

    cluster: servers.PatroniCluster
    haproxy: servers.HAProxy
    pgbouncer: servers.PgBouncer

    def url(self, side: int) -> str:
        """Return the address of PgBouncer, or of HAProxy."""
        return self.pgbouncer.url if side else f"{self.haproxy.url}?{INSTANT}"

    def routes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return both ways."""
        return {"HAProxy": (self.haproxy.url, (0,)), "PgBouncer": (self.pgbouncer.url, (1,))}

    def strike(self, fault: str) -> Callable[[], None]:
        """Kill one of the two, and start it again."""
        server = {"HAProxy restarted": self.haproxy, "PgBouncer killed": self.pgbouncer}[fault]
        server.kill()
        server.start()
        return lambda: None


@contextmanager
def proxies(cluster: servers.PatroniCluster) -> Iterator[Proxies]:
    """Lend the two ways to *cluster*."""
    with servers.haproxy(cluster) as haproxy, servers.pgbouncer(haproxy, pool_size=POOL_SIZE) as pgbouncer:
        yield Proxies(cluster, haproxy, pgbouncer)


class ProxiedFailOvers:
    """The standby is synchronous, and every client has one address."""

    name = "PostgreSQL fails over behind HAProxy and PgBouncer"
    minimum = sum(FAULTS.values())

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:  # noqa: ARG002 - a server that others use stays up
        """Fail over, and restart the proxies, while workers at both entry points serve the same payments."""
        with failing_over(self.name, plan, through=proxies, synchronous=True) as run:
            run.bring_about(FAULTS)
            return run.judged()
