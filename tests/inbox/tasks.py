"""A Celery app with a worker of its own: ``celery -A tests.inbox.tasks worker``. The environment says where."""

import os
import time
from datetime import timedelta
from typing import Any

from celery import Celery

from semel.inbox import Inbox
from semel.inbox.celery import once

app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "memory://"))
app.conf.worker_prefetch_multiplier = 1
app.conf.broker_connection_retry_on_startup = True
app.conf.task_default_queue = "shop"

inbox = Inbox(os.environ.get("SHOP_STORE", "sqlite:///shop.db"), consumer="billing", max_attempts=2)


@once(app, inbox, name="shop.ship", pause=timedelta(0))
def ship(connection: Any, message: str) -> str:
    """Send a parcel; or die, or fail, or hang, if the message says so."""
    connection.execute(f"INSERT INTO parcels VALUES ('{message}')")
    if message == "bad":
        raise ValueError("no stock")
    if message == "dying" and not os.path.exists(died := os.environ["SHOP_DIED"]):  # noqa: PTH110 - a name, not a Path
        with open(died, "x", encoding="utf-8"):  # noqa: PTH123 - as above
            os._exit(9)
    if message == "slow" and not os.path.exists(slept := os.environ["SHOP_DIED"] + "-slow"):  # noqa: PTH110 - as above
        with open(slept, "x", encoding="utf-8"):  # noqa: PTH123 - as above
            time.sleep(60)
    return f"shipped {message}"
