"""Messages of the outbox: what is sent, how a try can end, and when the next one comes. Nothing here sends or stores.

A message is written in the transaction of the business change that it tells of, and sent later, at least once. Its id
is the same on every try and in the field that each broker has for it, so that a consumer can drop what came twice.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import field
from datetime import timedelta

from semel.core.canonical import pack
from semel.core.cursor import Walk
from semel.core.value import value
from semel.errors import ConfigurationError

#: Names of destinations, types and ordering keys are headers and routing keys at the brokers.
MAX_NAME = 255
#: Brokers take 1 MiB by default (NATS, Kafka); a message that is larger belongs in a file, with its address sent.
MAX_PAYLOAD = 1024 * 1024
MAX_HEADERS = 16 * 1024
#: A message that is ready for longer is not being sent: a relay takes milliseconds.
UNSENT_AFTER = timedelta(minutes=1)
#: A call that takes longer than this share of its time limit is not made larger: twice as much has to fit, with a
#: reserve for a link that gets slower.
MAX_SHARE = 1 / 3
#: Bytes that are not too many for any call: seconds of a slow modem.
MIN_PACE_BYTES = 64 * 1024


@value
class Message:
    """One message, as a publisher gets it."""

    #: A UUID, the same on every try. Consumers tell duplicates by it.
    id: str
    #: What happened: ``order.paid``.
    type: str
    #: The destination's name.
    to: str
    payload: bytes
    content_type: str = "application/json"
    #: Messages of one destination with the same key are sent in the order in which they were added. None: in any order.
    key: str | None = None
    #: The application's own headers, and those of CloudEvents where they were asked for.
    headers: tuple[tuple[str, str], ...] = ()
    #: The trace (W3C) that the message belongs to.
    traceparent: str | None = None
    #: When it was added, in seconds since 1970 by the store's clock.
    created_at: float = 0.0
    #: How many tries have failed so far.
    attempts: int = 0


@value
class Delivered:
    """The destination has confirmed that it has the message."""


@value
class Rejected:
    """The destination will never take this message: it becomes a dead letter at once."""

    reason: str


@value
class Failed:
    """The try failed, and another may not: it counts, and the message waits for its next try."""

    reason: str
    #: What the destination asked for (``Retry-After``), if it did.
    retry_after: timedelta | None = None
    #: Whether it was reached, and did not answer within the time limit.
    is_late: bool = field(default=False, compare=False)


@value
class Unreachable:
    """The destination could not be asked. It costs the message nothing, and the destination gets a pause."""

    reason: str
    #: Whether it was reached, and ended the connection while it had the message. A message that is alone whenever this
    #: happens is to blame: that is counted as ``Failed``.
    is_dropped: bool = field(default=False, compare=False)
    #: Whether it was reached, and did not confirm within the time limit. A message that is alone whenever this happens,
    #: while others are confirmed, is to blame.
    is_late: bool = field(default=False, compare=False)


Verdict = Delivered | Rejected | Failed | Unreachable


@value
class Schedule:
    """The pauses between the tries of one message. After the last one it becomes a dead letter."""

    pauses: tuple[timedelta, ...]
    #: Each pause is longer or shorter by up to this share.
    jitter: float = 0.2

    def pause(self, failures: int, chance: float) -> timedelta | None:
        """Return how long to wait after so many *failures*; None: it was the last try. *chance* is between 0 and 1."""
        if failures > len(self.pauses):
            return None
        return self.pauses[failures - 1] * (1 + self.jitter * (2 * chance - 1))


class Pace:
    """How much one call of a publisher gets: all that a batch may have, until that was too much for the time limit;
    from then on no more than twice what was seen to work.
    """

    def __init__(self, count: int, size: int, least: int = 1) -> None:
        """Begin with *count* messages and *size* bytes. A publisher that sends *least* messages side by side may always
        have as many.
        """
        self._most, self._least = (count, size), min(least, count)
        self.count, self.size = count, size

    def note(self, messages: Sequence[Message], verdicts: Sequence[Verdict], share: float) -> None:
        """Take note of a call, which took this *share* of its time limit."""
        if any(isinstance(each, Unreachable) or (isinstance(each, Failed) and each.is_late) for each in verdicts):
            pairs = zip(messages, verdicts, strict=True)
            sizes = [len(message.payload) for message, verdict in pairs if isinstance(verdict, Delivered)]
            # Half: the same number would take all of the time again.
            self.count = min(self.count, max(self._least, len(sizes) // 2))
            self.size = min(self.size, max(MIN_PACE_BYTES, sum(sizes) // 2))
        elif share < MAX_SHARE:
            self.count = min(self._most[0], max(self.count, 2 * len(messages)))
            self.size = min(self._most[1], max(self.size, 2 * sum(len(message.payload) for message in messages)))


@value
class Claimed:
    """What one claim got."""

    messages: tuple[Message, ...]
    #: Where the walk was; None where an index has no dead entries.
    walk: Walk | None
    #: How many messages were looked at, and how many of those were set aside.
    walked: int
    set_aside: int


@value
class Ending:
    """What became of one message of a batch: ``delivered``, ``failed``, ``dead`` or ``released``."""

    id: str
    ending: str
    #: When a failed one is tried next.
    pause: timedelta | None = None
    error: str | None = None


def _seconds(*numbers: float) -> tuple[timedelta, ...]:
    return tuple(timedelta(seconds=number) for number in numbers)


#: For brokers: what they refuse for now they take within minutes, or a person has to look. About three hours in all.
BROKER_SCHEDULE = Schedule(_seconds(1, 5, 15, 60, 300, 900, 1800, 3600, 3600))
#: The example schedule of Standard Webhooks: 75 hours.
WEBHOOK_SCHEDULE = Schedule(
    _seconds(5, 300, 1800, *(hours * 3600 for hours in (2, 5, 10, 14, 20, 24))),
)

#: How long a destination that can't be reached is left alone: a hiccup is over soon, and an outage is asked about every
#: 30 s, by one message.
BREAKER_PAUSES = _seconds(1, 5, 30)


def breaker_pause(failures: int) -> timedelta:
    """Return how long to leave a destination alone after so many probes in a row have failed, 1 or more."""
    return BREAKER_PAUSES[min(failures, len(BREAKER_PAUSES)) - 1]


def message_id(scope: str, key: str, *, step: str, type_: str, to: str, number: int) -> str:
    """Return the id of a message that an operation publishes: the same whenever its handler runs again.

    *step* is the phase that it is published in, or empty; *number* counts the messages of this type and destination
    that the same step has published before.
    """
    parts = (scope, key, step, type_, to, str(number))
    packed = pack(tuple(part.encode("utf-8", "surrogatepass") for part in parts))
    # Version 8: a UUID of one's own making. The key is among the parts, too: HMAC pads it with zeros.
    return _marked(hmac.digest(key.encode("utf-8", "surrogatepass"), packed, "sha256")[:16], 8)


def time_ordered_id(milliseconds: int, random: bytes) -> str:
    """Return a UUID of version 7 from the time and ten random bytes: new ones come last in every index."""
    # A clock that is off by years is no reason to fail: the time is for the order alone.
    return _marked((milliseconds % 2**48).to_bytes(6, "big") + random, 7)


def _marked(data: bytes, version: int) -> str:
    """Write 16 bytes as a UUID of this version."""
    digits = data.hex()
    return (
        f"{digits[:8]}-{digits[8:12]}-{version}{digits[13:16]}-{0x80 | data[8] & 0x3F:02x}{digits[18:20]}-{digits[20:]}"
    )


def waves(messages: Sequence[Message]) -> list[list[Message]]:
    """Split a batch into waves, to be sent one after the other: of each key, one message in each wave, in order.

    A message may be sent only when all before it with the same key were confirmed: sent together, the second could
    arrive where the first did not.
    """
    split: list[list[Message]] = []
    counts: dict[str, int] = {}
    for message in messages:
        wave = 0
        if message.key is not None:
            wave = counts.get(message.key, 0)
            counts[message.key] = wave + 1
        if wave == len(split):
            split.append([])
        split[wave].append(message)
    return split


def check_name(what: str, name: object) -> str:
    """Return *name*, if it can be that of a destination, a type or a key."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ConfigurationError(f"{what} is a text of 1 to {MAX_NAME} printable characters, not {_shown(name)}.")
    return name  # What is printable can be written as UTF-8: lone surrogates are not.


def _shown(name: object) -> str:
    shown = ascii(name)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"  # noqa: PLR2004 - a line
