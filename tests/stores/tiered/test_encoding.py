"""Answers as bytes: what was written is read again, and nothing else ever is."""

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.message import Answer
from semel.core.state import State
from semel.stores.tiered.cache import _SEAL, decoded, encoded, name_of
from semel.stores.tiered.memory import Entry

texts = st.text(st.characters(), max_size=40)
headers = st.lists(st.tuples(st.binary(max_size=12), st.binary(max_size=12)), max_size=4).map(tuple)
answers = st.builds(Answer, st.integers(100, 599), headers, st.none() | st.binary(max_size=200))
entries = st.builds(
    Entry,
    scope=texts,
    key=texts,
    state=st.sampled_from([State.COMPLETE, State.FAILED]),
    attempt=st.integers(1, 2**31 - 1),
    token=st.binary(min_size=16, max_size=16),
    fingerprint=st.binary(max_size=69),
    answer=answers,
    steps=st.none() | texts,
    is_accepted=st.booleans(),
    deadline=st.just(1.5),
    traceparent=st.none() | texts,
)

ENTRY = Entry(
    "scope",
    "key",
    State.COMPLETE,
    1,
    bytes(range(16)),
    b"print",
    Answer(201, ((b"a", b"b"),), b'{"id": 1}'),
    None,
    is_accepted=False,
    deadline=1.5,
)


def read(entry: Entry, value: object, namespace: str = "here") -> Entry | None:
    return decoded(namespace, entry.scope, entry.key, value, 1.5)


@given(entries, texts)
def test_round_trip(entry: Entry, namespace: str) -> None:
    """Every answer comes back as it was: status, header pairs in order, body, and that it is a tombstone."""
    assert read(entry, encoded(namespace, entry), namespace) == entry


@given(entries, st.data())
def test_cut_off(entry: Entry, data: st.DataObject) -> None:
    """A value that is cut off anywhere is nothing."""
    value = encoded("here", entry)
    assert read(entry, value[: data.draw(st.integers(0, len(value) - 1))]) is None
    assert read(entry, value + b"\0") is None


@given(entries, st.data())
def test_any_bit(entry: Entry, data: st.DataObject) -> None:
    """A value with one byte changed is nothing."""
    value = bytearray(encoded("here", entry))
    place = data.draw(st.integers(0, len(value) - 1))
    value[place] ^= data.draw(st.integers(1, 255))
    assert read(entry, bytes(value)) is None


@given(st.binary(max_size=300))
def test_foreign_bytes(value: bytes) -> None:
    """What somebody else has written there is nothing, and no error, even where its checksum is right."""
    assert read(ENTRY, value) is None
    assert read(ENTRY, _SEAL.pack(1, zlib.crc32(value)) + value) is None


@pytest.mark.parametrize("value", [None, 7, "text", [b"1"], ValueError("WRONGTYPE")])
def test_odd_replies(value: object) -> None:
    """What is no string of bytes is nothing."""
    assert read(ENTRY, value) is None


def test_a_version_to_come() -> None:
    """A value of another version is left to those who know it."""
    value = encoded("here", ENTRY)
    assert value[0] == 1
    assert read(ENTRY, b"\x02" + value[1:]) is None


@pytest.mark.parametrize("scope, key", [("scop", "key"), ("key", "scope"), ("scope", "kez"), ("scope", "")])
def test_another_key(scope: str, key: str) -> None:
    """An answer to another key, or of another scope, is nothing, wherever it was found."""
    assert read(replace(ENTRY, scope=scope, key=key), encoded("here", ENTRY)) is None
    assert read(ENTRY, encoded("there", ENTRY)) is None


def test_names() -> None:
    """Names are told apart by namespace, scope and key, wherever one of them ends; and they tell nobody's key."""
    parts = [("n", "s", "k"), ("ns", "", "k"), ("n", "sk", ""), ("n", "s", "{k}"), ("", "ns", "k")]
    names = [name_of("semel", *each) for each in parts]
    assert len(set(names)) == len(parts)
    assert all(name.startswith(b"semel:answer:") and b"{" not in name for name in names)
