"""Receives webhooks in FastAPI and Starlette: one decorator. What is verified and answered is in ``receiving.py``.

    @app.post("/hooks")
    @webhook(inbox, secrets=["env:HOOK_SECRET"])
    async def paid(connection, event): ...

The body is read here, raw: let no parameter of FastAPI's read it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

from semel.errors import Refusal
from semel.webhooks.receiving import MAX_BODY, TOLERANCE, AnyInbox, Receiver, named_after, refusal, text_headers

try:
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response
except ImportError as error:
    raise ImportError("semel.webhooks.fastapi needs FastAPI or Starlette. Run: pip install 'semel[fastapi]'") from error

View = Callable[[Request], Coroutine[Any, Any, Response]]


def webhook(
    inbox: AnyInbox | None = None,
    *,
    secrets: Sequence[str],
    preset: str = "standard",
    tolerance: timedelta = TOLERANCE,
    max_body: int = MAX_BODY,
) -> Callable[[Callable[..., Any]], View]:
    """Make an endpoint of ``handler(connection, event)``; without an *inbox*, of ``handler(event)``.

    A plain handler, and an inbox for threads, are called in a thread.
    """
    receiver = Receiver.of(inbox, secrets=secrets, preset=preset, tolerance=tolerance, max_body=max_body)

    def decorate(handler: Callable[..., Any]) -> View:
        async def receive(request: Request) -> Response:
            try:
                event = receiver.event(request.headers.items(), await _body(request, receiver))
                outcome = await receiver.hand_on_async(handler, event, run_in_threadpool)
                answer = receiver.answer(outcome)
            except Refusal as error:
                answer = refusal(error)
            return Response(answer.body, answer.status, text_headers(answer))

        named_after(handler, receive)
        return receive

    return decorate


async def _body(request: Request, receiver: Receiver) -> bytes:
    """Read the body, and no more of it than it may have. One that a middleware has read is there still."""
    body = bytearray()
    async for part in request.stream():
        body += part
        receiver.check_length(len(body))
    return bytes(body)
