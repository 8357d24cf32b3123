"""`semel keys erase`: what is shown, what is asked, what stays, and what is left."""

import getpass
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from urllib.parse import urlsplit

import pytest

from semel.core.commands import Claim, Complete, Erase, Look, Note, Park, ReadTrail
from semel.core.key import digest_of
from semel.core.message import Answer, Head, Request
from semel.core.record import Hold
from semel.core.scope import reported
from semel.core.state import Event
from semel.stores import Store, store
from semel.stores.tiered import Tiered
from tests.kit import servers

Semel = Callable[..., subprocess.CompletedProcess[str]]

DAY, LONG = timedelta(days=1), timedelta(hours=1)
ME = f"{getpass.getuser()}@{socket.gethostname()}"
CANARY = b"canary"
REQUEST = Request(Head("POST", "/rides", b"", ()), b"{}", "acme")


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    with closing(store(found)) as keys:
        keys.migrate()
    return found


def claim(keys: Store, key: str, scope: str = "acme", **more: object) -> Hold:
    hold = keys.perform(Claim(scope, key, os.urandom(16), b"\x0a" * 32, LONG, DAY, **more))  # type: ignore[arg-type]  # as it takes them
    assert isinstance(hold, Hold)
    return hold


def end(keys: Store, key: str = "key", scope: str = "acme") -> None:
    hold = claim(keys, key, scope)
    keys.perform(Note(hold, "said"))
    keys.perform(Complete(hold, Event.COMPLETE, Answer(201, (), CANARY)))


def body(keys: Store, key: str = "key", scope: str = "acme") -> bytes | None:
    record = keys.perform(Look(scope, key))
    assert record is not None
    assert record.answer is not None
    return record.answer.body


def test_erased(semel: Semel, url: str, keys: Store) -> None:
    """What will happen is said; answers and lines are deleted, those of report mode too, and tombstones stay."""
    end(keys)
    end(keys, scope="acme\tPOST /payments")
    end(keys, scope=reported("acme"))
    end(keys, scope="globex")
    ended = semel("keys", "erase", "acme", "--store", url, "--yes", "--reason", "ticket 7")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "Operations that have ended: 3. Their answers, and what was stored of their requests, are deleted.",
        "A retry of one is refused, and runs nothing, until its retention ends.",
        "Lines of the audit trail: 3. They are deleted. None of this can be undone.",
        "erased: 3 operations, 3 audit lines deleted, 0 left",
    ]
    assert [body(keys, scope=each) for each in ("acme", "acme\tPOST /payments", reported("acme"))] == [None] * 3
    assert body(keys, scope="globex") == CANARY
    assert keys.perform(ReadTrail("acme", "key")) == ()
    lines = [each for each in keys.perform(ReadTrail("", "")) if each.event == "erased"]
    assert {each.actor for each in lines} == {ME}
    assert "ticket 7: 2 erased" in {each.detail for each in lines}
    assert "acme" not in repr(lines)


def test_what_is_left(semel: Semel, url: str, keys: Store) -> None:
    """What has not ended is named by its digest, with what to do; the command fails, and can be repeated."""
    end(keys)
    claim(keys, "running")
    claim(keys, "accepted", request=REQUEST, is_accepted=True)
    keys.perform(Park(claim(keys, "parked")))
    ended = semel("keys", "erase", "acme", "--store", url, "--yes")
    assert ended.returncode == 1
    assert "run this again" in ended.stderr
    assert "Operations that stay as they are: 3." in ended.stdout
    for key, said in (
        ("running", "processing: wait for its end"),
        ("accepted", "pending: a worker runs it"),
        ("parked", "unknown: find out whether it happened"),
    ):
        assert f"{digest_of(key)[:12]}  {said}" in ended.stdout
        assert key not in ended.stdout.replace(said, "")
    assert body(keys) is None
    again = semel("keys", "erase", "acme", "--store", url, "--yes", "--json")
    assert again.returncode == 1
    facts = json.loads(again.stdout)
    assert (facts["erased"], facts["error"]) == (0, None)
    assert {"digest": digest_of("parked"), "state": "unknown"} in facts["left"]


@pytest.mark.parametrize("said, status", [("n\n", 1), ("", 1), ("y\n", 0)])
def test_asking(sqlite_url: str, environment: dict[str, str], said: str, status: int) -> None:
    """Nothing is erased unless the question is answered with yes."""
    with closing(store(sqlite_url)) as keys:
        keys.migrate()
        end(keys)
        ended = subprocess.run(
            [sys.executable, "-m", "semel", "keys", "erase", "acme", "--store", sqlite_url],
            input=said,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == status
        assert "[y/N]" in ended.stdout
        assert (body(keys) is None) == (status == 0)


def test_nothing_to_erase(semel: Semel, url: str) -> None:
    """Of an owner without records nothing is erased, which is a success, and no question is asked."""
    ended = semel("keys", "erase", "nobody", "--store", url)
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (0, "There is nothing to erase.")
    facts = json.loads(semel("keys", "erase", "nobody", "--store", url, "--yes", "--json").stdout)
    assert facts == {"erased": 0, "audit_lines": 0, "left": [], "error": None, "copies": None}
    assert semel("keys", "erase", "nobody", "--store", url, "--json").returncode == 2


def test_spelled_as_shown(semel: Semel, url: str, keys: Store) -> None:
    """A scope that holds a tab is spelled as lists show it, and is that one only."""
    end(keys, scope="acme\tPOST /payments")
    end(keys)
    assert semel("keys", "erase", r"acme\tPOST /payments", "--store", url, "--yes").returncode == 0
    assert body(keys, scope="acme\tPOST /payments") is None
    assert body(keys) == CANARY


def test_with_a_cache(semel: Semel, sqlite_url: str, redis_server: servers.RedisServer) -> None:
    """With --cache, copies in Redis are deleted, too; a cache that can't be reached is an error."""
    tiered = Tiered(sqlite_url, redis_server.url, memory=0, namespace="shop")
    with closing(store(sqlite_url)) as keys, closing(store(tiered)) as front:
        keys.migrate()
        end(front)
        front.perform(Claim("acme", "key", os.urandom(16), b"\x0a" * 32, LONG, DAY))
        front.close()  # writes what is queued
        gone = ("--cache", "redis://127.0.0.1:1/0")
        assert semel("keys", "erase", "acme", "--store", sqlite_url, "--yes", *gone).returncode == 1
        found = front.perform(Claim("acme", "key", os.urandom(16), b"\x0a" * 32, LONG, DAY))
        assert getattr(found, "answer", None) == Answer(201, (), CANARY)
        done = semel("keys", "erase", "acme", "--store", sqlite_url, "--yes", "--cache", redis_server.url)
        assert (done.returncode, "1 copies in the cache" in done.stdout) == (0, True)
        found = front.perform(Claim("acme", "key", os.urandom(16), b"\x0a" * 32, LONG, DAY))
        assert getattr(found, "answer", None) == Answer(201, (), None)
        front.close()
        wrong = urlsplit(redis_server.url)._replace(path="/7").geturl()
        done = semel("keys", "erase", "acme", "--store", sqlite_url, "--yes", "--cache", wrong)
        assert "No copy was in that cache" in done.stderr


def test_however_the_store_is_spelled(semel: Semel, postgres_url: str, redis_url: str) -> None:
    """A customer is erased from the cache, whichever host, role and port the application and the operator write; the
    answers of others stay there.
    """
    applications = postgres_url.replace("127.0.0.1", "localhost") + "?application_name=shop"
    tiered = Tiered(applications, redis_url, memory=0)

    def found(keys: Store, key: str, scope: str) -> object:
        got = keys.perform(Claim(scope, key, os.urandom(16), b"\x0a" * 32, LONG, DAY))
        return getattr(got, "answer", None)

    with closing(store(postgres_url)) as keys:
        keys.migrate()
    with closing(store(tiered)) as front:
        for scope, key in (("acme", "key"), ("acme\tPOST /rides", "key"), ("acme2", "key")):
            end(front, key, scope)
            assert found(front, key, scope) == Answer(201, (), CANARY)  # and it is in the cache from now on
    done = semel("keys", "erase", "acme", "--store", postgres_url, "--cache", redis_url, "--yes", "--json")
    assert (done.returncode, json.loads(done.stdout)["copies"]) == (0, 2)
    with closing(store(tiered)) as front:
        assert found(front, "key", "acme") == found(front, "key", "acme\tPOST /rides") == Answer(201, (), None)
        with closing(store(postgres_url)) as keys:
            keys.perform(Erase("acme2", 100))  # in the durable store alone: what is served now is the copy
        assert found(front, "key", "acme2") == Answer(201, (), CANARY)
