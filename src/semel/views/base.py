"""What both colours of views share: a request and its response, between the framework's terms and the core's."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, Generic, TypeVar
from urllib.parse import quote_plus

from semel.core.canonical import media_type, pack
from semel.core.commands import Ending
from semel.core.message import Answer, Head, Headers
from semel.core.replay import is_endless
from semel.core.value import value
from semel.door import CHUNK_BYTES, Limits, answered, inside, streaming
from semel.flows.reply import Reraise, Send
from semel.operation import Operation

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

    #: All of the request but its body.
    head: Head

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
        """Tell whoever reports errors that the view raised *error*: the client gets an answer of ours for it."""

    def response_to(self, reply: Send | Reraise, own: R | None, answer: Answer | None) -> R:
        """Return what the client gets: the view's *own* response where *answer* was taken from it, or ours.

        An exception that nobody answers for is raised.
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
