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
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
_NEEDED = "--jwt-key with a public key needs cryptography. Run: pip install 'semel[encryption]'"

Check = Callable[[bytes, bytes], bool]
#: The algorithm of a key, and what checks a signature with it.
Key = tuple[str, Check]
#: By the type of a key in a set. A key that says another algorithm is for something else.
_ALGORITHMS: Mapping[object, tuple[str, ...]] = {"RSA": ("RS256", "PS256"), "EC": ("ES256",), "OKP": ("EdDSA",)}
_PUBLIC = frozenset(each for names in _ALGORITHMS.values() for each in names)


class TokenRefused(Exception):
    """This token is not accepted."""


class KeyNotKnown(TokenRefused):
    """None of our keys has signed this token. One that was published since they were read may have."""


def claims_of(token: str) -> dict[str, Any]:
    """Return what *token* says, unverified."""
    parts = token.split(".")
    if len(parts) != _PARTS:
        raise TokenRefused("it is not a signed JSON Web Token.")
    return _object(parts[1])


class Verifier:
    """Verifies the signature and the times of a token. For which application it was made is ``check_recipient``'s."""

    def __init__(self, keys: Mapping[str, Sequence[Key]]) -> None:
        """Know *keys*, by id. Those with the id "" are for all tokens that name no other."""
        self._keys = keys

    @classmethod
    def read(cls, path: str) -> Verifier:
        """Read a file: a public key (PEM), a set of keys (JWKS), or a shared secret."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            # What it says is not quoted: it may be the key itself.
            raise ConfigurationError(f"--jwt-key names a file, or a URL: {error.strerror}.") from None
        if (begin := data.find(b"-----BEGIN")) >= 0:
            return cls({"": [_public(data[begin:])]})
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
        return cls({"": [_shared(secret)]})

    @classmethod
    def of_set(cls, data: bytes, name: str) -> Verifier:
        """Read a set of keys (JWKS), which messages call *name*."""
        return cls(_key_set(data, name))

    def verified(self, token: str) -> dict[str, Any]:
        """Return the claims of *token*, if a key of ours has signed it and it is valid now."""
        claims = claims_of(token)
        signed, _, signature = token.rpartition(".")
        head = _object(signed.partition(".")[0])
        keys = self._keys.get(_id(head)) or self._keys.get("")
        if not keys:
            raise KeyNotKnown("it is signed with a key that is not known here.")
        if "crit" in head:
            raise TokenRefused("it demands an extension (crit) that is not known here.")
        said = head.get("alg")
        checks = [check for algorithm, check in keys if algorithm == said]
        if not checks:
            message = f"its algorithm is not {' or '.join(sorted({algorithm for algorithm, _ in keys}))}."
            raise KeyNotKnown(message) if isinstance(said, str) and said in _PUBLIC else TokenRefused(message)
        text, proof = signed.encode("latin-1"), _decoded(signature)
        if not any(check(text, proof) for check in checks):
            raise KeyNotKnown("its signature is wrong.")
        now = time.time()
        if _time(claims, "exp", now) < now - LEEWAY:
            raise TokenRefused("it has expired.")
        if _time(claims, "nbf", now) > now + LEEWAY:
            raise TokenRefused("it is not valid yet.")
        return claims


def check_recipient(claims: Mapping[str, Any], audiences: Collection[str], issuers: Collection[str]) -> None:
    """Refuse verified *claims* of a token for another recipient than *audiences*, or of another than *issuers*.

    A provider signs the tokens of all its applications with the same keys (RFC 8725, 3.9). So a token that names its
    audience is refused where none is known here, and one that names none where there are *audiences*.
    """
    if "aud" in claims:
        named = [claims["aud"]] if isinstance(claims["aud"], str) else claims["aud"]
        if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
            raise TokenRefused("its audience (aud) can't be read.")
        if not audiences:
            raise TokenRefused("it is for an audience (aud), and none is set here: --jwt-audience names it.")
        if not any(each in audiences for each in named):
            raise TokenRefused("it is for another audience (aud).")
    elif audiences:
        raise TokenRefused("it names no audience (aud).")
    if "iss" in claims and not isinstance(claims["iss"], str):
        # As if there were none, its users would be those of a token without an issuer.
        raise TokenRefused("its issuer (iss) can't be read.")
    if issuers and claims.get("iss") not in issuers:
        raise TokenRefused("it is from another issuer (iss).")


def _id(named: Mapping[str, Any]) -> str:
    """Return the id that a key has, or that a token names; "" if there is none."""
    kid = named.get("kid")
    return "" if kid is None else str(kid)


def _time(claims: dict[str, Any], name: str, now: float) -> float:
    said = claims.get(name, now)
    # JSON of Python's reads NaN, which is neither before nor after any time.
    if isinstance(said, bool) or not isinstance(said, int | float) or not -math.inf < said < math.inf:
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


def _shared(secret: bytes) -> Key:
    def check(signed: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(hmac.digest(secret, signed, hashlib.sha256), signature)

    return "HS256", check


def _key_set(data: bytes, name: str) -> dict[str, list[Key]]:
    try:
        entries = json.loads(data)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise ConfigurationError(f"--jwt-key: {name} can't be read as a set of keys (JWKS).")
    found: dict[str, list[Key]] = {}
    for each in entries:
        # A provider may publish other keys, too, for others: what is not for us does no harm to the rest.
        if isinstance(each, dict) and _is_for_signatures(each) and (key := _public_of(each)) is not None:
            found.setdefault(_id(each), []).append(key)
    if not found:
        raise ConfigurationError(f"--jwt-key: {name} has no key for signatures by {_KINDS}.")
    return found


def _is_for_signatures(jwk: Mapping[str, Any]) -> bool:
    """Return whether one key of a set says nothing against its use here."""
    kind, alg, operations = jwk.get("kty"), jwk.get("alg"), jwk.get("key_ops")
    return (
        isinstance(kind, str)
        and jwk.get("use") in (None, "sig")
        and (operations is None or (isinstance(operations, list) and "verify" in operations))
        and (alg is None or alg in _ALGORITHMS.get(kind, ()))
    )


def _public_of(jwk: Mapping[str, Any]) -> Key | None:
    """Return one key of a set; None if it is of another kind, or can't be read."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: PLC0415 - as above
    except ModuleNotFoundError:
        raise ConfigurationError(_NEEDED) from None

    def number(name: str) -> int:
        return int.from_bytes(_decoded(str(jwk[name])))

    key: Any
    try:
        match jwk["kty"], jwk.get("crv"):
            case "RSA", _:
                key = rsa.RSAPublicNumbers(number("e"), number("n")).public_key()
            case "EC", "P-256":
                key = ec.EllipticCurvePublicNumbers(number("x"), number("y"), ec.SECP256R1()).public_key()
            case "OKP", "Ed25519":
                key = ed25519.Ed25519PublicKey.from_public_bytes(_decoded(str(jwk["x"])))
            case _:
                return None
    except (ValueError, KeyError, OverflowError, TokenRefused, UnsupportedAlgorithm):
        return None
    return _checked(key, jwk.get("alg"))


def _public(data: bytes) -> Key:
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ConfigurationError(_NEEDED) from None
    try:
        key = load_pem_public_key(data)
    except ValueError:
        raise ConfigurationError("--jwt-key: the file holds no public key (PEM).") from None
    return _checked(key)


def _checked(key: Any, alg: object = None) -> Key:
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
