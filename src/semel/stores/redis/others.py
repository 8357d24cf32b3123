"""What is asked less often of one record: take-overs, releases, steps, and what operators do. It sends nothing.

Each is a call and how to read its reply; a batch of them, whatever they are, is one round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from semel.core.commands import (
    Again,
    Command,
    Decree,
    Discard,
    Look,
    Mark,
    Note,
    Now,
    Park,
    ReadRequest,
    ReadTrail,
    Release,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Unpark,
    Verdict,
)
from semel.core.record import NOBODYS_TOKEN, Hold
from semel.core.recovery import Progress, change, written
from semel.errors import StoreError
from semel.stores.headers import written as written_headers
from semel.stores.lane import refused
from semel.stores.milestones import written as written_milestone
from semel.stores.redis.courier import Courier, Talk
from semel.stores.redis.keys import YES_OR_NO, Aside, Keys, of_hold
from semel.stores.redis.replies import entry, moment, read, record, spelled
from semel.stores.redis.wire import Call, Reply, packed, script
from semel.stores.requests import read_back

#: How to read a reply, and what to write down then.
Read = Callable[[Reply, Aside], Any]

_NOBODYS = NOBODYS_TOKEN.hex().encode()


def others(keys: Keys, courier: Courier, commands: Sequence[Command[Any]]) -> Talk[list[Any]]:
    """Carry out *commands*, each by itself, in one round trip."""
    asked = [_ASK[type(command)](keys, command) for command in commands]
    calls = [call for call, _ in asked if call is not None]
    replies = iter((yield from keys.beside(courier, calls)) if calls else ())
    aside = Aside()
    outcomes = [_outcome(reader, call and next(replies), aside) for call, reader in asked]
    yield from keys.afterwards(courier, aside)
    return outcomes


def _outcome(reader: Read, reply: Reply, aside: Aside) -> Any:
    if isinstance(reply, StoreError):
        return reply
    if isinstance(reply, Exception):
        return reply if isinstance(reply, ValueError) else refused(reply)
    return reader(reply, aside)


def _take_over(keys: Keys, command: TakeOver) -> tuple[Call, Read]:
    claim, seen = command.claim, command.seen
    name = keys.name_of(claim.scope, claim.key)

    def reader(reply: Reply, aside: Aside) -> Hold | Again:
        if reply is None:
            return Again.AGAIN
        attempt, event = reply
        hold = Hold(claim.scope, claim.key, attempt, claim.token)
        if event == b"accepted":
            aside.unattended.append((name, 0))
        else:
            keys.began(name, claim)
        aside.lines.append((hold, event.decode(), None))
        return hold

    more = (*of_hold(seen), YES_OR_NO[command.is_abandoned])
    return script("take_over").on(name, *keys.of_claim(claim, *more)), reader


def _release(keys: Keys, command: Release) -> tuple[Call, Read]:
    hold = command.hold
    name = keys.name_of(hold.scope, hold.key)

    def reader(reply: Reply, aside: Aside) -> Verdict:
        what, attempt = reply
        if what == _FENCED:
            return Verdict.FENCED
        keys.index.ended(name)
        if what in _RELEASED:
            aside.lines.append((replace(hold, attempt=attempt), _RELEASED[what], command.reason))
        if what == _GIVEN_UP:
            aside.unattended.append((name, 0))
        return Verdict.DONE

    words = (*of_hold(hold), _NOBODYS, *keys.waking(hold, is_waking=command.wakes))
    return script("release").on(name, *words), reader


#: What the script of ``release`` answers.
_FENCED, _FREE, _GIVEN_UP = 0, 2, 3
_RELEASED = {_FREE: "released", _GIVEN_UP: "given up"}


def _save(keys: Keys, command: Save) -> tuple[Call, Read]:
    hold, progress = command.hold, command.progress
    words = (*of_hold(hold), _steps(command.before), *_of_progress(progress))
    told = _written(hold, "saved", change(command.before, progress))
    return script("save").on(keys.name_of(hold.scope, hold.key), *words), told


def _mark(keys: Keys, command: Mark) -> tuple[Call, Read]:
    hold = command.hold
    words = (*of_hold(hold), written_milestone(command.milestone).encode())
    return script("mark").on(keys.name_of(hold.scope, hold.key), *words), lambda reply, _aside: _verdict(reply)


def _park(keys: Keys, command: Park) -> tuple[Call, Read]:
    hold = command.hold
    name = keys.name_of(hold.scope, hold.key)

    def reader(reply: Reply, aside: Aside) -> Verdict:
        if reply == _PARKED_NOW:
            keys.index.ended(name)
            aside.lines.append((hold, "parked", command.reason))
        return _verdict(reply)

    return script("park").on(name, *of_hold(hold), YES_OR_NO[command.if_silent]), reader


#: What the script of ``park`` answers when it was not parked before.
_PARKED_NOW = 2


def _look(keys: Keys, command: Look) -> tuple[Call, Read]:
    call = script("look").on(keys.name_of(command.scope, command.key), YES_OR_NO[True])
    return call, lambda reply, _aside: None if reply is None else record(reply)


def _settle(keys: Keys, command: Settle) -> tuple[Call, Read]:
    # A script is over when the next begins: there is nothing to wait for.
    return _look(keys, Look(command.hold.scope, command.hold.key))


def _now(_keys: Keys, _command: Now) -> tuple[Call, Read]:
    return Call(b"", packed("TIME")), lambda reply, _aside: moment(int(reply[0]) * 1_000_000 + int(reply[1]))


def _read_request(keys: Keys, command: ReadRequest) -> tuple[Call, Read]:
    hold = command.hold
    call = script("read_request").on(keys.name_of(hold.scope, hold.key), *of_hold(hold))
    return call, lambda reply, _aside: None if reply is None else read_back(read(reply[0]), reply[1])


def _sweep(keys: Keys, command: Sweep) -> tuple[Call, Read]:
    hold = command.hold
    call = script("sweep").on(keys.name_of(hold.scope, hold.key), *of_hold(hold), _NOBODYS)
    return call, _written(hold, "swept")


def _discard(keys: Keys, command: Discard) -> tuple[Call, Read]:
    hold = command.hold
    call = script("discard").on(keys.name_of(hold.scope, hold.key), *of_hold(hold))
    return call, _written(hold, "discarded")


def _unpark(keys: Keys, command: Unpark) -> tuple[Call, Read]:
    hold = command.hold
    name = keys.name_of(hold.scope, hold.key)

    def reader(attempt: Reply, aside: Aside) -> Verdict:
        if attempt:
            aside.lines.append((replace(hold, attempt=attempt), "resolved", None))
            aside.unattended.append((name, 0))
        return _verdict(attempt)

    return script("unpark").on(name, *of_hold(hold), _NOBODYS, *_of_progress(command.progress)), reader


def _decree(keys: Keys, command: Decree) -> tuple[Call, Read]:
    hold, answer = command.hold, command.answer
    name = keys.name_of(hold.scope, hold.key)

    def reader(reply: Reply, aside: Aside) -> Verdict:
        if reply:
            aside.lines.append((hold, "resolved", None))
            if type(reply) is list:
                aside.unattended.append((name, max(reply[0], 0)))
        return _verdict(reply)

    words = [*of_hold(hold), _NOBODYS, b"%d" % answer.status, written_headers(answer.headers).encode()]
    if answer.body is not None:
        words.append(bytes(answer.body))
    return script("decree").on(name, *words), reader


def _note(keys: Keys, command: Note) -> tuple[Call | None, Read]:
    calls = keys.noting([(command.hold, command.event, command.detail)]) if keys.has_trail else [None]
    return calls[0], lambda _reply, _aside: None


def _read_trail(keys: Keys, command: ReadTrail) -> tuple[Call, Read]:
    name = keys.trail_of(command.scope, command.key)
    call = Call(name, packed("LRANGE", name, 0, command.limit - 1))
    return call, lambda reply, _aside: tuple(entry(line) for line in reply)


def _written(hold: Hold, event: str, detail: str | None = None) -> Read:
    def reader(reply: Reply, aside: Aside) -> Verdict:
        if reply:
            aside.lines.append((hold, event, detail))
        return _verdict(reply)

    return reader


def _verdict(reply: Reply) -> Verdict:
    return Verdict.DONE if reply else Verdict.FENCED


def _of_progress(progress: Progress) -> tuple[bytes, bytes]:
    return _steps(progress), spelled(progress.recovery_point or "")


def _steps(progress: Progress) -> bytes:
    return spelled(written(progress) or "")


_ASK: dict[type[Command[Any]], Callable[[Keys, Any], tuple[Call | None, Read]]] = {
    Decree: _decree,
    Discard: _discard,
    Look: _look,
    Mark: _mark,
    Note: _note,
    Now: _now,
    Park: _park,
    ReadRequest: _read_request,
    ReadTrail: _read_trail,
    Release: _release,
    Save: _save,
    Settle: _settle,
    Sweep: _sweep,
    TakeOver: _take_over,
    Unpark: _unpark,
}

#: Every command that is carried out here.
OTHERS = frozenset(_ASK)
