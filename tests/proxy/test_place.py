"""Which operation a request asks for, as the server behind the proxy may read it: its path, its host, its method."""

import tracemalloc
from pathlib import Path

import pytest

from semel.core.fingerprint import Fingerprinter, Subject, fingerprint_of
from semel.proxy.place import COUNTED, SpelledRoutes
from tests.proxy.kit import BOB, KEY, proxied

PLACES = Fingerprinter()


@pytest.mark.parametrize(
    "target",
    [
        *("/payments/", "//payments", "/Payments", "/PAYMENTS", "/x/../payments", "/./payments", "/%70ayments"),
        *("/payments;x", "/payments;jsessionid=1", "/a/;b/../../payments", "/x\\..\\payments", "/%2e%2e/payments"),
        *("/payments?a=b", "/payments//", "/payments/.", "/payments/x/..", "/%2Fpayments", "/x/%2e%2E%2fpayments"),
    ],
)
async def test_spellings_of_a_guarded_path(tmp_path: Path, target: str) -> None:
    """A path that some server takes for a guarded one is guarded: one key runs once at it, and never twice."""
    async with proxied(tmp_path, paths=["/payments"]) as world:
        got = [await world.send(KEY, BOB, target=target) for _ in range(2)]
        assert [each.is_replay for each in got] == [False, True]
        assert [each.target for each in world.origin.seen] == [target]
        plain = await world.send(KEY, BOB, target="/payments")
        assert plain.code == "idempotency-key-reused"
    assert len(world.origin.seen) == 1


@pytest.mark.parametrize("target", ["/", "/refunds", "/payments/7", "/payments.json", "/x/payments", "/pay%20ments"])
async def test_other_paths(tmp_path: Path, target: str) -> None:
    """Another path passes, key and all."""
    async with proxied(tmp_path, paths=["/payments", "/Orders/*/pay/"]) as world:
        got = [await world.send(KEY, BOB, target=target) for _ in range(2)]
        assert not any(each.is_replay for each in got)
        assert not await world.records()


async def test_spellings_of_a_pattern(tmp_path: Path) -> None:
    """A pattern is compared in the same way, however it is written itself."""
    async with proxied(tmp_path, paths=["/Orders/*/pay/"]) as world:
        for number, target in enumerate(("/orders/7/pay", "/ORDERS//7/pay/")):
            key = f"Idempotency-Key: key-{number}"
            got = [await world.send(key, BOB, target=target) for _ in range(2)]
            assert [each.is_replay for each in got] == [False, True]


async def test_required_key(tmp_path: Path) -> None:
    """A key that is required is required in every spelling of the path."""
    async with proxied(tmp_path, paths=["/payments"], rules={"required": True}) as world:
        assert (await world.send(BOB, target="/Payments/")).code == "idempotency-key-missing"


@pytest.mark.parametrize("name", ["X-HTTP-Method-Override", "X-Method-Override", "X-HTTP-Method", "x_http_method"])
async def test_overriding_methods(tmp_path: Path, name: str) -> None:
    """One key on two operations that differ by the overriding method is refused, not answered with the other's."""
    async with proxied(tmp_path) as world:
        first = await world.send(KEY, BOB, f"{name}: delete")
        assert (first.status, first.is_replay) == (201, False)
        assert (await world.send(KEY, BOB, f"{name}: DELETE")).is_replay
        for line in (f"{name}: PUT", "X-Other: 1"):
            assert (await world.send(KEY, BOB, line)).code == "idempotency-key-reused"
    assert len(world.origin.seen) == 1


async def test_method_that_is_not_overridden(tmp_path: Path) -> None:
    """An overriding method that is the method itself overrides nothing."""
    async with proxied(tmp_path) as world:
        assert not (await world.send(KEY, BOB)).is_replay
        assert (await world.send(KEY, BOB, "X-HTTP-Method-Override: POST")).is_replay


async def test_hosts(tmp_path: Path) -> None:
    """One key at two hosts is two operations: a customer of one shop never gets the answer of another."""
    async with proxied(tmp_path) as world:
        assert not (await world.send(KEY, BOB, host="a.example")).is_replay
        for same in ("A.example", "a.example.", "a.example:80", "a.example:443"):
            assert (await world.send(KEY, BOB, host=same)).is_replay
        for other in ("b.example", "a.example:8443", "127.0.0.1"):
            assert (await world.send(KEY, BOB, host=other)).code == "idempotency-key-reused"
        assert (await world.send(KEY, BOB, "X-Forwarded-Host: b.example", host="a.example")).status == 422
    assert len(world.origin.seen) == 1


async def test_hosts_that_an_outer_proxy_names(tmp_path: Path) -> None:
    """Behind a trusted proxy that rewrites ``Host``, the host that the client named counts; from others it does not."""
    line = "X-Forwarded-Host: a.example"
    async with proxied(tmp_path) as world:
        assert not (await world.send(KEY, BOB, line, host="app-1")).is_replay
        assert (await world.send(KEY, BOB, f"{line}, outer", host="app-2")).is_replay
    (tmp_path / "other").mkdir()
    async with proxied(tmp_path / "other", scope="header:X-Api-Key", trusted=["192.0.2.0/24"]) as world:
        assert not (await world.send(KEY, "X-Api-Key: k", line, host="b.example")).is_replay
        assert (await world.send(KEY, "X-Api-Key: k", host="b.example")).is_replay


async def test_addresses_are_no_hosts(tmp_path: Path) -> None:
    """A host that is an address names no shop: outer proxies send to one address or another."""
    async with proxied(tmp_path) as world:
        assert not (await world.send(KEY, BOB, host="10.0.0.5:8080")).is_replay
        assert (await world.send(KEY, BOB, host="[::1]:8080")).is_replay


def subject(
    method: str = "POST", body: bytes = b"{}", host: bytes = b"shop.example", *more: tuple[bytes, bytes]
) -> Subject:
    return Subject(method, "/pay", b"", ((b"host", host), *more), body)


def test_fingerprints_of_before() -> None:
    """A record of a proxy that counted no host is compared as before, and so is one whose host is an address."""
    asked = subject()
    before, now = fingerprint_of(PLACES, asked), COUNTED.of(asked)
    assert before != now
    assert COUNTED.matches(before, now, asked)
    other = subject(body=b'{"a":1}')
    assert not COUNTED.matches(before, COUNTED.of(other), other)
    deleting = subject("POST", b"{}", b"shop.example", (b"x-http-method-override", b"DELETE"))
    assert not COUNTED.matches(before, COUNTED.of(deleting), deleting)
    # A proxy of before that reads a record of now knows method, path and query.
    assert PLACES.matches(now, before, asked)
    bare = subject(host=b"127.0.0.1:8080")
    assert COUNTED.of(bare) == fingerprint_of(PLACES, bare)
    assert not COUNTED.matches(now, COUNTED.of(bare), bare)


def test_long_paths_and_hosts() -> None:
    """Long paths and hosts, which any client can think of, are not all remembered."""
    long = "x" * 60_000
    tracemalloc.start()
    for number in range(1000):
        assert not SpelledRoutes.fits(f"/{number}/{long}", "/payments")
        assert COUNTED.of(subject("POST", b"{}", f"{number}.{long}".encode()))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 50_000_000
