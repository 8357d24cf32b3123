"""What a client prefers, read off a header that anybody may fill with anything."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.preference import NONE, Preferences, preferences_of

WAIT = Preferences(wait=timedelta(seconds=5))
ASYNC = Preferences(respond_async=True)


@pytest.mark.parametrize(
    "said, meant",
    [
        (b"wait=5", WAIT),
        (b'wait="5"', WAIT),
        (b" Wait = 5 ", WAIT),
        (b"wait=5; foo=bar", WAIT),
        (b'wait=5; foo="a, respond-async"', WAIT),
        (b'foo="a\\", wait=9", wait=5', WAIT),
        (b"return=minimal, wait=5", WAIT),
        (b"wait=5, wait=9", WAIT),
        (b"respond-async", ASYNC),
        (b"Respond-Async;x", ASYNC),
        (b'respond-async=""', ASYNC),
        (b"respond-async, wait=5", Preferences(timedelta(seconds=5), respond_async=True)),
        (b"wait=0", Preferences(wait=timedelta(0))),
        (b"wait=86401", Preferences(wait=timedelta(days=1))),
        (b"wait=" + b"9" * 5000, Preferences(wait=timedelta(days=1))),
        (b"wait", NONE),
        (b"wait=", NONE),
        (b"wait=-1", NONE),
        (b"wait=1.5", NONE),
        (b"wait=soon", NONE),
        (b"wait=\xb2", NONE),
        (b"await=5", NONE),
        (b"wait=5 respond-async", NONE),
        (b'"wait=5"', NONE),
        (b"respond-async-not", NONE),
        (b",,;=\x00", NONE),
        (b"", NONE),
    ],
)
def test_what_is_said_and_what_is_meant(said: bytes, meant: Preferences) -> None:
    """Names are read whatever their case, values quoted or not, and of several the first; rubbish is no preference."""
    assert preferences_of(((b"prefer", said),)) == meant


def test_several_headers() -> None:
    """A preference may be in any of several headers of that name, and in no other."""
    assert preferences_of(((b"prefer", b"wait=5"), (b"prefer", b"respond-async"))) == Preferences(
        timedelta(seconds=5), respond_async=True
    )
    assert preferences_of(((b"preference-applied", b"wait=5"),)) is NONE


@given(st.binary(max_size=60))
def test_never_an_error(said: bytes) -> None:
    """Whatever is sent, it is a preference or none."""
    assert isinstance(preferences_of(((b"prefer", said),)), Preferences)


@pytest.mark.parametrize(
    "unit, last",
    [
        (b"a", b'"'),
        (b"a;", b'"'),
        (b" ", b'"'),
        (b"a=b", b'"'),
        (b'a="', b""),
        (b'a;"', b","),
        (b'a;"x"y', b'"'),
        (b'",a;', b""),
        (b'\\"', b""),
        (b",", b""),
    ],
)
def test_rubbish_comes_to_an_end(unit: bytes, last: bytes) -> None:
    """As much as fits into a header, and fits nowhere, is read once. Read anew from each byte, it would take hours."""
    said = (unit * 64_000)[:64_000] + last
    assert preferences_of(((b"prefer", said),)).wait is None
