"""Whose key it is."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.message import Head
from semel.core.policy import Policy
from semel.core.scope import (
    MAX_PRINCIPAL_LENGTH,
    MAX_SCOPE_LENGTH,
    SEPARATOR,
    SINGLE_TENANT,
    is_of,
    principal_of,
    reported,
    scoped,
    scopes_of,
)
from semel.errors import ConfigurationError, ScopeMissing

BY_PRINCIPAL = Policy()
BY_OPERATION = Policy(scope_by="operation")

principals = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=MAX_PRINCIPAL_LENGTH)
heads = st.builds(
    Head,
    st.sampled_from(["POST", "PATCH"]),
    st.text("abc/\t", max_size=1200).map("/".__add__),
    st.just(b""),
    st.just(()),
)


def head(path: str = "/charges", method: str = "POST") -> Head:
    return Head(method, path, b"", ())


def test_principal_alone() -> None:
    """By default a scope is the principal, whatever the endpoint."""
    assert scoped("alice", head(), BY_PRINCIPAL) == scoped("alice", head("/refunds"), BY_PRINCIPAL) == "alice"


def test_principal_and_operation() -> None:
    """By operation, one key on two endpoints or methods is two operations."""
    assert scoped("alice", head(), BY_OPERATION) == "alice\tPOST /charges"
    scopes = {scoped("alice", each, BY_OPERATION) for each in (head(), head("/refunds"), head(method="PATCH"))}
    assert len(scopes) == 3


@pytest.mark.parametrize("nobody", [None, "", False])
def test_nobody(nobody: object) -> None:
    """A request that is nobody's is refused: a shared scope would let strangers meet."""
    with pytest.raises(ScopeMissing):
        scoped(principal_of(nobody), head(), BY_PRINCIPAL)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (7.5, "not float"),
        (True, "not bool"),
        (b"alice", "not bytes"),
        ("a\tb", "control"),
        ("a\0", "control"),
        ("a" * 256, "255"),
    ],
)
def test_wrong_principals(wrong: object, said: str) -> None:
    """A scope function that returns what can't be stored is the developer's mistake, and says which."""
    with pytest.raises(ConfigurationError, match=said):
        scoped(principal_of(wrong), head(), BY_PRINCIPAL)


@pytest.mark.parametrize(
    "named, scope",
    [
        (7, "7"),
        (0, "0"),
        (UUID(int=7), str(UUID(int=7))),
        ((7, "acme"), "7/acme"),
        ((0, UUID(int=7)), f"0/{UUID(int=7)}"),
    ],
)
def test_numbers_and_uuids(named: object, scope: str) -> None:
    """A primary key names an account as its digits do, alone or among others; 0 is a number like any other."""
    assert scoped(principal_of(named), head(), BY_PRINCIPAL) == scope


@given(st.lists(principals, min_size=1, max_size=3), st.lists(principals, min_size=1, max_size=3))
def test_several_names_are_joined(one: list[str], other: list[str]) -> None:
    """A principal of several names is told from every other, whatever is in the names."""
    try:
        scopes = [scoped(principal_of(tuple(each)), head(), BY_PRINCIPAL) for each in (one, other)]
    except ConfigurationError:
        return  # together they are too long
    assert (scopes[0] == scopes[1]) == (one == other)


@pytest.mark.parametrize(
    "names, scope",
    [
        (("alice", "acme"), "alice/acme"),
        (("alice/acme", "eu"), "alice%2Facme/eu"),
        (("alice", "acme/eu"), "alice/acme%2Feu"),
        (("100%", "2F"), "100%25/2F"),
        (("alice",), "alice"),
    ],
)
def test_how_several_names_are_joined(names: tuple[str, ...], scope: str) -> None:
    """What people see of several names is the names, with a slash between them that none of them can have brought."""
    assert scoped(principal_of(names), head(), BY_PRINCIPAL) == scope
    assert scoped(principal_of(names), head(), BY_OPERATION) == f"{scope}\tPOST /charges"


@pytest.mark.parametrize("names", [(), ("alice", ""), ("", "acme"), ("alice", None)])
def test_a_name_that_is_missing(names: tuple[str, ...]) -> None:
    """Who has no account is refused, and does not share the scope of all that have none."""
    with pytest.raises(ScopeMissing):
        scoped(principal_of(names), head(), BY_PRINCIPAL)


@pytest.mark.parametrize(
    "wrong, said",
    [((7.5, "acme"), "not float"), (("a", ("b",)), "not tuple"), (("a\tb", "c"), "control"), (("a" * 200,) * 2, "255")],
)
def test_wrong_names(wrong: tuple[object, ...], said: str) -> None:
    """Each of several names is what one may be, and together they are no longer than one."""
    with pytest.raises(ConfigurationError, match=said):
        scoped(principal_of(wrong), head(), BY_PRINCIPAL)


def test_long_paths_are_hashed() -> None:
    """A path too long for an index is put in as its digest, and two of them stay two."""
    one, other = (scoped("alice", head("/" + "a" * 2000 + end), BY_OPERATION) for end in "xy")
    assert one.startswith("alice\tPOST sha256:")
    assert one != other
    longest = scoped("alice", head("/" * (MAX_SCOPE_LENGTH - len("alice\tPOST "))), BY_OPERATION)
    assert len(longest) == MAX_SCOPE_LENGTH


@given(principals, principals, heads, heads)
def test_two_principals_never_meet(one: str, other: str, here: Head, there: Head) -> None:
    """Whatever they ask for, two principals have two scopes; and every scope fits."""
    for policy in (BY_PRINCIPAL, BY_OPERATION):
        mine, theirs = scoped(one, here, policy), scoped(other, there, policy)
        assert len(mine) <= MAX_SCOPE_LENGTH
        assert mine.split(SEPARATOR)[0] == one
        assert one == other or mine != theirs


def test_single_tenant_is_said_aloud() -> None:
    """An API with one user says so, and every request is that user's."""
    assert SINGLE_TENANT(object()) == SINGLE_TENANT(None) == "single-tenant"
    assert repr(SINGLE_TENANT) == "semel.SINGLE_TENANT"


@pytest.mark.parametrize("scope", ["alice", "alice\tPOST /orders", "x" * MAX_SCOPE_LENGTH])
def test_report_mode_keeps_apart(scope: str) -> None:
    """What report mode sees is kept under scopes that no request is guarded under, and that a store has room for."""
    apart = reported(scope)
    assert apart.startswith("\treport\t")
    assert len(apart) <= MAX_SCOPE_LENGTH
    assert apart != reported(scope[:-1])


def test_scopes_of_a_principal() -> None:
    """The scopes of a principal are one range, in the order of their bytes, in which no other principal's are."""
    first, end = scopes_of("acme")
    for scope, is_own in (
        ("acme", True),
        ("acme\tPOST /", True),
        ("acme\t", True),
        ("acme ", False),
        ("acme2", False),
        ("acm", False),
        ("", False),
        ("\treport\tacme", False),
    ):
        assert is_of(scope, "acme") == is_own, scope
        assert (first.encode() <= scope.encode() < end.encode()) == is_own, scope
