"""Commands of services and operators on many records. Commands on one record are in ``keys.py``.

The lists (``due.py``) say which records to read; each record is judged by itself, by its own server's clock, and
changed by a script that checks it again. A walk through all records, at intervals, lists missing ones.
"""

from __future__ import annotations

import time
from binascii import unhexlify
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Any, cast

from semel.core.commands import (
    AddCounts,
    Browse,
    Command,
    Erase,
    Erased,
    EraseTrail,
    FindStuck,
    Minutes,
    Page,
    ReadCounts,
    Reap,
    Reaped,
    ReapTrail,
    Search,
    Survey,
    Surveyed,
)
from semel.core.events import StoreSurveyed
from semel.core.key import digest_of
from semel.core.place import written_place
from semel.core.record import NO_TOKEN, Hold, OnCrash, Record, Stuck
from semel.core.search import fits, surveyed
from semel.core.search import page as page_of
from semel.core.upkeep import in_turn, is_due
from semel.core.value import value
from semel.errors import StoreError
from semel.stores.base import this_process
from semel.stores.batching import refused
from semel.stores.headers import written as written_headers
from semel.stores.redis import erasing
from semel.stores.redis.cluster import Client
from semel.stores.redis.due import DIGITS, Walk
from semel.stores.redis.keys import Afterwards, Keys
from semel.stores.redis.protocol import Call, Reply, Word, packed, script
from semel.stores.redis.records import ANY_DIGEST, entry, microseconds, moment, read, record

#: Entries of one list that are read in one round trip.
PAGE = 200
#: Records that are read in one round trip.
CHUNK = 500
#: How far a service walks at once: 10,000 keys. A smaller store is walked completely each time.
MAX_STEPS = 10
#: How often, in seconds, one of all processes walks while it looks for stuck records. What is on the list
#: is found every time.
WALK_SECONDS = 10

#: How long the counts of a minute are kept.
_COUNTS_SECONDS = 7200

_TERMINAL = frozenset({b"complete", b"failed"})


@value
class Judged:
    """The part of a record that the services need, and the server's time."""

    name: bytes
    state: bytes
    hold: Hold
    lease_expires_at: int | None
    created_at: int
    expires_at: int
    after_retention: bytes
    on_crash: OnCrash
    steps: str | None
    tries: int
    is_accepted: bool
    has_request: bool
    now: int

    @classmethod
    def of(cls, name: bytes, reply: Sequence[Any]) -> Judged:
        """Read it."""
        state, scope, key, attempt, token, lease, created_at, expires_at, keeping, *rest = reply
        on_crash, steps, tries, accepted, has_request, now = rest
        return cls(
            name=name,
            state=state,
            hold=Hold(read(scope), read(key), int(attempt), unhexlify(token)),
            lease_expires_at=None if lease is None else int(lease),
            created_at=int(created_at),
            expires_at=int(expires_at),
            after_retention=keeping,
            on_crash=cast("OnCrash", on_crash.decode()),
            steps=None if steps is None else read(steps),
            tries=int(tries or 0),
            is_accepted=accepted is not None,
            has_request=has_request == 1,
            now=now,
        )

    @property
    def is_expired(self) -> bool:
        """Whether it is past its retention."""
        return self.expires_at <= self.now

    @property
    def look_again_in(self) -> int | None:
        """In how many microseconds there may be something to do about it; None: never."""
        if self.state in _TERMINAL:
            if self.after_retention == b"strip" or (self.after_retention == b"delete" and self.is_expired):
                return max(self.expires_at - self.now, 0)
            return None  # Redis deletes it by itself, or it stays.
        if self.state == b"unknown":
            return None  # It waits for an operator.
        return 0 if self.lease_expires_at is None else max(self.lease_expires_at - self.now, 0)

    def is_wanted(self, command: FindStuck) -> bool:
        """Whether *command* looks for it. It has no worker, and is due now."""
        return (
            (self.state == b"processing" or (self.state == b"pending" and command.with_pending))
            and not self.is_expired
            and (self.has_request or not command.with_request)
            and (self.hold.token != NO_TOKEN or command.with_no_token)
            and (not command.only_due or is_due(self.stuck))
        )

    @property
    def stuck(self) -> Stuck:
        """What the sweeper and the completer get."""
        silent_since = self.created_at if self.lease_expires_at is None else self.lease_expires_at
        return Stuck(
            hold=self.hold,
            on_crash=self.on_crash,
            steps=self.steps,
            has_request=self.has_request,
            silent_for=timedelta(microseconds=self.now - silent_since),
            tries=self.tries,
            is_accepted=self.is_accepted,
        )


class Upkeep:
    """The commands on many records. One for each store, since it remembers the positions of its walks."""

    def __init__(self, keys: Keys) -> None:
        """Work on the records of *keys*."""
        self._keys = keys
        self._pattern = f"{keys.prefix}:{ANY_DIGEST}"
        self._records = Walk(self._pattern, "hash")
        self._trails = Walk(f"{keys.prefix}:trail:{ANY_DIGEST}", "list")
        self._walk_at = 0.0
        #: The offset in each list from which to read next.
        self._pages: dict[str, int] = {}
        self._turn = f"{keys.prefix}:walk".encode()
        self._asks: dict[type[Command[Any]], Callable[[Client, Any], Awaitable[Any]]] = {
            AddCounts: self._add_counts,
            Browse: self._browse,
            Erase: self._erase,
            EraseTrail: self._erase_trail,
            FindStuck: self._find_stuck,
            ReadCounts: self._read_counts,
            Survey: self._survey,
            Reap: self._reap,
            ReapTrail: self._reap_trail,
            Search: self._search,
        }

    async def each(self, client: Client, commands: Sequence[Command[Any]]) -> list[Any]:
        """Carry out *commands*, one after the other."""
        outcomes: list[Any] = []
        for command in commands:
            try:
                outcomes.append(await self._asks[type(command)](client, command))
            except (StoreError, ValueError) as error:
                outcomes.append(error)
            except Exception as error:  # noqa: BLE001 - these are no batch: each has its own fate
                outcomes.append(refused(error))
        return outcomes

    async def _find_stuck(self, client: Client, command: FindStuck) -> tuple[Stuck, ...]:
        await self._list_own(client)
        if await self._may_walk(client):
            await self._list_missing(client)
        wanted, more = await self._due(client, command.limit, lambda each: each.is_wanted(command))
        found = [each for each, _ in wanted]
        found += [each for each in await self._further_on(client, more) if each.is_wanted(command)]
        return in_turn({each.name: each.stuck for each in found}.values(), command.limit)

    async def _reap(self, client: Client, command: Reap) -> Reaped:
        await self._list_own(client)
        await self._list_missing(client)
        due, _ = await self._due(client, command.limit, lambda each: each.is_expired)
        due = sorted(due, key=lambda each: each[0].expires_at)[: command.limit]
        answer = command.abandoned
        words: tuple[Word, ...] = (
            NO_TOKEN.hex(),
            int(answer.status),
            written_headers(answer.headers),
            answer.body or b"",
        )
        replies = await client.execute([script("reap").on(each.name, *words) for each, _ in due])
        afterwards, counts = Afterwards(), dict.fromkeys(_REAPED.values(), 0)
        error = None
        gone: list[tuple[bytes, int, None]] = []
        for (each, seen), reply in zip(due, replies, strict=True):
            if isinstance(reply, Exception):
                error = reply
                continue
            what, attempt = reply
            if what in _REAPED:
                counts[_REAPED[what]] += 1
                if self._keys.tells(_TOLD[what]):
                    afterwards.lines.append((replace(each.hold, attempt=attempt), _TOLD[what], None))
            if what in _GONE:
                gone.append((each.name, seen, None))
        if not self._keys.tells_all and gone:
            summary = ", ".join(f"{counts[what]} {what}" for what in ("deleted", "stripped") if counts[what])
            afterwards.lines.append((_NO_RECORD, "reaped", summary))
        await client.execute(self._keys.due.refile(gone))
        await self._keys.write(client, afterwards)
        if error is not None and not any(counts.values()):
            raise error
        return Reaped(**counts)

    async def _due(
        self, client: Client, limit: int, is_wanted: Callable[[Judged], bool]
    ) -> tuple[list[tuple[Judged, int]], dict[str, int]]:
        """Read the due records of the lists, and return the wanted ones with their times in the list; and
        which lists have more, after how many.
        """
        due = self._keys.due
        wanted: list[tuple[Judged, int]] = []
        digits = list(DIGITS)
        #: How many of each list were left on it.
        offsets = dict.fromkeys(digits, 0)
        while digits and len(wanted) < limit:
            pages = await client.read([script("due").on(due.list_of(digit), offsets[digit], PAGE) for digit in digits])
            seen: dict[bytes, int] = {}
            for page in pages:
                words = iter(page)
                seen |= {name: int(float(score)) for name, score in zip(words, words, strict=True)}
            judged = await self._judge(client, seen)
            changes = [(name, score, _new_time(judged.get(name))) for name, score in seen.items()]
            staying = {name for name, _, new in changes if new == _STAYS}
            await client.execute(due.refile([each for each in changes if each[0] not in staying]))
            wanted += [(judged[name], seen[name]) for name in seen if name in staying and is_wanted(judged[name])]
            for name in staying:
                offsets[chr(name[-1])] += 1
            digits = [digit for digit, page in zip(digits, pages, strict=True) if len(page) == 2 * PAGE]
        return wanted, {digit: offsets[digit] for digit in digits}

    async def _further_on(self, client: Client, more: dict[str, int]) -> list[Judged]:
        """Read one more page of each list that has *more*, the next one each time: the lists are in the order of time,
        and one scope with more records than a page must not hide all later ones.
        """
        due = self._keys.due
        starts = {digit: max(self._pages.get(digit, 0), offset) for digit, offset in more.items()}
        pages = await client.read(
            [script("due").on(due.list_of(digit), start, PAGE) for digit, start in starts.items()]
        )
        names = [name for page in pages for name in page[::2]]
        self._pages = {
            digit: start + PAGE
            for (digit, start), page in zip(starts.items(), pages, strict=True)
            if len(page) == 2 * PAGE
        }
        return list((await self._judge(client, names)).values())

    async def _may_walk(self, client: Client) -> bool:
        """Whether it is time for a walk, and no other process has begun one."""
        if time.monotonic() < self._walk_at:
            return False
        self._walk_at = time.monotonic() + WALK_SECONDS
        words = packed("SET", self._turn, this_process(), "NX", "PX", WALK_SECONDS * 1000)
        return await client.read_one(Call(self._turn, words)) is not None

    async def _list_own(self, client: Client) -> None:
        """List what this process knows of and has not listed yet."""
        calls = self._keys.due.rest()
        self._keys.due.listed(calls, await client.execute(calls))

    async def _list_missing(self, client: Client) -> None:
        """Walk a part of the keys, and list records that will be due. Those that are listed already stay."""
        names = await self._records.stretch(client, MAX_STEPS)
        judged = await self._judge(client, names)
        again = [(name, each.look_again_in) for name, each in judged.items()]
        calls = self._keys.due.enlist((name, delay) for name, delay in again if delay is not None)
        await client.execute(calls)

    async def _judge(self, client: Client, names: Iterable[bytes]) -> dict[bytes, Judged]:
        replies = await self._read(client, "judge", list(names))
        return {name: Judged.of(name, reply) for name, reply in replies}

    async def _read(self, client: Client, how: str, names: list[bytes], *words: Word) -> list[tuple[bytes, Reply]]:
        """Read records by a script; deleted ones, and keys that are not records, are left out."""
        found = []
        for start in range(0, len(names), CHUNK):
            chunk = names[start : start + CHUNK]
            replies = await client.read([script(how).on(name, *words) for name in chunk])
            found += [(name, reply) for name, reply in zip(chunk, replies, strict=True) if reply is not None]
        return found

    async def _erase(self, client: Client, command: Erase) -> Erased:
        return await erasing.erase(client, self._keys, command)

    async def _erase_trail(self, client: Client, command: EraseTrail) -> Erased:
        return await erasing.erase_trail(client, self._keys, command)

    async def _browse(self, client: Client, command: Browse) -> tuple[Record, ...]:
        if command.scope is not None and command.key is not None:
            names = {self._keys.name_of(command.scope, command.key)}
        else:
            # For operators, who can wait: it reads all keys.
            names = await Walk(self._pattern, "hash").stretch(client)
        replies = await self._read(client, "look", list(names), 0)
        records = (record(reply) for _, reply in replies)
        fitting = (
            each
            for each in records
            if command.scope in {None, each.scope}
            and command.key in {None, each.key}
            and command.state in {None, each.state}
            and (command.digest is None or digest_of(each.key).startswith(command.digest))
        )
        return tuple(nlargest(command.limit, fitting, key=lambda each: each.created_at))

    async def _search(self, client: Client, command: Search) -> Page:
        """Walk past some records, in no order: Redis has no index by age. A store with more than that is cut; its next
        page begins at the same place, and has to walk further.
        """
        wanted = command.wanted
        if wanted.scope is not None and wanted.key is not None:
            names, is_cut = {self._keys.name_of(wanted.scope, wanted.key)}, False
        else:
            names, is_cut = await self._some(client, command.scan)
        records = [record(reply) for _, reply in await self._read(client, "look", list(names), 0)]
        details: dict[tuple[str, str], list[str | None]] = {}
        if wanted.reason is not None:
            some = replace(wanted, reason=None)
            for each in records:
                if fits(some, each, lambda _: ()):
                    details[each.scope, each.key] = await self._details(client, each)
        # All that was read is looked at: it has no order in which a part of it could be left out.
        found = page_of(
            replace(command, scan=len(records) + 1), records, lambda each: details.get((each.scope, each.key), [])
        )
        if not is_cut:
            return replace(found, walked=len(names))
        # Newer ones may be among those that were not read.
        return Page(found.records, command.after or _BEGINNING, len(names), is_cut=True)

    async def _survey(self, client: Client, command: Survey) -> Surveyed:
        """Count what the lists tell, which is what no worker works on; and some records, or all of a small store."""
        found = await self._find_stuck(client, FindStuck(command.limit, with_pending=True))
        pending = [each.silent_for.total_seconds() for each in found if each.is_pending]
        listed = StoreSurveyed(
            in_flight=None,
            stuck=len(found) - len(pending),
            parked=None,
            accepted=len(pending),
            expired=None,
            oldest_in_flight=None,
            oldest_accepted=max(pending, default=0.0),
        )
        _, now = await self._minute(client)
        if not command.newest:
            return Surveyed(now, listed, 0, None, is_partial=True)
        names, is_cut = await self._some(client, command.newest)
        records = [record(reply) for _, reply in await self._read(client, "look", list(names), 0)]
        judged = (await self._judge(client, names)).values()
        expired = sum(each.is_expired and each.look_again_in == 0 for each in judged)
        counts = surveyed(command, records, now, expired)
        return replace(counts, gauges=listed, oldest=None, total=None, is_partial=True) if is_cut else counts

    async def _add_counts(self, client: Client, command: AddCounts) -> None:
        """Add to the hash of this minute, which Redis deletes by itself."""
        minute, _ = await self._minute(client)
        name = self._counts_of(minute)
        calls = [Call(name, packed("HINCRBY", name, outcome, n)) for outcome, n in command.counts.items()]
        for reply in await client.execute([*calls, Call(name, packed("EXPIRE", name, _COUNTS_SECONDS))]):
            if isinstance(reply, Exception):
                raise reply

    async def _read_counts(self, client: Client, command: ReadCounts) -> Minutes:
        newest, now = await self._minute(client)
        minutes = range(newest - command.minutes + 1, newest + 1)
        names = [self._counts_of(each) for each in minutes]
        counts = []
        for minute, reply in zip(
            minutes, await client.read([Call(name, packed("HGETALL", name)) for name in names]), strict=True
        ):
            words = iter(reply)
            counts += [
                (moment(minute * 60_000_000), outcome.decode(), int(n)) for outcome, n in zip(words, words, strict=True)
            ]
        return Minutes(now, tuple(counts))

    async def _minute(self, client: Client) -> tuple[int, datetime]:
        """Return the number of this minute, and the time."""
        (reply,) = await client.read([Call(b"", packed("TIME"))])
        seconds = int(reply[0])
        return seconds // 60, moment(seconds * 1_000_000 + int(reply[1]))

    def _counts_of(self, minute: int) -> bytes:
        return f"{self._keys.prefix}:counts:{minute}".encode()

    async def _some(self, client: Client, most: int) -> tuple[set[bytes], bool]:
        """Walk past about *most* records; whether there are more."""
        walk = Walk(self._pattern, "hash")
        names = await walk.stretch(client, 1)
        while not walk.is_at_end and len(names) < most:
            names |= await walk.stretch(client, 1)
        return names, not walk.is_at_end

    async def _details(self, client: Client, about: Record) -> list[str | None]:
        name = self._keys.trail_of(about.scope, about.key)
        return [entry(line).detail for line in await client.read_one(Call(name, packed("LRANGE", name, 0, -1)))]

    async def _reap_trail(self, client: Client, command: ReapTrail) -> int:
        if not self._keys.has_trail:
            return 0  # Redis deletes old trails by their TTL.
        names = await self._trails.stretch(client, MAX_STEPS)
        count = 0
        for name in names:
            if count >= command.limit:
                break
            words = (command.limit - count, microseconds(command.older_than))
            count += await client.read_one(script("reap_trail").on(name, *words))
        return count


#: The answers of the script ``reap``, and their lines in the audit trail.
_REAPED = {1: "deleted", 2: "stripped", 3: "failed"}
_TOLD = {1: "reaped", 2: "stripped", 3: "abandoned"}
_GONE = frozenset({1, 2})

#: Unless the trail is full, one line sums up what was deleted and stripped: it is about no single record.
_NO_RECORD = Hold("", "", 0, b"")

#: The place after every record.
_BEGINNING = written_place(2**61)

#: In place of a new time.
_STAYS = 0


def _new_time(judged: Judged | None) -> int | None:
    """When a record that was due has to be checked again: it may be deleted by now, or held by a worker."""
    again = None if judged is None else judged.look_again_in
    if judged is None or again is None:
        return None
    return judged.now + again if again else _STAYS


#: Every command that is carried out here.
UPKEEP: frozenset[type[Command[Any]]] = frozenset(
    {AddCounts, Browse, Erase, EraseTrail, FindStuck, ReadCounts, Reap, ReapTrail, Search, Survey}
)
