"""One operation on its way: the ports of ``flows/send.py`` in which no library of HTTP has a part. How a request is
sent and an answer is read, each library's own file says.
"""

from __future__ import annotations

import logging
import random
import secrets
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from semel.client.journal import Journal
from semel.client.options import Options
from semel.core.credentials import NEVER_STORED, looks_secret
from semel.core.events import ClientRetried
from semel.core.intent import Beginning, Begun, Outgoing, Wish
from semel.core.message import Answer
from semel.core.outcome import RetryReason
from semel.core.retrying import Origin
from semel.errors import ClientError, JournalError, RedirectRefused, RequestOutcomeUnknown
from semel.flows.send import Reply, Terms
from semel.telemetry.stream import count, sinks

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger("semel")

#: Of a request that is not sent to a status URL: it asks, and has no body.
NOT_OF_A_LOOK = frozenset(
    {"expect", "prefer", "transfer-encoding", "content-length", "content-type", "content-encoding"}
)
_EVENT_STREAM = "text/event-stream"
#: A try waits for a place, a connection, the request and the answer, and for each no longer than the deadline.
_MAX_STEPS = 4
#: Of what tells one sender of an intent from another.
_TOKEN_BYTES = 16
#: Keys of operations that may have taken effect, and where: a caller may send one again, in a request that is new.
_doubted: dict[tuple[Origin, str], None] = {}
_lock = threading.Lock()
MAX_DOUBTED = 1000


def _steady() -> float:
    """Return the seconds of a clock that only goes forward: on Linux, the monotonic one stands still asleep."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class Clock:
    """Counts the seconds since an operation began, by the clock that says most: a virtual machine that was paused knows
    of it by the time of day alone, which may be set back.
    """

    __slots__ = ("_steady", "_today")

    def __init__(self) -> None:
        """Begin now."""
        self._steady, self._today = _steady(), time.time()

    def now(self) -> float:
        """Return the seconds since then."""
        return max(_steady() - self._steady, time.time() - self._today)


class Exchange(ABC):
    """What sending takes, apart from the library: clocks, dice, the quota, the journal."""

    today = staticmethod(time.time)
    dice = staticmethod(random.random)

    #: Whether the server has sent the request on to another URL.
    is_redirected = False

    def __init__(self, options: Options, place: Origin, terms: Terms, clock: Clock, *, is_key_given: bool) -> None:
        """Nothing is sent or written yet; *place* is where it goes."""
        self.options = options
        self.clock = clock
        self.now = clock.now
        self.terms = terms
        self.key = terms.key
        self._is_key_given = is_key_given
        self._place = place
        self._token = b""
        #: Whether the journal has it for us.
        self._is_ours = False
        #: What the journal has said of earlier processes. Until it has said something, they may have sent it.
        self._was_in_doubt = True

    def spend(self) -> bool:
        """Take one retry from the host's quota."""
        return self.options.quotas.spend(self._place)

    def retrying(self, reason: RetryReason) -> None:
        """Let operators know, if there is a sink."""
        if sinks():
            count(ClientRetried(reason))

    def answered(self) -> None:
        """Give something back."""
        self.options.quotas.answered(self._place)

    async def begin(self) -> Beginning:
        """Write the intent down."""
        self._token = self._token or secrets.token_bytes(_TOKEN_BYTES)
        wish = Wish(
            self.intent,
            self.key,
            self.outgoing(),
            self.options.retention.total_seconds(),
            self.options.seconds,
            self._is_key_given,
            self.is_redirected,
            self.options.header,
            self.options.account,
        )
        # Before the call: it may be cancelled when the entry is made.
        self._is_ours = True
        found = await self.call(self.journal.begin, wish, self._token)
        if isinstance(found, Begun):
            self._was_in_doubt = found.is_resumed
            self.journal.leases.hold(self.intent, self._token, _MAX_STEPS * self.options.seconds)
            self.key = found.key
            self.restore(found.outgoing)
        else:
            self._is_ours = False
        return found

    async def renew(self) -> bool:
        """Keep the intent for one more try."""
        try:
            return await self.call(self.journal.renew, self.intent, self._token)
        except JournalError as error:  # Others may send as well, with the same key.
            _logger.warning("The journal could not renew %r: %s", self.intent, error)
            return False

    async def is_held(self) -> bool:
        """Ask the journal."""
        try:
            return await self.call(self.journal.is_held, self.intent, self._token)
        except JournalError as error:  # As above.
            _logger.warning("The journal can't tell which process has %r: %s", self.intent, error)
            return False

    async def settle(self, reply: Reply, *, is_certain: bool) -> bool:
        """Write the answer down. Without it, the operation is pending, and the server has its answer."""
        token = None if is_certain else self._token
        try:
            is_settled = await self.call(self.journal.settle, self.intent, self.key, self.answer_of(reply), token=token)
        except JournalError as error:
            _logger.warning("The journal could not keep the answer of %r: %s", self.intent, error)
            return is_certain or await self.is_held()
        if not (is_certain or is_settled):
            return False
        self.journal.leases.drop(self.intent, self._token)
        self._is_ours = False
        return True

    def release(self, *, in_doubt: bool) -> None:
        """Give the intent back."""
        if in_doubt and self.terms.intent is None:  # Of an intent, the journal knows.
            with _lock:
                if len(_doubted) >= MAX_DOUBTED:
                    del _doubted[next(iter(_doubted))]
                _doubted[self._place, self.key] = None
        if in_doubt or self.terms.was_sent:
            self.leave_doubt(in_doubt=in_doubt)
        if self._is_ours:
            self._is_ours = False
            self.journal.leases.drop(self.intent, self._token)
            try:
                self.journal.release(self.intent, self._token, in_doubt=in_doubt or self._was_in_doubt)
            except JournalError as error:  # It is free when its lease is over.
                _logger.warning("The journal could not release %r: %s", self.intent, error)

    def is_streamed(self, headers: Mapping[str, str]) -> bool:
        """Whether an answer is handed over as it comes, by what its head says."""
        length = headers.get("content-length", "")
        is_large = length.isdecimal() and float(length) > self.options.max_answer
        return is_large or _EVENT_STREAM in headers.get("content-type", "")

    @property
    def journal(self) -> Journal:
        """The journal: an intent without one is refused before."""
        opened = self.options.opened
        assert opened is not None  # noqa: S101 - for the type checker
        return opened

    @property
    def intent(self) -> str:
        """The intent: only asked where there is one."""
        assert self.terms.intent is not None  # noqa: S101 - for the type checker
        return self.terms.intent

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what waits for the disk."""
        return function(*args, **kwargs)

    async def pause(self, seconds: float) -> None:
        """Wait, in this thread."""
        time.sleep(seconds)  # noqa: ASYNC251 - on a loop, it is another method

    @abstractmethod
    def method(self) -> str:
        """Return the request's method."""

    @abstractmethod
    def url(self) -> str:
        """Return where it is sent to."""

    @abstractmethod
    def outgoing(self) -> Outgoing:
        """Return the request as it is sent."""

    @abstractmethod
    def restore(self, outgoing: Outgoing) -> None:
        """Send what the journal has: the same key and the same bytes."""

    @abstractmethod
    def answer_of(self, reply: Reply) -> Answer:
        """Return what the journal keeps of an answer."""

    @abstractmethod
    def leave_doubt(self, *, in_doubt: bool) -> None:
        """Have a request that is redirected take along whether it may have taken effect."""


def terms_of(options: Options, place: Origin, key: str, intent: str | None, clock: Clock, *, was_sent: bool) -> Terms:
    """Return how a request is sent: one that may have taken effect before it was redirected, not past the retention."""
    left = options.retention.total_seconds() - clock.now() if was_sent else options.seconds
    return Terms(key, min(options.seconds, left), intent, options.follow_accepted, was_sent or (place, key) in _doubted)


def is_untrusted(error: BaseException) -> bool:
    """Whether the server's certificate was refused, which does not change with time."""
    seen: BaseException | None = error
    for _ in range(10):  # A chain of causes is short, unless it is a circle.
        if seen is None:
            return False
        if isinstance(seen, ssl.SSLCertVerificationError) or any(
            isinstance(each, ssl.SSLCertVerificationError) for each in (*seen.args, getattr(seen, "reason", None))
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def redirect_refused(
    key: str, intent: str | None, place: Origin, there: Origin | None, *, in_doubt: bool
) -> ClientError:
    """Return the error for a redirect from *place* that is not followed; *there* is None where it is not known."""
    words = None
    if there is not None and (place[0], there[0]) == ("http", "https") and place[1] == there[1]:
        words = (
            f"This request was redirected from http to https on {place[1]}, and was not sent there: the first try has "
            "gone out in the clear. Write https:// in its URL."
        )
    refused = RedirectRefused(words, key=key, intent=intent)
    if not in_doubt:
        return refused
    # What was sent before the redirect may have taken effect: this comes first.
    unknown = RequestOutcomeUnknown(key=key, intent=intent)
    unknown.__cause__ = refused
    return unknown


def is_left_behind(name: str) -> bool:
    """Whether a header, by its name in lower case, is not for the origin that a redirect to the result leads to. Those
    that every library knows it sees to: it may have set them anew, from its cookies or from ``.netrc``.
    """
    return looks_secret(name) and name not in NEVER_STORED


def looked_at(headers: list[tuple[Any, Any]], header: str) -> list[tuple[Any, Any]]:
    """Return the headers of a request to a status URL: those of the operation, without its key and its body's."""
    return [
        (name, said)
        for name, said in headers
        if (text := (name.decode("latin-1") if isinstance(name, bytes) else name).lower()) not in NOT_OF_A_LOOK
        and text != header.lower()
    ]
