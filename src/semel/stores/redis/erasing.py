"""Erasing what Redis has of one owner. Records are named by digests, and no index has their owners: so this walks
through all keys of the store, some at a time, and looks at each.
"""

from __future__ import annotations

from collections.abc import Iterable

from semel.core.commands import Erase, Erased, EraseTrail, Left
from semel.core.place import read_place, written_place
from semel.core.record import NO_TOKEN, Hold
from semel.core.scope import is_of
from semel.core.state import TERMINAL, State
from semel.core.trail import LINES, NO_KEY, erased
from semel.stores.redis.cluster import Client
from semel.stores.redis.due import Walk
from semel.stores.redis.keys import Afterwards, Keys
from semel.stores.redis.protocol import Call, packed, script
from semel.stores.redis.records import ANY_DIGEST, entry, read, spelled

#: Keys that are asked about in one round trip.
CHUNK = 500

_ENDED = frozenset(str(state).encode() for state in TERMINAL)


async def erase(client: Client, keys: Keys, command: Erase) -> Erased:
    """Make tombstones of what has ended."""
    names, further = await _walk(client, command, f"{keys.prefix}:{ANY_DIGEST}", "hash")
    count, ended, left = 0, [], []
    words = spelled(command.scope), int(command.is_preview)
    for chunk in _chunks(names):
        for reply in await client.read([script("erase").on(name, *words) for name in chunk]):
            if reply is None:
                continue
            scope, key, state, has_data = reply
            count += has_data
            if state in _ENDED:
                ended.append((read(scope), read(key)))
            else:
                left.append(Left(read(scope), read(key), State(state.decode())))
    await _note(client, keys, command, erased(count, command.reason))
    return Erased(count, tuple(ended), tuple(left), further)


async def erase_trail(client: Client, keys: Keys, command: EraseTrail) -> Erased:
    """Delete lines of the trail. Those of one record are one list."""
    names, further = await _walk(client, command, f"{keys.prefix}:trail:{ANY_DIGEST}", "list")
    count = 0
    for chunk in _chunks(names):
        firsts = await client.read([Call(name, packed("LRANGE", name, 0, 0)) for name in chunk])
        own = [
            name
            for name, lines in zip(chunk, firsts, strict=True)
            if lines and is_of(entry(lines[0]).scope, command.scope)
        ]
        records = [b"%b:%b" % (keys.prefix.encode(), name[-len(ANY_DIGEST) :]) for name in own]
        states = await client.read([Call(name, packed("HGET", name, "state")) for name in records])
        gone = [name for name, state in zip(own, states, strict=True) if state is None or state in _ENDED]
        count += sum(await client.read([Call(name, packed("LLEN", name)) for name in gone]))
        if not command.is_preview:
            await client.read([Call(name, packed("DEL", name)) for name in gone])
    await _note(client, keys, command, erased(count, command.reason, LINES))
    return Erased(count, further=further)


async def _walk(client: Client, command: Erase | EraseTrail, pattern: str, kind: str) -> tuple[set[bytes], str | None]:
    """Walk past about as many keys as wanted; return them, and where to go on."""
    walk = Walk(pattern, kind)
    if command.after is not None:
        _, node, cursor = read_place(command.after)
        await walk.resume(client, node, cursor.encode())
    names = await walk.stretch(client, 1)
    while not walk.is_at_end and len(names) < command.limit:
        names |= await walk.stretch(client, 1)
    return names, None if walk.is_at_end else written_place(0, *walk.place)


async def _note(client: Client, keys: Keys, command: Erase | EraseTrail, summary: str | None) -> None:
    if summary is not None and not command.is_preview:
        await keys.write(client, Afterwards([(Hold(NO_KEY, NO_KEY, 0, NO_TOKEN), "erased", summary)]))


def _chunks(names: Iterable[bytes]) -> Iterable[list[bytes]]:
    listed = list(names)
    return (listed[start : start + CHUNK] for start in range(0, len(listed), CHUNK))
