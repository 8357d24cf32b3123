"""What every request asks of the store: claims, answers, leases, as talks with the server. It sends nothing by itself.

A batch is one round trip. Beside it go, now and then, the errands of ``index.py``; and after it the lines of the audit
trail, where there is one. Neither can be one step with the change that it is about, since it has a key of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.core.commands import Claim, Complete, Renew, Verdict
from semel.core.hint import hint_of
from semel.core.record import Hold
from semel.core.state import Event, State, after
from semel.stores.base import this_process
from semel.stores.headers import written as written_headers
from semel.stores.redis.address import Address
from semel.stores.redis.courier import Courier, Talk
from semel.stores.redis.index import Index
from semel.stores.redis.replies import count, digest_of, found, microseconds, spelled, written_line
from semel.stores.redis.wire import Call, Reply, script
from semel.stores.requests import written as written_request

_logger = logging.getLogger("semel")

#: How long a trail is there after its last line, in milliseconds, where no reaper clears it sooner: a year.
_TRAIL_MILLISECONDS = b"%d" % (366 * 24 * 60 * 60 * 1000)

YES_OR_NO = {False: b"0", True: b"1"}


@dataclass(slots=True)
class Aside:
    """What has to be written down after some commands were carried out."""

    #: Of the audit trail.
    lines: list[tuple[Hold, str, str | None]] = field(default_factory=list)
    #: Records that nobody runs, and that somebody should look at, after so many microseconds.
    unattended: list[tuple[bytes, int]] = field(default_factory=list)


class Keys:
    """Talks about records below one prefix."""

    def __init__(self, address: Address, actor: Callable[[], str | None]) -> None:
        """Name *actor* in the audit trail, or this process."""
        self.prefix = address.prefix
        self.has_trail = address.audit != "off"
        self.index = Index(address.prefix)
        self.channel = f"{address.prefix}:ended".encode()
        self._actor = actor
        self._head = f"{address.prefix}:".encode()
        self._claim = script("claim")
        self._complete = script("complete")
        self._renew = script("renew")

    def name_of(self, scope: str, key: str) -> bytes:
        """Return the name of a record in the database."""
        return self._head + digest_of(scope, key)

    def trail_of(self, scope: str, key: str) -> bytes:
        """Return the name of a record's trail."""
        return b"%btrail:%b" % (self._head, digest_of(scope, key))

    def claim(self, courier: Courier, claims: Sequence[Claim]) -> Talk[list[Any]]:
        """Claim every key of *claims*, which may name a key more than once."""
        calls = [self._claim.on(self.name_of(claim.scope, claim.key), *self.of_claim(claim)) for claim in claims]
        replies = yield from self.beside(courier, calls)
        aside = Aside()
        outcomes = [
            # Anything else is an error.
            found(reply) if type(reply) is list else self._won(claim, call, aside) if reply == 1 else reply
            for claim, call, reply in zip(claims, calls, replies, strict=True)
        ]
        yield from self.afterwards(courier, aside)
        return outcomes

    def of_claim(self, claim: Claim, *more: bytes) -> list[bytes]:
        """Return the arguments that hold a claim."""
        words = [
            spelled(claim.scope),
            spelled(claim.key),
            claim.token.hex().encode(),
            claim.fingerprint.hex().encode(),
            b"%d" % microseconds(claim.lease),
            b"%d" % microseconds(claim.retention),
            claim.on_crash.encode(),
            claim.after_retention.encode(),
            self.channel,
            YES_OR_NO[claim.is_accepted],
            b"" if claim.made_at is None else b"%d" % count(claim.made_at),
            *more,
        ]
        if claim.request is not None:
            words += [spelled(written_request(claim.request)), claim.request.body]
        return words

    def complete(self, courier: Courier, commands: Sequence[Complete]) -> Talk[list[Any]]:
        """Store the answers of *commands*."""
        calls = [self._completing(command) for command in commands]
        replies = yield from self.beside(courier, calls)
        aside = Aside()
        outcomes = [
            self._completed(command, call.key, reply, aside)
            for command, call, reply in zip(commands, calls, replies, strict=True)
        ]
        yield from self.afterwards(courier, aside)
        return outcomes

    def renew(self, courier: Courier, commands: Sequence[Renew]) -> Talk[list[Any]]:
        """Prolong all leases of *commands*; whoever has one of them in vain is told which."""
        calls = [
            self._renew.on(self.name_of(hold.scope, hold.key), *of_hold(hold), b"%d" % microseconds(lease))
            for command in commands
            for hold, lease in command.holds
        ]
        replies = iter((yield from self.beside(courier, calls)) if calls else [])
        outcomes: list[Any] = []
        for command in commands:
            told = {hold: next(replies) for hold, _ in command.holds}
            error = next((reply for reply in told.values() if isinstance(reply, Exception)), None)
            lost = frozenset(hold for hold, reply in told.items() if reply == 0)
            # Those that are lost are so for good, whatever happened to the others.
            outcomes.append(lost or error or lost)
        return outcomes

    def beside(self, courier: Courier, calls: Sequence[Call]) -> Talk[list[Reply]]:
        """Deliver *calls*, and now and then something else in the same parcel."""
        errands = self.index.errands(time.monotonic())
        if not errands:
            return (yield from courier.deliver(calls))
        replies = yield from courier.deliver([*calls, *[errand.call for errand in errands]])
        self.index.done(errands, replies[len(calls) :])
        return replies[: len(calls)]

    def afterwards(self, courier: Courier, aside: Aside) -> Talk[None]:
        """Write down what the records themselves don't say."""
        if not (aside.unattended or (aside.lines and self.has_trail)):
            return
        calls = [errand.call for errand in self.index.enlist(aside.unattended)]
        if self.has_trail:
            calls += self.noting(aside.lines)
        for reply in (yield from courier.deliver(calls)):
            if isinstance(reply, Exception):
                # What was asked for is done. The list is a hint, and the trail of a Redis store has gaps.
                _logger.warning("A record was changed, and what belongs beside it could not be written: %s", reply)

    def noting(self, lines: list[tuple[Hold, str, str | None]]) -> list[Call]:
        """Return the calls that write lines of the audit trail."""
        actor = self._actor() or this_process()
        by_key: dict[bytes, list[bytes]] = {}
        for hold, event, detail in lines:
            trail = by_key.setdefault(self.trail_of(hold.scope, hold.key), [])
            trail.append(written_line(hold, event, actor, detail))
        return [script("note").on(key, _TRAIL_MILLISECONDS, *some) for key, some in by_key.items()]

    def _won(self, claim: Claim, call: Call, aside: Aside) -> Hold:
        hold = Hold(claim.scope, claim.key, 1, claim.token)
        if claim.is_accepted:
            aside.unattended.append((call.key, 0))
        else:
            self.began(call.key, claim)
        aside.lines.append((hold, "accepted" if claim.is_accepted else "claimed", None))
        return hold

    def began(self, name: bytes, claim: Claim) -> None:
        """Remember that *claim* has got its key."""
        self.index.began(name, claim.lease, time.monotonic())

    def _completing(self, command: Complete) -> Call:
        hold, answer = command.hold, command.answer
        words = [
            *of_hold(hold),
            _ENDS[command.event],
            b"%d" % answer.status,
            written_headers(answer.headers).encode(),
            *self.waking(hold, is_waking=command.wakes),
        ]
        if answer.body is not None:
            words.append(bytes(answer.body))
        return self._complete.on(self.name_of(hold.scope, hold.key), *words)

    def waking(self, hold: Hold, *, is_waking: bool) -> tuple[bytes, bytes]:
        """Return where to give a hint, and which."""
        return (self.channel, hint_of(hold.scope, hold.key).encode()) if is_waking else (b"", b"")

    def _completed(self, command: Complete, name: bytes, reply: Reply, aside: Aside) -> Any:
        if isinstance(reply, Exception):
            return reply
        if reply == _FENCED:
            return Verdict.FENCED
        is_kept = type(reply) is list
        self.index.ended(name, max(reply[0], 0) if is_kept else None)
        if is_kept or reply == _NOW:
            aside.lines.append((command.hold, _TOLD[command.event], None))
        return Verdict.DONE


#: What the script of ``complete`` answers; _NOW: it has ended by this very call.
_FENCED, _NOW = 0, 2

_ENDS = {event: str(after(State.PROCESSING, event)).encode() for event in (Event.COMPLETE, Event.FAIL)}
_TOLD = {Event.COMPLETE: "completed", Event.FAIL: "failed"}


def of_hold(hold: Hold) -> tuple[bytes, bytes]:
    """Return the arguments that name a hold."""
    return b"%d" % hold.attempt, hold.token.hex().encode()
