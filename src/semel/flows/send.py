"""One operation of a client: the order in which it is written down, sent, sent again, followed and settled. What an
answer means is in ``core/retrying.py``.

The key is made before this begins, and is the same for every try.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from semel.core.intent import Beginning, Ended, Lapsed, Taken
from semel.core.message import Answer
from semel.core.outcome import RetryReason
from semel.core.retrying import (
    SUCCESSES,
    Failure,
    Final,
    Follow,
    Refused,
    Retry,
    Unknown,
    Verdict,
    judge,
    judge_failure,
    pause,
    reason_of,
    status_url,
)
from semel.core.value import value
from semel.errors import AnswerNotKept, IntentBusy, RequestOutcomeUnknown

#: Seconds between two looks at the journal while another process sends.
LOOK_SECONDS = 0.1
#: A pause may take longer than it was to, and a time limit must be above zero.
MIN_TRY_SECONDS = 0.05
#: Seconds between two looks at a status URL, where the server does not say.
FOLLOW_SECONDS = 1.0

_ACCEPTED = 202
_CLIENT_ERROR = 400
_UNAUTHORIZED = 401

_TOO_LATE = (
    "It is not known whether this request took effect, and its key is past the server's retention, so it is not sent "
    "again. Look it up; then: semel journal forget."
)
_SERVER_SAYS = "The server can't tell whether this request took effect. Look it up before you start a new one."


@value
class Reply:
    """An answer, with what the library made of it."""

    status: int
    #: Looked up by names in lower case.
    headers: Mapping[str, str]
    #: Returns its content, decoded; only asked where the answer is not a success.
    content: Callable[[], bytes]
    response: Any


@value
class NoReply:
    """A try without an answer."""

    failure: Failure
    error: Exception


@value
class Terms:
    """How one operation is sent."""

    key: str
    #: Seconds from its beginning to its end, tries and pauses together.
    deadline: float
    intent: str | None = None
    #: Whether a 202 is followed to its result.
    follows: bool = True


class SendPorts(Protocol):
    """What sending one operation takes."""

    def now(self) -> float:
        """Return the seconds of a clock that only goes forward."""

    def today(self) -> float:
        """Return the seconds since 1970."""

    def dice(self) -> float:
        """Return a random number from 0 to 1."""

    def url(self) -> str:
        """Return where the request is sent to."""

    def begin(self) -> Awaitable[Beginning]:
        """Write the intent into the journal, on the disk, or find what is there."""

    def renew(self) -> Awaitable[None]:
        """Tell the journal that this process is about to try again."""

    def settle(self, reply: Reply, /) -> Awaitable[None]:
        """Write the final answer into the journal."""

    def release(self) -> None:
        """Give the intent back to other processes, unless it is settled."""

    def attempt(self, seconds: float, /) -> Awaitable[Reply | NoReply]:
        """Send the request, and read the whole answer, in at most *seconds*."""

    def look(self, url: str, seconds: float, /) -> Awaitable[Reply | NoReply]:
        """Ask at a status URL."""

    def pause(self, seconds: float, /) -> Awaitable[None]:
        """Wait."""

    def spend(self) -> bool:
        """Take one retry from the host's quota; False: none is left."""

    def retrying(self, reason: RetryReason, /) -> None:
        """Let operators know that the request is sent again."""

    def answered(self) -> None:
        """Give the host's quota something back."""

    def stored(self, answer: Answer, /) -> Any:
        """Make a response of what the journal has."""


async def send(ports: SendPorts, terms: Terms) -> Any:
    """Send one operation until it has its answer, or its time is over; return the library's response.

    An error of the library is raised only where nothing was sent.
    """
    end = ports.now() + terms.deadline
    if terms.intent is None:
        return await _tries(ports, terms, end, was_sent=False)
    try:
        begun = await _begun(ports, end)
        if isinstance(begun, Ended):
            if begun.answer is None:
                raise AnswerNotKept(key=begun.key, intent=terms.intent)
            return ports.stored(begun.answer)
        if isinstance(begun, Lapsed):
            raise RequestOutcomeUnknown(_TOO_LATE, key=begun.key, intent=terms.intent)
        if isinstance(begun, Taken):
            raise IntentBusy(key=begun.key, intent=terms.intent)
        own = Terms(begun.key, terms.deadline, terms.intent, terms.follows)
        return await _tries(ports, own, end, was_sent=begun.is_resumed)
    finally:
        ports.release()


async def _begun(ports: SendPorts, end: float) -> Beginning:
    while True:
        found = await ports.begin()
        if not isinstance(found, Taken) or ports.now() + LOOK_SECONDS >= end:
            return found
        await ports.pause(LOOK_SECONDS)


async def _tries(ports: SendPorts, terms: Terms, end: float, *, was_sent: bool) -> Any:
    """Send until there is an end. *was_sent*: an earlier process may have sent it before."""
    tries, in_doubt = 0, False
    #: The status URL, while it is followed.
    where: str | None = None
    while True:
        left = max(end - ports.now(), MIN_TRY_SECONDS)
        got = await _tried(ports, terms, where, left, in_doubt=in_doubt or was_sent)
        verdict = _judged(ports, got) if where is None else _judged_look(ports, got)
        if isinstance(verdict, Final):
            assert isinstance(got, Reply)  # noqa: S101 - for the type checker
            ports.answered()
            if terms.intent is not None:
                await ports.settle(got)
            return got.response
        if isinstance(verdict, Retry):
            # What is said at a status URL may be about the look: the request itself is then sent again, and gets 202,
            # or the answer of the operation, marked as a replay.
            in_doubt = in_doubt or verdict.in_doubt or where is not None
            where = None
            tries += 1
            wait = pause(tries, verdict.after, ports.dice())
            if ports.now() + wait >= end or (verdict.is_counted and not ports.spend()):
                return _given_up(terms, got, in_doubt=in_doubt or was_sent)
            ports.retrying(reason_of(got.failure if isinstance(got, NoReply) else got.status))
            await ports.pause(wait)
            if terms.intent is not None:
                await ports.renew()
            continue
        assert isinstance(got, Reply)  # noqa: S101 - without an answer, the verdict is Retry
        if not isinstance(verdict, Follow):
            return _stopped(terms, got, verdict, in_doubt=in_doubt or where is not None)
        where = status_url(ports.url(), verdict.location) if terms.follows else None
        wait = pause(1, FOLLOW_SECONDS if verdict.after is None else verdict.after, ports.dice())
        if where is None or ports.now() + wait >= end:
            return got.response  # A 202 is true: it was accepted, and has not ended.
        await ports.pause(wait)


def _stopped(terms: Terms, got: Reply, verdict: Refused | Unknown, *, in_doubt: bool) -> Any:
    """Return an answer that is not the operation's, if nothing can have happened in this call.

    What an earlier process did is in the journal, and such an answer may be a challenge to log in.
    """
    if isinstance(verdict, Unknown):
        raise RequestOutcomeUnknown(_SERVER_SAYS, key=terms.key, intent=terms.intent, response=got.response)
    # One that is redirected goes on elsewhere, under the same key.
    if in_doubt and got.status >= _CLIENT_ERROR:
        raise RequestOutcomeUnknown(key=terms.key, intent=terms.intent, response=got.response)
    return got.response


def _judged(ports: SendPorts, got: Reply | NoReply) -> Verdict:
    if isinstance(got, NoReply):
        return judge_failure(got.failure)
    if got.status in SUCCESSES and got.status != _ACCEPTED:
        return _FINAL  # As judge would say, but without a look at the answer.
    return judge(got.status, got.headers, got.content(), now=ports.today())


async def _tried(
    ports: SendPorts, terms: Terms, where: str | None, seconds: float, *, in_doubt: bool
) -> Reply | NoReply:
    try:
        return await (ports.attempt(seconds) if where is None else ports.look(where, seconds))
    except Exception as error:
        if in_doubt or where is not None:
            # It ends the tries, and must not hide that an earlier one may have taken effect.
            raise RequestOutcomeUnknown(key=terms.key, intent=terms.intent) from error
        raise


def _judged_look(ports: SendPorts, got: Reply | NoReply) -> Verdict:
    """Judge what was said at a status URL. It may be about the look alone, if it is no success, and not marked as the
    answer of the operation: a replica is late, or a login is over.
    """
    verdict = _judged(ports, got)
    if isinstance(got, NoReply) or got.status in SUCCESSES or got.status == _UNAUTHORIZED:
        return verdict
    is_marked = got.headers.get("idempotent-replayed", "").strip().lower() == "true"
    return Retry() if isinstance(verdict, Final | Refused) and not is_marked else verdict


def _given_up(terms: Terms, got: Reply | NoReply, *, in_doubt: bool) -> Any:
    """Return what is known in the end: an answer, if nothing can have happened; else raise what holds the key."""
    response = got.response if isinstance(got, Reply) else None
    error = got.error if isinstance(got, NoReply) else None
    if in_doubt:
        raise RequestOutcomeUnknown(key=terms.key, intent=terms.intent, response=response) from error
    if error is not None:
        raise error
    return response


_FINAL = Final()
