"""A function's result or exception, as it is stored and as a retry gets it. Nothing here calls a function."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from semel.core.handler import Ending
from semel.core.message import Answer, Headers
from semel.core.recovery import as_json, as_text
from semel.errors import (
    Abandoned,
    ConfigurationError,
    FailedBefore,
    InProgress,
    KeyReused,
    LeaseLost,
    NoEffect,
    NotReplayable,
    Refusal,
    ResultNotJSON,
    SemelError,
    StoreError,
)
from semel.flows.handle import STORE_RETRY_AFTER_SECONDS
from semel.flows.reply import Reply, Reraise, Send
from semel.functions.names import module_of
from semel.functions.typed import Form, Misfit
from semel.guard.endings import answered, streaming
from semel.operation import Operation

RETURNED = 200
RAISED = 500

#: Characters of a stored exception's message. Some hold the whole response of another service.
MAX_WORDS = 1000

JSON_TYPE = b"application/json"
CODECS_TYPE = b"application/octet-stream"

#: What is said of a call in other words than of a request.
_WORDS: dict[type[Refusal], str] = {
    InProgress: "Another call of {} with this key is under way, or its process has died and its lease has not ended. "
    "Wait, then call it again.",
    KeyReused: "This key was used for a call with other arguments. Use a new key for a new operation.",
    NotReplayable: "This call of {} took effect, but its result was not kept: it can't be stored, was too large, or "
    "was erased. It was not run again.",
}

_HOW = (
    "Annotate what the function returns (-> Decimal, or a dataclass), with names that are there when it runs and not "
    "under TYPE_CHECKING; or give codec=."
)
_NOT_AS_IT_WAS = "it does not come back from JSON as it was"

#: Refusals that are stored in place of a result, or stand for one that was not kept, by their slug.
_STORED_REFUSALS: dict[str, type[Refusal]] = {each.slug: each for each in (Abandoned, NotReplayable)}


class Codec(Protocol):
    """How results become bytes, if JSON is not enough. It must read what older versions of your code have written."""

    def encode(self, result: Any, /) -> bytes:
        """Write *result*."""

    def decode(self, stored: bytes, /) -> Any:
        """Read it back."""


@dataclass(frozen=True, slots=True)
class Results:
    """How the results of one function are stored."""

    name: str
    codec: Codec | None
    #: The exceptions that are an outcome, and kept.
    keep: tuple[type[Exception], ...]
    #: Whether everything that a failed call has written is rolled back.
    is_atomic: bool
    #: How the annotated type becomes JSON; None: it is JSON.
    form: Form | None = None

    def encode(self, result: object) -> bytes:
        """Write *result*, or raise where it can't be written."""
        if self.codec is None:
            return as_text(self._as_json(result)).encode()
        stored: object = self.codec.encode(result)
        if not isinstance(stored, bytes):
            raise ConfigurationError(f"codec of {self.name}: encode must return bytes, not {type(stored).__name__}.")
        return stored

    def _as_json(self, result: object) -> Any:
        form = self.form
        try:
            stored = as_json(self.name, result if form is None else form.write(result, "result"))
            is_exact = form is None or form.write(form.read(stored), "result") == stored
            where = None if is_exact else _NOT_AS_IT_WAS
        except ResultNotJSON as error:
            error.add_note(_HOW)
            raise
        except Exception as error:
            where = str(error) if isinstance(error, Misfit) else f"{_NOT_AS_IT_WAS} ({type(error).__name__})"
            raise ResultNotJSON(self.name, result, where) from error
        if where is not None:
            raise ResultNotJSON(self.name, result, where)
        return stored

    @property
    def headers(self) -> Headers:
        """The headers stored with a result: which codec wrote it."""
        return ((b"content-type", JSON_TYPE if self.codec is None else CODECS_TYPE),)

    def decode(self, body: bytes, headers: Headers) -> Any:
        """Read a result back. One from before there was a codec, or from an operator, is JSON."""
        if self.codec is None or (b"content-type", JSON_TYPE) in headers:
            stored = json.loads(body)
            return stored if self.form is None else self._read(self.form, stored)
        return self.codec.decode(body)

    def _read(self, form: Form, stored: Any) -> Any:
        try:
            return form.read(stored)
        except Exception as error:
            raise ConfigurationError(
                f"The stored result of {self.name} is not of the type that it is annotated to return: an older version "
                "of the code, or an operator, has written it. Give codec=, which can read it."
            ) from error

    def replay(self, answer: Answer) -> Any:
        """Return the result that *answer* holds, or raise what it says."""
        if answer.status == RETURNED:
            return self.decode(answer.body or b"", answer.headers)
        said: dict[str, str] = json.loads(answer.body or b"{}")
        if refusal := _STORED_REFUSALS.get(said.get("code", "")):
            raise self.told(refusal())
        raise FailedBefore.of(said.get("error", ""), said.get("message", ""))

    def told(self, refusal: Refusal) -> Refusal:
        """Return *refusal* in the words of a call, where it has any."""
        if words := _WORDS.get(type(refusal)):
            refusal.args = (words.format(self.name),)
        return refusal

    def failure(self, error: Exception) -> Answer:
        """Return what is stored of *error*."""
        kind = f"{module_of(type(error))}.{type(error).__qualname__}".removeprefix("builtins.")
        said = {"error": kind, "message": _words(error)}
        # Escaped: the message of an exception may hold characters that UTF-8 can't encode.
        return Answer(RAISED, ((b"content-type", JSON_TYPE),), json.dumps(said).encode())


class Outcome:
    """How one call ended, as far as this process knows."""

    def __init__(self, results: Results) -> None:
        """Start before anything has run."""
        self._results = results
        self._result: Any = None
        self.error: Exception | None = None
        #: Whether this call ran the function, and not another call with its key.
        self.has_run = False

    def returned(self, result: object, operation: Operation, limit: int) -> Ending:
        """Note the function's result, and return its ending."""
        headers = self._results.headers
        try:
            body = self._results.encode(result)
            # The first caller gets the same as a retry will get, so that no code depends on a difference.
            self._result = self._results.decode(body, headers)
        except Exception as error:  # noqa: BLE001 - a codec is the application's, and may raise anything
            self.error = error
            # It has run and must not run again, unless it was rolled back, or all of it is in its steps.
            is_safe = self._results.is_atomic or operation.has_no_effect or operation.story.is_used
            return _freed(operation) if is_safe else streaming(RETURNED, headers, operation)
        if len(body) > limit:
            return streaming(RETURNED, headers, operation)
        return answered(Answer(RETURNED, headers, body), operation, reached_handler=True)

    def raised(self, error: Exception, operation: Operation) -> Ending:
        """Note what the function raised, and return its ending."""
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
        """Return what the caller gets if the flow has refused."""
        if self.has_run and isinstance(refusal, InProgress):
            # Another worker had taken the operation over before this one had a result. The result is discarded.
            return LeaseLost()
        if isinstance(refusal, StoreError):
            refusal.retry_after = STORE_RETRY_AFTER_SECONDS
        # Where in the flow it was refused says nothing to the caller.
        return self._results.told(refusal).with_traceback(None)


def _freed(operation: Operation) -> Ending:
    # For the flow this is as if the function had not run: nothing is kept, whatever the policy keeps.
    return answered(Answer(RAISED), operation, reached_handler=False)


def _words(error: Exception) -> str:
    try:
        return str(error)[:MAX_WORDS]
    except Exception:  # noqa: BLE001 - its words are its own code, and what is known of it without them is kept
        return ""
