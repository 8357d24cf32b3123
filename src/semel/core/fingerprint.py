"""What makes a retry the same request: a digest of its content. What follows from it is in ``decision``.

One digest of the request is stored: of the body's canonical form if it has one, so that a client which rebuilds its
JSON in another order is not refused; else of the bytes as they came. A second digest, of method, path and query alone,
can be compared whatever the recipe of the first was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import NoReturn

from semel.core.canonical import Buffer, canonical, media_type, pack, pairs
from semel.core.value import value
from semel.errors import ConfigurationError

__all__ = ["Buffer", "Fingerprinter", "Subject", "fingerprint_of", "is_same_request"]

#: The stored form: version (1 byte), recipe (4), digest of the place (16) and of the request (16). Raise the version
#: when any byte that is hashed changes.
VERSION = b"\x03"
#: Also comparable: version 2 hashed the same, and stored the digest of the body as it came even if there
#: was one of its canonical form, which came after it.
_COMPARABLE = frozenset({VERSION, b"\x02"})
RECIPE_BYTES = 4
#: Bytes of SHA-256. Only one client's requests under one key are compared: a collision takes 2^128 tries to find.
DIGEST_BYTES = 16
_VERSION = slice(0, 1)
_RECIPE = slice(1, 5)
_PLACE = slice(5, 21)
_REQUEST = slice(21, 37)
#: Of version 2.
_CANONICAL = slice(37, 53)

#: Stands for the recipe if there is none, and nothing but the key is compared.
_NO_RECIPE = bytes(RECIPE_BYTES)

#: Hashed before a body as it came, and before its canonical form, so that the two never have the same digest.
_AS_IT_CAME, _IN_FORM = b"\x00", b"\x01"

#: Bytes of JSON or form that are brought into canonical form. 1 MB of JSON blocks an event loop for 90 ms.
CANONICAL_LIMIT = 64 * 1024
#: Bytes. The secret protects against guessing, so it must not be guessable itself.
MIN_SECRET = 16

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_COUNTED_ALREADY = frozenset({"content-type", "content-encoding"})
_NEVER_COUNTED = re.compile(
    r"""
    (proxy-)?authorization | cookie                                         # secrets, renewed between retries
  | date | x-amz-date | .*signature(-input)?                                # the time of sending, and its signature
  | traceparent | tracestate | baggage | b3 | x-b3-.* | .*-trace-id         # new for every try
  | .*request-id | .*correlation-id
  | via | forwarded | x-forwarded-.* | content-length | transfer-encoding   # the route through proxies
  | .*idempotency-key                                                       # what it is compared under
    """,
    re.VERBOSE,
)


#: Stands for the headers that count, if none do.
_NO_HEADERS = pack((b"",))


@value
class Subject:
    """The parts of a request that a fingerprint may use."""

    method: str
    #: As the client sent it, not decoded: decoded, two resources can have one path.
    path: str
    query: bytes
    #: Lower-case names, in the order they came.
    headers: Sequence[tuple[bytes, bytes]]
    body: Buffer
    #: As in ``Head``. It is part of the path already, so no fingerprint uses it.
    mount: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprinter:
    """A recipe for fingerprints: what of a request must be the same on its retry.

    Method, path, query, media type and body always count; headers do not, unless named here.
    """

    #: Digests are HMAC-SHA-256 under this secret: a plain digest of a small body can be guessed after a leak.
    secret: bytes | None = field(default=None, repr=False)
    #: Secrets used before. Records written with them are still compared; new ones are written with ``secret``.
    previous_secrets: tuple[bytes, ...] = field(default=(), repr=False)
    #: Headers that count too, such as an API version.
    headers: tuple[str, ...] = ()
    #: JSON members that do not count, as dotted paths: ``sent_at``, ``meta.trace``. A path goes on through arrays:
    #: ``lines.seen`` is left out of every line. It applies to bodies up to ``canonical_limit``.
    omit: tuple[str, ...] = ()
    #: Your own choice of what counts in place of the body. Rename it when it chooses differently: records know a
    #: recipe by its name, and with an unknown name only method, path and query are compared.
    select: Callable[[Subject], bytes] | None = None
    #: Longer JSON and forms are compared as they came, byte by byte; multipart is read whatever its length.
    canonical_limit: int = CANONICAL_LIMIT

    _recipe: bytes = field(init=False, repr=False, compare=False)
    _header_names: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    _omit_paths: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every field, and name the recipe."""
        self._check_secrets()
        self._check_headers()
        self._check_omit()
        if self.select is not None and not callable(self.select):
            _wrong("select", "a function of the Subject that returns bytes")
        limit: object = self.canonical_limit
        if not isinstance(limit, int) or limit < 0:
            _wrong("canonical_limit", "a number of bytes, 0 or more")
        self._set("_header_names", tuple(name.encode() for name in self.headers))
        self._set("_omit_paths", tuple(tuple(path.split(".")) for path in self.omit))
        self._set("_recipe", self._name_recipe())

    def of(self, subject: Subject) -> bytes:
        """Return the fingerprint to store with the key."""
        kind: bytes | None = None
        encoding: bytes | None = None
        for name, each in subject.headers:
            if name == b"content-type":
                kind = each if kind is None else kind + b", " + each
            elif name == b"content-encoding":
                encoding = each if encoding is None else encoding + b", " + each
        media = media_type("" if kind is None else kind.decode("latin-1"))
        head = VERSION + self._recipe + _place(self.secret, subject.method, subject.path, subject.query)
        # All but the body, which can follow without its length: the parts in front of it are always six.
        coding = "" if encoding is None else encoding.decode("latin-1").strip().lower()
        start = _start(subject.method, subject.path, subject.query, media.name, coding) + (
            pack((pack(pack(_lines(subject, name)) for name in self._header_names),))
            if self._header_names
            else _NO_HEADERS
        )
        request = hashlib.sha256(start) if self.secret is None else hmac.new(self.secret, start, "sha256")
        form = None
        if self.select is None:
            form = canonical(media, subject.body, limit=self.canonical_limit, omit=self._omit_paths)
        if form is not None:
            # Bodies with the same bytes have the same canonical form: one digest is enough.
            request.update(_IN_FORM)
            request.update(form)
        else:
            request.update(_AS_IT_CAME)
            request.update(subject.body if self.select is None else self.select(subject))
        return head + request.digest()[:DIGEST_BYTES]

    def matches(self, stored: bytes, fresh: bytes, subject: Subject) -> bool:
        """Return whether *subject*, with the fingerprint *fresh*, asks for what was *stored*.

        A record of another recipe is compared by that recipe if it is known. If not, method, path and query decide: an
        upgrade must not refuse the retries of earlier requests, and one endpoint has one recipe at a time. A request
        to another endpoint, which may always have had another recipe, is never the same.
        """
        if _alike(stored, fresh):
            return True
        if _is_of(stored, fresh[_RECIPE]):
            return False
        secrets = (*self.previous_secrets, None)
        for secret in secrets:
            older = dataclasses.replace(self, secret=secret)
            if older.has_made(stored):
                return _alike(stored, older.of(subject))
        return _is_same_place(stored, subject, self.secret, *secrets)

    def has_made(self, stored: bytes) -> bool:
        """Return whether *stored* was made by this recipe."""
        return _is_of(stored, self._recipe)

    def _check_secrets(self) -> None:
        previous: object = self.previous_secrets
        if isinstance(previous, bytes) or not isinstance(previous, Collection):
            _wrong("previous_secrets", "a tuple of bytes")
        self._set("previous_secrets", tuple(previous))
        if self.secret is not None:
            _check_secret("secret", self.secret)
        for secret in self.previous_secrets:
            _check_secret("previous_secrets", secret)

    def _check_headers(self) -> None:
        names = sorted({name.lower() for name in _strings("headers", self.headers)})
        for name in names:
            if fault := header_fault(name):
                _wrong("headers", f"headers that a retry repeats, and {fault}")
        self._set("headers", tuple(names))

    def _check_omit(self) -> None:
        paths = sorted(set(_strings("omit", self.omit)))
        if not all(all(path.split(".")) for path in paths):
            _wrong("omit", "dotted paths of JSON members, such as 'sent_at' or 'meta.trace'")
        if paths and self.select is not None:
            _wrong("omit", "empty when there is a select, which alone chooses what counts")
        self._set("omit", tuple(paths))

    def _name_recipe(self) -> bytes:
        parts = (
            # The secret's own digest, not the secret: this name is stored.
            b"" if self.secret is None else hmac.digest(self.secret, b"semel recipe", "sha256"),
            pack(self._header_names),
            pack(path.encode("utf-8", "surrogatepass") for path in self.omit),
            b"" if self.select is None else _qualified_name(self.select).encode(),
            # Under another limit the same body may have no canonical digest.
            b"%d" % self.canonical_limit,
        )
        return hashlib.sha256(pack(parts)).digest()[:RECIPE_BYTES]

    def _set(self, name: str, value: object) -> None:
        # The dataclass is frozen to its users; this is still its constructor.
        object.__setattr__(self, name, value)


def fingerprint_of(recipe: Fingerprinter | None, subject: Subject) -> bytes:
    """Return the fingerprint to store with the key of *subject*; without a *recipe*, of its method, path and query."""
    if recipe is None:
        return VERSION + _NO_RECIPE + _place(None, subject.method, subject.path, subject.query)
    return recipe.of(subject)


def is_same_request(recipe: Fingerprinter | None, stored: bytes, fresh: bytes, subject: Subject) -> bool:
    """Return whether *subject*, with the fingerprint *fresh*, asks for what was *stored*.

    Without a *recipe* the key alone decides, if the stored request had no recipe either. The answer to a request that
    was stored with a recipe is not given to another method, path or query.
    """
    if recipe is None:
        has_none = not stored or _is_of(stored, _NO_RECIPE)
        return has_none or _is_same_place(stored, subject, None)
    return recipe.matches(stored, fresh, subject)


def header_fault(name: str) -> str | None:
    """Return why the header *name* (lower case) can't be part of a fingerprint; None if it can."""
    if not _HEADER_NAME.fullmatch(name):
        return f"{name!r} is not a header name"
    if name in _COUNTED_ALREADY:
        return f"{name!r} counts already"
    if _NEVER_COUNTED.fullmatch(name):
        return f"{name!r} may differ on each try, or is a secret"
    return None


def canonical_query(query: bytes) -> bytes:
    """Bring a query into one form: a retry may have its names in another order."""
    # Proxies and dictionaries reorder names. The values of one name are a list, and keep their order.
    return pack(part for pair in sorted(pairs(query), key=itemgetter(0)) for part in pair)


@lru_cache(maxsize=64)  # Most requests go to the same few places.
def _start(method: str, path: str, query: bytes, media: str, encoding: str) -> bytes:
    return pack(
        (
            *_place_parts(method, path, query),
            media.encode("latin-1"),
            b"" if encoding == "identity" else encoding.encode("latin-1"),
        )
    )


@lru_cache(maxsize=64)  # As above.
def _place(secret: bytes | None, method: str, path: str, query: bytes) -> bytes:
    """Return the digest of a request's method, path and query."""
    parts = pack(_place_parts(method, path, query))
    digest = hashlib.sha256(parts).digest() if secret is None else hmac.digest(secret, parts, "sha256")
    return digest[:DIGEST_BYTES]


def _place_parts(method: str, path: str, query: bytes) -> tuple[bytes, bytes, bytes]:
    return method.encode(), path.encode("utf-8", "surrogatepass"), query and canonical_query(query)


def _is_same_place(stored: bytes, subject: Subject, *secrets: bytes | None) -> bool:
    """Return whether *stored*, of any recipe under one of *secrets*, has the method, path and query of *subject*.

    A fingerprint of another version, or under another secret, can't be compared, and is not the same.
    """
    place = subject.method, subject.path, subject.query
    return stored[_VERSION] in _COMPARABLE and any(
        hmac.compare_digest(stored[_PLACE], _place(secret, *place)) for secret in secrets
    )


def _is_of(stored: bytes, recipe: bytes) -> bool:
    return stored[_VERSION] in _COMPARABLE and stored[_RECIPE] == recipe


def _alike(stored: bytes, fresh: bytes) -> bool:
    request = fresh[_REQUEST]
    if hmac.compare_digest(stored[_REQUEST], request):
        return True
    return stored[_VERSION] != VERSION and hmac.compare_digest(stored[_CANONICAL], request)


def _lines(subject: Subject, name: bytes) -> list[bytes]:
    return [value for each, value in subject.headers if each == name]


def _qualified_name(function: Callable[[Subject], bytes]) -> str:
    # A partial, or an object with __call__, has no name of its own.
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _check_secret(name: str, secret: object) -> None:
    if not isinstance(secret, bytes) or len(secret) < MIN_SECRET:
        _wrong(name, f"bytes, {MIN_SECRET} or more of them: os.urandom(32) makes a good secret")


def _strings(name: str, value: object) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(each, str) for each in value):
        _wrong(name, "a tuple of strings")
    return list(value)


def _wrong(name: str, wanted: str) -> NoReturn:
    raise ConfigurationError(f"Fingerprinter.{name} must be {wanted}.")
