"""What is said to Redis, and how its replies are read: once, for threads and for an event loop. It carries nothing.

An answer is asked for as two commands: how long it will be there still, and then what it is. If another takes its place
in between, it is that other one that is kept, and for too short a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from semel.core.commands import Command
from semel.core.value import value
from semel.errors import StoreError, StoreRefused
from semel.stores.redis.address import Address
from semel.stores.redis.courier import Courier, Talk
from semel.stores.redis.wire import Call, Reply, packed
from semel.stores.tiered.encoding import decoded, encoded, name_of
from semel.stores.tiered.entry import Entry
from semel.stores.tiered.expiry import RedisClock, deadline, now

#: A connection takes several round trips: TCP, TLS, a greeting.
ROUND_TRIPS_TO_CONNECT = 4
#: Bytes of answers on their way to Redis. A cache that is slower than the application gets fewer of them.
MOST_QUEUED = 4 * 1024 * 1024
#: How long a write may take. Nobody waits for it, and it may be large.
WRITE_SECONDS = 1.0
#: How long the end of a process may be put off by what is still on its way to Redis.
CLOSE_SECONDS = 1.0

_TIME = packed("TIME")
# Filled in at once: packing word by word takes three times as long, and these are sent with every request.
_PTTL = b"*2\r\n$4\r\nPTTL\r\n$%d\r\n%b\r\n"
_GET = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n"


@value
class Wanted(Command[Entry | None]):
    """Somebody asks for the answer to a key."""

    scope: str
    key: str


class Talks:
    """Everything that is said to one Redis about the answers of one durable store."""

    def __init__(self, address: Address, namespace: str) -> None:
        """Speak to *address* of what is in *namespace*."""
        self._address = address
        self._namespace = namespace

    def greet(self, courier: Courier) -> Talk[None]:
        """See whether it is there."""
        self._refuse_trouble((yield from courier.deliver([Call(b"semel", _TIME)])))

    def read(self, courier: Courier, wanted: Sequence[Wanted]) -> Talk[list[Entry | None]]:
        """Ask for answers; what is not there, or can't be read, is None."""
        asked_at = now()
        calls = []
        for each in wanted:
            name = self._name(each.scope, each.key)
            calls += [Call(name, _PTTL % (len(name), name)), Call(name, _GET % (len(name), name))]
        replies = yield from courier.deliver(calls)
        self._refuse_trouble(replies)
        return [
            self._entry(each, left, value, asked_at)
            for each, left, value in zip(wanted, replies[::2], replies[1::2], strict=True)
        ]

    def write(self, courier: Courier, entries: Sequence[Entry]) -> Talk[StoreError | None]:
        """Hand answers over; return why the server would not have one, if so."""
        named = [(self._name(entry.scope, entry.key), entry) for entry in entries]
        # In a Cluster each server has its own clock.
        asked = named if self._address.kind == "cluster" else named[:1]
        times = yield from courier.deliver([Call(name, _TIME) for name, _ in asked])
        heard_at = now()
        self._refuse_trouble(times)
        clocks = [RedisClock.read(time, heard_at) for time in times] * (len(named) // len(times))
        replies = yield from courier.deliver(
            [self._call(name, entry, clock) for (name, entry), clock in zip(named, clocks, strict=True)]
        )
        return next((reply for reply in replies if isinstance(reply, StoreError)), None)

    def _name(self, scope: str, key: str) -> bytes:
        return name_of(self._address.prefix, self._namespace, scope, key)

    def _call(self, name: bytes, entry: Entry, clock: RedisClock) -> Call:
        at = clock.at(entry.deadline)
        return Call(name, packed("SET", name, encoded(self._namespace, entry), "PXAT", at))

    def _entry(self, wanted: Wanted, left: Reply, value: Reply, asked_at: float) -> Entry | None:
        if not isinstance(left, int) or left <= 0:
            return None
        until = deadline(asked_at, left / 1000)
        return decoded(self._namespace, wanted.scope, wanted.key, value, until)

    @staticmethod
    def _refuse_trouble(replies: Sequence[Reply]) -> None:
        """Raise what is wrong with the server. That a value is of another kind, and no answer of ours, is not."""
        for reply in replies:
            if isinstance(reply, StoreError) and not isinstance(reply, StoreRefused):
                raise reply


def cache_address(url: str, limit: timedelta) -> Address:
    """Read the URL of a cache. It may evict, and is not waited for."""
    seconds = limit.total_seconds()
    return replace(
        Address.of(url),
        connect_seconds=ROUND_TRIPS_TO_CONNECT * seconds,
        command_seconds=seconds,
        is_durable=False,
    )


def unhurried(address: Address) -> Address:
    """Return the same address for what nobody waits for."""
    return replace(
        address,
        connect_seconds=max(address.connect_seconds, WRITE_SECONDS),
        command_seconds=max(address.command_seconds, WRITE_SECONDS),
    )
