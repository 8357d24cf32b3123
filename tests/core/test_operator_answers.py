"""What an operator types about an answer is read, or refused before anything is changed."""

import pytest

from semel.core.message import Answer
from semel.core.operator import ResultUnreadable, explanation, granted, read_headers, read_result
from semel.core.record import NO_TOKEN, Hold
from semel.errors import ConfigurationError

JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    "text, result", [('{"a": [1, null]}', {"a": [1, None]}), ('"x"', "x"), ("7", 7), ("null", None)]
)
def test_results(text: str, result: object) -> None:
    """A result is JSON."""
    assert read_result(text) == result


@pytest.mark.parametrize("text", ["", "x", "NaN", "[" * 100_000, '{"a": 1, "a": 2}', '[{"a": 1, "a": 1}]'])
def test_what_is_no_result(text: str) -> None:
    """What is no JSON is refused, and so are two members of one name, of which one would be lost."""
    with pytest.raises(ResultUnreadable):
        read_result(text)


def test_headers() -> None:
    """Headers are in the order in which they were typed, and their names in lower case."""
    typed = ["Location: /a", "x-empty:", "ETag:\tü "]
    assert read_headers(typed) == ((b"location", b"/a"), (b"x-empty", b""), (b"etag", b"\xfc"))


@pytest.mark.parametrize("line", ["Location", ": a", "a b: c", "a: b\r\nc: d", "a: \u20ac", "Set-Cookie: a", "DATE: x"])
def test_what_is_no_header(line: str) -> None:
    """What could not be sent, or is never repeated, is refused."""
    with pytest.raises(ConfigurationError):
        read_headers([line])


def test_answers() -> None:
    """An answer is JSON with status 200, unless something else was said; some statuses have no body."""
    assert granted({"id": 7}) == Answer(200, (JSON,), b'{"id": 7}')
    assert granted("ü\ud800").body == '"ü\\\\ud800"'.replace("\\\\", "\\").encode()
    own = ((b"content-type", b"application/hal+json"),)
    assert granted(1, status=201, headers=own) == Answer(201, own, b"1")
    assert granted(None, headers=own, body=b"a") == Answer(200, own, b"a")
    assert granted(None, status=204) == Answer(204, (), b"")


@pytest.mark.parametrize("status", [0, 101, 600])
def test_what_is_no_status(status: int) -> None:
    """An answer has a final status."""
    with pytest.raises(ConfigurationError):
        granted(None, status=status)


def test_reasons() -> None:
    """A reason is one line of limited length."""
    note = explanation(Hold("acme", "key", 1, NO_TOKEN), " asked\nthe bank " + "x" * 999)
    assert note.event == "explained"
    assert note.detail is not None
    assert "\n" not in note.detail
    assert len(note.detail) == 500
