"""What a connection needs that stays open as long as its process: what it asks of the server, and when it is opened
again.

Nothing here connects. The statements of the store go over connections that may be lost at any time and are opened with
the next one; over a standing connection come hints (``listening.py``), or a lock is held on it (``liveness.py``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from semel.stores.postgres.address import SESSION
from semel.stores.postgres.network import (
    DEAD_AFTER_SECONDS,
    KEEPALIVE_COUNT,
    KEEPALIVE_IDLE_SECONDS,
    KEEPALIVE_INTERVAL_SECONDS,
)

#: Keepalives are between kernels. A proxy in between that cuts what looks idle to it wants to see a statement.
HEARTBEAT_SECONDS = 30
HEARTBEAT = "SELECT 1"

APPLICATION_NAME = SESSION["application_name"]

#: What the session asks of the server, which is to notice a dead peer as soon as we do, and not to end what is idle.
SETTINGS = {
    "application_name": APPLICATION_NAME,
    "idle_session_timeout": "0",
    "statement_timeout": "0",
    "tcp_keepalives_idle": str(KEEPALIVE_IDLE_SECONDS),
    "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL_SECONDS),
    "tcp_keepalives_count": str(KEEPALIVE_COUNT),
    # Where this is set for the whole server it would count instead of the above.
    "tcp_user_timeout": f"{DEAD_AFTER_SECONDS}s",
}

_LITERALS = ", ".join(f"('{name}', '{value}')" for name, value in SETTINGS.items())
#: Sets them. A server that does not know one yet (the first came with PostgreSQL 14) does without.
SETTLE = f"""
SELECT set_config(wanted.name, wanted.value, false)
  FROM (VALUES {_LITERALS}) AS wanted (name, value)
  JOIN pg_settings USING (name)
"""  # noqa: S608 - made of what stands above

#: How long to wait before a connection that was lost, or could not be made, is opened again.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 10.0


def pauses() -> Iterator[float]:
    """Return how long to wait before each try. All processes lose a server at once, and must not come back at once."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
