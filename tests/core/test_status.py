"""The address of an operation: made of its key, read back or not found, and below a path that can be chosen."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from semel.core.record import Milestone
from semel.core.state import State
from semel.core.status import Name, checked_path, location_of, mounted_path, name_below, not_ended
from semel.errors import ConfigurationError, OperationNotFound
from tests.core.test_record import NOW, PROCESSING

PENDING = replace(PROCESSING, state=State.PENDING, lease_expires_at=None, lease_left=None, is_accepted=True)


@pytest.mark.parametrize("key", ["key", "k" * 1024, 'a "quoted" one', "/../?#&%", "body:0123"])
@pytest.mark.parametrize("scope", ["alice", "alice\tPOST /charges/\xf6"])
def test_read_back(key: str, scope: str) -> None:
    """Whatever the key and the endpoint, a name is one part of a path, and reads back as what it was."""
    name = Name.of(replace(PENDING, key=key, scope=scope))
    assert Name.read(str(name)) == name
    assert str(name).replace("-", "").replace("_", "").isalnum()
    assert name.scope_of("alice") == scope
    assert name.scope_of("bob") != scope


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "====",
        "é",
        "bnVsbA",
        "W10",
        "WzFd",
        "[" * 9000,
        "W1tb" * 2000,
        "WyJrIiwiIiwxLCIxIl0",
        "WyJrIiwiIiwxLDFdIA",
    ],
)
def test_not_found(text: str) -> None:
    """What no operation is named is not found."""
    with pytest.raises(OperationNotFound):
        Name.read(text)


@pytest.mark.parametrize("key, operation", [("\x00", ""), ("\x1f", ""), ("\ud800", ""), ("k", "\x7f"), ("k", "\tx")])
def test_what_no_database_has(key: str, operation: str) -> None:
    """A name of what can be no key is not even looked for."""
    with pytest.raises(OperationNotFound):
        Name.read(str(Name(key, operation, 1, 1)))


def test_past() -> None:
    """A name knows when its record expires, to the second."""
    name = Name.of(PENDING)
    assert not name.is_past(PENDING.expires_at - timedelta(seconds=1))
    assert name.is_past(PENDING.expires_at)
    assert Name("k", "", 1, 10**30).is_past(NOW) is False


def test_of_the_same_operation() -> None:
    """A name stays good when its operation is kept for longer, and is not that of another under the same key."""
    name = Name.of(PENDING)
    longer = timedelta(days=1)
    assert name.is_of(replace(PENDING, expires_at=PENDING.expires_at + longer))
    assert not name.is_of(replace(PENDING, created_at=PENDING.created_at + longer))
    assert not name.is_of(replace(PENDING, key="another"))
    assert not name.is_of(replace(PENDING, scope=f"{PENDING.scope}\tPOST /charges"))


def test_not_ended() -> None:
    """What is said of one that has not ended: its state, how far it says it is, where and when to ask again."""
    answer = not_ended(PENDING, "/jobs", (b"preference-applied", b"respond-async"))
    where = location_of(PENDING, "/jobs")
    headers = dict(answer.headers)
    assert (answer.status, headers[b"location"], headers[b"retry-after"]) == (202, where.encode(), b"1")
    assert (headers[b"cache-control"], headers[b"preference-applied"]) == (b"no-store", b"respond-async")
    said = {"state": "pending", "progress": None, "note": None, "status_url": where}
    assert json.loads(answer.body or b"") == said
    half_way = not_ended(replace(PROCESSING, milestone=Milestone(0.5, "half-way")), "/jobs")
    assert json.loads(half_way.body or b"") == said | {"state": "processing", "progress": 0.5, "note": "half-way"}


def test_paths() -> None:
    """A path is plain, or None; a mount point goes in front of it, as a client spells it."""
    assert [checked_path(path) for path in ("/semel/operations", "/a", None)] == ["/semel/operations", "/a", None]
    for path in ("", "/", "a", "/a/", "/a//b", "/a*", "/{a}", "/a b", "/a%20", "/é", 1):
        with pytest.raises(ConfigurationError, match="status_path must be a plain path"):
            checked_path(path)
    assert mounted_path("", "/jobs") == "/jobs"
    assert mounted_path("/größe", "/jobs") == "/gr%C3%B6%C3%9Fe/jobs"
    assert mounted_path("/api", None) is None


def test_below() -> None:
    """Only what is below the path names an operation."""
    assert name_below("/jobs", "/jobs/abc") == "abc"
    assert name_below("/jobs", "/jobs/") == ""
    assert [name_below("/jobs", path) for path in ("/jobs", "/jobsabc", "/", "/other/abc")] == [None] * 4
    assert name_below(None, "/jobs/abc") is None
