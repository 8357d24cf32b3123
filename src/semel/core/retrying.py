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
    """The answer is not about the operation (who asks, where, how): nothing was run for this try."""


@value
class Follow:
    """It was accepted, and its result will be at this address."""

    location: str
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


Verdict = Final | Refused | Follow | Retry | Unknown


class Meaning(Enum):
    """What a problem's code or a status means."""

    FINAL = "final"
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
    "idempotency-key-reused": Meaning.FINAL,
    "operation-failed": Meaning.FINAL,
    "response-not-replayable": Meaning.FINAL,
    "idempotency-key-invalid": Meaning.REFUSED,
    "idempotency-key-missing": Meaning.REFUSED,
    "idempotency-scope-missing": Meaning.REFUSED,
    "identity-refused": Meaning.REFUSED,
    "request-ambiguous": Meaning.REFUSED,
    "request-body-too-large": Meaning.REFUSED,
}

#: Statuses that mean something else than ``FINAL_STATUSES`` says, where nothing in the answer says more.
STATUSES = {
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

_IN_MILLISECONDS = ("retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after")
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?")
_ACCEPTED = 202
SUCCESSES = range(200, 300)
_SERVER_ERROR = 500


#: Scheme, host and port.
Origin = tuple[str, str, int | None]

PORTS = {"http": 80, "https": 443}


def judge(status: int, headers: Mapping[str, str], body: bytes, *, now: float) -> Verdict:
    """Say what an answer to a request with a key means.

    *headers* are looked up by names in lower case. *now* is in seconds since 1970, and counts only where the answer
    has no ``Date``.
    """
    after = retry_after(headers, now=now)
    if status == _ACCEPTED and (location := headers.get("location")):
        return Follow(location, after)
    if status in SUCCESSES:
        return Final()  # Whatever it says: it is the application's.
    if _is_said(headers, "idempotent-replayed"):
        return Final()  # It is what was stored, and the next try would get the same: a server error, too.
    problem = _problem(headers, body)
    known = CODES.get(_code(problem))
    if known is not None:
        return _verdict(known, after)
    directed = _directive(headers, problem)
    if directed is not None:
        is_run = problem.get("safe_new_key") is not True
        return Retry(after, in_doubt=is_run) if directed else Final()
    return _verdict(_by_status(status, after), after)


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


def _by_status(status: int, after: float | None) -> Meaning:
    if status in STATUSES:
        return STATUSES[status]
    if status >= _SERVER_ERROR:
        return Meaning.DOUBT
    if status == 409 and after is not None:  # noqa: PLR2004 - to say when is to say that it is not for ever
        return Meaning.BUSY
    return Meaning.FINAL if status in FINAL_STATUSES else Meaning.REFUSED


def _verdict(meaning: Meaning, after: float | None) -> Verdict:
    verdicts: dict[Meaning, Verdict] = {
        Meaning.FINAL: Final(),
        Meaning.REFUSED: Refused(),
        Meaning.UNKNOWN: Unknown(),
        Meaning.BUSY: Retry(after, is_counted=False),
        Meaning.LATER: Retry(after, in_doubt=False),
        Meaning.DOUBT: Retry(after),
    }
    return verdicts[meaning]


def _is_said(headers: Mapping[str, str], name: str) -> bool:
    return headers.get(name, "").strip().lower() == "true"


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
