"""Tokens that are verified with the keys an identity provider publishes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from semel.errors import ConfigurationError
from semel.proxy.published_keys import MAX_SIZE, PublishedKeys
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
                assert (await world.send(KEY, bearer(stranger.token("two")))).code == "idempotency-scope-missing"
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
        ("http://localhost@example.com/jwks", "jwks: keys are fetched by https://"),
        ("http://127.0.0.1:1/jwks", "can't be fetched"),
        ("https://", "can't be fetched"),
        ("https://[/", "--jwt-key"),
    ],
)
def test_no_such_place(url: str, message: str) -> None:
    """A URL that leads nowhere, or could be answered by anyone, is refused at the start."""
    with pytest.raises(ConfigurationError, match=message):
        PublishedKeys(url)
