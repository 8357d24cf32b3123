"""The request that is to be verified, from a file. A mistake is told with its line and column; nothing is sent here.

A file is a request line, headers, a blank line and the body::

    POST /payments
    Authorization: Bearer ${TOKEN}
    Content-Type: application/json

    {"amount": 500}

Lines before the request line that begin with ``#`` are comments. ``${NAME}`` in a header is a variable of the
environment. The newline at the end of the file is not part of a body that is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from semel.errors import ConfigurationError
from semel.verify.message import Request

#: Methods that can take a key. Others are never guarded.
METHODS = ("POST", "PATCH", "PUT", "DELETE")

TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VERSION = re.compile(r"HTTP/[0-9](?:\.[0-9])?")
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
BAD_IN_TARGET = re.compile(r"[^!-~]")
BAD_IN_VALUE = re.compile(r"[^\t -~\x80-\xff]")
#: Headers that say how this message is framed. They are computed.
_COMPUTED = frozenset({"content-length", "transfer-encoding", "connection", "expect"})
_TEXT = re.compile(r"text/.*|application/(?:.*\+)?(?:json|xml)|application/x-www-form-urlencoded|")


class RequestFileWrong(ConfigurationError):
    """The request file has a mistake."""

    def __init__(self, name: str, line: int, column: int, message: str) -> None:
        """Say where the mistake is: *line* and *column* begin at 1."""
        super().__init__(f"{name}, line {line}, column {column}: {message}")
        self.line = line
        self.column = column


def parse(data: bytes, environment: Mapping[str, str], *, name: str = "the request file") -> Request:
    """Read the request in *data*."""
    return _Parser(data, environment, name).request()


class _Parser:
    def __init__(self, data: bytes, environment: Mapping[str, str], name: str) -> None:
        self._rest = data.removeprefix(b"\xef\xbb\xbf")
        self._environment = environment
        self._name = name
        self._number = 0

    def request(self) -> Request:
        line = self._next_line()
        while line is not None and (not line.strip() or line.startswith("#")):
            line = self._next_line()
        if line is None:
            raise self._wrong(0, "There is no request line. It begins with one such as: POST /payments")
        method, target = self._request_line(line)
        headers = list[tuple[str, str]]()
        while line := self._next_line():
            header = self._header(line)
            if header[0].lower() not in _COMPUTED:
                headers.append(header)
        request = Request(method, target, tuple(headers), self._rest)
        return self._with_body(request)

    def _request_line(self, line: str) -> tuple[str, str]:
        method, _, rest = line.partition(" ")
        if not TOKEN.fullmatch(method):
            raise self._wrong(0, f"{method[:20]!r} is no method. The line reads: POST /payments")
        if method.upper() not in METHODS:
            raise self._wrong(0, f"{method} takes no key. One of {', '.join(METHODS)} does.")
        if method != method.upper():
            raise self._wrong(0, f"A method is written in capitals: {method.upper()}")
        at = len(line) - len(rest.lstrip(" "))
        target, _, version = rest.strip(" ").partition(" ")
        if not target:
            raise self._wrong(len(line), f"There is no path after {method}. The line reads: {method} /payments")
        if version and not _VERSION.fullmatch(version.strip()):
            raise self._wrong(at + len(target) + 1, "There is text after the path. Write a blank in a path as %20.")
        if not target.startswith("/"):
            raise self._wrong(at, "The path begins with / and is relative to the URL on the command line.")
        if bad := BAD_IN_TARGET.search(target):
            raise self._wrong(at + bad.start(), f"{bad[0]!r} can't stand in a path. Write it percent-encoded.")
        if "#" in target:
            raise self._wrong(at + target.index("#"), "A fragment is never sent. Write # in a path as %23.")
        return method, target

    def _header(self, line: str) -> tuple[str, str]:
        if line[0] in " \t":
            raise self._wrong(0, "A header begins at the start of its line, and is one line.")
        header, colon, value = line.partition(":")
        if not colon:
            raise self._wrong(len(line), "This is no header: there is no colon. A blank line comes before the body.")
        if bad := re.search(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]", header):
            raise self._wrong(bad.start(), f"{bad[0]!r} can't stand in the name of a header.")
        if not header:
            raise self._wrong(0, "There is no name before the colon.")
        at = len(header) + 1
        value = _VARIABLE.sub(lambda match: self._variable(match, at), value)
        if bad := BAD_IN_VALUE.search(value):
            raise self._wrong(at + bad.start(), f"{bad[0]!r} can't stand in the value of a header.")
        return header, value.strip(" \t")

    def _variable(self, match: re.Match[str], at: int) -> str:
        if match[1] not in self._environment:
            raise self._wrong(at + match.start(), f"The variable {match[1]} is not set in the environment.")
        return self._environment[match[1]]

    def _with_body(self, request: Request) -> Request:
        body, is_typed = request.body, request.header("content-type") is not None
        if _TEXT.fullmatch(request.media_type):
            body = body.removesuffix(b"\n").removesuffix(b"\r")
        request = Request(request.method, request.target, request.headers, body)
        if body and (request.is_json or (not is_typed and body[:1] in b'{["')):
            self._look_at_json(body)
            if not is_typed:
                return request.having(("Content-Type", "application/json"))
        return request

    def _look_at_json(self, body: bytes) -> None:
        try:
            json.loads(body)
        except json.JSONDecodeError as error:
            number = self._number + error.lineno
            message = f"The body is no JSON: {error.msg}."
            raise RequestFileWrong(self._name, number, error.colno, message) from None
        except (UnicodeDecodeError, RecursionError) as error:
            message = f"The body is no JSON: {error}."
            raise RequestFileWrong(self._name, self._number + 1, 1, message) from None

    def _next_line(self) -> str | None:
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        self._number += 1
        text = line.removesuffix(b"\r").decode("utf-8", "surrogateescape")
        for at, character in enumerate(text):
            if character > "\xff":
                raise self._wrong(at, f"{character!r} can't be sent in a header: write ASCII.")
        return text

    def _wrong(self, at: int, message: str) -> RequestFileWrong:
        return RequestFileWrong(self._name, max(self._number, 1), at + 1, message)
