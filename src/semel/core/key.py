"""Idempotency keys: parsed from a header, and written to one. Scopes and records are not known here.

A key is an RFC 9651 Item with a String as its value, ``"abc"``. Most clients send it bare, ``abc``, so that is read
too unless ``strict``. Both are one key: otherwise an SDK upgrade between two retries would run an operation twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from urllib.parse import unquote_to_bytes

from semel.core.value import value
from semel.errors import KeyInvalid

#: RFC 9651 requires a parser to accept this many characters. A policy may allow fewer.
MAX_KEY = 1024
#: Characters of a header line that are parsed: the longest key with all of it escaped, and as much for parameters.
#: Even a linear parser wastes time on 64 KB, so this is checked before anything else.
MAX_LINE = 4 * MAX_KEY
#: Around the value of a header, it is no part of it (RFC 9110, 5.5); not every server takes it away.
_OPTIONAL_SPACE = " \t"
#: Stripe's limit, which most other APIs have taken.
DEFAULT_MAX_LENGTH = 255
#: Hexadecimal digits: few enough to read, many enough to tell the keys in one log apart.
SHORT_LENGTH = 12

_EMPTY = "The idempotency key is empty. Send a value that is unique to this operation, such as a UUID."
_SENT_TWICE = "The idempotency key was sent more than once. Send one header line that holds one key."
_DISAGREE = "Two headers of this request hold different idempotency keys. Send one of them."
_TOO_LONG = "The idempotency key is too long. Send at most {} characters."
_UNPRINTABLE = "The idempotency key holds a character that is not printable ASCII. Use only 0x20 to 0x7E."
_LIST = "The idempotency key is a list. Send one key, and put it in double quotes if it holds a comma."
_PARAMETER_FAULT = 'What follows the semicolon after the idempotency key is not a parameter such as "your-key";name=1.'
_TRAILING = 'There is text after the closing quote of the idempotency key. Inside the quotes, write \\" for a quote.'
_ESCAPE = 'The idempotency key holds a stray backslash. Write \\\\ for a backslash and \\" for a quote.'
_UNCLOSED = "The idempotency key starts with a double quote that is never closed. Close it."
_HALF_QUOTED = 'The idempotency key holds a double quote but does not start with one. Send it as "your-key".'
_QUOTE_IT = 'The idempotency key is not a quoted string. Quote it: send "your-key", with the double quotes.'

# RFC 9651's grammar, with [0-9] since \d would match the digits of every script.
_PLAIN = r"[ !#-\[\]-~]"  # what a String may contain without an escape: all but DQUOTE and backslash
_STRING = rf'"(?:{_PLAIN}|\\["\\])*+"'
_QUOTED = re.compile(_STRING)
_ESCAPED = re.compile(r"\\(.)")
_PARAMETER = re.compile(
    rf"""
    ;[ ]*+ [a-z*][a-z0-9_.*-]*+ (?: = (?:
        {_STRING}
      | -?(?: [0-9]{{1,12}}\.[0-9]{{1,3}} | [0-9]{{1,15}} )               # Decimal, Integer
      | [A-Za-z*][A-Za-z0-9:/!#$%&'*+.^_`|~-]*+                           # Token
      | :(?: [A-Za-z0-9+/]{{4}} )*(?: [A-Za-z0-9+/]{{2,4}}={{0,2}} )?:    # Byte Sequence: padding may be missing
      | \?[01]                                                            # Boolean
      | @-?[0-9]{{1,15}}                                                  # Date
      | %"(?P<display>(?: [ !#$&-~] | %[0-9a-f]{{2}} )*+)"                # Display String
    ))?
    """,
    re.VERBOSE,
)

# The two spellings of nearly every request. A bare key is VCHAR without DQUOTE, comma, semicolon and backslash: with
# one of those it could be a list, a parameter or half a String, and it is not clear which.
_SIMPLY_QUOTED = re.compile(rf'"({_PLAIN}+)"')
_BARE = re.compile(r"[!#-+\--:<-\[\]-~]+")
_NOT_BLANK = re.compile(r" *+[!-~][ -~]*+")

#: For a line that is not a key: the first pattern that matches says what is wrong with it.
_FAULTS = tuple(
    (re.compile(pattern), detail)
    for pattern, detail in (
        (r"\A\Z", _EMPTY),
        (r"[^ -~]", _UNPRINTABLE),
        (rf'\A(?:{_STRING} *|[^"]*),', _LIST),
        (rf"\A{_STRING};", _PARAMETER_FAULT),
        (rf"\A{_STRING}", _TRAILING),
        (rf'\A"(?:{_PLAIN}|\\["\\])*+\\[^"\\]', _ESCAPE),
        (r'\A"', _UNCLOSED),
        (r'"', _HALF_QUOTED),
        (r"", _QUOTE_IT),
    )
)

# One character before the @ is enough, and keeps the search linear.
_EMAIL = re.compile(r"[\w.+-]@[\w-]++\.[\w-]")
_INTERNATIONAL = re.compile(r"(?<![0-9A-Za-z])\+[1-9](?:[ ().-]{0,2}[0-9]){6,14}(?![0-9A-Za-z])")  # E.164
_NATIONAL = re.compile(
    r"""
    (?: \([0-9]{3}\)[ ]? | [0-9]{3}[ .-] ) [0-9]{3}[ .-][0-9]{4}    # North America
  | 0[1-9] (?: [ ()/.-]?[0-9] ){7,10}                               # a trunk zero, as in most of Europe
    """,
    re.VERBOSE,
)

_PREFIX = r"(?:[A-Za-z][0-9A-Za-z_]*_)?"  # idem_…, and TypeIDs: a prefix and a UUIDv7 spelled like a ULID
_UUID7 = re.compile(
    rf"{_PREFIX}([0-9a-f]{{8}})-([0-9a-f]{{4}})-7[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}", re.IGNORECASE
)
# From 2004 to 2039 every ULID begins with 01. A decimal number with 26 digits that begins so would be too old a ULID.
_ULID = re.compile(rf"{_PREFIX}(01[0-9A-HJKMNP-TV-Z]{{8}})[0-9A-HJKMNP-TV-Z]{{16}}", re.IGNORECASE)
# Crockford's digits, as int() wants them.
_CROCKFORD = str.maketrans("0123456789ABCDEFGHJKMNPQRSTVWXYZ", "0123456789ABCDEFGHIJKLMNOPQRSTUV")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The year in which ULIDs were published; UUIDv7 is newer. A key with an older time is neither of them, or was made by
#: a device without a clock.
_NONE_IS_OLDER = datetime(2016, 1, 1, tzinfo=UTC)


@value
class Key:
    """A key as the client meant it: unquoted, unescaped, and compared byte for byte."""

    value: str

    def __post_init__(self) -> None:
        """Refuse a value that no header can carry, or that can't be told apart from another."""
        if _NOT_BLANK.fullmatch(self.value) is None:
            raise KeyInvalid(_UNPRINTABLE if self.value.strip(" ") else _EMPTY)
        if len(self.value) > MAX_KEY:
            raise KeyInvalid(_TOO_LONG.format(MAX_KEY))

    def __str__(self) -> str:
        """Return the key itself. In a log, write :meth:`short`."""
        return self.value

    def __repr__(self) -> str:
        """Show the short digest: a repr gets into tracebacks and logs, and a key may be personal data."""
        return f"<Key {self.short()}>"

    def short(self) -> str:
        """Return a digest that names the key in a log; ``printf %s KEY | sha256sum | cut -c1-12`` gives the same."""
        return digest_of(self.value)[:SHORT_LENGTH]

    @property
    def personal(self) -> bool:
        """Whether it looks like an e-mail address or a phone number, which would then be in stores and backups."""
        value = self.value  # the two `in` save a search for nearly every key: this runs for every request
        return bool(
            ("@" in value and _EMAIL.search(value))
            or ("+" in value and _INTERNATIONAL.search(value))
            or _NATIONAL.fullmatch(value)
        )

    @property
    def made_at(self) -> datetime | None:
        """When the client made it, if it is a UUIDv7 or a ULID. The client's clock may be wrong, or ahead."""
        if match := _UUID7.fullmatch(self.value):
            milliseconds = int(match[1] + match[2], 16)
        elif match := _ULID.fullmatch(self.value):
            milliseconds = int(match[1].upper().translate(_CROCKFORD), 32)
        else:
            return None
        try:
            made_at = _EPOCH + timedelta(milliseconds=milliseconds)
        except OverflowError:  # 48 bits reach the year 10889, datetime 9999
            return None
        return made_at if made_at >= _NONE_IS_OLDER else None

    def is_late(self, now: datetime, retention: timedelta) -> bool:
        """Whether, by its own time, its *retention* is over *now*: its record may be deleted, though it took effect.

        The exact end counts as over: from then on, a record that was made with the key may be reaped.
        """
        return self.made_at is not None and self.made_at <= now - retention


def digest_of(key: str) -> str:
    """Return the whole digest of *key*; logs show its beginning."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def find(
    headers: Iterable[tuple[bytes, bytes]],
    names: Sequence[bytes],
    *,
    strict: bool = False,
    max_length: int = DEFAULT_MAX_LENGTH,
) -> Key | None:
    """Read the key that *headers* hold under any of *names* (lower case); None means that they hold no such header."""
    # A server that forgets to lower its header names must not switch the guard off.
    sent = [(name, line) for name, line in headers if name.lower() in names]
    if not sent:
        return None
    present: dict[bytes, list[bytes | str]] = {}
    for name, line in sent:
        present.setdefault(name.lower(), []).append(line)
    key: Key | None = None
    for lines in present.values():
        found = parse(lines, strict=strict, max_length=max_length)
        if key is not None and found != key:
            raise KeyInvalid(_DISAGREE)
        key = found
    return key


def parse(lines: Sequence[bytes | str], *, strict: bool = False, max_length: int = DEFAULT_MAX_LENGTH) -> Key:
    """Read a key from every line of its header; what can't be read is KeyInvalid, never "no key"."""
    if len(lines) != 1:
        # Joined by a comma they are not an Item, and it would be a guess which one counts, even when they are equal.
        raise KeyInvalid(_SENT_TWICE if lines else _EMPTY)
    line = lines[0]
    if len(line) > MAX_LINE:
        raise KeyInvalid(_TOO_LONG.format(max_length))
    text = (line if isinstance(line, str) else line.decode("latin-1")).strip(_OPTIONAL_SPACE)
    if match := _SIMPLY_QUOTED.fullmatch(text):
        value = match[1]
    elif not strict and _BARE.fullmatch(text):
        value = text
    else:
        value = _string_item(text)
    if len(value) > max_length:
        # Never truncated: two keys could become one.
        raise KeyInvalid(_TOO_LONG.format(max_length))
    return Key(value)


def serialise(value: str) -> str:
    """Write *value* as a Structured Field String, the form to send."""
    if not value.isascii() or not value.isprintable():
        raise KeyInvalid(_UNPRINTABLE)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _string_item(text: str) -> str:
    string = _QUOTED.match(text)
    if string is None:
        raise KeyInvalid(_fault(text))
    position = string.end()
    # No parameter is defined yet. By RFC 9651 unknown ones are ignored, but only if they are well formed.
    while position < len(text):
        parameter = _PARAMETER.match(text, position)
        if parameter is None or not _is_utf8(parameter["display"] or ""):
            raise KeyInvalid(_fault(text))
        position = parameter.end()
    return _ESCAPED.sub(r"\1", string[0][1:-1])


def _is_utf8(display: str) -> bool:
    try:
        unquote_to_bytes(display).decode()
    except UnicodeDecodeError:
        return False
    return True


def _fault(text: str) -> str:
    return next(detail for pattern, detail in _FAULTS if pattern.search(text))
