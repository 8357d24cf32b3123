"""Which user a proxied request belongs to, and whose word is taken for it."""

import base64
import hashlib
import hmac
import json
import math
import socket
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from semel.errors import ConfigurationError, Unauthenticated
from semel.proxy.scope import Peers, scope_of
from semel.proxy.tokens import TokenRefused, Verifier
from tests.proxy.kit import KEY, proxied, request

SECRET = b"a shared secret of more than thirty-two bytes"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(claims: Any, sign: Any, **head: Any) -> str:
    text = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(claims).encode())}"
    return f"{text}.{b64(sign(text.encode()))}"


def hs256(claims: Any, secret: bytes = SECRET, **head: Any) -> str:
    return signed(claims, lambda text: hmac.digest(secret, text, hashlib.sha256), **({"alg": "HS256"} | head))


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}"


def test_peers() -> None:
    """Loopback is trusted, and what else is named; at a Unix socket all peers are. No address proves nothing."""
    usual, more = Peers(), Peers(["10.0.0.0/8", "[2001:db8:0::0]/32"])
    assert all(map(usual.trusts, ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]))
    assert not any(map(usual.trusts, ["10.1.2.3", "::2", "unknown", None]))
    assert Peers(is_unix=True).trusts(None)
    assert all(map(more.trusts, ["10.1.2.3", "::ffff:10.1.2.3", "2001:db8::9%eth0"]))
    assert not more.trusts("127.0.0.1")
    with pytest.raises(ConfigurationError, match="trusted"):
        Peers(["everybody"])


@pytest.mark.parametrize("spelled", ["", "header", "header:", "header:X User", "query:user", "jwt", "cookie:a=b"])
def test_spelled_wrongly(spelled: str) -> None:
    """A scope is one of four."""
    with pytest.raises(ConfigurationError):
        scope_of(spelled)


async def test_missing(tmp_path: Path) -> None:
    """A key without a user is refused; a request without a key needs none."""
    async with proxied(tmp_path) as world:
        for lines in ((KEY,), (KEY, "X-User:"), (KEY, "X_User: bob")):
            assert (await world.send(*lines)).code == "idempotency-scope-missing"
        assert (await world.send()).status == 201
        assert (await world.send(KEY, "X-User: a\tb")).code == "identity-refused"
        assert (await world.send(KEY, "X-User: " + "a" * 300)).status == 201
    assert len(world.origin.seen) == 2


@pytest.mark.parametrize("scope, line", [("header:X-User", "{}"), ("cookie:sid", "sid={}"), ("header:X-Api-Key", "{}")])
def test_names_in_utf8(scope: str, line: str) -> None:
    """Users are not taken for each other because a letter of theirs ends with a byte that Python takes for a blank."""
    name = {"cookie": b"cookie"}.get(scope.partition(":")[0], scope.partition(":")[2].lower().encode())
    named = scope_of(scope)
    users = ["B\u00e0", "B\u00c5", "B", "\u0418\u0420", "\u0418\u0405"]
    asked: list[Any] = [SimpleNamespace(raw={"headers": [(name, line.format(each).encode())]}) for each in users]
    assert len({named(each) for each in asked}) == len(users)


async def test_strangers(tmp_path: Path) -> None:
    """A peer that is not trusted can't name a user, with or without a key; without a user it is served."""
    async with proxied(tmp_path, trusted=["192.0.2.0/24"]) as world:
        for lines in ((KEY, "X-User: bob"), ("X-User: bob",)):
            assert (await world.send(*lines)).code == "identity-refused"
        assert (await world.send()).status == 201
    assert len(world.origin.seen) == 1


async def test_a_peer_that_resets_its_connection(tmp_path: Path) -> None:
    """A peer that has reset its connection has no address any more; it names a user no better than before."""
    async with proxied(tmp_path, trusted=["192.0.2.0/24"]) as world:
        for number in range(5):
            with socket.create_connection(("127.0.0.1", world.port)) as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.sendall(request(f"Idempotency-Key: key-{number}", "X-User: bob"))
            # It was reset before the proxy's loop has run, so the next answer comes after the proxy has met that.
            assert (await world.send()).status == 201
        assert await world.records() == ()
    assert len(world.origin.seen) == 5


async def test_single(tmp_path: Path) -> None:
    """An API with one user says so."""
    async with proxied(tmp_path, scope="single") as world:
        assert [(await world.send(KEY)).is_replay for _ in range(2)] == [False, True]


async def test_cookie(tmp_path: Path) -> None:
    """A session's cookie is the scope, and the store holds its hash."""
    async with proxied(tmp_path, scope="cookie:sid", trusted=["192.0.2.0/24"]) as world:
        one, other = "Cookie: a=b; sid=s3cret; c=d", "Cookie: sid=other"
        got = [await world.send(KEY, line) for line in (one, one, other)]
        assert [each.is_replay for each in got] == [False, True, False]
        assert (await world.send(KEY, "Cookie: a=b")).code == "idempotency-scope-missing"
        assert (await world.send(KEY, "Cookie: sid=a", "Cookie: sid=b")).code == "identity-refused"
        assert not [each for each in await world.records() if "s3cret" in each.scope]


async def test_credential(tmp_path: Path) -> None:
    """A header that holds a credential proves itself: any peer may send it, and the store holds its hash."""
    async with proxied(tmp_path, scope="header:X-Api-Key", trusted=["192.0.2.0/24"]) as world:
        line = "X-Api-Key: s3cret"
        got = [await world.send(KEY, each) for each in (line, line, "X-Api-Key: other")]
        assert [each.is_replay for each in got] == [False, True, False]
        assert (await world.send(KEY, line, line)).code == "identity-refused"
        assert not [each for each in await world.records() if "s3cret" in each.scope]


async def test_unverified_token(tmp_path: Path) -> None:
    """Without a key to verify it with, a claim alone is nothing: another token with the same claim is another scope."""
    async with proxied(tmp_path, scope="jwt:sub") as world:
        bob, forged = hs256({"sub": "bob"}), hs256({"sub": "bob"}, b"made up")
        got = [await world.send(KEY, bearer(each)) for each in (bob, bob, forged)]
        assert [each.is_replay for each in got] == [False, True, False]
        for token in (hs256({}), hs256({"sub": ""}), hs256({"sub": {"a": 1}})):
            assert (await world.send(KEY, bearer(token))).code == "idempotency-scope-missing"
        for token in ("x", "a.b.c", hs256(["sub"])):
            assert (await world.send(KEY, bearer(token))).code == "unauthenticated"


async def test_verified_token(tmp_path: Path) -> None:
    """With a key, the claim is the scope: a renewed token of the same user gets the replay, a forged one nothing."""
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    now = int(time.time())
    async with proxied(tmp_path, scope="jwt:sub", jwt_key=str(tmp_path / "secret")) as world:
        first, renewed = hs256({"sub": "bob", "exp": now + 60}), hs256({"sub": "bob", "exp": 10**400})
        got = [await world.send(KEY, bearer(each)) for each in (first, renewed, hs256({"sub": "eve"}))]
        assert [each.is_replay for each in got] == [False, True, False]
        refused = [
            hs256({"sub": "bob"}, b"made up"),
            hs256({"sub": "bob", "exp": now - 100}),
            hs256({"sub": "bob", "nbf": now + 100}),
            hs256({"sub": "bob", "exp": "never"}),
            *(hs256({"sub": "bob", name: each}) for name in ("exp", "nbf") for each in (math.nan, math.inf, -math.inf)),
            hs256({"sub": "bob"}, alg="none"),
            signed({"sub": "bob"}, lambda _: b"", alg="none"),
        ]
        for token in refused:
            assert (await world.send(KEY, bearer(token))).code == "unauthenticated"
    assert len(world.origin.seen) == 2


async def test_challenges(tmp_path: Path) -> None:
    """A token that is refused is 401 with ``invalid_token``, so a client renews it; without one, 401 asks for it."""
    (tmp_path / "secret").write_bytes(SECRET)
    async with proxied(tmp_path, scope="jwt:sub", jwt_key=str(tmp_path / "secret")) as world:
        expired = hs256({"sub": "bob", "exp": int(time.time()) - 100})
        asked = {
            bearer(expired): 'Bearer error="invalid_token"',
            bearer("x"): 'Bearer error="invalid_token"',
            "Authorization: Basic Ym9i": "Bearer",
            "X-Other: 1": "Bearer",
        }
        for line, challenge in asked.items():
            got = await world.send(KEY, line)
            assert (got.status, got.values("www-authenticate")) == (401, [challenge])
        assert (await world.send(KEY, bearer(hs256({})))).status == 400
        assert (await world.send(bearer(expired))).status == 201
    assert len(world.origin.seen) == 1


@pytest.mark.parametrize(
    "claims, settings, is_ours",
    [
        ({}, {}, True),
        ({"aud": "shop"}, {}, False),
        ({"aud": "shop"}, {"jwt_audience": ["shop"]}, True),
        ({"aud": ["pay", "shop"]}, {"jwt_audience": ["x", "shop"]}, True),
        ({"aud": "forum"}, {"jwt_audience": "shop"}, False),
        ({}, {"jwt_audience": "shop"}, False),
        *(({"aud": each}, {"jwt_audience": "shop"}, False) for each in ([], None, 1, [1, "shop"], {"shop": 1}, "SHOP")),
        *(({"iss": each}, {}, False) for each in (None, ["login"], {"login": 1}, True)),
        ({"iss": "https://id"}, {"jwt_issuer": ["https://id", "x"]}, True),
        *(({"iss": each}, {"jwt_issuer": "https://id"}, False) for each in ("https://id/", None, ["https://id"])),
        ({}, {"jwt_issuer": "https://id"}, False),
    ],
)
async def test_recipients(tmp_path: Path, claims: dict[str, Any], settings: dict[str, Any], is_ours: bool) -> None:
    """A token for another application of the same provider names no user here: no stored answer, and no key."""
    (tmp_path / "secret").write_bytes(SECRET)
    async with proxied(tmp_path, scope="jwt:sub", jwt_key=str(tmp_path / "secret"), **settings) as world:
        got = await world.send(KEY, bearer(hs256({"sub": "bob"} | claims)))
        assert (got.status, got.code) == ((201, None) if is_ours else (401, "unauthenticated"))
        assert len(await world.records()) == len(world.origin.seen) == is_ours


def test_audience_that_is_not_set(tmp_path: Path) -> None:
    """The refusal of a token with an audience says what the operator is to type."""
    (tmp_path / "secret").write_bytes(SECRET)
    named = scope_of("jwt:sub", Verifier.read(str(tmp_path / "secret")))
    token = hs256({"sub": "bob", "aud": "shop"})
    asked: Any = SimpleNamespace(raw={"headers": [(b"authorization", f"Bearer {token}".encode())]})
    with pytest.raises(Unauthenticated, match="--jwt-audience"):
        named(asked)


def _pem(key: Any) -> bytes:
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    made: bytes = key.public_key().public_bytes(serialization.Encoding.PEM, kind)
    return made


def test_public_keys(tmp_path: Path) -> None:
    """RSA, P-256 and Ed25519, each by its own algorithm; a public key is never taken for a shared secret."""
    rsa_key, ec_key, ed_key = rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1()), None
    ed_key = ed25519.Ed25519PrivateKey.generate()

    def by_ec(text: bytes) -> bytes:
        r, s = decode_dss_signature(ec_key.sign(text, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32) + s.to_bytes(32)

    signing: dict[str, tuple[Any, Any]] = {
        "RS256": (rsa_key, lambda text: rsa_key.sign(text, padding.PKCS1v15(), hashes.SHA256())),
        "ES256": (ec_key, by_ec),
        "EdDSA": (ed_key, ed_key.sign),
    }
    for alg, (key, sign) in signing.items():
        file = tmp_path / alg
        file.write_bytes(_pem(key))
        verifier = Verifier.read(str(file))
        token = signed({"sub": "bob"}, sign, alg=alg)
        assert verifier.verified(token) == {"sub": "bob"}
        body = b64(b'{"sub":"eve"}')
        head, _, signature = token.split(".")
        for forged in (f"{head}.{body}.{signature}", f"{head}.{body}.", hs256({"sub": "eve"}, _pem(key))):
            with pytest.raises(TokenRefused):
                verifier.verified(forged)


def test_key_set(tmp_path: Path) -> None:
    """A set of keys knows each token's by its id."""
    key = ed25519.Ed25519PrivateKey.generate()
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    numbers = rsa.generate_private_key(65537, 2048).public_key().public_numbers()
    keys = [
        {"kty": "OKP", "crv": "Ed25519", "kid": "one", "x": b64(raw)},
        {"kty": "RSA", "kid": "two", "n": b64(numbers.n.to_bytes(256)), "e": "AQAB"},
    ]
    (tmp_path / "jwks").write_text(json.dumps({"keys": keys}))
    verifier = Verifier.read(str(tmp_path / "jwks"))
    assert verifier.verified(signed({"sub": "bob"}, key.sign, alg="EdDSA", kid="one")) == {"sub": "bob"}
    for kid in ("two", "three"):
        with pytest.raises(TokenRefused):
            verifier.verified(signed({"sub": "bob"}, key.sign, alg="EdDSA", kid=kid))


def _jwk(key: ed25519.Ed25519PrivateKey, **more: Any) -> dict[str, Any]:
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return {"kty": "OKP", "crv": "Ed25519", "x": b64(raw)} | more


def _set(*keys: Any) -> Verifier:
    return Verifier.of_set(json.dumps({"keys": keys}).encode(), "the set")


@pytest.mark.parametrize(
    "entry",
    [
        *({}, None, "key", [], {"kty": None}, {"kty": ["RSA"]}, {"kty": "RSA", "e": "AQAB"}),
        {"kty": "RSA", "n": b64(b"\xff" * 256), "e": "AQ"},
        {"kty": "RSA", "n": "?", "e": "AQAB"},
        {"kty": "EC", "crv": "P-256", "x": "AQ", "y": "AQ"},
        {"kty": "EC", "crv": ["P-256"], "x": "AQ", "y": "AQ"},
        {"kty": "OKP", "crv": "Ed25519", "x": "AQ"},
    ],
)
def test_entries_that_are_no_keys(entry: Any) -> None:
    """One that can't be read is passed over, and does not take the place of one that can."""
    key = ed25519.Ed25519PrivateKey.generate()
    named = entry | {"kid": "one"} if isinstance(entry, dict) else entry
    token = signed({"sub": "bob"}, key.sign, alg="EdDSA", kid="one")
    for entries in ([_jwk(key, kid="one"), named], [named, _jwk(key, kid="one")]):
        assert _set(*entries).verified(token) == {"sub": "bob"}
    with pytest.raises(ConfigurationError, match="has no key"):
        _set(entry)


@pytest.mark.parametrize("kid", [{}, {"kid": "one"}])
def test_keys_of_one_id(kid: dict[str, str]) -> None:
    """Each key of an id counts, and so does each that has none."""
    keys = [ed25519.Ed25519PrivateKey.generate() for _ in range(3)]
    verifier = _set(*(_jwk(each, **kid) for each in keys[:2]))
    for each in keys[:2]:
        assert verifier.verified(signed({"sub": "bob"}, each.sign, alg="EdDSA", **kid)) == {"sub": "bob"}
    with pytest.raises(TokenRefused, match="signature"):
        verifier.verified(signed({"sub": "bob"}, keys[2].sign, alg="EdDSA", **kid))


def test_keys_without_an_id() -> None:
    """They are for tokens that name no key of the set, and for no others."""
    one, other = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    verifier = _set(_jwk(one, kid="one"), _jwk(other))
    for kid in ({}, {"kid": "two"}):
        assert verifier.verified(signed({"sub": "bob"}, other.sign, alg="EdDSA", **kid)) == {"sub": "bob"}
    with pytest.raises(TokenRefused):
        verifier.verified(signed({"sub": "bob"}, other.sign, alg="EdDSA", kid="one"))


@pytest.mark.parametrize(
    "said, is_ours",
    [
        *(({}, True), ({"alg": "RS256", "use": "sig", "key_ops": ["verify"]}, True)),
        *(({"alg": each}, False) for each in ("RS512", "RSA-OAEP", "ES256", "HS256", 1, ["RS256"])),
        *(({"use": "enc"}, False), ({"use": ["sig"]}, False)),
        *(({"key_ops": each}, False) for each in ([], ["encrypt"], "verify")),
    ],
)
def test_what_a_key_is_for(said: dict[str, Any], is_ours: bool) -> None:
    """A key that is for something else verifies nothing."""
    key = rsa.generate_private_key(65537, 2048)
    numbers = key.public_key().public_numbers()
    jwk = {"kty": "RSA", "n": b64(numbers.n.to_bytes(256)), "e": "AQAB"} | said
    token = signed({"sub": "bob"}, lambda text: key.sign(text, padding.PKCS1v15(), hashes.SHA256()), alg="RS256")
    if is_ours:
        assert _set(jwk).verified(token) == {"sub": "bob"}
    else:
        with pytest.raises(TokenRefused):
            _set(_jwk(ed25519.Ed25519PrivateKey.generate()), jwk).verified(token)


@pytest.mark.parametrize("claims", [{"sub": "\ud800"}, {"sub": "\udfff" * 300}, {"iss": "\ud800", "sub": "bob"}])
async def test_half_a_character(tmp_path: Path, claims: dict[str, str]) -> None:
    """A name that can't be stored is refused, though it is signed."""
    (tmp_path / "secret").write_bytes(SECRET)
    async with proxied(tmp_path, scope="jwt:sub", jwt_key=str(tmp_path / "secret")) as world:
        refused = await world.send(KEY, bearer(hs256(claims)))
        assert (refused.status, refused.code) == (400, "identity-refused")
        assert (await world.send(KEY, bearer(hs256({"sub": "\U0001f600"})))).status == 201


@pytest.mark.parametrize(
    "text",
    [
        *(b"short", b"{", b'{"keys": []}', b'{"keys": [{"kty": "oct"}]}', b"-----BEGIN X", None),
        # Public keys in forms that are not read here, and files that hold no key at all.
        *(
            b"ssh-rsa " + b"A" * 80,
            b"\x30\x82" + b"\x01" * 80,
            b"import os\n" * 9,
            b"\xef\xbb\xbf-----BEGIN PUBLIC KEY-----",
        ),
    ],
)
def test_bad_keys(tmp_path: Path, text: bytes | None) -> None:
    """A file without a key in it is refused at the start."""
    if text is not None:
        (tmp_path / "key").write_bytes(text)
    with pytest.raises(ConfigurationError, match="--jwt-key"):
        Verifier.read(str(tmp_path / "key"))


def test_key_in_place_of_its_file() -> None:
    """A key that is given in place of the name of its file is not shown: what is refused at the start is logged."""
    with pytest.raises(ConfigurationError, match="names a file") as caught:
        Verifier.read(SECRET.decode())
    assert SECRET.decode() not in str(caught.value)
