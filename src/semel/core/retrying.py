"""What a client does about an answer, or about none: one pure function over tables. It sends nothing and waits for
nothing.

``clients/vectors.json`` has its cases; the client in JavaScript follows the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any
from urllib.parse import urljoin, urlsplit

from semel.core.outcome import RetryReason
from semel.core.policy import FINAL_STATUSES
from semel.core.value import value

#: Seconds: the first pause is at most this long, and the next at most twice as long, up to the longest.
FIRST_PAUSE = 0.1
MAX_PAUSE = 10.0
#: A pause that the server asks for is lengthened by up to this part of it: clients must not come back all at once.
SPREAD = 0.1
#: Seconds. A longer Retry-After is read as this: no deadline is as long.
MAX_RETRY_AFTER = 86_400.0 * 366

#: Retries that a host gets at once; then one for every ten answers, so that a server in trouble has at most a tenth
#: more to do.
QUOTA_RETRIES = 10.0
QUOTA_PER_ANSWER = 0.1
#: Seconds. One more retry comes back in this time, for a client that sends little.
QUOTA_SECONDS = 30.0


class Failure(Enum):
    """What became of a try without an answer."""

    #: No connection: the request was not sent.
    NOT_SENT = "not sent"
    #: The connection was lost, or no answer came in time: the request may have been carried out.
    LOST = "lost"


_REASONS: dict[int, RetryReason] = {
    409: "conflict",
    425: "conflict",
    429: "too_many",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
}


def reason_of(got: Failure | int) -> RetryReason:
    """Say in a word why a request is sent again, after a failure or an answer with this status."""
    if isinstance(got, Failure):
        return "not_sent" if got is Failure.NOT_SENT else "lost"
    return _REASONS.get(got, "other")


@value
class Final:
    """The operation has this answer, and will have no other."""


@value
class Refused:
    """The answer is not the operation's, and another try would get the same. It says nothing of earlier tries."""

    #: Whether this try may have taken effect all the same: a server error that is not to be sent again.
    in_doubt: bool = False


@value
class Moved:
    """The same request is to be sent to another URL, with the same key: nothing was run here."""


@value
class Follow:
    """It was accepted, and its result will be at this address."""

    #: None: where this was said.
    location: str | None
    #: Seconds.
    after: float | None


@value
class Retry:
    """Send the same request again."""

    #: Seconds, as the server asks; None: as the client thinks right.
    after: float | None = None
    #: Whether this try may have taken effect, or still may.
    in_doubt: bool = True
    #: Whether it is counted: a server that is busy with this very operation is not in trouble.
    is_counted: bool = True


@value
class Unknown:
    """The server itself can't tell whether the operation took effect."""


Verdict = Final | Refused | Moved | Follow | Retry | Unknown


class Meaning(Enum):
    """What a problem's code or a status means."""

    #: The operation's own answer, whatever came before.
    ANSWER = "answer"
    #: The operation's answer, unless an earlier try is in doubt.
    FINAL = "final"
    #: Not about the operation, but about who asks, where and how.
    REFUSED = "refused"
    UNKNOWN = "unknown"
    #: It runs at this moment.
    BUSY = "busy"
    #: Nothing was run.
    LATER = "later"
    #: It may have been run.
    DOUBT = "doubt"


#: The codes of Semel's problems (``docs/reference/problems.md``), and two of Stripe's.
CODES = {
    "idempotency-key-in-progress": Meaning.BUSY,
    "idempotency_key_in_use": Meaning.BUSY,
    "lock_timeout": Meaning.LATER,
    "request-body-incomplete": Meaning.LATER,
    "no-effect": Meaning.LATER,
    "shutting-down": Meaning.LATER,
    "store-unavailable": Meaning.LATER,
    "upstream-unreachable": Meaning.LATER,
    "answer-not-stored": Meaning.DOUBT,
    "operation-unfinished": Meaning.DOUBT,
    "upstream-lost": Meaning.DOUBT,
    "upstream-timeout": Meaning.DOUBT,
    "idempotency-key-expired": Meaning.UNKNOWN,
    "operation-abandoned": Meaning.UNKNOWN,
    "operation-expired": Meaning.UNKNOWN,
    "operation-not-found": Meaning.UNKNOWN,
    "outcome-unknown": Meaning.UNKNOWN,
    "operation-failed": Meaning.ANSWER,
    "response-not-replayable": Meaning.ANSWER,
    # With the same bytes every time, it may be an earlier try that the server takes for the other request.
    "idempotency-key-reused": Meaning.FINAL,
    "idempotency-key-invalid": Meaning.REFUSED,
    "idempotency-key-missing": Meaning.REFUSED,
    "idempotency-scope-missing": Meaning.REFUSED,
    "identity-refused": Meaning.REFUSED,
    "request-ambiguous": Meaning.REFUSED,
    "request-body-too-large": Meaning.REFUSED,
    "unauthenticated": Meaning.REFUSED,
}

#: Statuses that mean something else than ``FINAL_STATUSES`` says, where nothing in the answer says more.
STATUSES = {
    # Without an address to go to.
    307: Meaning.REFUSED,
    308: Meaning.REFUSED,
    408: Meaning.DOUBT,
    425: Meaning.LATER,
    429: Meaning.LATER,
    501: Meaning.FINAL,
    505: Meaning.FINAL,
}

#: In the order in which they are asked. Adyen's says something only when it is true.
DIRECTIVES = ("stripe-should-retry", "x-should-retry", "transient-error")

#: Redirects that leave the method and the body as they are. For ``POST``, the first two make a ``GET`` of it.
_MOVED = frozenset({301, 302, 307, 308})
_MOVED_FOR_POST = frozenset({307, 308})

#: Refusals of what the request says, which only the application gives: also after a try that is in doubt, since a
#: server that honours keys would have answered with that try's answer. A gateway gives the second, too, but not in
#: JSON.
_OF_THE_APPLICATION = frozenset({402, 422})
_BAD_REQUEST = 400
#: In doubt, it is as likely that the earlier try is being carried out: not all servers say so.
_CONFLICT = 409

#: What says at a status URL that it has not ended, where the status does not: in lower case, letters only.
_RUNNING = frozenset({"running", "queued", "inprogress", "notstarted", "processing"})
_NO_LETTERS = re.compile(r"[^a-z]")

_IN_MILLISECONDS = ("retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after")
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?")
_ACCEPTED = 202
_UNAUTHORIZED = 401
SUCCESSES = range(200, 300)
_SERVER_ERROR = 500


#: Scheme, host and port.
Origin = tuple[str, str, int | None]

PORTS = {"http": 80, "https": 443}


def judge(  # noqa: PLR0911 - in the order of what counts most
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
    method: str = "POST",
    in_doubt: bool = False,
) -> Verdict:
    """Say what an answer to a request with a key means.

    *headers* are looked up by names in lower case. *now* is in seconds since 1970, and counts only where the answer
    has no ``Date``. With *in_doubt* an earlier try may have taken effect: then only what the server can't have said
    without a look at the key, or at the content, is the operation's answer.
    """
    after = retry_after(headers, now=now)
    if status == _ACCEPTED and (location := headers.get("location")):
        return Follow(location, after)
    if status in SUCCESSES:
        return Final()  # Whatever it says: it is the application's.
    if status in (_MOVED_FOR_POST if method == "POST" else _MOVED) and headers.get("location"):
        return Moved()  # Marked or not: stored as an answer, it would be followed to itself.
    if is_replayed(headers):
        return Final()  # It is what was stored, and the next try would get the same: a server error, too.
    problem = _problem(headers, body)
    known = CODES.get(_code(problem))
    if known is not None:
        return _verdict(Meaning.REFUSED if in_doubt and known is Meaning.FINAL else known, after)
    meaning = _by_status(status, after)
    if in_doubt and meaning is Meaning.FINAL:
        meaning = _in_doubt(status, headers)
    is_run = problem.get("safe_new_key") is not True
    directed = _directive(headers, problem)
    if directed is True:
        return Retry(after, in_doubt=is_run)
    if directed is False and meaning in _TO_BE_RETRIED:
        # It ends the tries, and is no answer.
        return Refused(in_doubt=is_run and meaning is not Meaning.LATER)
    return _verdict(meaning, after)


def judge_look(status: int, headers: Mapping[str, str], body: bytes, *, now: float) -> Verdict:
    """Say what an answer at a status URL means for the operation.

    It may be about the look alone, if it is no success, and not marked as the answer of the operation: a replica is
    late, or a login is over. Then the request itself is sent again.
    """
    if not is_replayed(headers) and (
        status == _ACCEPTED or (status in SUCCESSES and _says_running(_problem(headers, body)))
    ):
        return Follow(headers.get("location") if status == _ACCEPTED else None, retry_after(headers, now=now))
    verdict = judge(status, headers, body, now=now, method="GET", in_doubt=True)
    if status in SUCCESSES or status == _UNAUTHORIZED or is_replayed(headers):
        return Final() if isinstance(verdict, Moved) else verdict
    return Retry() if isinstance(verdict, Final | Refused | Moved) else verdict


def judge_failure(failure: Failure) -> Retry:
    """Say what to do where no answer came."""
    return Retry(in_doubt=failure is Failure.LOST)


def status_url(url: str, location: str) -> str | None:
    """Return the address to ask at, for a request to *url*; None: it is another host's, which must not get what this
    one is sent (credentials).
    """
    try:
        there = urljoin(url, location)
        return there if origin_of(there) == origin_of(url) else None
    except ValueError:
        return None


def origin_of(url: str) -> Origin:
    """Return scheme, host and port: where *url* is sent to."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or PORTS.get(parts.scheme)


def said_of(origin: Origin) -> str:
    """Return the beginning of its URLs."""
    scheme, host, port = origin
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}" + ("" if port == PORTS.get(scheme) else f":{port}")


def _by_status(status: int, after: float | None) -> Meaning:
    if status in STATUSES:
        return STATUSES[status]
    if status >= _SERVER_ERROR:
        return Meaning.DOUBT
    if status == _CONFLICT and after is not None:  # To say when is to say that it is not for ever.
        return Meaning.BUSY
    return Meaning.FINAL if status in FINAL_STATUSES else Meaning.REFUSED


def _in_doubt(status: int, headers: Mapping[str, str]) -> Meaning:
    """Say what a final answer without a mark means where an earlier try may have taken effect."""
    if status in _OF_THE_APPLICATION or (status == _BAD_REQUEST and "json" in headers.get("content-type", "")):
        return Meaning.ANSWER
    return Meaning.DOUBT if status == _CONFLICT else Meaning.REFUSED


def _verdict(meaning: Meaning, after: float | None) -> Verdict:
    verdicts: dict[Meaning, Verdict] = {
        Meaning.ANSWER: Final(),
        Meaning.FINAL: Final(),
        Meaning.REFUSED: Refused(),
        Meaning.UNKNOWN: Unknown(),
        Meaning.BUSY: Retry(after, is_counted=False),
        Meaning.LATER: Retry(after, in_doubt=False),
        Meaning.DOUBT: Retry(after),
    }
    return verdicts[meaning]


_TO_BE_RETRIED = frozenset({Meaning.BUSY, Meaning.LATER, Meaning.DOUBT})


def is_replayed(headers: Mapping[str, str]) -> bool:
    """Whether the server says that this is the stored answer of the operation."""
    return headers.get("idempotent-replayed", "").strip().lower() == "true"


def _says_running(said: Mapping[str, Any]) -> bool:
    words = (said.get(name) for name in ("status", "state"))
    return said.get("done") is False or any(
        isinstance(word, str) and _NO_LETTERS.sub("", word.lower()) in _RUNNING for word in words
    )


def _directive(headers: Mapping[str, str], problem: Mapping[str, Any]) -> bool | None:
    """Return whether the answer says in so many words that the request may, or must not, be sent again."""
    for name in DIRECTIVES:
        said = headers.get(name, "").strip().lower()
        if said == "true":
            return True
        if said == "false" and name != "transient-error":
            return False
    retryable = problem.get("retryable")
    return retryable if isinstance(retryable, bool) else None


def _problem(headers: Mapping[str, str], body: bytes) -> Mapping[str, Any]:
    if "json" not in headers.get("content-type", ""):
        return {}
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _code(problem: Mapping[str, Any]) -> str:
    """Return the code of a problem, or of an error in Stripe's form; else the last part of its type's address."""
    error = problem.get("error")
    said = error if isinstance(error, dict) else problem
    for name in ("code", "type", "doc_url"):
        text = said.get(name)
        if isinstance(text, str) and (last := re.split(r"[/#:]", text)[-1]) in CODES:
            return last
    return ""


def retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return for how many seconds the server asks to wait; None: it does not, or in a form that can't be read."""
    for name in _IN_MILLISECONDS:
        if _NUMBER.fullmatch(said := headers.get(name, "").strip()):
            return min(float(said) / 1000, MAX_RETRY_AFTER)
    said = headers.get("retry-after", "").strip()
    if _NUMBER.fullmatch(said):
        return min(float(said), MAX_RETRY_AFTER)
    moment = _moment(said)
    if moment is None:
        return None
    # The server means its own clock, and may have said what that shows.
    today = _moment(headers.get("date", ""))
    return min(max(moment - (now if today is None else today), 0.0), MAX_RETRY_AFTER)


def _moment(said: str) -> float | None:
    try:
        moment = parsedate_to_datetime(said)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def pause(attempt: int, after: float | None, dice: float) -> float:
    """Return the seconds to wait after try number *attempt* (from 1). *dice* is a random number below 1."""
    if after is not None:
        # Not at once, even if the server says so: what is not counted would be sent without an end.
        return max(after, FIRST_PAUSE) * (1 + SPREAD * dice)
    # Full jitter: the whole of the pause is random. The exponent is bounded, since a float is.
    return dice * min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt - 1, 30))


@value
class Quota:
    """The retries that are left for one host: a token bucket."""

    left: float = QUOTA_RETRIES
    #: When that was counted, in seconds by any clock that only goes forward.
    at: float = 0.0

    def answered(self, now: float) -> Quota:
        """Return the quota after one more operation has had its answer."""
        return Quota(min(QUOTA_RETRIES, self._left(now) + QUOTA_PER_ANSWER), now)

    def spent(self, now: float) -> Quota | None:
        """Return the quota after one more retry; None: there is none left."""
        left = self._left(now)
        return Quota(left - 1, now) if left >= 1 else None

    def _left(self, now: float) -> float:
        return min(QUOTA_RETRIES, self.left + max(0.0, now - self.at) / QUOTA_SECONDS)
