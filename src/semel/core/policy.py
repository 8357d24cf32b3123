"""What to guard, what to keep and for how long: one frozen value. It makes no decision; ``decision`` reads it.

Every field is checked when a policy is made, so a mistake shows at start-up and names its field.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypedDict, Unpack, get_args

from semel.core.body_hash import BodyHash
from semel.core.credentials import NEVER_STORED, looks_secret
from semel.core.fingerprint import Fingerprinter
from semel.core.key import DEFAULT_MAX_LENGTH, MAX_KEY
from semel.core.record import OnCrash
from semel.core.vendors import VendorName, vendor
from semel.errors import ConfigurationError, UnknownField

#: RFC 9110: these are safe, so a retry needs no key; a key on them is ignored.
NEVER_GUARDED = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "CONNECT"})

#: What belongs to one response, one connection or one session, and must not be repeated to another.
NEVER_REPLAYED = frozenset(
    {
        "age",
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "server",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "www-authenticate",
    }
)  # fmt: skip - one word a line would fill the screen

#: The handler's final answers. Left out are those that say "not now" or "not you" and not the outcome of the
#: operation (401, 407, 408, 421, 425, 429), those that are given before a handler runs (405, 413, 415), and those that
#: make no sense for an unsafe method (206, 304, 416).
FINAL_STATUSES = frozenset(range(200, 500)) - {206, 304, 401, 405, 407, 408, 413, 415, 416, 421, 425, 429}

#: A live worker renews at a third of this, so a client waits this long only for a dead one.
LEASE = timedelta(seconds=30)
#: The most common value among published APIs; clients give up long before.
RETENTION = timedelta(hours=24)

#: The limit of all stores: Redis counts in floating point, and datetimes end with the year 9999.
LONGEST = timedelta(days=100 * 365)

#: Below the time-outs of most clients and proxies, which are 15 seconds or more.
WAIT = timedelta(seconds=10)
#: Far more than a double click; a client that sends more is told to retry later.
MAX_WAITERS_PER_KEY = 100

MAX_REQUEST_BODY = 8 * 1024 * 1024
MAX_RESPONSE_BODY = 1024 * 1024
#: An answer is held back until it is complete, and its client gets no byte meanwhile; most clients and proxies give up
#: after 15 seconds of silence or more. An answer that is made in one piece takes none of this time.
MAX_RESPONSE_TIME = timedelta(seconds=10)

#: Method, path, query, media type and body.
EVERYTHING = Fingerprinter()

#: A name and not a URL: Semel has no such pages online, and a link must not lead to a page of another owner.
PROBLEM_BASE = "urn:semel:problem:"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_METHOD = re.compile(r"[A-Z][A-Z0-9_-]*")  # The standard allows even *, which would silently guard nothing.

Dialect = Literal["ietf", "stripe"]
ScopeBy = Literal["principal", "operation"]
Mode = Literal["guard", "atomic"]
WhileInProgress = Literal["conflict", "wait", "accept"]
Preference = Literal["wait", "respond-async"]
ServerErrors = Literal["auto", "release", "keep"]
Late = Literal["rerun", "refuse"]
Enforcement = Literal["enforce", "report", "off"]


class PolicyFields(TypedDict, total=False):
    """The fields of a ``Policy`` as the presets take them: an editor offers them, and a type checker sees a typo."""

    header: str | tuple[str, ...]
    methods: Collection[str]
    required: bool
    key_from: BodyHash | None
    strict: bool
    max_key_length: int
    scope_by: ScopeBy
    fingerprint: Fingerprinter | None
    mode: Mode
    in_progress: WhileInProgress
    preferences: Collection[Preference]
    wait: timedelta
    max_waiters: int | None
    max_waiters_per_key: int
    lease: timedelta
    retention: timedelta
    keep: Collection[int]
    server_errors: ServerErrors
    on_crash: OnCrash
    late: Late
    max_request_body: int
    max_response_body: int
    max_response_time: timedelta
    store_request: bool
    store_headers: Collection[str]
    omit_headers: Collection[str]
    replay_headers: Collection[str]
    enforcement: Enforcement
    dialect: Dialect
    problem_base: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """How an operation is guarded. ``Policy.ietf()`` and ``Policy.stripe()`` are the two to start from."""

    #: The request header, or several accepted names: sent together, they must agree.
    header: str | tuple[str, ...] = "Idempotency-Key"
    #: The methods that are guarded. GET, HEAD, OPTIONS and TRACE never are.
    methods: Collection[str] = frozenset({"POST", "PATCH"})
    #: Whether a request without a key is refused (400) or passes through unguarded.
    required: bool = False
    #: How a request without a key gets one: a ``BodyHash`` makes it from the body. A key in a header comes first.
    key_from: BodyHash | None = None
    #: Whether RFC 9651 is applied strictly: a quoted string. Otherwise ``abc`` and ``"abc"`` are one key.
    strict: bool = False
    #: Longer keys are refused (400), never truncated: two keys could become one.
    max_key_length: int = DEFAULT_MAX_LENGTH
    #: Whether one key on two endpoints is a mistake ("principal") or two operations ("operation").
    scope_by: ScopeBy = "principal"
    #: What must be the same on a retry. None compares the key alone: weaker, and a client's mistake is not noticed.
    fingerprint: Fingerprinter | None = EVERYTHING
    #: "guard" is one run at a time, and one answer; "atomic" commits what the handler writes
    #: and its answer together.
    mode: Mode = "guard"
    #: What a duplicate gets while the first still runs: "conflict" is 409 with ``Retry-After``; "wait" holds it back,
    #: and gives it the first one's answer. With "accept" every request is stored, answered with 202 and a status
    #: URL, and run by a worker.
    in_progress: WhileInProgress = "conflict"
    #: Which preferences of a client (``Prefer``) are honoured, whatever *in_progress* says: "wait", "respond-async".
    preferences: Collection[Preference] = frozenset({"wait"})
    #: How long a duplicate is held back at most; then it is told to retry later (409).
    wait: timedelta = WAIT
    #: How many may be held back at once in one process; others are told to retry later. None is a thousand on an event
    #: loop, and four where each occupies a thread.
    max_waiters: int | None = None
    #: How many of them for one key.
    max_waiters_per_key: int = MAX_WAITERS_PER_KEY
    #: How long a worker may be silent before its key is taken over. A live one renews.
    lease: timedelta = LEASE
    #: How long an answer is kept, from the first request with the key.
    retention: timedelta = RETENTION
    #: The statuses below 500 that are kept; any other answer frees the key.
    keep: Collection[int] = FINAL_STATUSES
    #: 5xx and exceptions: "auto" frees the key only when no effect is proven: the handler says ``NoEffect``, atomic
    #: mode has rolled everything back, or what it did is in its phases, and a retry goes on from there.
    server_errors: ServerErrors = "auto"
    #: After a worker died during the handler: run it again, or refuse as *outcome unknown*. With a recovery point, it
    #: always goes on after that point.
    on_crash: OnCrash = "rerun"
    #: A retry after retention: a new operation, or 410.
    late: Late = "rerun"
    #: Bytes; a larger request is refused (413) and nothing is stored.
    max_request_body: int = MAX_REQUEST_BODY
    #: Bytes; a larger answer is sent, but not kept: a retry is told that the operation is done (409).
    max_response_body: int = MAX_RESPONSE_BODY
    #: How long an answer may take from its first byte to its last. One that takes longer is sent from then on as it
    #: comes, and not kept: a retry is told that the operation is done (409).
    max_response_time: timedelta = MAX_RESPONSE_TIME
    #: Whether the request is stored until it is answered: ``semel work`` can then finish what no client retries.
    store_request: bool = False
    #: Request headers that are stored with it although they look like credentials, such as an ``X-Partition-Key`` that
    #: the handler reads. Authorization, Proxy-Authorization and Cookie never are.
    store_headers: Collection[str] = frozenset()
    #: Further request headers that are not stored with it, in addition to those that look like credentials.
    omit_headers: Collection[str] = frozenset()
    #: Further response headers to repeat on a replay, in addition to the usual ones.
    replay_headers: Collection[str] = frozenset()
    #: Whether this policy is applied, or only counted: "report" changes no answer, and logs what it would have replayed
    #: or refused. With "off" requests pass as if they had no key, and the store is not asked.
    enforcement: Enforcement = "enforce"
    #: The shape of refusals: RFC 9457 problems, or Stripe's errors.
    dialect: Dialect = "ietf"
    #: Problem types are this and a slug. Set it to your own documentation, by http(s): refusals then link to it.
    problem_base: str = PROBLEM_BASE

    @classmethod
    def ietf(cls, **overrides: Unpack[PolicyFields]) -> Policy:
        """Behave as draft-ietf-httpapi-idempotency-key-header says; where it says nothing, choose the safer way."""
        return cls(**_known(cls, {**overrides}))

    @classmethod
    def stripe(cls, **overrides: Unpack[PolicyFields]) -> Policy:
        """Behave as Stripe does: POST only, 400 on a mismatch, server errors kept, Stripe's error bodies."""
        stripe = {"methods": frozenset({"POST"}), "server_errors": "keep", "dialect": "stripe"}
        return cls(**(stripe | _known(cls, {**overrides})))

    @classmethod
    def vendor(cls, name: VendorName, **overrides: Unpack[PolicyFields]) -> Policy:
        """Read keys as the clients of a well-known API send them, such as "paypal"; all else is as usual."""
        theirs = dataclasses.asdict(vendor(name))
        return cls(**(theirs | _known(cls, {**overrides})))

    def __post_init__(self) -> None:
        """Check every field, and put collections into one form."""
        self._check_header()
        self._check_stored_headers()
        self._check_methods()
        self._check_choices()
        self._check_durations()
        self._check_sizes()
        self._check_keep()
        self._check_fingerprint()
        self._check_problem_base()
        self._check_enforcement()
        self._check_waiting()
        self._set("_by_body", self._check_key_from())

    def __repr__(self) -> str:
        """Return what differs from ``Policy()``."""
        usual = Policy()
        said = ((each.name, getattr(self, each.name), getattr(usual, each.name)) for each in dataclasses.fields(self))
        told = (f"{name}={_told(name, value)}" for name, value, default in said if value != default)
        return f"{type(self).__name__}({', '.join(told)})"

    @property
    def header_names(self) -> tuple[bytes, ...]:
        """The accepted request headers, lower case, the recommended one first."""
        return self._header_names  # type: ignore[attr-defined, no-any-return]  # put there by _set

    def stores_header(self, name: bytes) -> bool:
        """Whether the request header *name*, in lower case, is stored with a request that is stored."""
        if name in self.header_names:
            return True
        word = name.decode("latin-1")
        return word in self.store_headers or not (word in self.omit_headers or looks_secret(word))

    @property
    def gives_hints(self) -> bool:
        """Whether the end of an operation is announced: a request in any process is likely to wait for it."""
        return self.in_progress != "conflict"

    @property
    def max_held(self) -> timedelta | None:
        """How long an answer is held back at most; None: until it is complete, since an atomic handler's transaction is
        open until the handler has ended.
        """
        return None if self.mode == "atomic" else self.max_response_time

    @property
    def may_accept(self) -> bool:
        """Whether a request can be stored, to be run by a worker."""
        return self.in_progress == "accept" or "respond-async" in self.preferences

    @property
    def by_body(self) -> Policy:
        """The policy of keys that were made from a body: kept for their window, without a separate fingerprint."""
        return self._by_body  # type: ignore[attr-defined, no-any-return]  # put there by _set

    def _check_header(self) -> None:
        names: Any = (self.header,) if isinstance(self.header, str) else self.header
        if (
            not isinstance(names, Collection)
            or not names
            or not all(isinstance(name, str) and _TOKEN.fullmatch(name) for name in names)
        ):
            _wrong("header", self.header, "a header name, or several in a tuple")
        self._set("_header_names", tuple(name.lower().encode() for name in names))
        extra = _words("replay_headers", self.replay_headers)
        wanted = frozenset(name.lower() for name in extra)
        if never := wanted & NEVER_REPLAYED:
            _wrong("replay_headers", sorted(never), "headers of the answer itself: these belong to one response")
        self._set("replay_headers", wanted)

    def _check_stored_headers(self) -> None:
        for field in ("store_headers", "omit_headers"):
            names = frozenset(name.lower() for name in _words(field, getattr(self, field)))
            if wrong := [name for name in names if not _TOKEN.fullmatch(name)]:
                _wrong(field, sorted(wrong), 'names of headers, such as {"X-Partition-Key"}')
            self._set(field, names)
        if never := NEVER_STORED & frozenset(self.store_headers):
            _wrong("store_headers", sorted(never), "headers that hold no credentials")
        if both := frozenset(self.store_headers) & frozenset(self.omit_headers):
            _wrong("store_headers", sorted(both), "other headers than those of omit_headers")
        if ours := [name for name in self.omit_headers if name.encode() in self.header_names]:
            _wrong("omit_headers", sorted(ours), "other headers than the key's own, which a worker needs")

    def _check_methods(self) -> None:
        methods = frozenset(method.upper() for method in _words("methods", self.methods))
        if safe := methods & NEVER_GUARDED:
            _wrong("methods", sorted(safe), "unsafe methods only: these need no key")
        if wrong := [method for method in methods if not _METHOD.fullmatch(method)]:
            _wrong("methods", sorted(wrong), 'names of methods, such as {"POST", "PUT"}: no request has these')
        if not methods:
            _wrong("methods", self.methods, "at least one method")
        self._set("methods", methods)

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(choices):
                _wrong(name, value, "one of " + ", ".join(repr(choice) for choice in get_args(choices)))
        for name in ("required", "strict", "store_request"):
            if not isinstance(getattr(self, name), bool):
                _wrong(name, getattr(self, name), "True or False")

    def _check_durations(self) -> None:
        for name in ("lease", "retention", "wait", "max_response_time"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                _wrong(name, value, "a timedelta, such as timedelta(seconds=30)")
            if value <= timedelta(0):
                _wrong(name, value, "greater than zero")
            if value > LONGEST:
                _wrong(name, value, f"no longer than a hundred years, or timedelta(days={LONGEST.days})")
        if self.lease > self.retention:
            _wrong("lease", self.lease, f"no longer than retention ({self.retention})")

    def _check_sizes(self) -> None:
        for name in ("max_request_body", "max_response_body"):
            value = getattr(self, name)
            if not _is_count(value) or value < 0:
                _wrong(name, value, "a number of bytes, 0 or more")
        if not _is_count(self.max_key_length) or not 1 <= self.max_key_length <= MAX_KEY:
            _wrong("max_key_length", self.max_key_length, f"between 1 and {MAX_KEY} characters")

    def _check_keep(self) -> None:
        given: Any = self.keep
        if isinstance(given, str) or not isinstance(given, Collection):
            _wrong("keep", given, "a collection of statuses, such as range(200, 300)")
        keep = frozenset(given)
        if bad := [status for status in keep if not _is_count(status) or not 200 <= status < 500]:  # noqa: PLR2004
            _wrong("keep", bad[:3], "final statuses from 200 to 499; server_errors decides about 5xx")
        self._set("keep", keep)

    def _check_fingerprint(self) -> None:
        given: Any = self.fingerprint
        if given is not None and not isinstance(given, Fingerprinter):
            _wrong("fingerprint", given, "a Fingerprinter, or None to compare the key alone")

    def _check_key_from(self) -> Policy | None:
        given: Any = self.key_from
        if given is None:
            return None
        if not isinstance(given, BodyHash):
            _wrong("key_from", given, "a BodyHash, or None")
        if given.window < self.lease:
            _wrong("key_from", given, f"a BodyHash with a window no shorter than lease ({self.lease})")
        if self.late == "refuse":
            _wrong("late", self.late, '"rerun" with key_from: after its window, the same body is a new operation')
        if given.unless_header is not None and given.unless_header.lower().encode() in self.header_names:
            _wrong("key_from", given, "a BodyHash with an unless_header other than the header of the key")
        return dataclasses.replace(self, key_from=None, fingerprint=None, retention=given.window)

    def _check_waiting(self) -> None:
        wishes = frozenset(_words("preferences", self.preferences))
        if unknown := wishes - frozenset(get_args(Preference)):
            _wrong("preferences", sorted(unknown), "some of " + ", ".join(repr(each) for each in get_args(Preference)))
        self._set("preferences", wishes)
        for name in ("max_waiters", "max_waiters_per_key"):
            value = getattr(self, name)
            if not (_is_count(value) and value >= 0) and not (name == "max_waiters" and value is None):
                _wrong(name, value, "a number of requests, 0 or more")
        if self.may_accept and self.mode == "atomic":
            _wrong("mode", self.mode, '"guard" if requests are accepted: the answer (202) is sent before any commit')

    def _check_enforcement(self) -> None:
        if self.enforcement != "enforce" and self.mode == "atomic":
            wanted = '"enforce" with mode="atomic": its handlers need the transaction. Report with mode="guard" first'
            _wrong("enforcement", self.enforcement, wanted)

    def _check_problem_base(self) -> None:
        given: Any = self.problem_base
        if not isinstance(given, str) or not re.match(r"https?://|urn:", given):
            _wrong("problem_base", given, "an absolute http(s) URI, or a urn")

    def _set(self, name: str, value: object) -> None:
        # The dataclass is frozen to its users; this is still its constructor.
        object.__setattr__(self, name, value)


_CHOICES: dict[str, Any] = {
    "scope_by": ScopeBy,
    "mode": Mode,
    "in_progress": WhileInProgress,
    "server_errors": ServerErrors,
    "on_crash": OnCrash,
    "late": Late,
    "enforcement": Enforcement,
    "dialect": Dialect,
}


def _known(cls: type[Policy], overrides: dict[str, Any]) -> dict[str, Any]:
    names = [each.name for each in dataclasses.fields(cls)]
    for name in overrides:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(names)}."
            raise UnknownField(f"Policy has no field {name!r}.{hint}")
    return overrides


def _told(name: str, value: Any) -> str:
    """Write a field; hundreds of statuses by what they differ from the usual ones."""
    if name != "keep":
        return repr(value)
    more, less = value - FINAL_STATUSES, FINAL_STATUSES - value
    if len(more) + len(less) >= len(value):
        return repr(set(value))
    return "FINAL_STATUSES" + (f" | {set(more)}" if more else "") + (f" - {set(less)}" if less else "")


def _words(field: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(each, str) for each in value):
        _wrong(field, value, "a collection of strings")
    return list(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(field: str, value: object, wanted: str) -> NoReturn:
    shown = str(value) if isinstance(value, timedelta) else repr(value)
    raise ConfigurationError(f"Policy.{field} can't be {shown}: it must be {wanted}.")
