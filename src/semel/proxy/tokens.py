"""JSON Web Tokens, verified with one key or a set of keys (JWKS). No token is made here, and no key is fetched.

Which algorithm a signature may have is said by the key and never by the token: a token that chooses for itself can
choose "none", or take a public key for a shared secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from semel.errors import ConfigurationError

#: Seconds by which two clocks may differ.
LEEWAY = 60
#: Bytes. Shorter secrets can be found by trying.
MIN_SECRET = 32
_SECRET = re.compile(rb"[ -~]*")
_PUBLIC_FORMS = (b"ssh-", b"ecdsa-", b"sk-")
#: A token of three parts.
_PARTS = 3

_KINDS = "RSA (RS256, PS256), P-256 (ES256) or Ed25519 (EdDSA)"
_NEEDED = "--jwt-key with a public key needs cryptography. Run: pip install 'semel[webhooks]'"

Check = Callable[[bytes, bytes], bool]


class TokenRefused(Exception):
    """This token is not accepted."""


class KeyNotKnown(TokenRefused):
    """The key that has signed this token is not one of ours."""


def claims_of(token: str) -> dict[str, Any]:
    """Return what *token* says, unverified."""
    parts = token.split(".")
    if len(parts) != _PARTS:
        raise TokenRefused("it is not a signed JSON Web Token.")
    return _object(parts[1])


class Verifier:
    """Verifies the signature and the times of a token."""

    def __init__(self, keys: Mapping[str, tuple[str, Check]]) -> None:
        """Know *keys*, by id: the algorithm of each, and what checks a signature. The id "" is for all tokens."""
        self._keys = keys

    @classmethod
    def read(cls, path: str) -> Verifier:
        """Read a file: a public key (PEM), a set of keys (JWKS), or a shared secret."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"--jwt-key: {path}: {error.strerror}.") from None
        if (begin := data.find(b"-----BEGIN")) >= 0:
            return cls({"": _public(data[begin:])})
        if data.lstrip().startswith(b"{"):
            return cls.of_set(data, path)
        secret = data.rstrip(b"\r\n")
        # A public key in another form would be a secret that everyone has.
        if not _SECRET.fullmatch(secret) or secret.startswith(_PUBLIC_FORMS):
            raise ConfigurationError(
                f"--jwt-key: {path} is neither a public key (PEM), nor a set of keys (JWKS), nor a shared secret, "
                "which is one line of printable ASCII."
            )
        if len(secret) < MIN_SECRET:
            raise ConfigurationError(f"--jwt-key: {path}: a shared secret has {MIN_SECRET} bytes or more.")
        return cls({"": _shared(secret)})

    @classmethod
    def of_set(cls, data: bytes, name: str) -> Verifier:
        """Read a set of keys (JWKS), which messages call *name*."""
        return cls(_key_set(data, name))

    def verified(self, token: str) -> dict[str, Any]:
        """Return the claims of *token*, if a key of ours has signed it and it is valid now."""
        claims = claims_of(token)
        signed, _, signature = token.rpartition(".")
        head = _object(signed.partition(".")[0])
        found = self._keys.get(str(head.get("kid", ""))) or self._keys.get("")
        if found is None:
            raise KeyNotKnown("it is signed with a key that is not known here.")
        algorithm, check = found
        if head.get("alg") != algorithm or "crit" in head:
            raise TokenRefused(f"its algorithm is not {algorithm}.")
        if not check(signed.encode("latin-1"), _decoded(signature)):
            raise TokenRefused("its signature is wrong.")
        now = time.time()
        if _time(claims, "exp", now) < now - LEEWAY:
            raise TokenRefused("it has expired.")
        if _time(claims, "nbf", now) > now + LEEWAY:
            raise TokenRefused("it is not valid yet.")
        return claims


def _time(claims: dict[str, Any], name: str, now: float) -> float:
    said = claims.get(name, now)
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise TokenRefused(f"its {name} is no time.")
    return said


def _object(part: str) -> dict[str, Any]:
    try:
        said = json.loads(_decoded(part))
    except (ValueError, RecursionError):
        raise TokenRefused("it is not a JSON Web Token.") from None
    if not isinstance(said, dict):
        raise TokenRefused("it is not a JSON Web Token.")
    return said


def _decoded(part: str) -> bytes:
    try:
        return base64.b64decode(part.encode("ascii") + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise TokenRefused("it is not a JSON Web Token.") from None


def _shared(secret: bytes) -> tuple[str, Check]:
    def check(signed: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(hmac.digest(secret, signed, hashlib.sha256), signature)

    return "HS256", check


def _key_set(data: bytes, name: str) -> dict[str, tuple[str, Check]]:
    try:
        keys = json.loads(data)["keys"]
        read = {str(each.get("kid", "")): _public_of(each) for each in keys if each.get("use", "sig") == "sig"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TokenRefused):
        raise ConfigurationError(f"--jwt-key: {name} can't be read as a set of keys (JWKS).") from None
    # A provider may sign with other keys, too, for others.
    found = {kid: key for kid, key in read.items() if key is not None}
    if not found:
        raise ConfigurationError(f"--jwt-key: {name} has no key for signatures by {_KINDS}.")
    return found


def _public_of(jwk: Mapping[str, Any]) -> tuple[str, Check] | None:
    """Return one key of a set; None if it is of another kind."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ConfigurationError(_NEEDED) from None

    def number(name: str) -> int:
        return int.from_bytes(_decoded(str(jwk[name])))

    match jwk["kty"]:
        case "RSA":
            return _checked(rsa.RSAPublicNumbers(number("e"), number("n")).public_key(), jwk.get("alg"))
        case "EC" if jwk["crv"] == "P-256":
            curve = ec.SECP256R1()
            return _checked(ec.EllipticCurvePublicNumbers(number("x"), number("y"), curve).public_key())
        case "OKP" if jwk["crv"] == "Ed25519":
            return _checked(ed25519.Ed25519PublicKey.from_public_bytes(_decoded(str(jwk["x"]))))
        case _:
            return None


def _public(data: bytes) -> tuple[str, Check]:
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ConfigurationError(_NEEDED) from None
    try:
        key = load_pem_public_key(data)
    except ValueError:
        raise ConfigurationError("--jwt-key: the file holds no public key (PEM).") from None
    return _checked(key)


def _checked(key: Any, alg: object = None) -> tuple[str, Check]:
    """Return the algorithm of *key*, and what checks a signature with it."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 - as above
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, utils  # noqa: PLC0415 - as above

    half = 32  # Bytes: a signature by ES256 is two numbers of this length.
    if isinstance(key, rsa.RSAPublicKey):
        pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
        algorithm, filler = ("PS256", pss) if alg == "PS256" else ("RS256", padding.PKCS1v15())

        def verify(signed: bytes, signature: bytes) -> None:
            key.verify(signature, signed, filler, hashes.SHA256())

    elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        algorithm = "ES256"

        def verify(signed: bytes, signature: bytes) -> None:
            if len(signature) != 2 * half:
                raise InvalidSignature
            r, s = int.from_bytes(signature[:half]), int.from_bytes(signature[half:])
            key.verify(utils.encode_dss_signature(r, s), signed, ec.ECDSA(hashes.SHA256()))

    elif isinstance(key, ed25519.Ed25519PublicKey):
        algorithm = "EdDSA"

        def verify(signed: bytes, signature: bytes) -> None:
            key.verify(signature, signed)

    else:
        raise ConfigurationError(f"--jwt-key: keys are {_KINDS}.")

    def check(signed: bytes, signature: bytes) -> bool:
        try:
            verify(signed, signature)
        except InvalidSignature:
            return False
        return True

    return algorithm, check
