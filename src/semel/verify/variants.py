"""Other requests that are made from the given one: the same in another spelling, another of its kind, a broken one.
Whether the API accepts them is not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from semel.verify.message import Request

#: More than any buffer that a server reads at once, less than what servers refuse by default.
LARGE_BYTES = 256 * 1024
QUERY = "semel-verify=1"
UNICODE = " \u00e9\u2603\U0001f600"
FORM = "application/x-www-form-urlencoded"

_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*\Z)")


def others(request: Request) -> Iterator[Request]:
    """Yield requests for another operation of the same kind: one value of the body is different in each."""
    if request.is_json and request.body:
        content = json.loads(request.body)
        for edit in (_next_number, _longer_text, _more):
            for changed in _changed(content, edit):
                yield replace(request, body=_spelled(changed))
    elif request.media_type == FORM:
        pairs = parse_qsl(request.body.decode("latin-1"), keep_blank_values=True)
        for number, (name, value) in enumerate(pairs):
            longer = _next_text(value)
            yield replace(request, body=urlencode([*pairs[:number], (name, longer), *pairs[number + 1 :]]).encode())
    elif request.body:
        text = request.body.decode("latin-1")
        yield replace(request, body=_next_text(text).encode("latin-1"))


def reordered(request: Request) -> Request | None:
    """Return the same JSON with its members in another order and other white space; None if it is not JSON."""
    if not request.is_json or not request.body:
        return None
    content = json.loads(request.body)
    if isinstance(content, dict):
        content = dict(reversed(content.items()))
    body = json.dumps(content, indent=3).encode()
    return None if body == request.body else replace(request, body=body)


def padded(request: Request) -> Request | None:
    """Return the same JSON with so much white space before its members that it is large; None if it has none."""
    if not request.is_json or request.body[:1] != b"{" or len(request.body) < len(b'{"":0}'):
        return None
    return replace(request, body=b"{" + b" " * LARGE_BYTES + request.body[1:])


def with_number(request: Request, number: int) -> Request | None:
    """Return the same JSON with *number* as one more member; None if it has none."""
    if not request.is_json or request.body[:1] != b"{":
        return None
    return replace(request, body=_spelled(json.loads(request.body) | {"semel-verify": number}))


def with_unicode(request: Request) -> Iterator[Request]:
    """Yield requests in which one text has characters of two, three and four bytes."""
    if request.is_json and request.body:
        content = json.loads(request.body)
        for changed in _changed(content, lambda value: value + UNICODE if isinstance(value, str) else None):
            yield replace(request, body=json.dumps(changed, ensure_ascii=False).encode())


def broken(request: Request) -> Request | None:
    """Return a request that any API refuses before it does anything: JSON that ends too early; None if not JSON."""
    return replace(request, body=request.body.rstrip()[:-1]) if request.is_json and request.body else None


def with_query(request: Request) -> Request:
    """Return the request with one more parameter in its query."""
    return replace(request, target=request.target + ("&" if "?" in request.target else "?") + QUERY)


def numbered(request: Request, number: int) -> Request | None:
    """Return the *number*-th of many requests that are all different; None if no value can be changed."""
    other: Request | None = request
    for _ in range(number):
        other = next(others(other), None) if other else None
    return other


def _changed(content: Any, edit: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield copies of *content*, each with one value edited. An edit returns None for a value that it leaves alone."""
    edited = edit(content)
    if edited is not None:
        yield edited
    if isinstance(content, dict):
        for name, value in content.items():
            yield from (content | {name: each} for each in _changed(value, edit))
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from ([*content[:number], each, *content[number + 1 :]] for each in _changed(value, edit))


def _next_number(value: Any) -> Any:
    return value + 1 if isinstance(value, int | float) and not isinstance(value, bool) else None


def _longer_text(value: Any) -> Any:
    return _next_text(value) if isinstance(value, str) else None


def _more(value: Any) -> Any:
    return value | {"semel-verify": 1} if isinstance(value, dict) else None


def _next_text(text: str) -> str:
    counted = _LAST_NUMBER.sub(lambda match: str(int(match[0]) + 1).zfill(len(match[0])), text, count=1)
    return counted if counted != text else text + "x"


def _spelled(content: Any) -> bytes:
    return json.dumps(content).encode()
