"""Receives webhooks in Flask: one decorator. What is verified and answered is in ``receiving.py``.

    @app.post("/hooks")
    @webhook(inbox, secrets=["env:HOOK_SECRET"])
    def paid(connection, event): ...

The inbox is one for threads. An ``async def`` handler is run as Flask runs async views.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from semel.errors import BodyTooLarge, ConfigurationError, Refusal
from semel.webhooks.receiving import MAX_BODY, TOLERANCE, AnyInbox, Receiver, named_after, refusal, text_headers

try:
    from flask import Response, current_app, request
    from werkzeug.exceptions import RequestEntityTooLarge
except ImportError as error:
    raise ImportError("semel.webhooks.flask needs Flask 3. Run: pip install 'semel[flask]'") from error


def webhook(
    inbox: AnyInbox | None = None,
    *,
    secrets: Sequence[str],
    preset: str = "standard",
    tolerance: timedelta = TOLERANCE,
    max_body: int = MAX_BODY,
) -> Callable[[Callable[..., Any]], Callable[..., Response]]:
    """Make a view of ``handler(connection, event)``; without an *inbox*, of ``handler(event)``.

    ``MAX_CONTENT_LENGTH`` of the app bounds the body, too.
    """
    receiver = Receiver.of(inbox, secrets=secrets, preset=preset, tolerance=tolerance, max_body=max_body)
    if inbox is not None and inspect.iscoroutinefunction(inbox.receive):
        raise ConfigurationError(f"{type(inbox).__name__} belongs to an event loop. Give Flask the one for threads.")

    def decorate(handler: Callable[..., Any]) -> Callable[..., Response]:
        def receive(**_: Any) -> Response:
            try:
                receiver.check_length(request.content_length)
                _bound(receiver.max_body)
                # Kept, since what runs after this view may look at it, too.
                event = receiver.event(request.headers.items(), request.get_data(cache=True))
                answer = receiver.answer(receiver.hand_on(current_app.ensure_sync(handler), event))
            except RequestEntityTooLarge:
                answer = refusal(BodyTooLarge())
            except Refusal as error:
                answer = refusal(error)
            return Response(answer.body, answer.status, text_headers(answer))

        named_after(handler, receive)
        return receive

    return decorate


def _bound(limit: int) -> None:
    """Let hardly more be read of a body that does not say how long it is. Flask 3.0 can't be told."""
    given = request.max_content_length
    with suppress(AttributeError):
        # One byte more: what is longer is cut off without a word, and has to be seen to be longer.
        request.max_content_length = limit + 1 if given is None else min(limit + 1, given)
