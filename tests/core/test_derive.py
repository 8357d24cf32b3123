"""Keys for calls to others."""

from uuid import UUID

from hypothesis import example, given
from hypothesis import strategies as st

from semel.core.derive import derive

words = st.tuples(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))


def test_derived_key_never_changes() -> None:
    """A retry after a deploy must send the provider the same key, so no release may derive another one."""
    assert derive("alice", "key-1", "charge") == "034df8d2-e8de-57cf-91e4-05e4cc12aaa1"


@given(words)
def test_derived_key_is_a_uuid(parts: tuple[str, str, str]) -> None:
    """It is spelled as a UUID, since some providers take nothing else, and shows nothing of the client's key."""
    assert str(UUID(derive(*parts))) == derive(*parts)


@given(words, words)
@example(("", "", ""), ("", "\0", ""))
def test_derived_keys_never_meet(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    """Another scope, another key or another call gives another key, however the parts run into each other."""
    assert (derive(*one) == derive(*other)) == (one == other)
