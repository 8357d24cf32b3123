"""The file that a request is given in: what is read, and where its mistakes are."""

import pytest

from semel.verify.request_file import RequestFileWrong, parse

FORM = "application/x-www-form-urlencoded"
ENVIRONMENT = {"TOKEN": "sesame"}


def test_a_whole_file() -> None:
    """A file has a request line, headers, a blank line and a body; a comment, a version and CRLF are allowed."""
    request = parse(
        b"# pays\r\nPOST /payments?a=1 HTTP/1.1\r\nAuthorization: Bearer ${TOKEN}\r\nContent-Length: 99\r\n"
        b'Content-Type: application/json\r\n\r\n{"a":\r\n1}\r\n',
        ENVIRONMENT,
    )
    assert (request.method, request.target) == ("POST", "/payments?a=1")
    assert request.headers == (("Authorization", "Bearer sesame"), ("Content-Type", "application/json"))
    assert request.body == b'{"a":\r\n1}'


@pytest.mark.parametrize(
    "data, body, media",
    [
        (b"POST /a", b"", ""),
        (b"POST /a\n\n", b"", ""),
        (b'POST /a\n\n{"a": 1}\n', b'{"a": 1}', "application/json"),
        (b"POST /a\nContent-Type: text/plain\n\na\n\n", b"a\n", "text/plain"),
        (
            b"POST /a\nContent-Type: application/x-www-form-urlencoded\n\na=1\n",
            b"a=1",
            "application/x-www-form-urlencoded",
        ),
        (b"POST /a\nContent-Type: image/png\n\n\x89PNG\n", b"\x89PNG\n", "image/png"),
        (b"\xef\xbb\xbfPATCH /a\n\n\xc3\xa9", b"\xc3\xa9", ""),
    ],
)
def test_bodies(data: bytes, body: bytes, media: str) -> None:
    """The last newline of a file is not part of a body that is text; JSON without a type is told to be JSON."""
    request = parse(data, {})
    assert (request.body, request.media_type) == (body, media)


@pytest.mark.parametrize(
    "data, line, column, message",
    [
        (b"", 1, 1, "no request line"),
        (b"# only a comment\n", 1, 1, "no request line"),
        (b"GET /a\n", 1, 1, "GET takes no key"),
        (b"post /a\n", 1, 1, "in capitals: POST"),
        (b"/payments\n", 1, 1, "no method"),
        (b'{"amount": 5}\n', 1, 1, "no method"),
        (b"POST\n", 1, 5, "no path"),
        (b"POST payments\n", 1, 6, "begins with /"),
        (b"POST http://a/b\n", 1, 6, "begins with /"),
        (b"POST /a b\n", 1, 9, "%20"),
        (b"POST /a#b\n", 1, 8, "%23"),
        (b"POST /\xc3\xa9\n", 1, 7, "percent-encoded"),
        (b"\n# c\nPOST /a\nAccept\n", 4, 7, "no colon"),
        (b"POST /a\nAc cept: b\n", 2, 3, "name of a header"),
        (b"POST /a\n: b\n", 2, 1, "no name"),
        (b"POST /a\nA: b\n  c\n", 3, 1, "start of its line"),
        (b"POST /a\nA: ${NONE}\n", 2, 4, "NONE is not set"),
        (b"POST /a\nA: b\x00\n", 2, 5, "value of a header"),
        (b"POST /a\nA: \xe2\x98\x83\n", 2, 4, "ASCII"),
        (b'POST /a\n\n{"a": 1,\n "b" 2}\n', 4, 6, "no JSON: Expecting ':' delimiter"),
        (b"POST /a\nContent-Type: application/json\n\nnone\n", 4, 1, "no JSON"),
        (b"POST /a\nContent-Type: application/json\n\n\xff\xfe{\n", 4, 1, "no JSON"),
    ],
)
def test_mistakes(data: bytes, line: int, column: int, message: str) -> None:
    """A mistake is told with the file, the line and the column."""
    with pytest.raises(RequestFileWrong) as wrong:
        parse(data, ENVIRONMENT, name="pay.http")
    assert str(wrong.value).startswith(f"pay.http, line {line}, column {column}: ")
    assert message in str(wrong.value)
