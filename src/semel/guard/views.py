"""The ports of one guarded call of a view: a function that a framework calls with a request, and that returns it a
response.

What is the framework's own is behind ``View``; Flask's and Django's are in ``semel.flask`` and ``semel.django``. It is
reached after the framework's own authentication, and what it gives back is the framework's own response.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import chain
from typing import IO, ClassVar, Generic, TypeVar, cast
from urllib.parse import quote_plus

from semel.core.canonical import media_type, pack
from semel.core.fingerprint import Buffer
from semel.core.handler import Ending
from semel.core.message import Answer, Head, Headers
from semel.core.outcome import Door
from semel.core.policy import Policy
from semel.core.record import Hold
from semel.core.replay import is_endless
from semel.core.value import value
from semel.errors import Interrupted
from semel.flows.reply import Done, PassOn, Reply, Reraise, Send
from semel.flows.serve import serve
from semel.guard.body import CHUNK_BYTES, Limits, inside
from semel.guard.endings import answered, raised, streaming
from semel.guard.measuring import measured
from semel.guard.ports import AsyncCallPorts, AsyncGuard, Guard, ThreadPorts
from semel.guard.running import interruptible
from semel.operation import Operation, around, enter

R = TypeVar("R")


@value
class Taken:
    """A response, as far as it can be kept."""

    status: int
    #: Lower-case names. Cookies may be left out: they are not kept.
    headers: Headers
    #: The whole body; None: it is too large to be kept, or has no end.
    body: bytes | None

    def ending(self, operation: Operation, *, reached_handler: bool = True) -> Ending:
        """Return how the view ended that gave this."""
        if self.body is None or is_endless(self.headers):
            return streaming(self.status, self.headers, operation)
        return answered(Answer(self.status, self.headers, self.body), operation, reached_handler=reached_handler)


class Translation(ABC, Generic[R]):
    """One request of a framework's, in the core's terms and back."""

    #: As metrics have it.
    door: ClassVar[Door]
    #: All of the request but its body.
    head: Head

    @abstractmethod
    def template(self) -> str | None:
        """Return the template of the route; None: it has none."""

    @abstractmethod
    def response_of(self, answer: Answer) -> R:
        """Return the framework's response for an *answer* of ours: a replay, a refusal. Add its length."""

    @abstractmethod
    def status_of(self, response: R) -> int:
        """Return the status of the view's own *response*."""

    def status_raised(self, error: Exception) -> int | None:  # noqa: ARG002 - a server error, unless a framework knows better
        """Return the status that the framework answers with where a view raises *error*; None: as a server error."""
        return None

    @abstractmethod
    def report(self, error: Exception) -> None:
        """Tell what reports errors that the view raised *error*: the client gets an answer of ours for it."""

    def response_to(self, reply: Send | Reraise, own: R | None, answer: Answer | None) -> R:
        """Return what the client gets: the view's *own* response where *answer* was taken from it, or ours.

        An exception without an answer is raised.
        """
        if isinstance(reply, Send):
            return own if own is not None and reply.answer is answer else self.response_of(reply.answer)
        if reply.answer is None:
            raise reply.error
        # So that this client and its retries see the same.
        self.report(reply.error)
        return self.response_of(reply.answer)


def gathered(chunks: Iterator[bytes], limits: Limits) -> tuple[bytes | None, Iterator[bytes]]:
    """Read *chunks* within *limits*; return the whole, or None where there are more, and what to send instead.

    A thread that waits for the next chunk can't be called away, so the time is looked at when that has come.
    """
    held: list[bytes] = []
    size = 0
    end = limits.end()
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size > limits.size or limits.is_late(end):
            return None, chain(held, inside(limits.operation, chunks))
    whole = b"".join(held)
    return whole, iter((whole,))


#: A file of a form: its field, its own name, its type, and what is in it.
File = tuple[str, str | None, str | None, IO[bytes]]


def written_form(head: Head, fields: Iterable[tuple[str, str]], files: Iterable[File]) -> bytes:
    """Write down a form that the framework has parsed already: the same form gives the same bytes, and no other does.

    For fingerprints, and keys that are made of a body. A form without files is encoded as its content type says, since
    it is read as that again. In one with files, names, types and contents count in their order; each file is left at
    its beginning.
    """
    pairs = [(_bytes(name), _bytes(text)) for name, text in fields]
    content_type = b", ".join(value for name, value in head.headers if name == b"content-type")
    if media_type(content_type.decode("latin-1")).is_form:
        return "&".join(f"{quote_plus(name)}={quote_plus(text)}" for name, text in pairs).encode()
    return pack(
        (
            pack(part for pair in pairs for part in pair),
            pack(
                part
                for name, filename, kind, file in files
                for part in (_bytes(name), _bytes(filename or ""), _bytes(kind or ""), _digest(file))
            ),
        )
    )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(file: IO[bytes]) -> bytes:
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    file.seek(0)
    return digest.digest()


class View(Translation[R]):
    """One request to a view, and the view."""

    @abstractmethod
    def principal(self) -> object:
        """Name the user of the request, as the application's own authentication has it."""

    @abstractmethod
    def read_body(self, limit: int) -> Buffer | None:
        """Return the whole body, and leave it for the view to read; None: it is larger than *limit*."""

    @abstractmethod
    def call(self) -> R:
        """Call the view. An exception that the framework would answer below 500 is to be answered here."""

    def call_unguarded(self) -> R:
        """Call the view as if it were not guarded: what it raises may go on. By default, as ``call``."""
        return self.call()

    @abstractmethod
    def take(self, response: R, limits: Limits) -> Taken:
        """Return the *response* as far as it can be kept. It must still be there to send."""


class ViewPorts(ThreadPorts, Generic[R]):
    """One request to a view, and its response."""

    def __init__(self, guard: Guard, policy: Policy, view: View[R]) -> None:
        """Guard one call of *view* by *policy*."""
        super().__init__(guard, policy)
        self._policy = policy
        self._view = view
        self._response: R | None = None
        self._has_response = False
        self._answer: Answer | None = None
        #: What the view raised where it is not guarded.
        self._error: Exception | None = None

    def serve(self) -> R:
        """Take the request from its headers to its response."""
        notes, token = self.guard.store.notes_replays, os.urandom(16)
        return self._give(
            self.conduct(measured(serve), self._view.head, self._policy, token, notes_replays=notes, around=around())
        )

    def handle(self, operation: Operation, limit: int) -> Ending:
        """Call the view."""
        try:
            self._response = self._view.call()
            self._has_response = True
            ending = self._view.take(self._response, self.limits(limit, operation)).ending(operation)
        except Exception as error:  # noqa: BLE001 - it is the flow's to judge
            return raised(error, operation)
        self._answer = getattr(ending, "answer", None)
        return ending

    @property
    def door(self) -> Door:
        """The entry point."""
        return self._view.door

    def endpoint(self) -> str | None:
        """Return the route's template."""
        template = self._view.template()
        return None if template is None else f"{self._view.head.method} {template}"

    def limits(self, size: int, operation: Operation) -> Limits:
        """Return how much of a response is held back: at most *size* bytes, for as long as the policy says."""
        return Limits(size, self._policy.max_held, operation)

    async def principal(self) -> object:
        """Ask the application for the user of this request."""
        self.guard.gate.check()
        try:
            return self._view.principal()
        except Exception:
            raise
        except BaseException as death:
            raise Interrupted from death

    async def read_body(self, limit: int) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        try:
            return self._view.read_body(limit)
        except Exception:
            raise
        except BaseException as death:
            raise Interrupted from death

    async def run_unguarded(self, hold: Hold | None, lease: timedelta | None) -> int | None:
        """Call the view as if it were not guarded."""
        if hold is not None and lease is not None:
            self.keep_lease(hold, lease)
        try:
            self._response = self._view.call_unguarded()
            self._has_response = True
        except Exception as error:  # noqa: BLE001 - it goes on when the flow has ended
            self._error = error
            return self._view.status_raised(error)
        finally:
            self.let_go()
        return self._view.status_of(self._response)

    def _give(self, reply: Reply) -> R:
        if self._error is not None:
            raise self._error
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            with enter(self.unrecorded(reply.unrecorded)):
                return self._view.call_unguarded()
        if isinstance(reply, PassOn | Done):
            return cast("R", self._response) if self._has_response else self._view.call_unguarded()
        return self._view.response_to(reply, self._response, self._answer)


class AsyncView(Translation[R]):
    """One request to an async view, and the view."""

    @abstractmethod
    async def principal(self) -> object:
        """As ``View.principal``."""

    @abstractmethod
    async def read_body(self, limit: int) -> Buffer | None:
        """As ``View.read_body``."""

    @abstractmethod
    async def call(self) -> R:
        """As ``View.call``."""

    async def call_unguarded(self) -> R:
        """As ``View.call_unguarded``."""
        return await self.call()

    @abstractmethod
    async def take(self, response: R, limits: Limits) -> Taken:
        """As ``View.take``."""


class AsyncViewPorts(AsyncCallPorts, Generic[R]):
    """One request to an async view, and its response."""

    def __init__(self, guard: AsyncGuard, policy: Policy, view: AsyncView[R]) -> None:
        """Guard one call of *view* by *policy*."""
        super().__init__(guard, policy)
        self._policy = policy
        self._view = view
        self._response: R | None = None
        self._has_response = False
        self._answer: Answer | None = None
        #: What the view raised where it is not guarded.
        self._error: Exception | None = None

    async def serve(self) -> R:
        """Take the request from its headers to its response."""
        notes, token = self.guard.store.notes_replays, os.urandom(16)
        return await self._give(
            await self.conduct(
                measured(serve), self._view.head, self._policy, token, notes_replays=notes, around=around()
            )
        )

    async def handle(self, operation: Operation, limit: int) -> Ending:
        """Call the view."""
        try:
            self._response = await self._view.call()
            self._has_response = True
            ending = (await self._view.take(self._response, self.limits(limit, operation))).ending(operation)
        except Exception as error:  # noqa: BLE001 - it is the flow's to judge
            return raised(error, operation)
        self._answer = getattr(ending, "answer", None)
        return ending

    @property
    def door(self) -> Door:
        """The entry point."""
        return self._view.door

    def endpoint(self) -> str | None:
        """Return the route's template."""
        template = self._view.template()
        return None if template is None else f"{self._view.head.method} {template}"

    def limits(self, size: int, operation: Operation) -> Limits:
        """Return how much of a response is held back: at most *size* bytes, for as long as the policy says."""
        return Limits(size, self._policy.max_held, operation)

    async def principal(self) -> object:
        """Ask the application for the user of this request."""
        self.guard.gate.check()
        return await interruptible(self._view.principal())

    async def read_body(self, limit: int) -> Buffer | None:
        """Read the whole body, while it is within the limit."""
        return await interruptible(self._view.read_body(limit))

    async def run_unguarded(self, hold: Hold | None, lease: timedelta | None) -> int | None:
        """Call the view as if it were not guarded."""
        if hold is not None and lease is not None:
            self.guard.leases.add(hold, lease)
        try:
            self._response = await self._view.call_unguarded()
            self._has_response = True
        except Exception as error:  # noqa: BLE001 - it goes on when the flow has ended
            self._error = error
            return self._view.status_raised(error)
        finally:
            if hold is not None:
                self.guard.leases.discard(hold)
        return self._view.status_of(self._response)

    async def _give(self, reply: Reply) -> R:
        if self._error is not None:
            raise self._error
        if isinstance(reply, PassOn) and reply.unrecorded is not None:
            with enter(self.unrecorded(reply.unrecorded)):
                return await self._view.call_unguarded()
        if isinstance(reply, PassOn | Done):
            return cast("R", self._response) if self._has_response else await self._view.call_unguarded()
        return self._view.response_to(reply, self._response, self._answer)
