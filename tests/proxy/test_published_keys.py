"""Tokens that are verified with the keys an identity provider publishes."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from semel.errors import ConfigurationError, Unauthenticated
from semel.proxy.published_keys import MAX_SIZE, MAX_STALE, THREAD, KeysTooOld, PublishedKeys
from semel.proxy.scope import scope_of
from semel.proxy.tokens import KeyNotKnown
from tests.proxy.kit import KEY, proxied
from tests.proxy.test_scope import b64, bearer, signed

ODD = {"kty": "EC", "crv": "P-521", "kid": "odd", "x": "AA", "y": "AA"}


class Provider:
    """An identity provider: signs tokens, and publishes the keys it has."""

    def __init__(self) -> None:
        self.keys: dict[str, ed25519.Ed25519PrivateKey] = {}
        self.fetched = 0
        self.status = 200
        self.body: bytes | None = None
        self.url = ""
        #: What it drips out, a byte at a time, before all else: "head", "body" or nothing.
        self.drips = ""
        self.released = threading.Event()

    def rotate(self, kid: str) -> None:
        self.keys = {kid: ed25519.Ed25519PrivateKey.generate()}

    def token(self, kid: str, user: str = "bob") -> str:
        return signed({"sub": user}, self.keys[kid].sign, alg="EdDSA", kid=kid)

    def published(self) -> bytes:
        raw = (serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        keys = [
            {"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": b64(key.public_key().public_bytes(*raw))}
            for kid, key in self.keys.items()
        ]
        return json.dumps({"keys": [ODD, *keys]}).encode()


@contextmanager
def serving() -> Iterator[Provider]:
    provider = Provider()
    provider.rotate("one")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            provider.fetched += 1
            drips = provider.drips
            if drips == "head":
                self.wfile.write(b"HTTP/1.0 200 ")
            if drips == "body":
                self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            while drips and not provider.released.wait(0.01):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    return
            self.send_response(provider.status)
            if provider.status == 302:
                self.send_header("Location", f"{provider.url}/elsewhere")
            self.end_headers()
            self.wfile.write(provider.published() if provider.body is None else provider.body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its own signature
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider.url = f"http://127.0.0.1:{server.server_port}/jwks.json"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield provider
    finally:
        provider.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_token_of_the_provider(tmp_path: Path) -> None:
    """Its user has a scope; a key of another kind in the set does no harm; one that is not in it signs nothing here."""
    stranger = Provider()
    stranger.rotate("two")
    with serving() as provider:
        async with proxied(tmp_path, scope="jwt:sub", jwt_key=provider.url) as world:
            bob, eve = provider.token("one"), provider.token("one", "eve")
            got = [await world.send(KEY, bearer(each)) for each in (bob, bob, eve)]
            assert [each.is_replay for each in got] == [False, True, False]
            for _ in range(3):
                assert (await world.send(KEY, bearer(stranger.token("two")))).code == "unauthenticated"
        assert provider.fetched == 1  # Whoever makes up ids sends no one to the provider.


async def test_a_new_key() -> None:
    """A token of a key that was published since is accepted, and one of the key that was withdrawn no more."""
    with serving() as provider:
        keys = PublishedKeys(provider.url, min_age=0)
        old = provider.token("one")
        assert keys.verified(old) == {"sub": "bob"}
        provider.rotate("two")
        new = provider.token("two")
        with pytest.raises(KeyNotKnown):
            keys.verified(new)
        await keys.renewed()
        assert keys.verified(new) == {"sub": "bob"}
        with pytest.raises(KeyNotKnown):
            keys.verified(old)


async def test_old_keys_are_fetched_again() -> None:
    """Past their age they are fetched in the background, and the token that was there first did not wait."""
    with serving() as provider:
        keys = PublishedKeys(provider.url, max_age=0)
        token = provider.token("one")
        provider.rotate("two")
        assert keys.verified(token) == {"sub": "bob"}
        await keys.renewed()
        assert provider.fetched == 2
        assert keys.verified(provider.token("two")) == {"sub": "bob"}


@pytest.mark.parametrize("status", [500, 200])
async def test_a_provider_in_trouble(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """While it answers with errors, or with nonsense, the known keys stay."""
    with serving() as provider:
        keys = PublishedKeys(provider.url, min_age=0)
        provider.status, provider.body = status, b"{}"
        await keys.renewed()
        assert keys.verified(provider.token("one")) == {"sub": "bob"}
    assert "Those that are known stay" in caplog.text


@pytest.mark.parametrize("fault", ["redirect", "large", "nonsense", "error"])
def test_mistakes(fault: str) -> None:
    """What is no set of keys is said at the start, and where a redirect leads is not asked."""
    with serving() as provider:
        provider.status = {"redirect": 302, "error": 404}.get(fault, 200)
        provider.body = {"large": b" " * (MAX_SIZE + 1), "nonsense": b"<html>"}.get(fault, b"{}")
        with pytest.raises(ConfigurationError, match="--jwt-key: http"):
            PublishedKeys(provider.url)
        assert provider.fetched == 1


@pytest.mark.parametrize(
    "url, message",
    [
        ("http://login.example.com/jwks", "jwks: keys are fetched by https://"),
        ("http://localhost.example.com/jwks", "jwks: keys are fetched by https://"),
        ("http://localhost@example.com/jwks", "^--jwt-key: the URL has a user's name or a password in it"),
        ("https://shop:pass@127.0.0.1:1/jwks", "^--jwt-key: the URL has a user's name or a password in it"),
        ("http://127.0.0.1:1/jwks", "can't be fetched"),
        ("https://", "can't be fetched"),
        ("https://[/", "--jwt-key"),
    ],
)
def test_no_such_place(url: str, message: str) -> None:
    """A URL that leads nowhere, or could be answered by anyone, is refused at the start."""
    with pytest.raises(ConfigurationError, match=message):
        PublishedKeys(url)


def fetching() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD]


def asked(token: str) -> Any:
    return SimpleNamespace(raw={"headers": [(b"authorization", f"Bearer {token}".encode())]})


@pytest.mark.parametrize("where", ["head", "body"])
def test_an_endless_answer_at_the_start(where: str) -> None:
    """One that comes byte by byte is given up as a whole, and so is the thread that reads it."""
    with serving() as provider:
        provider.drips = where
        with pytest.raises(ConfigurationError, match="no whole answer within"):
            PublishedKeys(provider.url, timeout=0.2)
        for each in fetching():
            assert each.daemon
            each.join()
        assert not provider.released.is_set()


async def test_an_endless_answer_later(caplog: pytest.LogCaptureFixture) -> None:
    """A request waits for it until the deadline; then another fetch may be made, and what is late is not taken."""
    with serving() as provider:
        keys = PublishedKeys(provider.url, min_age=0, timeout=1)
        provider.drips = "head"
        one = provider.token("one")
        provider.rotate("two")
        with pytest.raises(Unauthenticated, match="not known"):
            await scope_of("jwt:sub", keys)(asked(provider.token("two")))
        assert keys.verified(one) == {"sub": "bob"}
        assert "no whole answer within" in caplog.text
        provider.drips = ""
        assert await scope_of("jwt:sub", keys)(asked(provider.token("two"))) == "bob"


async def test_one_fetch_at_a_time() -> None:
    """Whatever ids are made up, they wait for one fetch together."""
    with serving() as provider:
        keys = PublishedKeys(provider.url, min_age=-1, max_age=-1, timeout=60)
        provider.drips = "head"
        before = fetching()
        waiting = [asyncio.ensure_future(keys.renewed()) for _ in range(6)]
        await asyncio.sleep(0)
        assert keys.verified(provider.token("one")) == {"sub": "bob"}
        assert len([each for each in fetching() if each not in before]) == 1
        provider.released.set()
        await asyncio.gather(*waiting)
        assert provider.fetched == 2


async def test_a_key_replaced_under_its_id() -> None:
    """A signature that the known key has not made is looked at again with the key that has its id now."""
    with serving() as provider:
        keys = PublishedKeys(provider.url, min_age=-1)
        old = provider.token("one")
        provider.rotate("one")
        assert await scope_of("jwt:sub", keys)(asked(provider.token("one"))) == "bob"
        with pytest.raises(Unauthenticated, match="signature"):
            await scope_of("jwt:sub", keys)(asked(old))


async def test_keys_that_are_too_old(caplog: pytest.LogCaptureFixture) -> None:
    """After a day without a good fetch no token is accepted, until there is one."""
    now = 0.0
    with serving() as provider:
        keys = PublishedKeys(provider.url, clock=lambda: now)
        token = provider.token("one")
        provider.body = b"nonsense"
        now = float(MAX_STALE)
        assert keys.verified(token) == {"sub": "bob"}
        await keys.renewed()
        now += 60
        with pytest.raises(KeysTooOld):
            keys.verified(token)
        with pytest.raises(Unauthenticated, match="too old"):
            await scope_of("jwt:sub", keys)(asked(token))
        assert "no token is accepted" in caplog.text
        provider.body = None
        now += 60
        assert await scope_of("jwt:sub", keys)(asked(token)) == "bob"


def test_no_proxy_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on loopback is asked directly, whatever proxy the environment names."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as provider, serving() as other:
        monkeypatch.setenv("http_proxy", other.url.removesuffix("/jwks.json"))
        assert PublishedKeys(provider.url).verified(provider.token("one")) == {"sub": "bob"}
        assert (provider.fetched, other.fetched) == (1, 0)
