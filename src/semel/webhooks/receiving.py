"""What every receiver of webhooks does: verify, hand to the inbox, answer. Frameworks are in files of their own;
without one, ``verify`` is all there is.

The signature is that of the bytes that came, so they are verified as they are, before anything reads them. What is
verified goes to the inbox by its id: an event that is delivered twice is handled once.

    verified, and handled or handled before      200
    headers missing, or can't be read            400
    sent too long ago                            400
    no secret of ours has signed it              401
    larger than *max_body*                       413
    another body under an id that is known       422
    being handled at this moment                 503, with Retry-After
    parked: it waits for an operator             503, with Retry-After; the sender keeps it, and the inbox does not
    the handler raised an exception              what the framework makes of it, a 500: the sender tries again
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.webhook import TOLERANCE, Preset, WebhookEvent, preset_named, verified
from semel.errors import (
    BodyTooLarge,
    ConfigurationError,
    MessageDiffers,
    Refusal,
    SignatureInvalid,
    WebhookBusy,
    WebhookParked,
    WebhookReused,
)
from semel.stores.secrets import resolved

#: What senders advise is 20 kB, and the largest that are known send a few hundred.
MAX_BODY = 1024 * 1024

#: When to come back: the handler of another delivery is at work.
BUSY_SECONDS = 5
#: When to come back: an operator has to look first.
PARKED_SECONDS = 3600

_JSON = (b"content-type", b"application/json")
#: A 401 says by what it could be proven; there is no registered name for this.
_CHALLENGE = (b"www-authenticate", b"Webhook-Signature")

#: What the verdicts of an inbox are answered with, by their names.
_DONE = {"Ran": "ran", "Duplicate": "duplicate"}

Handler = Callable[..., Any]
#: Runs a plain function beside the event loop.
InThread = Callable[..., Awaitable[Any]]


class AnyInbox(Protocol):
    """An inbox, of either colour."""

    def receive(self, message_id: str, handler: Handler, /, *args: Any, payload: object = None) -> Any:
        """Call ``handler(connection, *args)`` once for each id; return a verdict, or what is to be awaited for it.
        Another *payload* under the same id is refused.
        """


@dataclass(frozen=True, slots=True)
class Receiver:
    """The settings of one endpoint that receives."""

    inbox: AnyInbox | None
    #: Not shown: they may be the secrets themselves, and pages of errors show local variables.
    secrets: tuple[str, ...] = field(repr=False)
    preset: Preset
    tolerance: timedelta
    max_body: int

    @classmethod
    def of(
        cls, inbox: AnyInbox | None, *, secrets: Sequence[str], preset: str, tolerance: timedelta, max_body: int
    ) -> Receiver:
        """Check the settings. Every secret must be there by now; references are read again with each webhook."""
        given: Any = (secrets, tolerance, max_body)
        if isinstance(secrets, str) or not secrets or not all(isinstance(each, str) for each in given[0]):
            raise ConfigurationError("secrets= is a list of at least one secret, or of where it is: env:HOOK_SECRET.")
        if inbox is not None and not hasattr(inbox, "receive"):
            raise ConfigurationError(
                "The first argument is the inbox: @webhook(inbox, secrets=[…]). Without one: @webhook(secrets=[…])."
            )
        if not isinstance(given[1], timedelta) or tolerance <= timedelta(0):
            raise ConfigurationError(f"tolerance is a timedelta of more than nothing, not {tolerance!r}.")
        if not isinstance(given[2], int) or max_body < 1:
            raise ConfigurationError(f"max_body is a number of bytes, 1 or more, not {max_body!r}.")
        made = cls(inbox, tuple(secrets), preset_named(preset), tolerance, max_body)
        made.read_secrets()
        return made

    def read_secrets(self) -> list[Any]:
        """Return the secrets, from where they are."""
        return [self.preset.read_secret(resolved(each)) for each in self.secrets]

    def check_length(self, length: int | None) -> None:
        """Refuse a body that is larger than it may be; None: its length is not known yet."""
        if length is not None and length > self.max_body:
            raise BodyTooLarge

    def event(self, headers: Iterable[tuple[str | bytes, str | bytes]], body: bytes) -> WebhookEvent:
        """Return the webhook, if it is genuine and fresh; else raise a ``Refusal``."""
        self.check_length(len(body))
        lower = {_text(name).lower(): _text(value) for name, value in headers}
        secrets = self.read_secrets()
        return verified(self.preset, secrets, lower, body, now=time.time(), tolerance=self.tolerance)

    def hand_on(self, handler: Handler, event: WebhookEvent) -> Any:
        """Give it to the inbox, or to the handler itself where there is none; return what comes of it."""
        if self.inbox is None:
            return handler(event)
        payload = event.payload if self.preset.repeats_payload else None
        with _told():
            return self.inbox.receive(event.id, handler, event, payload=payload)

    async def hand_on_async(self, handler: Handler, event: WebhookEvent, in_thread: InThread) -> Any:
        """Do the same on an event loop. What is not async is called *in_thread*."""
        asked = handler if self.inbox is None else self.inbox.receive
        is_async = inspect.iscoroutinefunction(asked)
        given = self.hand_on(handler, event) if is_async else await in_thread(self.hand_on, handler, event)
        with _told():
            return (await given) if inspect.isawaitable(given) else given

    def answer(self, outcome: Any) -> Answer:
        """Return the answer to what ``hand_on`` brought."""
        if self.inbox is None:
            return _done("ran")
        name = type(outcome).__name__
        if name in _DONE:
            return _done(_DONE[name])
        if name == "Busy":
            return refusal(WebhookBusy(retry_after=BUSY_SECONDS))
        if name == "Parked":
            return refusal(WebhookParked(retry_after=PARKED_SECONDS))
        raise ConfigurationError(
            f"{type(self.inbox).__name__}.receive returned {name}, which is no verdict of an inbox."
        )


class Headers(Protocol):
    """A mapping, or a server's own class for headers."""

    def items(self) -> Iterable[tuple[str, str]]:
        """Return names and values."""


def verify(
    headers: Headers | Iterable[tuple[str | bytes, str | bytes]],
    body: bytes | bytearray | memoryview | str,
    *,
    secrets: Sequence[str],
    preset: str = "standard",
    tolerance: timedelta = TOLERANCE,
) -> WebhookEvent:
    """Return the webhook, if one of *secrets* has signed it and it is fresh; else raise a ``Refusal``, whose ``status``
    is the one to answer with.

    *headers* are a mapping, or pairs, with names in any case. *body* is as it came: nothing may have parsed it before.
    """
    given: Any = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    if not isinstance(given, bytes | bytearray | memoryview):
        raise ConfigurationError(
            f"body is what came, bytes or text, not {type(body).__name__}: that is what was signed, byte for byte."
        )
    content = bytes(given)
    limit = max(1, len(content))
    receiver = Receiver.of(None, secrets=secrets, preset=preset, tolerance=tolerance, max_body=limit)
    pairs: Any = headers.items() if hasattr(headers, "items") else headers
    return receiver.event(pairs, content)


def _text(given: str | bytes) -> str:
    if not isinstance(given, str | bytes):
        raise ConfigurationError(f"A header has a name and a value, each of them text or bytes, not {given!a}.")
    return given.decode("latin-1") if isinstance(given, bytes) else given


@contextmanager
def _told() -> Iterator[None]:
    """Tell the sender that it has used an id twice: to try again, as after a 500, would not help."""
    try:
        yield
    except MessageDiffers as differs:
        raise WebhookReused from differs


def refusal(error: Refusal) -> Answer:
    """Return the answer that tells the sender of a refusal."""
    answer = refused(error, Policy())
    if isinstance(error, SignatureInvalid):
        return Answer(answer.status, (*answer.headers, _CHALLENGE), answer.body)
    return answer


def text_headers(answer: Answer) -> dict[str, str]:
    """Return the headers of an *answer* as a framework takes them."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}


def named_after(handler: Handler, view: Callable[..., Any]) -> None:
    """Give the *view* the name and the words of its *handler*; not its signature, which is another."""
    for each in ("__name__", "__qualname__", "__doc__", "__module__"):
        if hasattr(handler, each):
            setattr(view, each, getattr(handler, each))


def _done(outcome: str) -> Answer:
    return Answer(200, (_JSON,), json.dumps({"outcome": outcome}).encode())


__all__ = ["MAX_BODY", "TOLERANCE", "AnyInbox", "Receiver", "named_after", "refusal", "text_headers", "verify"]
