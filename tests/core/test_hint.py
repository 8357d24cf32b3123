"""The name of an operation's end, as processes tell it each other."""

from itertools import combinations

from semel.core.hint import ACCEPTED, hint_of

ODD = [("alice", "key"), ("alicek", "ey"), ("", "alicekey"), ("alice", "KEY"), ("Zoë", "key"), ("\ud800", "key")]


def test_each_key_has_its_own() -> None:
    """Two keys have two names, wherever their scopes end; one key has one, in every process."""
    assert hint_of("alice", "key") == "3a00dd1373bfe781e71a43e2459cd281"
    for one, other in combinations(ODD, 2):
        assert hint_of(*one) != hint_of(*other)


def test_it_tells_nothing_of_the_key() -> None:
    """It is short, in plain letters, and is not what is said of new work."""
    for scope, key in ODD:
        name = hint_of(scope, key)
        assert name.isascii()
        assert name.isalnum()
        assert len(name) == 32
        assert name != ACCEPTED
