"""What a transport is told at its construction, checked there; and the quota of retries for each host. It knows no
library.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from semel.client.journal import Journal
from semel.core.retrying import Origin, Quota
from semel.errors import ConfigurationError

#: A server that died frees its keys after its lease, 30 seconds; then there should be time left.
DEADLINE = timedelta(minutes=2)
#: Of the server: Semel's, Stripe's and the most common.
RETENTION = timedelta(hours=24)
MAX_BODY = 16 * 2**20
MAX_ANSWER = 16 * 2**20
#: Methods that get a key of our making. Any other request is retried only with a key of its caller's.
METHODS = frozenset({"POST", "PATCH"})
#: Nothing is guarded for these, key or not.
SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "CONNECT"})
#: Hosts of which the quota is remembered.
MAX_HOSTS = 1000

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[0-9]{1,5})?")


class Quotas:
    """How many retries each host has left, for all that share this object."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """All hosts have the whole of it."""
        self._clock = clock
        self._lock = threading.Lock()
        self._of: dict[Origin, Quota] = {}

    def spend(self, host: Origin) -> bool:
        """Take one retry; False: there is none left."""
        now = self._clock()
        with self._lock:
            spent = self._of.get(host, Quota(at=now)).spent(now)
            if spent is not None:
                if len(self._of) >= MAX_HOSTS and host not in self._of:
                    self._of.pop(next(iter(self._of)))  # Each is full again after some minutes.
                self._of[host] = spent
        return spent is not None

    def answered(self, host: Origin) -> None:
        """Give something back for an answer."""
        if host in self._of:  # Else it is full.
            with self._lock:
                self._of[host] = self._of.get(host, Quota()).answered(self._clock())


#: Shared by the transports of this process: a server in trouble does not care which of them retries.
QUOTAS = Quotas()


@dataclass(frozen=True, kw_only=True)
class Options:
    """How requests with a key are sent."""

    #: A file, or an open journal. Without, a crash of this process loses its keys.
    journal: Journal | str | os.PathLike[str] | None = None
    #: The hosts that are known to honour keys, as ``name`` or ``name:port``. Requests to others are not touched.
    #: None: all that this is used for.
    hosts: Collection[str] | None = None
    #: From the first try to the end of the last.
    deadline: timedelta = DEADLINE
    #: How long the server remembers a key.
    retention: timedelta = RETENTION
    #: The application's name for the account whose credentials are sent, where a journal is used for several: an
    #: intent is that account's alone. Not a token, which changes.
    account: str | None = None
    header: str = "Idempotency-Key"
    #: Whether a key of ours is sent in double quotes, by the letter of the IETF's draft. Most APIs expect it without.
    quoted: bool = False
    #: Bytes of a request that are kept for another try, where the library does not keep them itself.
    max_body: int = MAX_BODY
    #: Bytes of an answer that are read before it is handed over. A longer one is handed over as it comes.
    max_answer: int = MAX_ANSWER
    #: Whether a 202 is followed to its result.
    follow_accepted: bool = True
    quotas: Quotas = QUOTAS
    #: The deadline.
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what can't work, before anything is sent."""
        for name in ("deadline", "retention"):
            given = getattr(self, name)
            if not isinstance(given, timedelta) or given <= timedelta(0):
                raise ConfigurationError(f"{name} is a timedelta above zero, not {given!r}.")
        if self.deadline >= self.retention:
            raise ConfigurationError(
                f"The deadline ({self.deadline}) must be shorter than the server's retention ({self.retention}): "
                "a try after it would be a new operation."
            )
        for name in ("max_body", "max_answer"):
            if not isinstance(size := getattr(self, name), int) or size < 0:
                raise ConfigurationError(f"{name} is a number of bytes, not {size!r}.")
        if not _HEADER.fullmatch(str(self.header)):
            raise ConfigurationError(f"header is the name of a header, such as 'Idempotency-Key', not {self.header!r}.")
        account: Any = self.account
        if account is not None and not (isinstance(account, str) and account.strip()):
            raise ConfigurationError(f"account is a name, such as 'customer 7', not {account!r}.")
        object.__setattr__(self, "hosts", None if self.hosts is None else checked_hosts(self.hosts))
        object.__setattr__(self, "seconds", self.deadline.total_seconds())
        if self.journal is not None and not isinstance(self.journal, Journal):
            object.__setattr__(self, "journal", Journal(self.journal))

    @property
    def opened(self) -> Journal | None:
        """The journal."""
        assert self.journal is None or isinstance(self.journal, Journal)  # noqa: S101 - for the type checker
        return self.journal

    def honours(self, host: str, port: int | None) -> bool:
        """Whether a host is known to honour keys."""
        return self.hosts is None or is_among(self.hosts, host, port)

    def guards(self, method: str, place: Origin, *, has_key: bool, has_intent: bool) -> bool:
        """Whether a request is sent with a key and retried; *place* is its scheme, host and port."""
        is_guarded = method not in SAFE and self.honours(*place[1:]) and (has_key or has_intent or method in METHODS)
        if has_intent and (not is_guarded or self.journal is None):
            raise ConfigurationError(
                "This request has an intent, and can't be kept: "
                + ("there is no journal." if self.journal is None else f"{method} to {place[1]} is sent without a key.")
            )
        return is_guarded

    def new_key(self) -> str:
        """Make a key, spelled as it is sent."""
        digits = os.urandom(16).hex()
        # A UUID of version 4. The class of the standard library takes three times as long.
        variant = "89ab"[int(digits[16], 16) & 3]
        key = f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
        return f'"{key}"' if self.quoted else key


def is_among(hosts: Collection[str], host: str, port: int | None) -> bool:
    """Whether a host is one of those that ``checked_hosts`` returned."""
    name = f"[{host}]" if ":" in host else host
    return name in hosts or f"{name}:{port}" in hosts


def checked_hosts(hosts: Collection[Any]) -> Collection[str]:
    """Return names of hosts, as ``name`` or ``name:port``, in lower case."""
    if isinstance(hosts, str):
        raise ConfigurationError(f"hosts is a list of names: hosts=[{hosts!r}].")
    for host in hosts:
        if not isinstance(host, str) or not _HOST.fullmatch(host.lower()):
            raise ConfigurationError(f"hosts has names such as 'api.example.com' or 'localhost:8000', not {host!r}.")
    return frozenset(host.lower() for host in hosts)
