"""Requests and answers as values."""

from semel.core.message import Answer, Head, one_line, request_of


def test_values_of_a_header() -> None:
    """Every value under a name is found, in the order they came."""
    head = Head("POST", "/", b"", ((b"a", b"1"), (b"b", b"2"), (b"a", b"3")))
    assert head.values(b"a") == [b"1", b"3"]
    assert head.values(b"c") == []


def test_tombstone() -> None:
    """An answer without a body is a tombstone; one with an empty body is an answer."""
    assert Answer(200, (), None).is_tombstone
    assert not Answer(200).is_tombstone


def test_one_line() -> None:
    """What can't be printed is escaped; all else stays, in whatever script."""
    assert one_line("/päy/\u4e2d") == "/päy/\u4e2d"
    assert one_line("ä\r\n\x1b[31m\u2028") == "ä\\r\\n\\x1b[31m\\u2028"


def test_one_request_to_two_guards() -> None:
    """A path that was quoted anew on the way is the same request."""
    assert request_of("POST", "/a%20b/%7e") == request_of("POST", "/a b/~")
    assert request_of("POST", "/a") != request_of("PUT", "/a")
