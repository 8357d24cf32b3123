"""From a log, or from what a command has shown, to the record of a key, and to what to type next."""

import logging
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from hashlib import sha256
from typing import Any

import httpx
import pytest

import semel as semel_package
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Claim, Park, Release, Save, Verdict
from semel.core.derive import derive
from semel.core.message import Head, Request
from semel.core.record import Hold
from semel.core.recovery import Begun, Done, Progress
from semel.stores import Store, store

Semel = Callable[..., subprocess.CompletedProcess[str]]

DAY, LONG, OVER = timedelta(days=1), timedelta(hours=1), timedelta(microseconds=1)
BY_OPERATION = "acme\tPOST /payments"
#: What an application may name its accounts, and a shell or a terminal may stumble over.
ODD_SCOPES = (BY_OPERATION, r"DOMAIN\tom", 'it\'s "odd"', "-x", "a\\\\b", "Zoë\u202e", "\treport\tacme")


@pytest.fixture(params=["sqlite_url", "postgres_url", "redis_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    with closing(store(found)) as keys:
        keys.migrate()
    return found


def claim(keys: Store, key: str, scope: str = "acme", lease: timedelta = LONG, request: Request | None = None) -> Hold:
    hold = keys.perform(Claim(scope, key, os.urandom(16), b"\x0a" * 32, lease, DAY, request=request))
    assert isinstance(hold, Hold)
    return hold


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def has(line: str, shown: str) -> bool:
    return re.search(f"^{line}$", shown, re.MULTILINE) is not None


def test_by_its_digest(semel: Semel, url: str, keys: Store) -> None:
    """A key that only a log has named is shown by its digest: the 12 digits of a log, or all of them."""
    claim(keys, "order-17", BY_OPERATION)
    claim(keys, "order-18")
    for typed in (digest("order-17")[:12], digest("order-17")):
        assert has("key +order-17", semel("keys", "show", typed, "--store", url).stdout)
    missing = semel("keys", "show", "0" * 12, "--store", url)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "digest" in missing.stderr


def test_a_key_that_looks_like_a_digest(semel: Semel, url: str, keys: Store) -> None:
    """A key is itself first, whatever it looks like."""
    claim(keys, "order-17")
    claim(keys, digest("order-17")[:12])
    shown = semel("keys", "show", digest("order-17")[:12], "--store", url).stdout
    assert has(f"key +{digest('order-17')[:12]}", shown)


def test_several_owners_of_a_digest(semel: Semel, url: str, keys: Store) -> None:
    """Where several owners use the key of a digest, they are named, and one of them can be chosen."""
    claim(keys, "order-17")
    claim(keys, "order-17", BY_OPERATION)
    asked = semel("keys", "show", digest("order-17")[:12], "--store", url)
    assert asked.returncode == 2
    assert r"'acme\tPOST /payments'" in asked.stderr
    chosen = semel("keys", "show", digest("order-17")[:12], "--scope", r"acme\tPOST /payments", "--store", url)
    assert has(r"scope +acme\\tPOST /payments", chosen.stdout)


def test_resolved_by_its_digest(semel: Semel, url: str, keys: Store) -> None:
    """What a log says is parked can be resolved by what the log calls it."""
    keys.perform(Park(claim(keys, "order-17")))
    ended = semel("keys", "resolve", digest("order-17")[:12], "--not-applied", "--yes", "--store", url)
    assert ended.stdout.endswith("Resolved.\n")


@pytest.mark.parametrize("scope", ODD_SCOPES)
def test_a_scope_can_be_copied(semel: Semel, sqlite_url: str, scope: str) -> None:
    """What a list and a sheet show of a scope finds its keys again, and so does the scope itself."""
    with closing(store(sqlite_url)) as keys:
        claim(keys, "order-17", scope)
        claim(keys, "order-18", "another")
    listed = semel("keys", "list", "--store", sqlite_url).stdout.splitlines()
    shown = next(re.split(r" {2,}", line)[1] for line in listed if line.startswith("order-17"))
    sheet = semel("keys", "show", "order-17", "--store", sqlite_url).stdout
    assert has(f"scope +{re.escape(shown)}", sheet)
    for typed in (shown, scope):
        found = semel("keys", "list", f"--scope={typed}", "--store", sqlite_url).stdout
        assert (found.count("order-17"), found.count("order-18")) == (1, 0)
        assert semel("keys", "show", "order-17", f"--scope={typed}", "--store", sqlite_url).returncode == 0


def test_a_copy_means_what_it_was_copied_from(semel: Semel, sqlite_url: str) -> None:
    """Where one scope looks like the spelling of another, a copy of either finds that one."""
    scopes = ("a\\b", "a\\\\b")
    with closing(store(sqlite_url)) as keys:
        for scope in scopes:
            claim(keys, f"of {len(scope)}", scope)
    for scope in scopes:
        sheet = semel("keys", "show", f"of {len(scope)}", "--store", sqlite_url).stdout
        (shown,) = re.findall("^scope +(.*)$", sheet, re.MULTILINE)
        assert f"of {len(scope)}" in semel("keys", "list", "--scope", shown, "--store", sqlite_url).stdout


def test_a_trail_can_be_asked_for_by_a_copied_scope(semel: Semel, sqlite_url: str) -> None:
    """So does the trail of a record that is gone."""
    with closing(store(sqlite_url)) as keys:
        keys.perform(Release(claim(keys, "order-17", BY_OPERATION), reason="answered 429"))
    shown = semel("keys", "show", "order-17", "--scope", r"acme\tPOST /payments", "--store", sqlite_url).stdout
    assert has("state +gone", shown)
    assert "released (answered 429)" in shown


def test_stuck_keys(semel: Semel, url: str, keys: Store) -> None:
    """`--state stuck` lists those whose worker is gone, and no others, of all owners or of one."""
    claim(keys, "running")
    claim(keys, "stuck", lease=OVER)
    claim(keys, "theirs", "globex", lease=OVER)
    both = semel("keys", "list", "--state", "stuck", "--store", url).stdout
    assert [name in both for name in ("stuck ", "theirs ", "running ")] == [True, True, False]
    one = semel("keys", "list", "--state", "stuck", "--scope", "globex", "--store", url).stdout.splitlines()
    assert [line.split()[0] for line in one] == ["key", "theirs", "scope:"]
    keys.perform(Park(claim(keys, "parked")))
    assert "parked" not in semel("keys", "list", "--state", "stuck", "--store", url).stdout


def test_what_was_asked(semel: Semel, url: str, keys: Store) -> None:
    """Where the request is kept, its method and path are shown."""
    claim(keys, "order-17", request=Request(Head("POST", "/orders/\x1b[2J", b"", ()), b"{}", "acme"))
    shown = semel("keys", "show", "order-17", "--store", url).stdout
    assert has(r"request +POST /orders/\\x1b\[2J", shown)


CREATED = Done("phase", "order_created", {"id": 7})
CHARGING = Begun("card_charged")


@pytest.mark.parametrize(
    "state, said",
    [
        ("running", "effect card_charged begun: not ended yet"),
        ("stuck", "effect card_charged begun: outcome unknown"),
        ("parked", "effect card_charged begun: outcome unknown"),
        ("done", 'effect card_charged done: "ch_1"'),
    ],
)
def test_begun_done_and_unknown(semel: Semel, url: str, keys: Store, state: str, said: str) -> None:
    """Of an effect it is shown whether it is under way, unknown or done, and its key at the provider."""
    hold = claim(keys, "order-17", lease=OVER if state == "stuck" else LONG)
    begun = Progress((CREATED, CHARGING))
    assert keys.perform(Save(hold, begun)) is Verdict.DONE
    if state == "parked":
        keys.perform(Park(hold, reason="effect card_charged unknown"))
    if state == "done":
        keys.perform(Save(hold, begun.plus(Done("effect", "card_charged", "ch_1")), begun))
    shown = semel("keys", "show", "order-17", "--store", url).stdout
    assert has(f" +{re.escape(said)}", shown)
    assert has(f" +its key at the provider: {derive('acme', 'order-17', 'card_charged')}", shown)


def test_what_to_type_next(semel: Semel, url: str, keys: Store) -> None:
    """Of a parked operation it is said what to find out and what to type, and that can be typed as it stands."""
    hold = claim(keys, "it's 17", BY_OPERATION)
    keys.perform(Save(hold, Progress((CREATED, CHARGING))))
    keys.perform(Park(hold))
    shown = semel("keys", "show", "it's 17", "--store", url).stdout
    assert "Find out whether card_charged happened" in shown
    (typed,) = re.findall(r"semel (keys resolve .*) --applied RESULT", shown)
    ended = semel(*shlex.split(typed), "--applied", '{"charge": 7}', "--yes", "--store", url)
    assert '\nResult: {"charge": 7}\n' in ended.stdout
    assert ended.stdout.endswith("Resolved.\n")
    assert "Find out" not in semel("keys", "show", "it's 17", "--store", url).stdout


def test_what_to_do_about_a_stuck_one(semel: Semel, url: str, keys: Store) -> None:
    """Of a stuck operation it is said what frees it."""
    claim(keys, "order-17", lease=OVER)
    assert has(" +semel sweep", semel("keys", "show", "order-17", "--store", url).stdout)


async def test_from_the_log_to_the_provider(semel: Semel, sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """An operation whose provider failed is followed from its log record to its key, its steps, and why it stopped."""
    seen: list[str] = []

    async def charge_card(*, idempotency_key: str) -> str:
        seen.append(idempotency_key)
        raise TimeoutError("the card of jane@example.com")

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await semel_package.current().effect("card_charged", charge_card)

    guarded = IdempotencyMiddleware(app, store=sqlite_url, scope=semel_package.SINGLE_TENANT)
    transport = httpx.ASGITransport(guarded, raise_app_exceptions=False)
    with caplog.at_level(logging.WARNING, logger="semel"):
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for _ in range(2):
                assert (await client.post("/", headers={"Idempotency-Key": "order-17"})).is_server_error
    await guarded.store.close()
    (told,) = (each.getMessage() for each in caplog.records if each.getMessage().startswith("TookOver: "))
    (found,) = re.findall(r"key=(\w+)", told)
    shown = semel("keys", "show", found, "--store", sqlite_url).stdout
    assert has(" +its key at the provider: " + seen[0], shown)
    assert seen == [seen[0]] * 2
    assert shown.count("given up (raised TimeoutError)") == 2
    assert "saved (effect card_charged begun)" in shown
    assert "jane" not in shown
