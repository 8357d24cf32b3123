"""What the doors share: which requests are guarded, whose they are, where a body waits. It speaks no protocol."""

from __future__ import annotations

import io
import logging
import math
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache
from types import FrameType
from typing import IO, Any, Literal, Self

from semel.core.commands import Answered, Ending, Lost, Parked, Raised, Streaming
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Head, Headers
from semel.core.policy import Policy
from semel.core.replay import FIRST_SERVER_ERROR, is_endless, may_be_endless
from semel.core.status import STATUS_PATH, checked_path
from semel.core.value import value
from semel.errors import ConfigurationError, NoEffect, ShuttingDown
from semel.flows.handle import SHUTDOWN_RETRY_AFTER_SECONDS
from semel.operation import Operation, enter
from semel.telemetry.logs import logger

#: A body larger than this waits on disk: a hundred uploads at once must not fill the memory.
SPILL_BYTES = 256 * 1024
CHUNK_BYTES = 64 * 1024

#: RFC 9110: these have no body, and say nothing of its length.
BODILESS = frozenset({204, 304})

#: What a router answers by itself, before any handler: no such path, or the same path spelled otherwise.
ROUTERS_STATUSES = frozenset({307, 308, 404})

#: Where an app that is run for a stored request finds whose it is (in the ASGI scope, or the WSGI environ): credentials
#: are not stored, and no server ever sets this.
PRINCIPAL = "semel.principal"

NOWHERE_TO_ASK = (
    'A policy here accepts requests to be run later (in_progress="accept", or "respond-async" among its preferences), '
    f"and their clients have nowhere to ask for the outcome. {{}}{STATUS_PATH!r}; or take that from the policy."
)

#: In the environment: switches every guard of this process off, or to report mode.
SWITCH = "SEMEL_ENFORCEMENT"

_ATOMIC_STAYS = 'What has mode="atomic" stays guarded: its handlers write through the guard\'s own transaction.'
SWITCHED: dict[str, tuple[int, str]] = {
    "off": (
        logging.CRITICAL,
        f"{SWITCH}=off: NOTHING IS GUARDED in this process. Keys are ignored, and every retry runs. " + _ATOMIC_STAYS,
    ),
    "report": (
        logging.WARNING,
        f"{SWITCH}=report: requests are not guarded in this process, and what would have been is reported. "
        + _ATOMIC_STAYS,
    ),
}

Paths = str | Iterable[str] | Mapping[str, Policy] | Callable[[str], bool] | None


@cache
def switch() -> Literal["off", "report"] | None:
    """Return to what the environment switches the guards of this process; None: to nothing. Said once, loudly."""
    said = os.environ.get(SWITCH, "")
    if said in {"", "enforce"}:
        return None
    if said not in SWITCHED:
        raise ConfigurationError(f'{SWITCH} can\'t be {said!r}: it must be "off", "report" or "enforce".')
    logger.log(*SWITCHED[said])
    return "off" if said == "off" else "report"


def switched(policy: Policy) -> Policy:
    """Return *policy* as the environment has it."""
    said = switch()
    if said is None or policy.mode == "atomic" or policy.enforcement == "off":
        return policy
    return replace(policy, enforcement=said)


class HeaderView(Mapping[str, str]):
    """Request headers by name, in any case; several of one name are joined with a comma."""

    def __init__(self, headers: Headers) -> None:
        """View *headers*, whose names are lower case."""
        self._headers = headers

    def __getitem__(self, name: str) -> str:
        """Return the value of *name*."""
        wanted = name.lower().encode("latin-1")
        values = [value.decode("latin-1") for each, value in self._headers if each == wanted]
        if not values:
            raise KeyError(name)
        return ", ".join(values)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(dict.fromkeys(name.decode("latin-1") for name, _ in self._headers))

    def __len__(self) -> int:
        """Count the names."""
        return len({name for name, _ in self._headers})


@value
class RequestView:
    """What the application's ``scope`` callable is given to say whose request this is."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    #: The ASGI scope, or the WSGI environ: where an outer layer left the user it knows.
    raw: Any

    @classmethod
    def of(cls, head: Head, path: str, raw: object) -> Self:
        """Show *head*, whose decoded path is *path*."""
        return cls(head.method, path, head.query.decode("latin-1"), HeaderView(head.headers), raw)


class Routes:
    """Which requests are guarded, and by which policy."""

    def __init__(self, policy: Policy | None, paths: Paths) -> None:
        """Guard the given *paths*: patterns such as ``/orders/*``, each perhaps with its own policy; None is all."""
        policy = Policy.ietf() if policy is None else policy
        if not isinstance(policy, Policy):
            raise ConfigurationError(f"policy must be a Policy, such as Policy.ietf(), not {policy!r}.")
        policy = switched(policy)
        #: That of requests whose path has none of its own.
        self.policy = policy
        self._accepts = paths if callable(paths) else None
        self._patterns: Mapping[str, Policy] | None = None
        if paths is not None and self._accepts is None:
            self._patterns = _patterns(paths, policy)

    @property
    def accepting(self) -> Policy | None:
        """A policy by which requests may be accepted, to be run later; None: there is none."""
        policies = (self.policy,) if self._patterns is None else self._patterns.values()
        return next((each for each in policies if each.may_accept), None)

    def policy_for(self, method: str, path: str) -> Policy | None:
        """Return the policy of this request, or None when it is not guarded."""
        policy = self.policy_at(path)
        return policy if policy is not None and method in policy.methods else None

    def policy_at(self, path: str) -> Policy | None:
        """Return the policy of requests to *path*, by whatever method, or None when none of them is guarded."""
        if self._patterns is not None:
            return next((each for pattern, each in self._patterns.items() if fnmatchcase(path, pattern)), None)
        return self.policy if self._accepts is None or self._accepts(path) else None


class Body:
    """A body: in memory while it is small, on disk when it is not."""

    def __init__(self, spill: int = SPILL_BYTES) -> None:
        """Start empty, and move to disk at more than *spill* bytes."""
        self._spill = spill
        self._parts: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self.size = 0

    def add(self, chunk: bytes) -> None:
        """Append *chunk*."""
        self.size += len(chunk)
        if self._file is None:
            self._parts.append(chunk)
            if self.size > self._spill:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this call; close() ends it
                self._file.write(b"".join(self._parts))
                self._parts = []
        else:
            self._file.write(chunk)

    def buffer(self) -> Buffer:
        """Return the whole body as bytes, or as a map of the file it is in."""
        if self._file is None:
            self._parts = [b"".join(self._parts)] if len(self._parts) != 1 else self._parts
            return self._parts[0]
        if self._map is None:
            self._file.flush()
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def stream(self) -> IO[bytes]:
        """Return the whole body as a file, at its beginning."""
        if self._file is None:
            return io.BytesIO(self.buffer())
        self._file.seek(0)
        return self._file

    def chunks(self) -> Iterator[tuple[bytes, bool]]:
        """Iterate over the body in pieces, each with whether more follow. An empty body is one empty piece."""
        whole = self.buffer()
        if isinstance(whole, bytes):
            yield whole, False
            return
        for start in range(0, self.size, CHUNK_BYTES):
            yield bytes(whole[start : start + CHUNK_BYTES]), start + CHUNK_BYTES < self.size

    def close(self) -> None:
        """Let go of the file."""
        if self._map is not None:
            self._map.close()
        if self._file is not None:
            self._file.close()


@value
class Limits:
    """How much of a response is held back, and for how long, before it is sent as it comes."""

    #: In bytes.
    size: int
    #: None: however long it takes.
    time: timedelta | None
    operation: Operation

    def end(self) -> float:
        """Return when the time is over that begins now, by the monotonic clock."""
        return math.inf if self.time is None else time.monotonic() + self.time.total_seconds()

    def is_late(self, end: float) -> bool:
        """Whether that time is over."""
        # What takes steps while it answers may take more of them: it is not done, and can't be said to be.
        return time.monotonic() > end and not self.operation.story.is_used


def flows_at_once(headers: Headers, operation: Operation, max_time: timedelta | None) -> bool:
    """Whether these headers begin a response that is sent as it comes, from its first byte."""
    # What takes steps may take more of them while it answers, and where there is no limit of time nobody waits for the
    # first byte: then it is only not waited for what never ends.
    is_waited_for = operation.story.is_used or max_time is None
    return is_endless(headers) if is_waited_for else may_be_endless(headers)


def inside(operation: Operation, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Iterate over *chunks*, each of which is made as part of *operation*. In between, this thread is the server's."""
    with enter(operation):
        remaining = iter(chunks)
    while True:
        with enter(operation):
            try:
                chunk = next(remaining)
            except StopIteration:
                return
        yield chunk


def framed(answer: Answer) -> Headers:
    """Return the headers of an answer of ours, with the length that belongs to its body."""
    if answer.status in BODILESS:
        return answer.headers
    return (*answer.headers, (b"content-length", b"%d" % len(answer.body or b"")))


def bodiless(answer: Answer) -> Answer:
    """Return what a HEAD request gets of an answer of ours: all but its body, the length of it included."""
    return Answer(answer.status, framed(answer), b"")


def nobody() -> None:
    """Call nobody: no worker is in this process."""


def declared_length(head: Head) -> int:
    """Return how long the client says its body is; 0 when it does not say."""
    values = head.values(b"content-length")
    return int(values[0]) if values and values[0].isdigit() else 0


def answered(answer: Answer, operation: Operation, *, reached_handler: bool, no_effect: bool = False) -> Ending:
    """Return the ending of a handler that gave *answer*."""
    story = operation.story
    if operation.is_refused and answer.status < FIRST_SERVER_ERROR and not story.is_used:
        reached_handler = False
    # What a handler of steps did is recorded, so an error leaves it where a retry can go on.
    nothing_lost = no_effect or operation.has_no_effect or story.is_used
    return _standing(Answered(answer, reached_handler, nothing_lost, story.skipped, story.is_used), operation)


def streaming(status: int, headers: Headers, operation: Operation) -> Ending:
    """Return the ending of a handler whose answer can't be kept."""
    return _standing(Streaming(status, headers, operation.story.skipped), operation)


def raised(error: Exception, operation: Operation) -> Ending:
    """Return the ending of a handler that raised *error*."""
    story = operation.story
    nothing_lost = isinstance(error, NoEffect) or operation.has_no_effect or story.is_used
    # A mistake in the program that comes before anything was recorded is not half-way: to come back would not help.
    has_steps = story.is_used and bool(story.progress.steps or not isinstance(error, ConfigurationError))
    return _standing(Raised(error, nothing_lost, story.skipped, has_steps), operation)


def _standing(ending: Ending, operation: Operation) -> Ending:
    """Return *ending*, unless the operation is no longer this handler's to end. No step may begin any more."""
    operation.story.is_over = True
    if operation.story.is_parked:
        return Parked()
    return Lost() if operation.story.is_lost else ending


class Gate:
    """Whether this process takes on new operations. A server that is about to stop finishes what it has begun."""

    def __init__(self) -> None:
        """Open."""
        self.is_closed = False
        self._is_listening = False

    def close(self) -> None:
        """Take on nothing new from now on."""
        self.is_closed = True

    def check(self) -> None:
        """Refuse a request that comes too late."""
        if self.is_closed:
            raise ShuttingDown(retry_after=SHUTDOWN_RETRY_AFTER_SECONDS)

    def close_on_sigterm(self) -> None:
        """Close when the server is told to stop, before it does whatever it does about that.

        Only where somebody handles the signal: by default it ends the process at once, and the lease does the rest.
        """
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            return
        servers = signal.getsignal(signal.SIGTERM)
        if not callable(servers):
            return
        self._is_listening = True

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            self.close()
            servers(number, frame)

        signal.signal(signal.SIGTERM, on_sigterm)


def checked_scope(scope: object) -> Callable[[RequestView], Any]:
    """Return *scope* if it can be asked, and explain it to whoever left it out."""
    if callable(scope):
        return scope
    raise ConfigurationError(
        "scope must be a callable that says whose request it is: scope=lambda request: request.headers['x-account']. "
        "For an API with one user, say so: scope=semel.SINGLE_TENANT."
    )


def status_path_for(routes: Routes, path: str | None) -> str | None:
    """Return where the state of operations is asked for; None: nowhere, for none is ever accepted."""
    path = checked_path(path)
    if routes.accepting is None:
        return None
    if path is None:
        raise ConfigurationError(NOWHERE_TO_ASK.format("Give the middleware a status_path, such as status_path="))
    return path


def _patterns(paths: object, policy: Policy) -> Mapping[str, Policy]:
    if isinstance(paths, Mapping):
        patterns = {pattern: switched(each) if isinstance(each, Policy) else each for pattern, each in paths.items()}
    elif isinstance(paths, str):
        patterns = {paths: policy}
    elif isinstance(paths, Iterable):
        patterns = dict.fromkeys(paths, policy)
    else:
        raise ConfigurationError(f"paths must be patterns such as '/orders/*' or a callable, not {paths!r}.")
    for pattern, each in patterns.items():
        if not isinstance(pattern, str) or not pattern.startswith(("/", "*")):
            raise ConfigurationError(f"paths: {pattern!r} is no pattern of a path, such as '/orders/*'.")
        if not isinstance(each, Policy):
            raise ConfigurationError(f"paths: {pattern!r} needs a Policy, not {each!r}.")
    return patterns
