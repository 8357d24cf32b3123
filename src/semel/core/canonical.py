"""The canonical form of a body: without what differs by accident between retries (order, ``1.0``, a boundary).

It hashes no request and compares none: ``fingerprint`` does. The rule is *exact or none*: two bodies that a handler
could tell apart never have the same form, and a body that can't be read with certainty has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from mmap import mmap
from typing import NamedTuple, NoReturn, TypeAlias
from urllib.parse import unquote_to_bytes

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap

#: The limit of Python's web frameworks as well. A field costs microseconds, and a body can hold millions of them.
MAX_FIELDS = 1000
#: Bytes of one part's headers: a file name and a type, with a margin.
MAX_PART_HEAD = 8 * 1024
#: Above this, a float no longer stands for exactly one integer.
FLOATS_ARE_EXACT_BELOW = 2**53

#: Decoding, parsing and int() raise ValueError; Decimal ArithmeticError; deep nesting RecursionError.
UNREADABLE = (ValueError, ArithmeticError, RecursionError)

_LENGTH_BYTES = 8
_MULTIPART = "multipart/form-data"
_FORM = "application/x-www-form-urlencoded"

_MEDIA_TYPE = re.compile(r"\s*([^\s;]+)\s*(?:;(.*))?", re.DOTALL)
_VALUE = r'("(?:[^"\\]|\\.)*+"|[^\s;"\\]++)'
_CHARSET = re.compile(rf"(?:^|;)\s*charset={_VALUE}", re.IGNORECASE)
_BOUNDARY = re.compile(rf"(?:^|;)\s*boundary={_VALUE}", re.IGNORECASE)
# Between two CRLF. Some parsers end a line at a bare CR or LF, others continue it where the next begins with a space.
_PART_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_FORM_DATA = re.compile(r"form-data\s*(?=;)", re.IGNORECASE)
_DISPOSITION_PARAMETER = re.compile(rf";\s*([A-Za-z0-9*_-]+)={_VALUE}\s*")


class _Unsure(ValueError):
    """This body has no canonical form."""


def pack(parts: Iterable[bytes]) -> bytes:
    """Join *parts* so that no other parts give the same bytes: each follows its length."""
    return b"".join([len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts])


class MediaType(NamedTuple):
    """The parts of a content type that count."""

    #: Lower case, with the charset of a text, and of a form that is not in UTF-8; other parameters say nothing about
    #: what is asked for.
    name: str
    #: Of a multipart body, and random each time.
    boundary: str | None

    @property
    def is_json(self) -> bool:
        """Whether it is JSON: ``application/json`` or any ``+json`` type."""
        return self.name == "application/json" or self.name.endswith("+json")

    @property
    def is_form(self) -> bool:
        """Whether it is a form as browsers send it, without files."""
        return self.name == _FORM


@lru_cache(maxsize=64)  # Clients send the same few types; one with a boundary soon drops out.
def media_type(content_type: str) -> MediaType:
    """Parse a Content-Type; one that can't be parsed counts as it is."""
    match = _MEDIA_TYPE.fullmatch(content_type)
    if match is None:
        return MediaType(content_type, None)
    name, parameters = match[1].lower(), match[2]
    if parameters is None:
        return MediaType(name, None)
    if found := _CHARSET.search(parameters):
        charset = _unquoted(found[1]).lower()
        # JSON has one charset only. A form has a default one, but some frameworks decode it by the declared one.
        if name.startswith("text/") or (name in {_FORM, _MULTIPART} and charset != "utf-8"):
            return MediaType(f"{name};charset={charset}", None)
    boundaries = _BOUNDARY.findall(parameters) if name == _MULTIPART else []
    # Parsers disagree on which of two boundaries counts, and on escapes in one.
    is_clear = len(boundaries) == 1 and "\\" not in boundaries[0]
    return MediaType(name, _unquoted(boundaries[0]) if is_clear else None)


def pairs(query: bytes) -> list[tuple[bytes, bytes]]:
    """Decode ``a=1&b=%20`` as the URL standard does: names and values as bytes, in order, empty pieces left out."""
    decoded = []
    for piece in query.replace(b"+", b" ").split(b"&"):
        if piece:
            name, _, value = piece.partition(b"=")
            decoded.append((unquote_to_bytes(name), unquote_to_bytes(value)))
    return decoded


def canonical(media: MediaType, body: Buffer, *, limit: int, omit: Iterable[tuple[str, ...]] = ()) -> bytes | None:
    """Return the canonical form of *body*, or None. JSON and forms over *limit* bytes have none."""
    try:
        if media.boundary is not None:
            return _multipart(media.boundary.encode("latin-1"), body)
        if len(body) > limit:
            return None
        if media.is_json:
            return _json(body, omit)
        if media.is_form:
            return pack(part for pair in form_fields(body) for part in pair)
    except UNREADABLE:
        pass
    return None


def form_fields(body: Buffer) -> list[tuple[bytes, bytes]]:
    """Parse a form; raise one of ``UNREADABLE`` if it is not a form, or has too many fields."""
    text = bytes(body)
    # A form escapes all that is not ASCII. So a body with other bytes is not a form; it may be compressed.
    if not text.isascii() or text.count(b"&") >= MAX_FIELDS:
        raise _Unsure
    return pairs(text)


def json_value(body: Buffer) -> object:
    """Parse JSON, with numbers as exact ``Decimal``; raise one of ``UNREADABLE`` if it is invalid or ambiguous."""
    return _decode_exactly(str(body, "utf-8"))


def _json(body: Buffer, omit: Iterable[tuple[str, ...]]) -> bytes:
    value = _decode(str(body, "utf-8"))
    for path in omit:
        _leave_out(value, path)
    return _encode(value).encode()


def _members(members: list[tuple[str, object]]) -> dict[str, object]:
    by_name = dict(members)
    if len(by_name) != len(members):
        raise _Unsure  # of two equal names, some parsers keep the first and others the last
    return by_name


def _number(text: str) -> float | int:
    number = float(text)
    if repr(number) != text and Decimal(repr(number)) != Decimal(text):
        raise _Unsure  # rounding would make two amounts equal
    if number.is_integer() and abs(number) < FLOATS_ARE_EXACT_BELOW:
        return int(number)
    return number


def _constant(name: str) -> NoReturn:
    raise _Unsure(name)  # NaN and Infinity: Python reads them, but they are not JSON


# Made once: making them is half of the cost for a small body.
_decode: Callable[[str], object] = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=_number, parse_constant=_constant
).decode
_decode_exactly: Callable[[str], object] = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=Decimal, parse_int=Decimal, parse_constant=_constant
).decode
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False).encode


def _leave_out(value: object, path: tuple[str, ...]) -> None:
    if isinstance(value, list):
        for element in value:
            _leave_out(element, path)
    elif isinstance(value, dict):
        name, *rest = path
        if not rest:
            value.pop(name, None)
        elif name in value:
            _leave_out(value[name], tuple(rest))


def _multipart(boundary: bytes, body: Buffer) -> bytes:
    # A view, so that a part of a large upload is hashed without a copy; closed, so that an mmap can be closed after it.
    with memoryview(body) as view:
        return pack([_part(view, start, end) for start, end in _spans(view, boundary)])


def _spans(view: memoryview, boundary: bytes) -> list[tuple[int, int]]:
    """Find where each part starts and ends, both without the delimiters and their line ends."""
    opening = b"--" + boundary + b"\r\n"
    # Some clients begin with an empty line. Any other preamble is legal too, but no known client sends one.
    first = 2 if bytes(view[:2]) == b"\r\n" else 0
    if view[first : first + len(opening)] != opening:
        raise _Unsure
    # A memoryview has no find().
    delimiter = re.compile(re.escape(b"\r\n--" + boundary))
    mark = re.compile(re.escape(b"--" + boundary))
    spans: list[tuple[int, int]] = []
    start, after = first + len(opening), b"\r\n"
    while after == b"\r\n":
        found = delimiter.search(view, start)
        if found is None or len(spans) == MAX_FIELDS:
            raise _Unsure
        if mark.search(view, start, found.start()):
            # After a bare LF, or anywhere: some parsers end the part here.
            raise _Unsure
        spans.append((start, found.start()))
        start = found.end() + 2
        after = bytes(view[found.end() : start])
    # Other text after a boundary: it is inside a part. Other text after the last boundary: an epilogue.
    if after != b"--" or bytes(view[start : start + 3]) not in (b"", b"\r\n"):
        raise _Unsure
    return spans


def _part(view: memoryview, start: int, end: int) -> bytes:
    head, blank_line, _ = bytes(view[start : min(end, start + MAX_PART_HEAD)]).partition(b"\r\n\r\n")
    if not blank_line:
        raise _Unsure
    content = start + len(head) + len(blank_line)
    return pack([_part_head(head.decode("latin-1")), sha256(view[content:end]).digest()])


def _part_head(head: str) -> bytes:
    """Return name, file name and type in one form; other headers (such as a transfer encoding) count as they are."""
    fields: dict[str, str] = {}
    for line in head.split("\r\n"):
        header = _PART_HEADER.fullmatch(line)
        if header is None or header[1].lower() in fields:
            raise _Unsure
        fields[header[1].lower()] = header[2].strip(" \t")
    disposition = _disposition(fields.pop("content-disposition", ""))
    kind = media_type(fields.pop("content-type", "")).name
    if kind.startswith("multipart/"):
        raise _Unsure  # a nested multipart: its boundary is random, too
    return pack([_packed(disposition), kind.encode("latin-1"), _packed(fields)])


def _disposition(value: str) -> dict[str, str]:
    kind = _FORM_DATA.match(value)
    parameters: dict[str, str] = {}
    position = kind.end() if kind else 0
    while position < len(value):
        parameter = _DISPOSITION_PARAMETER.match(value, position)
        if parameter is None or parameter[1].lower() in parameters:
            raise _Unsure
        # Escapes stay: some parsers unescape a file name, others take C:\new as it is.
        parameters[parameter[1].lower()] = _unquoted(parameter[2])
        position = parameter.end()
    if "name" not in parameters:
        raise _Unsure
    return parameters


def _packed(fields: dict[str, str]) -> bytes:
    return pack(text.encode("latin-1") for field in sorted(fields.items()) for text in field)


def _unquoted(value: str) -> str:
    return value[1:-1] if value.startswith('"') else value
