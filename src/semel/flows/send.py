"""One operation of a client: the order in which it is written down, sent, sent again, followed and settled. What an
answer means is in ``core/retrying.py``.

The key is made before this begins, and is the same for every try.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from semel.core.intent import TOO_LATE, Beginning, Ended, Lapsed, Taken
from semel.core.message import Answer
from semel.core.outcome import RetryReason
from semel.core.retrying import (
    SUCCESSES,
    Failure,
    Final,
    Follow,
    Moved,
    Refused,
    Retry,
    Unknown,
    Verdict,
    judge,
    judge_failure,
    judge_look,
    pause,
    reason_of,
    status_url,
)
from semel.core.value import value
from semel.errors import AnswerNotKept, IntentBusy, RequestOutcomeUnknown

#: Seconds between two looks at the journal while another process sends.
LOOK_SECONDS = 0.1
#: A deadline may be over before the first try, and a time limit must be above zero.
MIN_TRY_SECONDS = 0.05
#: Seconds between two looks at a status URL, where the server does not say.
FOLLOW_SECONDS = 1.0

_ACCEPTED = 202
#: They ask for credentials, which the library may then send.
_CHALLENGES = frozenset({401, 407})

_INTERRUPTED = "A request with the key {} was under way: it is not known whether it took effect."
_SERVER_SAYS = "The server can't tell whether this request took effect. Look it up before you start a new one."


@value
class Reply:
    """An answer, with what the library made of it."""

    status: int
    #: Looked up by names in lower case.
    headers: Mapping[str, str]
    #: Returns its content, decoded; not asked where the answer to the request itself is a success.
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
    #: Whether it may have taken effect before this call: in an earlier process, or before it was redirected.
    was_sent: bool = False


class _Doubt:
    """Whether a try may have taken effect: in this call, or before it."""

    __slots__ = ("before", "here")

    def __init__(self, *, before: bool) -> None:
        self.before = before
        self.here = False

    @property
    def is_left(self) -> bool:
        return self.here or self.before


class SendPorts(Protocol):
    """What sending one operation takes."""

    def now(self) -> float:
        """Return the seconds since the operation began, those in which this machine slept among them."""

    def today(self) -> float:
        """Return the seconds since 1970."""

    def dice(self) -> float:
        """Return a random number from 0 to 1."""

    def method(self) -> str:
        """Return the request's method."""

    def url(self) -> str:
        """Return where the request is sent to."""

    def begin(self) -> Awaitable[Beginning]:
        """Write the intent into the journal, on the disk, or find what is there."""

    def renew(self) -> Awaitable[bool]:
        """Tell the journal that this process is about to try again; False: others may have taken the intent over.
        Past the server's retention, this raises RequestOutcomeUnknown.
        """

    def is_held(self) -> Awaitable[bool]:
        """Return whether the intent is still this process's; False: others may have taken it over, and sent it."""

    def settle(self, reply: Reply, /, *, is_certain: bool) -> Awaitable[bool]:
        """Write the final answer into the journal. One that is not certain is not the operation's answer if another
        process may have sent it meanwhile: then it is not written, and this returns False.
        """

    def release(self, *, in_doubt: bool) -> None:
        """End this call. Give an intent that is not settled back to other processes, with the doubt that is left; a
        request that is redirected takes the doubt along.
        """

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
    doubt = _Doubt(before=terms.was_sent)
    try:
        if terms.intent is None:
            return await _noted(ports, terms, end, doubt)
        begun = await _begun(ports, end)
        if isinstance(begun, Ended):
            if begun.answer is None:
                raise AnswerNotKept(key=begun.key, intent=terms.intent)
            return ports.stored(begun.answer)
        if isinstance(begun, Lapsed):
            raise RequestOutcomeUnknown(TOO_LATE, key=begun.key, intent=terms.intent)
        if isinstance(begun, Taken):
            raise IntentBusy(key=begun.key, intent=terms.intent)
        doubt.before = doubt.before or begun.is_resumed
        own = Terms(begun.key, terms.deadline, terms.intent, terms.follows)
        return await _noted(ports, own, end, doubt)
    finally:
        ports.release(in_doubt=doubt.is_left)


async def _begun(ports: SendPorts, end: float) -> Beginning:
    while True:
        found = await ports.begin()
        if not isinstance(found, Taken) or ports.now() + LOOK_SECONDS >= end:
            return found
        await ports.pause(LOOK_SECONDS)


async def _noted(ports: SendPorts, terms: Terms, end: float, doubt: _Doubt) -> Any:
    """Send it. An interrupt, or the end of a task, is not ours to replace: it takes the key along in a note."""
    try:
        return await _tries(ports, terms, end, doubt)
    except BaseException as error:
        if doubt.here and not isinstance(error, Exception):
            error.add_note(_INTERRUPTED.format(terms.key))
        raise


async def _tries(ports: SendPorts, terms: Terms, end: float, doubt: _Doubt) -> Any:
    """Send until there is an end."""
    tries = 0
    #: The status URL, while it is followed.
    where: str | None = None
    _check_time(ports, terms, end)
    while True:
        left = max(end - ports.now(), MIN_TRY_SECONDS)
        was_in_doubt, in_doubt = doubt.here, doubt.here or doubt.before
        doubt.here = True  # Until there is a word of it: this may be cancelled.
        got = await _tried(ports, terms, where, left, in_doubt=in_doubt)
        verdict = _judged(ports, got, where, in_doubt=in_doubt)
        if isinstance(verdict, Final):
            ports.answered()
        if not await _is_kept(ports, terms, got, where, verdict, in_doubt=in_doubt):
            doubt.before = True
            verdict = _judged(ports, got, where, in_doubt=True)
        if isinstance(verdict, Final):
            assert isinstance(got, Reply)  # noqa: S101 - for the type checker
            doubt.here = terms.intent is not None  # If it can't be written down, the doubt stays, for the next process.
            return got.response
        if isinstance(verdict, Retry):
            # What is said at a status URL may be about the look: the request itself is then sent again, and gets 202,
            # or the answer of the operation, marked as a replay.
            doubt.here = was_in_doubt or verdict.in_doubt or where is not None
            where = None
            tries += 1
            if not (await _is_time_for(ports, verdict, tries, end) and await _is_noted(ports, terms, end, doubt)):
                return _given_up(terms, got, in_doubt=doubt.is_left)
            ports.retrying(reason_of(got.failure if isinstance(got, NoReply) else got.status))
            continue
        assert isinstance(got, Reply)  # noqa: S101 - without an answer, the verdict is Retry
        if not isinstance(verdict, Follow):
            doubt.here = was_in_doubt or where is not None or isinstance(verdict, Unknown)
            return _stopped(terms, got, verdict, doubt)
        if verdict.location is not None or where is None:
            where = status_url(ports.url(), verdict.location or "") if terms.follows else None
        wait = pause(1, FOLLOW_SECONDS if verdict.after is None else verdict.after, ports.dice())
        if where is None or ports.now() + wait >= end:
            return got.response  # A 202 is true: it was accepted, and has not ended.
        await ports.pause(wait)


def _check_time(ports: SendPorts, terms: Terms, end: float) -> None:
    """Refuse a first try after the deadline, if it may have been sent before: by another process, while this one was
    stopped.
    """
    if (terms.intent is not None or terms.was_sent) and ports.now() >= end:
        raise RequestOutcomeUnknown(key=terms.key, intent=terms.intent)


async def _is_time_for(ports: SendPorts, verdict: Retry, tries: int, end: float) -> bool:
    """Wait until the request is sent again; False: it is not."""
    wait = pause(tries, verdict.after, ports.dice())
    if ports.now() + wait >= end or (verdict.is_counted and not ports.spend()):
        return False
    await ports.pause(wait)
    return True


async def _is_noted(ports: SendPorts, terms: Terms, end: float, doubt: _Doubt) -> bool:
    """Tell the journal of the next try; False: it is too late for one."""
    doubt.before = not (terms.intent is None or await ports.renew()) or doubt.before
    # If the process was stopped, or the machine slept, the server may have forgotten the key by now.
    return ports.now() < end


async def _is_kept(
    ports: SendPorts, terms: Terms, got: Reply | NoReply, where: str | None, verdict: Verdict, *, in_doubt: bool
) -> bool:
    """Write a final answer down; False: it means something else, since this process may have lost its lease. The one
    that took the intent over may have sent it, and an answer that says nothing of that is not the operation's.
    """
    if terms.intent is None:
        return True
    if isinstance(verdict, Final) and isinstance(got, Reply):
        is_certain = in_doubt or isinstance(_judged(ports, got, where, in_doubt=True), Final)
        return await ports.settle(got, is_certain=is_certain)
    return in_doubt or isinstance(verdict, Follow | Unknown) or await ports.is_held()


def _stopped(terms: Terms, got: Reply, verdict: Refused | Moved | Unknown, doubt: _Doubt) -> Any:
    """Return an answer that is not the operation's, if nothing can have happened before it."""
    if isinstance(verdict, Unknown):
        raise RequestOutcomeUnknown(_SERVER_SAYS, key=terms.key, intent=terms.intent, response=got.response)
    # One that is redirected goes on elsewhere, with the same key. What an earlier process did is in the journal, and
    # a challenge is for the library, which comes back with credentials.
    is_passed_on = isinstance(verdict, Moved) or (got.status in _CHALLENGES and not doubt.here)
    if doubt.is_left and not is_passed_on:
        raise RequestOutcomeUnknown(key=terms.key, intent=terms.intent, response=got.response)
    doubt.here = doubt.here or (isinstance(verdict, Refused) and verdict.in_doubt)
    return got.response


def _judged(ports: SendPorts, got: Reply | NoReply, where: str | None, *, in_doubt: bool) -> Verdict:
    if isinstance(got, NoReply):
        return judge_failure(got.failure)
    if where is not None:
        return judge_look(got.status, got.headers, got.content(), now=ports.today())
    if got.status in SUCCESSES and got.status != _ACCEPTED:
        return _FINAL  # As judge would say, but without a look at the answer.
    method = ports.method()
    return judge(got.status, got.headers, got.content(), now=ports.today(), method=method, in_doubt=in_doubt)


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
