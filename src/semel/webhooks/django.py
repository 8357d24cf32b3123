"""Receives webhooks in Django: one decorator. What is verified and answered is in ``receiving.py``.

    @webhook(inbox, secrets=["env:HOOK_SECRET"])
    def paid(connection, event): ...

    urlpatterns = [path("hooks", paid)]

The view of an ``async def`` handler is async. It needs no token against forged forms: its signature is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from semel.core.message import Answer
from semel.core.webhook import WebhookEvent
from semel.errors import BodyTooLarge, Refusal
from semel.webhooks.receiving import MAX_BODY, TOLERANCE, AnyInbox, Receiver, named_after, refusal, text_headers

try:
    from asgiref.sync import sync_to_async
    from django.core.exceptions import RequestDataTooBig
    from django.db.transaction import non_atomic_requests
    from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
except ImportError as error:
    raise ImportError("semel.webhooks.django needs Django. Run: pip install 'semel[django]'") from error


def webhook(
    inbox: AnyInbox | None = None,
    *,
    secrets: Sequence[str],
    preset: str = "standard",
    tolerance: timedelta = TOLERANCE,
    max_body: int = MAX_BODY,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a view of ``handler(connection, event)``; without an *inbox*, of ``handler(event)``.

    ``DATA_UPLOAD_MAX_MEMORY_SIZE`` of the settings bounds the body, too.
    """
    receiver = Receiver.of(inbox, secrets=secrets, preset=preset, tolerance=tolerance, max_body=max_body)

    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        def receive(request: HttpRequest, *_: Any, **__: Any) -> HttpResponse:
            if request.method != "POST":
                return HttpResponseNotAllowed(["POST"])
            try:
                return _response(receiver.answer(receiver.hand_on(handler, _event(receiver, request))))
            except Refusal as error:
                return _response(refusal(error))

        async def receive_async(request: HttpRequest, *_: Any, **__: Any) -> HttpResponse:
            if request.method != "POST":
                return HttpResponseNotAllowed(["POST"])
            try:
                event = _event(receiver, request)
                return _response(receiver.answer(await receiver.hand_on_async(handler, event, _in_thread)))
            except Refusal as error:
                return _response(refusal(error))

        view: Any = receive_async if inspect.iscoroutinefunction(handler) else receive
        named_after(handler, view)
        view.csrf_exempt = True
        alias = getattr(getattr(inbox, "store", None), "alias", None)
        if alias is not None:
            # The inbox opens the transaction of the handler itself, in place of ATOMIC_REQUESTS.
            non_atomic_requests(using=alias)(view)
        return view  # type: ignore[no-any-return]  # one of the two above

    return decorate


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await sync_to_async(function)(*args)


def _event(receiver: Receiver, request: HttpRequest) -> WebhookEvent:
    length = request.META.get("CONTENT_LENGTH") or ""
    receiver.check_length(int(length) if length.isdigit() else None)
    try:
        body: bytes = request.body
    except RequestDataTooBig:
        raise BodyTooLarge from None
    return receiver.event(request.headers.items(), body)


def _response(answer: Answer) -> HttpResponse:
    return HttpResponse(answer.body or b"", status=answer.status, headers=text_headers(answer))
