"""What those who clean up ask, and people who look around: many records at once, as talks with the server.

The list (``index.py``) says where to look; each record is judged by itself, by its own server's clock, and changed by a
script that judges it again. A walk through all records, now and then, lists what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from heapq import nlargest
from typing import Any, cast

from semel.core.commands import Browse, Command, FindStuck, Reap, Reaped, ReapTrail
from semel.core.key import digest_of
from semel.core.record import NOBODYS_TOKEN, Hold, OnCrash, Record, Stuck
from semel.core.upkeep import in_turn, is_due
from semel.core.value import value
from semel.errors import StoreError
from semel.stores.base import this_process
from semel.stores.headers import written as written_headers
from semel.stores.lane import refused
from semel.stores.redis.courier import Courier, Talk
from semel.stores.redis.index import DIGITS
from semel.stores.redis.keys import YES_OR_NO, Aside, Keys
from semel.stores.redis.replies import ANY_DIGEST, microseconds, only, read, record
from semel.stores.redis.walk import Walk
from semel.stores.redis.wire import Call, Reply, packed, script

#: Of one list, in one round trip.
PAGE = 200
#: Records that are read in one round trip.
CHUNK = 500
#: How far those who clean up walk at once: 10,000 keys. A smaller store is gone through each time.
MOST_STEPS = 10
#: How often, in seconds, one of those who look for stuck records walks, of all processes together. What is on the list
#: is found every time.
WALK_SECONDS = 10

_NOBODYS = NOBODYS_TOKEN.hex().encode()
_TERMINAL = frozenset({b"complete", b"failed"})


@value
class Judged:
    """As much of a record as those who clean up have to know, and the time by which to judge it."""

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
            hold=Hold(read(scope), read(key), int(attempt), bytes.fromhex(token.decode())),
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
            return None  # It is an operator's.
        return 0 if self.lease_expires_at is None else max(self.lease_expires_at - self.now, 0)

    def is_wanted(self, command: FindStuck) -> bool:
        """Whether it is one of those that are looked for. Nobody holds it: somebody should look at it now."""
        return (
            (self.state == b"processing" or (self.state == b"pending" and command.with_pending))
            and not self.is_expired
            and (self.has_request or not command.with_request)
            and (self.hold.token != NOBODYS_TOKEN or command.with_nobodys)
            and (not command.only_due or is_due(self.stuck))
        )

    @property
    def stuck(self) -> Stuck:
        """What the sweeper and the completer get to see."""
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
    """Talks about many records. One for each store, since it remembers where its walks are."""

    def __init__(self, keys: Keys) -> None:
        """Look after the records of *keys*."""
        self._keys = keys
        self._pattern = f"{keys.prefix}:{ANY_DIGEST}"
        self._records = Walk(self._pattern, "hash")
        self._trails = Walk(f"{keys.prefix}:trail:{ANY_DIGEST}", "list")
        self._walk_at = 0.0
        #: Where in each list to look next for what is hidden behind others.
        self._pages: dict[str, int] = {}
        self._turn = f"{keys.prefix}:walk".encode()
        self._talks: dict[type[Command[Any]], Callable[[Courier, Any], Talk[Any]]] = {
            Browse: self._browse,
            FindStuck: self._find_stuck,
            Reap: self._reap,
            ReapTrail: self._reap_trail,
        }

    def each(self, courier: Courier, commands: Sequence[Command[Any]]) -> Talk[list[Any]]:
        """Carry out *commands*, one after the other."""
        outcomes: list[Any] = []
        for command in commands:
            try:
                outcomes.append((yield from self._talks[type(command)](courier, command)))
            except (StoreError, ValueError) as error:
                outcomes.append(error)
            except Exception as error:  # noqa: BLE001 - these are no batch: each has its own fate
                outcomes.append(refused(error))
        return outcomes

    def _find_stuck(self, courier: Courier, command: FindStuck) -> Talk[tuple[Stuck, ...]]:
        yield from self._list_own(courier)
        if (yield from self._may_walk(courier)):
            yield from self._list_missing(courier)
        wanted, more = yield from self._due(courier, command.limit, lambda each: each.is_wanted(command))
        found = [each for each, _ in wanted]
        found += [each for each in (yield from self._further_on(courier, more)) if each.is_wanted(command)]
        return in_turn({each.name: each.stuck for each in found}.values(), command.limit)

    def _reap(self, courier: Courier, command: Reap) -> Talk[Reaped]:
        yield from self._list_own(courier)
        yield from self._list_missing(courier)
        due, _ = yield from self._due(courier, command.limit, lambda each: each.is_expired)
        due = sorted(due, key=lambda each: each[0].expires_at)[: command.limit]
        answer = command.abandoned
        words = (_NOBODYS, b"%d" % answer.status, written_headers(answer.headers).encode(), answer.body or b"")
        replies = yield from courier.deliver([script("reap").on(each.name, *words) for each, _ in due])
        aside, counts = Aside(), dict.fromkeys(_REAPED.values(), 0)
        error = None
        gone = []
        for (each, seen), reply in zip(due, replies, strict=True):
            if isinstance(reply, Exception):
                error = reply
                continue
            what, attempt = reply
            if what in _REAPED:
                counts[_REAPED[what]] += 1
                hold = Hold(each.hold.scope, each.hold.key, attempt, each.hold.token)
                aside.lines.append((hold, _TOLD[what], None))
            if what in _GONE:
                gone.append((each.name, seen, None))
        yield from courier.deliver([errand.call for errand in self._keys.index.refile(gone)])
        yield from self._keys.afterwards(courier, aside)
        if error is not None and not any(counts.values()):
            raise error
        return Reaped(**counts)

    def _due(
        self, courier: Courier, limit: int, is_wanted: Callable[[Judged], bool]
    ) -> Talk[tuple[list[tuple[Judged, int]], dict[str, int]]]:
        """Look at those on the lists whose time has come, and return the wanted ones with the times they are under; and
        which lists have more, behind so many.
        """
        index = self._keys.index
        wanted: list[tuple[Judged, int]] = []
        digits = list(DIGITS)
        #: How many of each list were left where they are.
        offsets = dict.fromkeys(digits, 0)
        while digits and len(wanted) < limit:
            pages = yield from courier.deliver(
                [script("due").on(index.list_of(digit), b"%d" % offsets[digit], b"%d" % PAGE) for digit in digits]
            )
            seen: dict[bytes, int] = {}
            for page in pages:
                words = iter(only(page))
                seen |= {name: int(float(score)) for name, score in zip(words, words, strict=True)}
            judged = yield from self._judge(courier, seen)
            changes = [(name, score, _new_time(judged.get(name))) for name, score in seen.items()]
            staying = {name for name, _, new in changes if new == _STAYS}
            yield from courier.deliver(
                [errand.call for errand in index.refile([each for each in changes if each[0] not in staying])]
            )
            wanted += [(judged[name], seen[name]) for name in seen if name in staying and is_wanted(judged[name])]
            for name in staying:
                offsets[chr(name[-1])] += 1
            digits = [digit for digit, page in zip(digits, pages, strict=True) if len(page) == 2 * PAGE]
        return wanted, {digit: offsets[digit] for digit in digits}

    def _further_on(self, courier: Courier, more: dict[str, int]) -> Talk[list[Judged]]:
        """Look at one more page of each list that has *more*, each time the next: the lists are in the order of time,
        and one scope with more than a look finds must not hide all that came after it.
        """
        index = self._keys.index
        starts = {digit: max(self._pages.get(digit, 0), offset) for digit, offset in more.items()}
        pages = yield from courier.deliver(
            [script("due").on(index.list_of(digit), b"%d" % start, b"%d" % PAGE) for digit, start in starts.items()]
        )
        names = [name for page in pages for name in only(page)[::2]]
        self._pages = {
            digit: start + PAGE
            for (digit, start), page in zip(starts.items(), pages, strict=True)
            if len(page) == 2 * PAGE
        }
        return list((yield from self._judge(courier, names)).values())

    def _may_walk(self, courier: Courier) -> Talk[bool]:
        """Whether it is time for a walk, and nobody else is about to take it."""
        if time.monotonic() < self._walk_at:
            return False
        self._walk_at = time.monotonic() + WALK_SECONDS
        words = packed("SET", self._turn, this_process(), "NX", "PX", WALK_SECONDS * 1000)
        return only((yield from courier.deliver([Call(self._turn, words)]))[0]) is not None

    def _list_own(self, courier: Courier) -> Talk[None]:
        """List what this process knows of and has not listed yet."""
        index = self._keys.index
        errands = index.rest()
        index.done(errands, (yield from courier.deliver([errand.call for errand in errands])))

    def _list_missing(self, courier: Courier) -> Talk[None]:
        """Walk a stretch, and list what somebody should look at one day. What is listed already, stays so."""
        names = yield from self._records.stretch(courier, MOST_STEPS)
        judged = yield from self._judge(courier, names)
        again = [(name, each.look_again_in) for name, each in judged.items()]
        errands = self._keys.index.enlist((name, delay) for name, delay in again if delay is not None)
        yield from courier.deliver([errand.call for errand in errands])

    def _judge(self, courier: Courier, names: Iterable[bytes]) -> Talk[dict[bytes, Judged]]:
        replies = yield from self._read(courier, "judge", list(names))
        return {name: Judged.of(name, reply) for name, reply in replies}

    def _read(self, courier: Courier, how: str, names: list[bytes], *words: bytes) -> Talk[list[tuple[bytes, Reply]]]:
        """Read records by a script; those that are gone meanwhile are left out, and so is what is no record."""
        found = []
        for start in range(0, len(names), CHUNK):
            chunk = names[start : start + CHUNK]
            replies = yield from courier.deliver([script(how).on(name, *words) for name in chunk])
            found += [(name, only(reply)) for name, reply in zip(chunk, replies, strict=True) if reply is not None]
        return found

    def _browse(self, courier: Courier, command: Browse) -> Talk[tuple[Record, ...]]:
        if command.scope is not None and command.key is not None:
            names = {self._keys.name_of(command.scope, command.key)}
        else:
            # For people, who can wait: it goes through all that there is.
            names = yield from Walk(self._pattern, "hash").stretch(courier)
        replies = yield from self._read(courier, "look", list(names), YES_OR_NO[False])
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

    def _reap_trail(self, courier: Courier, command: ReapTrail) -> Talk[int]:
        if not self._keys.has_trail:
            return 0  # What there was goes by itself.
        names = yield from self._trails.stretch(courier, MOST_STEPS)
        count = 0
        for name in names:
            if count >= command.limit:
                break
            words = (b"%d" % (command.limit - count), b"%d" % microseconds(command.older_than))
            [reply] = yield from courier.deliver([script("reap_trail").on(name, *words)])
            count += only(reply)
        return count


#: What the script of ``reap`` answers, and the line of the audit trail about it.
_REAPED = {1: "deleted", 2: "stripped", 3: "failed"}
_TOLD = {1: "reaped", 2: "stripped", 3: "abandoned"}
_GONE = frozenset({1, 2})

#: In place of a new time.
_STAYS = 0


def _new_time(judged: Judged | None) -> int | None:
    """When to look at a record again that was due: by now it may be gone, or held by somebody."""
    again = None if judged is None else judged.look_again_in
    if judged is None or again is None:
        return None
    return judged.now + again if again else _STAYS


#: Every command that is carried out here.
UPKEEP: frozenset[type[Command[Any]]] = frozenset({Browse, FindStuck, Reap, ReapTrail})
