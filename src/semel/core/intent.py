"""An intent: one operation of a client as its journal knows it, by a name from the application ("invoice 17"). Nothing
is stored or sent here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal
from urllib.parse import quote, urlsplit, urlunsplit

from semel.core.credentials import NEVER_STORED, looks_secret
from semel.core.fingerprint import Fingerprinter, Subject, is_same_request
from semel.core.message import Answer, Headers
from semel.core.value import value
from semel.errors import ConfigurationError

MAX_INTENT = 500

TOO_LATE = (
    "It is not known whether this request took effect, and its key is past the server's retention, so it is not sent "
    "again. Look it up; then: semel journal forget."
)

EntryState = Literal["pending", "done", "unknown"]

#: Set anew for every try: by the client of HTTP, or from the key of the entry.
_OF_A_TRY = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "transfer-encoding"}
)


#: Where a key is sent, unless a client says otherwise.
KEY_HEADER = "idempotency-key"


@value
class Outgoing:
    """A request as it is sent: the same bytes with every try."""

    method: str
    url: str
    #: Lower-case names.
    headers: Headers
    body: bytes


@value
class Entry:
    """One intent in a journal. Times are in seconds since 1970."""

    intent: str
    key: str
    #: ``pending``: it is to be sent, or sent again. ``unknown``: its key is past the server's retention.
    state: EntryState
    method: str
    url: str
    attempts: int
    first_at: float
    #: It is not sent after this: the server may have forgotten the key.
    not_after: float
    #: Whether a process has it at this moment.
    is_leased: bool
    #: Of its answer.
    status: int | None = None
    ended_at: float | None = None
    #: That the key is sent in, in lower case.
    header: str = KEY_HEADER


@value
class Wish:
    """What a client wants to send under an intent."""

    intent: str
    key: str
    outgoing: Outgoing
    #: Of the server, in seconds.
    retention: float
    #: How long sending it may take, in seconds.
    deadline: float
    #: Whether the key is the application's own; else it was made for this wish.
    is_key_given: bool = False
    #: Whether the server has sent it on to another URL: that is no other content.
    is_redirected: bool = False
    #: That the key is sent in.
    header: str = KEY_HEADER
    #: The application's name for the account that it is sent with.
    account: str | None = None


@value
class Begun:
    """It is ours to send, with this key and these bytes."""

    key: str
    outgoing: Outgoing
    #: Whether it may have been sent before.
    is_resumed: bool


@value
class Ended:
    """It has its answer; None: which was too large to be kept."""

    key: str
    answer: Answer | None


@value
class Taken:
    """Another process, or another thread, is sending it."""

    key: str


@value
class Lapsed:
    """It may have been sent, and it is too late to send it again."""

    key: str


Beginning = Begun | Ended | Taken | Lapsed


def checked(intent: object) -> str:
    """Return *intent*, if it can be one."""
    if isinstance(intent, str) and intent.strip() and len(intent) <= MAX_INTENT and intent.isprintable():
        return intent
    raise ConfigurationError(
        f"An intent names one operation of your application, such as 'invoice 17': one line of text, with at most "
        f"{MAX_INTENT} characters, not {ascii(intent)[:80]}."
    )


def kept_headers(headers: Iterable[tuple[bytes, bytes]], *further: str) -> Headers:
    """Return the *headers* that a journal may keep: no credentials, and none of a single try or named in *further*."""
    kept = []
    for name, said in headers:
        lower = name.lower()
        text = lower.decode("latin-1")
        if text not in _OF_A_TRY and text not in NEVER_STORED and text not in further and not looks_secret(text):
            kept.append((lower, said))
    return tuple(kept)


def without_login(url: str) -> str:
    """Return *url* without the user and the password in front of its host, and without a fragment."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


_RECIPE = Fingerprinter()


def fingerprint(outgoing: Outgoing, account: str | None = None) -> bytes:
    """Return what is stored to tell whether another request is the same."""
    return _RECIPE.of(_subject(outgoing, account))


def is_same(stored: bytes, outgoing: Outgoing, account: str | None = None) -> bool:
    """Whether *outgoing* asks for the same: JSON in another order and a new boundary of multipart are no difference."""
    return is_same_request(_RECIPE, stored, fingerprint(outgoing, account), _subject(outgoing, account))


def _subject(outgoing: Outgoing, account: str | None) -> Subject:
    parts = urlsplit(outgoing.url)
    # The host in front: the same path elsewhere is another operation. The account is where a URL has its user, which is
    # not kept of the URL itself.
    user = "" if account is None else f"{quote(account, safe='')}@"
    where = f"{parts.scheme}://{user}{parts.netloc.lower()}{parts.path or '/'}"
    return Subject(outgoing.method, where, parts.query.encode(), outgoing.headers, outgoing.body)
