"""What a function returned or raised, as it is stored and as a retry gets it. Nothing here calls a function."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from semel.core.handler import Ending
from semel.core.message import Answer, Headers
from semel.core.recovery import as_json
from semel.errors import (
    Abandoned,
    ConfigurationError,
    FailedBefore,
    InProgress,
    LeaseLost,
    NoEffect,
    NotReplayable,
    Refusal,
    SemelError,
    StoreError,
)
from semel.flows.handle import STORE_RETRY_AFTER_SECONDS
from semel.flows.reply import Reply, Reraise, Send
from semel.functions.names import module_of
from semel.guard.endings import answered, streaming
from semel.operation import Operation

RETURNED = 200
RAISED = 500

#: Characters of a kept exception's own words. Some hold a whole response of somebody's.
MAX_WORDS = 1000

JSON_TYPE = b"application/json"
CODECS_TYPE = b"application/octet-stream"

#: Refusals that are stored in place of a result, or made of one that was not kept, by the slug they are stored under.
_STORED_REFUSALS: dict[str, type[Refusal]] = {each.slug: each for each in (Abandoned, NotReplayable)}


class Codec(Protocol):
    """How results become bytes, where JSON will not do. It must read back what older code of yours has written."""

    def encode(self, result: Any, /) -> bytes:
        """Write *result*."""

    def decode(self, stored: bytes, /) -> Any:
        """Read it back."""


@dataclass(frozen=True, slots=True)
class Results:
    """How the results of one function are kept."""

    name: str
    codec: Codec | None
    #: The exceptions that are an outcome, and kept.
    keep: tuple[type[Exception], ...]
    #: Whether all that a failed call has written is undone.
    is_atomic: bool

    def encode(self, result: object) -> bytes:
        """Write *result*, or raise where it can't be written."""
        if self.codec is None:
            return json.dumps(as_json(self.name, result), ensure_ascii=False, separators=(",", ":")).encode()
        stored: object = self.codec.encode(result)
        if not isinstance(stored, bytes):
            raise ConfigurationError(f"codec of {self.name}: encode must return bytes, not {type(stored).__name__}.")
        return stored

    @property
    def headers(self) -> Headers:
        """What is stored beside a result: in whose hand it is written."""
        return ((b"content-type", JSON_TYPE if self.codec is None else CODECS_TYPE),)

    def decode(self, body: bytes, headers: Headers) -> Any:
        """Read a result back. One that was written before there was a codec, or by an operator, is JSON."""
        if self.codec is None or (b"content-type", JSON_TYPE) in headers:
            return json.loads(body)
        return self.codec.decode(body)

    def replay(self, answer: Answer) -> Any:
        """Return the result that *answer* holds, or raise what it says."""
        if answer.status == RETURNED:
            return self.decode(answer.body or b"", answer.headers)
        said: dict[str, str] = json.loads(answer.body or b"{}")
        if refusal := _STORED_REFUSALS.get(said.get("code", "")):
            raise refusal
        raise FailedBefore.of(said.get("error", ""), said.get("message", ""))

    def failure(self, error: Exception) -> Answer:
        """Return what is stored of *error*."""
        kind = f"{module_of(type(error))}.{type(error).__qualname__}".removeprefix("builtins.")
        said = {"error": kind, "message": _words(error)}
        # Escaped: the words of an exception may hold what UTF-8 can't.
        return Answer(RAISED, ((b"content-type", JSON_TYPE),), json.dumps(said).encode())


class Outcome:
    """What one call came to, as far as this process knows."""

    def __init__(self, results: Results) -> None:
        """Nothing has been run."""
        self._results = results
        self._result: Any = None
        self.error: Exception | None = None
        #: Whether the function was called: by this call, and not by another with its key.
        self.has_run = False

    def returned(self, result: object, operation: Operation, limit: int) -> Ending:
        """Take what the function returned, and say how it ended."""
        headers = self._results.headers
        try:
            body = self._results.encode(result)
            # What a retry will get is what the first caller gets: nobody comes to depend on the difference.
            self._result = self._results.decode(body, headers)
        except Exception as error:  # noqa: BLE001 - a codec is the application's, and may raise anything
            self.error = error
            # It has run and must not run again, unless nothing of it is left or all of it is in its steps.
            is_safe = self._results.is_atomic or operation.has_no_effect or operation.story.is_used
            return _freed(operation) if is_safe else streaming(RETURNED, headers, operation)
        if len(body) > limit:
            return streaming(RETURNED, headers, operation)
        return answered(Answer(RETURNED, headers, body), operation, reached_handler=True)

    def raised(self, error: Exception, operation: Operation) -> Ending:
        """Take what the function raised, and say how it ended."""
        self.error = error
        is_ours = isinstance(error, SemelError)
        said_nothing = operation.has_no_effect or isinstance(error, NoEffect)
        if not isinstance(error, self._results.keep) or is_ours or said_nothing:
            return _freed(operation)
        return answered(self._results.failure(error), operation, reached_handler=True)

    def of(self, reply: Reply) -> Any:
        """Return what the caller gets, or raise it."""
        if isinstance(reply, Reraise):
            raise reply.error from self.error
        if self.error is not None:
            raise self.error
        if not self.has_run and isinstance(reply, Send):
            return self._results.replay(reply.answer)
        return self._result

    def refused(self, refusal: Refusal) -> SemelError:
        """Return what the caller is told where the flow has refused."""
        if self.has_run and isinstance(refusal, InProgress):
            # By the time this worker had a result, another had the operation. It is thrown away.
            return LeaseLost()
        if isinstance(refusal, StoreError):
            refusal.retry_after = STORE_RETRY_AFTER_SECONDS
        return refusal


def _freed(operation: Operation) -> Ending:
    # To the flow it is as if the function had not been reached: nothing is kept, whatever the policy keeps.
    return answered(Answer(RAISED), operation, reached_handler=False)


def _words(error: Exception) -> str:
    try:
        return str(error)[:MAX_WORDS]
    except Exception:  # noqa: BLE001 - its words are its own code, and what is known of it without them is kept
        return ""
