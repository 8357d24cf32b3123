"""Commands on single records: claims, answers, leases, and the rarer ones of steps and operators. Commands on many
records are in ``upkeep.py``.

A batch is one round trip. Sometimes the calls of ``due.py`` go with it; and after it come the lines of the audit trail,
if there is one. Neither can be atomic with the change that it is about: it is under another key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from hiredis import ReplyError

from semel.core.commands import (
    Again,
    Claim,
    Command,
    Complete,
    Discard,
    Look,
    Mark,
    Note,
    Now,
    Park,
    ReadRequest,
    ReadTrail,
    Release,
    Renew,
    Resolution,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Unpark,
    Verdict,
)
from semel.core.hint import hint_of
from semel.core.record import NO_TOKEN, Hold
from semel.core.recovery import Progress, change, written
from semel.core.state import Event, State, after
from semel.errors import StoreError
from semel.stores.base import this_process
from semel.stores.batching import refused
from semel.stores.headers import written as written_headers
from semel.stores.milestones import written as written_milestone
from semel.stores.redis.address import Address
from semel.stores.redis.cluster import Client
from semel.stores.redis.due import DueList
from semel.stores.redis.protocol import Call, Reply, Script, Word, packed, script
from semel.stores.redis.records import (
    count,
    digest_of,
    entry,
    found,
    microseconds,
    moment,
    read,
    record,
    spelled,
    written_line,
)
from semel.stores.requests import line_of, read_back
from semel.stores.requests import written as written_request

_logger = logging.getLogger("semel")

#: How long a trail is kept after its last line, in milliseconds, if no reaper clears it sooner: a year.
_TRAIL_MILLISECONDS = 366 * 24 * 60 * 60 * 1000

#: Events that the record itself shows: only a full trail has them.
ORDINARY = frozenset({"claimed", "accepted", "completed", "failed", "reaped", "stripped"})

#: How to read a reply, and what to write after it.
Read = Callable[[Reply, "Afterwards"], Any]


@dataclass(slots=True)
class Afterwards:
    """What has to be written after some commands were carried out."""

    #: Of the audit trail.
    lines: list[tuple[Hold, str, str | None]] = field(default_factory=list)
    #: Records without a worker, that a service should look at, after so many microseconds.
    unattended: list[tuple[bytes, int]] = field(default_factory=list)


class _Batch:
    """Commands that go out as one call of a script: the terms that they share, and the words of each key."""

    __slots__ = ("names", "places", "terms", "words")

    def __init__(self, terms: tuple[Word, ...]) -> None:
        self.terms = terms
        self.places: list[int] = []
        self.names: list[bytes] = []
        self.words: list[Word] = []

    def singles(self) -> Iterator[_Batch]:
        """Return a batch for each of them."""
        width = len(self.words) // len(self.places)
        for number, (place, name) in enumerate(zip(self.places, self.names, strict=True)):
            single = _Batch(self.terms)
            single.places, single.names = [place], [name]
            single.words = self.words[number * width : (number + 1) * width]
            yield single


class Keys:
    """The commands on records below one prefix."""

    def __init__(self, address: Address, actor: Callable[[], str | None]) -> None:
        """Name *actor* in the audit trail, or this process."""
        self.prefix = address.prefix
        self.has_trail = address.audit != "off"
        #: Whether the trail has every change.
        self.tells_all = address.audit in {"all", "replays"}
        self.due = DueList(address.prefix)
        self.channel = f"{address.prefix}:ended".encode()
        self._actor = actor
        self._claim = script("claim")
        self._complete = script("complete")
        self._head = f"{address.prefix}:".encode()
        self._asks: dict[type[Command[Any]], Callable[[Any], tuple[Call | None, Read]]] = {
            Resolution: self._resolve,
            Discard: self._discard,
            Look: self._look,
            Mark: self._mark,
            Note: self._note,
            Now: self._now,
            Park: self._park,
            ReadRequest: self._read_request,
            ReadTrail: self._read_trail,
            Release: self._release,
            Save: self._save,
            Settle: self._settle,
            Sweep: self._sweep,
            TakeOver: self._take_over,
            Unpark: self._unpark,
        }

    def name_of(self, scope: str, key: str) -> bytes:
        """Return the name of a record in the database."""
        return self._head + digest_of(scope, key)

    def trail_of(self, scope: str, key: str) -> bytes:
        """Return the name of a record's trail."""
        return b"%btrail:%b" % (self._head, digest_of(scope, key))

    def tells(self, event: str) -> bool:
        """Whether *event* is in the trail, where there is one."""
        return self.tells_all or event not in ORDINARY

    async def claim(self, client: Client, claims: Sequence[Claim]) -> list[Any]:
        """Claim every key of *claims*, which may name a key more than once."""
        batches: dict[tuple[Any, ...], _Batch] = {}
        for place, each in enumerate(claims):
            is_long = each.made_at is not None or each.request is not None
            terms = each.lease, each.retention, each.on_crash, each.after_retention, each.is_accepted, is_long
            batch = batches.get(terms)
            if batch is None:
                batch = batches[terms] = _Batch(self._terms(each))
            batch.places.append(place)
            batch.names.append(self._head + digest_of(each.scope, each.key))
            batch.words += _of_claim(each, is_long=is_long)
        outcomes = await self._call(client, self._claim, list(batches.values()), len(claims))
        afterwards = Afterwards()
        won = []
        for batch in batches.values():
            for place, name in zip(batch.places, batch.names, strict=True):
                outcome = outcomes[place]
                if type(outcome) is list:
                    outcomes[place] = found(outcome)
                elif outcome == 1:
                    each = claims[place]
                    outcomes[place] = Hold(each.scope, each.key, 1, each.token)
                    won.append((name, each))
        if won:
            self._won(won, afterwards)
        if afterwards.lines or afterwards.unattended:
            await self.write(client, afterwards)
        return outcomes

    async def complete(self, client: Client, commands: Sequence[Complete]) -> list[Any]:
        """Store the answers of *commands*."""
        batches: dict[bool, _Batch] = {}
        for place, each in enumerate(commands):
            is_tombstone = each.answer.body is None
            batch = batches.get(is_tombstone)
            if batch is None:
                batch = batches[is_tombstone] = _Batch((self.channel,))
            batch.places.append(place)
            batch.names.append(self._head + digest_of(each.hold.scope, each.hold.key))
            batch.words += _of_complete(each)
        outcomes = await self._call(client, self._complete, list(batches.values()), len(commands))
        afterwards = Afterwards()
        ended = []
        for batch in batches.values():
            for place, name in zip(batch.places, batch.names, strict=True):
                outcome = outcomes[place]
                if type(outcome) is not int:
                    continue
                outcomes[place] = Verdict.DONE if outcome else Verdict.FENCED
                if outcome:
                    ended.append((name, outcome - _KEPT if outcome >= _KEPT else None))
                if outcome >= _ENDED_NOW and self.tells_all:
                    afterwards.lines.append((commands[place].hold, _TOLD[commands[place].event], None))
        self.due.ended(ended)
        if afterwards.lines:
            await self.write(client, afterwards)
        return outcomes

    async def renew(self, client: Client, commands: Sequence[Renew]) -> list[Any]:
        """Renew all leases of *commands*; each gets the set of its lost holds."""
        calls = [
            script("renew").on(self.name_of(hold.scope, hold.key), *_of_hold(hold), microseconds(lease))
            for command in commands
            for hold, lease in command.holds
        ]
        replies = iter(await self._execute(client, calls) if calls else [])
        outcomes: list[Any] = []
        for command in commands:
            told = {hold: next(replies) for hold, _ in command.holds}
            error = next((reply for reply in told.values() if isinstance(reply, Exception)), None)
            lost = frozenset(hold for hold, reply in told.items() if reply == 0)
            # A lost hold stays lost, whatever happened to the others.
            outcomes.append(lost or error or lost)
        return outcomes

    async def each(self, client: Client, commands: Sequence[Command[Any]]) -> list[Any]:
        """Carry out the rarer commands, of any type, in one round trip."""
        asked = [self._asks[type(command)](command) for command in commands]
        calls = [call for call, _ in asked if call is not None]
        replies = iter(await self._execute(client, calls) if calls else ())
        afterwards = Afterwards()
        outcomes = [_outcome(reader, call and next(replies), afterwards) for call, reader in asked]
        await self.write(client, afterwards)
        return outcomes

    async def write(self, client: Client, afterwards: Afterwards) -> None:
        """Write what is not in the records themselves."""
        calls = self.due.enlist(afterwards.unattended) if afterwards.unattended else []
        if afterwards.lines and self.has_trail:
            calls += self.noting(afterwards.lines)
        if not calls:
            return
        for reply in await client.execute(calls):
            if isinstance(reply, Exception):
                # The command itself is done. The list is a hint, and the trail of a Redis store may have gaps.
                _logger.warning("A record was changed, but its list entry or audit line was not written: %s", reply)

    def noting(self, lines: Iterable[tuple[Hold, str, str | None]]) -> list[Call]:
        """Return the calls that write lines of the audit trail."""
        actor = self._actor() or this_process()
        by_key: dict[bytes, list[bytes]] = {}
        for hold, event, detail in lines:
            trail = by_key.setdefault(self.trail_of(hold.scope, hold.key), [])
            trail.append(written_line(hold, event, actor, detail))
        return [script("note").on(key, _TRAIL_MILLISECONDS, *some) for key, some in by_key.items()]

    async def _call(self, client: Client, called: Script, batches: Sequence[_Batch], count: int) -> list[Any]:
        """Call a script once for each batch, in a Cluster once for each key; return the *count* outcomes in place."""
        if not client.takes_many_keys:
            batches = [single for batch in batches for single in batch.singles()]
        calls = [called.on_all(batch.names, (*batch.terms, *batch.words)) for batch in batches]
        outcomes: list[Any] = [None] * count
        for batch, reply in zip(batches, await self._execute(client, calls), strict=True):
            if type(reply) is not list:
                for place in batch.places:
                    # One exception that is raised in several threads would collect all of their tracebacks.
                    outcomes[place] = copy(reply)
                    outcomes[place].__cause__ = reply.__cause__
                continue
            for place, outcome in zip(batch.places, reply, strict=True):
                outcomes[place] = client.refusal(outcome) if isinstance(outcome, ReplyError) else outcome
        return outcomes

    async def _execute(self, client: Client, calls: Sequence[Call]) -> list[Reply]:
        """Carry out *calls*, and sometimes calls for the lists in the same round trip."""
        beside = self.due.calls(time.monotonic())
        if not beside:
            return await client.execute(calls)
        replies = await client.execute([*calls, *beside])
        self.due.listed(beside, replies[len(calls) :])
        return replies[: len(calls)]

    def _won(self, claims: Sequence[tuple[bytes, Claim]], afterwards: Afterwards) -> None:
        """Note that *claims* have their keys: this process runs them, or a worker has to find them."""
        now = time.monotonic()
        self.due.began([(name, now + each.lease.total_seconds()) for name, each in claims if not each.is_accepted])
        afterwards.unattended += [(name, 0) for name, each in claims if each.is_accepted]
        if self.tells_all:
            afterwards.lines += [
                (Hold(each.scope, each.key, 1, each.token), "accepted" if each.is_accepted else "claimed", None)
                for _, each in claims
            ]

    def _terms(self, claim: Claim) -> tuple[Word, ...]:
        times = microseconds(claim.lease), microseconds(claim.retention)
        return (*times, claim.on_crash, claim.after_retention, int(claim.is_accepted), self.channel)

    def _take_over(self, command: TakeOver) -> tuple[Call, Read]:
        claim = command.claim
        name = self.name_of(claim.scope, claim.key)

        def reader(reply: Reply, afterwards: Afterwards) -> Hold | Again:
            if reply is None:
                return Again.AGAIN
            attempt, event = reply
            hold = Hold(claim.scope, claim.key, attempt, claim.token)
            if event == b"accepted":
                afterwards.unattended.append((name, 0))
            else:
                self.due.began([(name, time.monotonic() + claim.lease.total_seconds())])
            if self.tells(event.decode()):
                afterwards.lines.append((hold, event.decode(), None))
            return hold

        words = (*self._terms(claim), *_of_hold(command.seen), int(command.is_abandoned))
        return script("take_over").on(name, *words, *_of_claim(claim, is_long=True)), reader

    def _release(self, command: Release) -> tuple[Call, Read]:
        hold = command.hold
        name = self.name_of(hold.scope, hold.key)

        def reader(reply: Reply, afterwards: Afterwards) -> Verdict:
            what, attempt = reply
            if what == _FENCED:
                return Verdict.FENCED
            self.due.ended([(name, None)])
            if what in _RELEASED:
                afterwards.lines.append((replace(hold, attempt=attempt), _RELEASED[what], command.reason))
            if what == _GIVEN_UP:
                afterwards.unattended.append((name, 0))
            return Verdict.DONE

        hint = (self.channel, _hint(command)) if command.wakes else (b"", b"")
        return script("release").on(name, *_of_hold(hold), _NO_TOKEN, *hint), reader

    def _save(self, command: Save) -> tuple[Call, Read]:
        words = (_steps(command.before), *_of_progress(command.progress))
        return self._fenced("save", command.hold, words, "saved", change(command.before, command.progress))

    def _mark(self, command: Mark) -> tuple[Call, Read]:
        return self._fenced("mark", command.hold, (written_milestone(command.milestone),))

    def _park(self, command: Park) -> tuple[Call, Read]:
        hold = command.hold
        name = self.name_of(hold.scope, hold.key)

        def reader(reply: Reply, afterwards: Afterwards) -> Verdict:
            if reply == _PARKED_NOW:
                self.due.ended([(name, None)])
                afterwards.lines.append((hold, "parked", command.reason))
            return _verdict(reply)

        return script("park").on(name, *_of_hold(hold), int(command.if_silent)), reader

    def _look(self, command: Look) -> tuple[Call, Read]:
        call = script("look").on(self.name_of(command.scope, command.key), 1)
        return call, lambda reply, _: None if reply is None else record(reply)

    def _settle(self, command: Settle) -> tuple[Call, Read]:
        # Scripts run one after the other: there is nothing to wait for.
        return self._look(Look(command.hold.scope, command.hold.key))

    def _now(self, _command: Now) -> tuple[Call, Read]:
        return Call(b"", packed("TIME")), lambda reply, _: moment(int(reply[0]) * 1_000_000 + int(reply[1]))

    def _read_request(self, command: ReadRequest) -> tuple[Call, Read]:
        hold = command.hold
        call = script("read_request").on(self.name_of(hold.scope, hold.key), *_of_hold(hold))
        return call, lambda reply, _: None if reply is None else read_back(read(reply[0]), reply[1])

    def _sweep(self, command: Sweep) -> tuple[Call, Read]:
        return self._fenced("sweep", command.hold, (_NO_TOKEN,), "swept")

    def _discard(self, command: Discard) -> tuple[Call, Read]:
        return self._fenced("discard", command.hold, (), "discarded")

    def _unpark(self, command: Unpark) -> tuple[Call, Read]:
        hold = command.hold
        name = self.name_of(hold.scope, hold.key)

        def reader(attempt: Reply, afterwards: Afterwards) -> Verdict:
            if attempt:
                afterwards.lines.append((replace(hold, attempt=attempt), "resolved", None))
                afterwards.unattended.append((name, 0))
            return _verdict(attempt)

        words = (*_of_hold(hold), _NO_TOKEN, *_of_progress(command.progress))
        return script("unpark").on(name, *words), reader

    def _resolve(self, command: Resolution) -> tuple[Call, Read]:
        hold, answer = command.hold, command.answer
        name = self.name_of(hold.scope, hold.key)

        def reader(reply: Reply, afterwards: Afterwards) -> Verdict:
            if reply:
                afterwards.lines.append((hold, "resolved", None))
            if reply >= _KEPT:
                afterwards.unattended.append((name, reply - _KEPT))
            return _verdict(reply)

        words: list[Word] = [*_of_hold(hold), _NO_TOKEN, int(answer.status), written_headers(answer.headers)]
        if answer.body is not None:
            words.append(bytes(answer.body))
        return script("resolve").on(name, *words), reader

    def _note(self, command: Note) -> tuple[Call | None, Read]:
        calls = self.noting([(command.hold, command.event, command.detail)]) if self.has_trail else [None]
        return calls[0], lambda _reply, _: None

    def _read_trail(self, command: ReadTrail) -> tuple[Call, Read]:
        name = self.trail_of(command.scope, command.key)
        call = Call(name, packed("LRANGE", name, 0, command.limit - 1))
        return call, lambda reply, _: tuple(entry(line) for line in reply)

    def _fenced(
        self, how: str, hold: Hold, words: tuple[Word, ...], event: str | None = None, detail: str | None = None
    ) -> tuple[Call, Read]:
        """Call a script that answers whether *hold* is still the record's; note *event* if so."""

        def reader(reply: Reply, afterwards: Afterwards) -> Verdict:
            if reply and event is not None:
                afterwards.lines.append((hold, event, detail))
            return _verdict(reply)

        return script(how).on(self.name_of(hold.scope, hold.key), *_of_hold(hold), *words), reader


#: The commands of ``Keys.each``.
OTHERS: tuple[type[Command[Any]], ...] = (
    *(Resolution, Discard, Look, Mark, Note, Now, Park, ReadRequest),
    *(ReadTrail, Release, Save, Settle, Sweep, TakeOver, Unpark),
)

_NO_TOKEN = NO_TOKEN.hex()

#: The answer of the scripts ``complete`` and ``resolve``: it has ended by this call; from 3 on, also how long it is
#: kept.
_ENDED_NOW, _KEPT = 2, 3
#: The answers of the script ``release``.
_FENCED, _FREE, _GIVEN_UP = 0, 2, 3
_RELEASED = {_FREE: "released", _GIVEN_UP: "given up"}
#: The answer of the script ``park`` if it was not parked before.
_PARKED_NOW = 2

_ENDS = {event: str(after(State.PROCESSING, event)).encode() for event in (Event.COMPLETE, Event.FAIL)}
_TOLD = {Event.COMPLETE: "completed", Event.FAIL: "failed"}


def _of_claim(claim: Claim, *, is_long: bool) -> tuple[Word, ...]:
    words = (
        claim.scope.encode("utf-8", "surrogatepass"),
        claim.key.encode("utf-8", "surrogatepass"),
        claim.token.hex(),
        claim.fingerprint.hex(),
        (line_of(claim) or "").encode(),
        (claim.traceparent or "").encode(),
    )
    if not is_long:
        return words
    made_at: Word = b"" if claim.made_at is None else count(claim.made_at)
    request = claim.request
    kept = (b"", b"") if request is None else (spelled(written_request(request)), request.body)
    return (*words, made_at, *kept)


def _of_complete(command: Complete) -> tuple[Word, ...]:
    hold, answer = command.hold, command.answer
    hint = _hint(command) if command.wakes else b""
    # An application may use an enumeration's member as its status, which the driver does not accept as a number.
    status = int(answer.status)
    words = hold.attempt, hold.token.hex(), _ENDS[command.event], status, written_headers(answer.headers), hint
    return words if answer.body is None else (*words, bytes(answer.body))


def _of_hold(hold: Hold) -> tuple[int, str]:
    return hold.attempt, hold.token.hex()


def _hint(command: Complete | Release) -> str:
    return hint_of(command.hold.scope, command.hold.key)


def _of_progress(progress: Progress) -> tuple[bytes, bytes]:
    return _steps(progress), spelled(progress.recovery_point or "")


def _steps(progress: Progress) -> bytes:
    return spelled(written(progress) or "")


def _outcome(reader: Read, reply: Reply, afterwards: Afterwards) -> Any:
    if isinstance(reply, StoreError):
        return reply
    if isinstance(reply, Exception):
        return reply if isinstance(reply, ValueError) else refused(reply)
    return reader(reply, afterwards)


def _verdict(reply: Reply) -> Verdict:
    return Verdict.DONE if reply else Verdict.FENCED
