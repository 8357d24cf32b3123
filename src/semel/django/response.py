"""What a view has answered, as far as it can be kept: rendered, gathered, or too large. It must still be there to send.

A stream is read up to the limits before anything of it is sent, since an answer leaves only once it is stored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.http.response import HttpResponseBase

from semel.django.request import Response, headers_of
from semel.guard.body import Limits, flows_at_once, inside
from semel.guard.views import Taken, gathered
from semel.operation import Operation, enter


def checked(response: Any, view: Any) -> Response:
    """Return what *view* has returned if it is a response, in the words of Django otherwise."""
    if isinstance(response, HttpResponseBase):
        return response
    name = getattr(view, "__qualname__", type(view).__name__)
    what = "None" if response is None else f"{type(response).__name__}"
    raise ValueError(f"The view {name} didn't return an HttpResponse object. It returned {what} instead.")


def is_unrendered(response: Response) -> bool:
    """Whether a response is yet to be rendered, as a ``TemplateResponse`` is."""
    return not getattr(response, "is_rendered", True) and callable(getattr(response, "render", None))


def taken(response: Response, limits: Limits, *, on_a_loop: bool) -> Taken:
    """Return a rendered *response* as far as it can be kept; *on_a_loop*: an event loop will send it."""
    if not _can_be_gathered(response, limits):
        return _whole(response, limits)
    if response.is_async:
        # Without a loop that stays, a stream that is begun has to be read to its end: Django does so, too.
        body, rest = async_to_sync(_gathered)(response.streaming_content, limits, to_the_end=not on_a_loop)
    else:
        body, rest = gathered(iter(response.streaming_content), limits)
    response.streaming_content = rest
    return Taken(response.status_code, headers_of(response), body)


async def async_taken(response: Response, limits: Limits) -> Taken:
    """Return the same for an async view."""
    if not _can_be_gathered(response, limits):
        return _whole(response, limits)
    rest: Any
    if response.is_async:
        body, rest = await _gathered(response.streaming_content, limits)
    else:
        body, rest = await sync_to_async(gathered)(iter(response.streaming_content), limits)
    response.streaming_content = rest
    return Taken(response.status_code, headers_of(response), body)


def _can_be_gathered(response: Response, limits: Limits) -> bool:
    return response.streaming and not flows_at_once(headers_of(response), limits.operation, limits.time)


def _whole(response: Response, limits: Limits) -> Taken:
    if response.streaming:
        flow_on = _inside if response.is_async else inside
        response.streaming_content = flow_on(limits.operation, response.streaming_content)
        return Taken(response.status_code, headers_of(response), None)
    body = None if len(response.content) > limits.size else response.content
    return Taken(response.status_code, headers_of(response), body)


async def _gathered(
    chunks: AsyncIterator[bytes], limits: Limits, *, to_the_end: bool = False
) -> tuple[bytes | None, Any]:
    held: list[bytes] = []
    size = 0
    end = limits.end()
    async for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if not to_the_end and (size > limits.size or limits.is_late(end)):
            return None, _chained(held, _inside(limits.operation, chunks))
    if to_the_end:
        return (b"".join(held) if size <= limits.size else None), held
    whole = b"".join(held)
    return whole, _chained([whole], chunks)


async def _chained(held: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in held:
        yield chunk
    async for chunk in rest:
        yield chunk


async def _inside(operation: Operation, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate over *chunks*, each of which is made as part of *operation*, as ``inside`` does in a thread."""
    remaining = aiter(chunks)
    while True:
        with enter(operation):
            try:
                chunk = await anext(remaining)
            except StopAsyncIteration:
                return
        yield chunk
