"""A process that claims a key and works for ever: ``python worker.py URL COLOUR KEY LEASE_SECONDS [fork]``.

It says "claimed" when it has the key, and renews its lease. With *fork* it first has a child that outlives it, whose
process id it says as well.
"""

import asyncio
import os
import sys
import time
from datetime import timedelta

from semel.core.commands import Claim
from semel.core.record import Hold
from semel.stores import async_store, store
from semel.stores.leases import AsyncLeases, Leases

FOR_EVER = 3600


def claim(key: str, lease: timedelta) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", lease, timedelta(hours=1))


def say(child: int = 0) -> None:
    sys.stdout.write(f"claimed {child}\n")
    sys.stdout.flush()


def work(url: str, key: str, lease: timedelta, *, forks: bool) -> None:
    opened = store(url)
    hold = opened.perform(claim(key, lease))
    assert isinstance(hold, Hold)
    Leases(opened.perform, opened.watch).add(hold, lease)
    child = os.fork() if forks else 0
    if not forks or child:
        say(child)
    time.sleep(FOR_EVER)


async def work_on_a_loop(url: str, key: str, lease: timedelta) -> None:
    opened = async_store(url)
    hold = await opened.perform(claim(key, lease))
    assert isinstance(hold, Hold)
    AsyncLeases(opened.renew, opened.watch).add(hold, lease)
    say()
    await asyncio.sleep(FOR_EVER)


if __name__ == "__main__":
    address, colour, named, seconds, *more = sys.argv[1:]
    if colour == "sync":
        work(address, named, timedelta(seconds=float(seconds)), forks=bool(more))
    else:
        asyncio.run(work_on_a_loop(address, named, timedelta(seconds=float(seconds))))
