"""Requests and answers as values."""

from semel.core.message import Answer, Head


def test_values_of_a_header() -> None:
    """Every value under a name is found, in the order they came."""
    head = Head("POST", "/", b"", ((b"a", b"1"), (b"b", b"2"), (b"a", b"3")))
    assert head.values(b"a") == [b"1", b"3"]
    assert head.values(b"c") == []


def test_tombstone() -> None:
    """An answer without a body is a tombstone; one with an empty body is an answer."""
    assert Answer(200, (), None).is_tombstone
    assert not Answer(200).is_tombstone
