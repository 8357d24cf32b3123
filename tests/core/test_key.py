"""What is a key, and what is refused and in which words. Whose key it is, is tested with the scope."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import http_sf
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from semel.core.key import MAX_KEY, MAX_LINE, Key, find, parse, serialise
from semel.errors import KeyInvalid

UUID = "8e03978e-40d5-43e8-bc93-6894a57f9324"
NAMES = (b"idempotency-key",)

printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E))
values = printable.filter(str.strip).filter(lambda value: len(value) <= MAX_KEY)


def attempt(line: bytes | str, *, strict: bool = False, max_length: int = 255) -> Key | KeyInvalid:
    try:
        return parse([line], strict=strict, max_length=max_length)
    except KeyInvalid as refused:
        return refused


def refusal(line: bytes | str, *, strict: bool = False, max_length: int = 255) -> str:
    refused = attempt(line, strict=strict, max_length=max_length)
    assert isinstance(refused, KeyInvalid)
    return refused.detail


both_modes = pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])


# What is read


@pytest.mark.parametrize(
    "line, value",
    [
        (b'"abc"', "abc"),
        (b'  "abc" ', "abc"),
        (b'"a b"', "a b"),
        (b'"a,b"', "a,b"),
        (b'"a;b"', "a;b"),
        (rb'"a\"b"', 'a"b'),
        (rb'"a\\b"', "a\\b"),
        (rb'"\\\""', '\\"'),
        ('"abc"', "abc"),
    ],
)
@both_modes
def test_a_quoted_string_is_the_key_between_its_quotes(line: bytes | str, value: str, strict: bool) -> None:
    """A Structured Field String is unescaped, so that one key has one form; spaces around it are no part of it."""
    assert parse([line], strict=strict).value == value


@pytest.mark.parametrize(
    "parameters",
    [
        ";v",
        ";v=1",
        "; v=1;  w=2",
        ";*a-b_c.d*=?0",
        ';v="x;\\" y"',
        ";v=-12.345",
        ";v=999999999999999",
        ";v=tok/en:*%",
        ";v=:aGVsbG8=:;w=:aGVsbG8:;x=::",
        ";v=@-1659578233",
        ';v=%"f%c3%bc%c3%bc"',
        ";v=1;v=2",
    ],
)
@both_modes
def test_parameters_are_ignored(parameters: str, strict: bool) -> None:
    """Parameters of any type after the string are read and are no part of the key: a later draft may define some."""
    assert parse([f'"k"{parameters}'], strict=strict) == Key("k")


@pytest.mark.parametrize("value", [UUID, "abc", "abc-def", "2024", "idem_01H", "'abc'", "a=b", "?1", ":YQ==:", "~"])
def test_a_bare_key_is_the_same_key_as_a_quoted_one(value: str) -> None:
    """``abc`` and ``"abc"`` are one key: an SDK that starts to quote in mid-retry must not run the operation again."""
    assert parse([value.encode()]) == parse([f'"{value}"'.encode()]) == parse([f" {value} "]) == Key(value)


@both_modes
def test_white_space_around_a_value_is_no_part_of_it(strict: bool) -> None:
    """Spaces and tabs around a header's value are not in the value (RFC 9110, 5.5); no other character is white."""
    assert parse([b'\t "abc"\t '], strict=strict) == Key("abc")
    assert "printable ASCII" in refusal(b'\x0b"abc"', strict=strict)


@pytest.mark.parametrize("value", [UUID, "abc", "2024", "'abc'", "?1", ":YQ==:", "(a b)", "1.5", "@1", '%"a"', "a b"])
def test_strict_mode_reads_nothing_but_strings(value: str) -> None:
    """In strict mode a token, a number and every other type is refused, and the refusal shows the form to send."""
    detail = refusal(value, strict=True)
    assert "uote" in detail
    assert '"your-key"' in detail


def test_keys_are_compared_byte_for_byte() -> None:
    """``ABC`` and ``abc`` are two keys, and so are two spellings of a UUID: nothing is normalised."""
    assert parse([b"ABC"]) != parse([b"abc"])
    assert parse([UUID]) != parse([UUID.upper()]) != parse([UUID.replace("-", "")])


@given(values)
@both_modes
def test_what_is_written_is_read_back(strict: bool, value: str) -> None:
    """Every key survives being sent."""
    assert parse([serialise(value)], strict=strict, max_length=MAX_KEY) == Key(value)


@pytest.mark.parametrize("value", ["\x00", "a\tb", "a\nb", "a\x7f", "é", "日"])
def test_what_a_header_can_not_carry_is_not_written(value: str) -> None:
    """The client finds out before the wire does."""
    with pytest.raises(KeyInvalid, match="printable ASCII"):
        serialise(value)


# What is refused


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b'""', "empty"),
        (b'"   "', "empty"),
        (b'"abc', "never closed"),
        (b'"abc\\"', "never closed"),
        (b'"', "never closed"),
        (b'abc"', "does not start with one"),
        (b'"a\\x"', "stray backslash"),
        (b'"abc\\', "never closed"),
        (b'"abc"def', "after the closing quote"),
        (b'"abc" ;v', "after the closing quote"),
        (b'"a", "b"', "is a list"),
        (b'"a","a"', "is a list"),
        (b"a, b", "is a list"),
        (b"k;v=1", "Quote it"),
        (b"a b", "Quote it"),
        (b"a\\b", "Quote it"),
        (b'"k";', "semicolon"),
        (b'"k";V=1', "semicolon"),
        (b'"k";v=', "semicolon"),
        (b'"k";v=1.', "semicolon"),
        (b'"k";v=1.2345', "semicolon"),
        (b'"k";v=1234567890123.1', "semicolon"),
        (b'"k";v=1234567890123456', "semicolon"),
        (b'"k";v=?2', "semicolon"),
        (b'"k";v=:a:', "semicolon"),
        (b'"k";v=:====:', "semicolon"),
        (b'"k";v=@1.5', "semicolon"),
        (b'"k";v=%"%C3%BC"', "semicolon"),
        (b'"k";v=%"%c3"', "semicolon"),
        (b'"k";v=(1 2)', "semicolon"),
        (b'"k";v="x', "semicolon"),
        ("é".encode(), "printable ASCII"),
        ('"é"'.encode("latin-1"), "printable ASCII"),
        ("日", "printable ASCII"),
        (b"a\tb", "printable ASCII"),
        (b'"a\tb"', "printable ASCII"),
        (b"abc\x00", "printable ASCII"),
        (b"abc\n", "printable ASCII"),
        (b"\n", "printable ASCII"),
        (b'"abc"\r', "printable ASCII"),
        (b"\x7f", "printable ASCII"),
    ],
)
@both_modes
def test_a_malformed_key_is_refused(line: bytes | str, reason: str, strict: bool) -> None:
    """Whatever can't be read with certainty is refused in both modes, and the refusal says what is wrong."""
    assert reason in refusal(line, strict=strict)


@pytest.mark.parametrize("lines", [[b"a", b"a"], [b"a", b"b"], [b'"a"', b'"a"'], [b'"foo', b'bar"'], [b"", b""]])
@both_modes
def test_two_lines_are_refused(lines: list[bytes], strict: bool) -> None:
    """Two lines are refused even when they are equal: they are no Item, and picking one would be a guess."""
    with pytest.raises(KeyInvalid, match="more than once"):
        parse(lines, strict=strict)


def test_no_lines_are_an_empty_key() -> None:
    """Whoever calls this without a line has lost the key on the way, and must not go on as if there were none."""
    with pytest.raises(KeyInvalid, match="empty"):
        parse([])


@both_modes
def test_length_counts_after_unescaping(strict: bool) -> None:
    """The limit is on the key, not on the way it is written; a longer one is refused and never cut."""
    assert parse([serialise('"' * 255)], strict=strict).value == '"' * 255
    assert "too long. Send at most 255 characters" in refusal(serialise('"' * 256), strict=strict)
    assert "at most 36" in refusal(serialise(UUID + "0"), strict=strict, max_length=36)


@both_modes
def test_the_parser_takes_1024_characters(strict: bool) -> None:
    """RFC 9651 wants no less of a parser, whatever policy then says."""
    longest = '"\\' * (MAX_KEY // 2)
    assert parse([serialise(longest) + ";v=1"], strict=strict, max_length=MAX_KEY).value == longest
    assert "at most 1024" in refusal(serialise(longest + "x"), strict=strict, max_length=MAX_KEY + 1)


@both_modes
def test_a_huge_line_is_not_read_at_all(strict: bool) -> None:
    """Length comes first: a line over the limit is too long, whatever else is wrong with it."""
    assert "too long" in refusal(b"\x00" * (MAX_LINE + 1), strict=strict)


@given(st.text(st.characters(max_codepoint=0xFF), min_size=4))
@both_modes
def test_a_refusal_never_repeats_the_key(strict: bool, line: str) -> None:
    """Details end up in logs and screenshots, and keys can be personal."""
    assert "s3cr3t" not in repr(attempt(f"{line}s3cr3t", strict=strict))


# Against another implementation

lines_of_grammar = st.lists(
    st.sampled_from([*'"\\ ;=,:@?%*-.()1aAé\t', '"k"', '";', "v=", "23", "=?1", "=:YQ==:", '%"', "%c3", "%a9", '\\"']),
    max_size=12,
).map("".join)
parameter_values = st.one_of(
    st.from_regex(r"-?[0-9]{1,16}(\.[0-9]{0,4})?", fullmatch=True),
    st.from_regex(r":[A-Za-z0-9+/]{0,6}={0,3}:", fullmatch=True),
    st.from_regex(r"@-?[0-9]{1,11}(\.1)?", fullmatch=True),
    st.from_regex(r'%"([a-z "]|%[0-9a-fA-F]{2}|%c3%a9){0,4}"', fullmatch=True),
    st.from_regex(r'"([a-z ]|\\.){0,4}"', fullmatch=True),
    st.from_regex(r"[A-Za-z*?(][0-9a-zA-Z:/%]{0,4}", fullmatch=True),
)
lines_with_parameters = st.builds(
    lambda key, names, value, end: f'"{key}"' + "".join(f";{name}={value}" for name in names) + end,
    st.sampled_from(["k", "", " ", "a b"]),
    st.lists(st.from_regex(r" ?[a-z*A-Z][a-z0-9_.*-]{0,3} ?", fullmatch=True), min_size=1, max_size=2),
    parameter_values,
    st.sampled_from(["", " ", ";", "\t", ","]),
)


def by_http_sf(line: bytes) -> str | None:
    try:
        item = http_sf.parse(line, tltype="item")
    except ValueError:
        return None
    return item[0] if isinstance(item, tuple) and isinstance(item[0], str) else None


@given(st.one_of(st.binary(), st.one_of(st.text(), lines_of_grammar, lines_with_parameters).map(str.encode)))
def test_strict_mode_reads_what_http_sf_reads(line: bytes) -> None:
    """Strict mode and an independent parser of RFC 9651 agree on every line, but for the keys that policy refuses."""
    assume(len(line) <= MAX_LINE)
    expected = by_http_sf(line.strip(b" \t"))
    if expected is None or not expected.strip() or len(expected) > MAX_KEY:
        refusal(line, strict=True, max_length=MAX_KEY)
    else:
        assert attempt(line, strict=True, max_length=MAX_KEY) == Key(expected)


@given(printable)
def test_a_key_is_written_as_http_sf_writes_it(value: str) -> None:
    """The serialiser agrees with an independent one."""
    assert serialise(value) == http_sf.ser(value)


@given(st.one_of(st.text(), lines_of_grammar, lines_with_parameters))
def test_lenient_mode_reads_at_least_what_strict_mode_reads(line: str) -> None:
    """Leniency adds keys and changes none."""
    strictly = attempt(line, strict=True)
    assert isinstance(strictly, KeyInvalid) or attempt(line) == strictly


# Among the headers


def test_an_absent_header_is_no_key() -> None:
    """None means that the header was not sent, and nothing else."""
    assert find([(b"host", b"example.com")], NAMES) is None


def test_a_key_is_found_among_the_headers() -> None:
    """The name is compared without regard to case, even where a server forgot to lower it."""
    assert find([(b"host", b"example.com"), (b"idempotency-key", b"abc")], NAMES) == Key("abc")
    assert find([(b"Idempotency-Key", b"abc")], NAMES) == Key("abc")


def test_an_empty_header_is_not_an_absent_one() -> None:
    """An empty key is a client's bug, such as an unset variable: running unguarded would hide it."""
    with pytest.raises(KeyInvalid, match="empty"):
        find([(b"idempotency-key", b"")], NAMES)


def test_an_underscore_is_another_header() -> None:
    """``Idempotency_Key`` does not count: some servers would merge it with the real one."""
    assert find([(b"idempotency_key", b"abc")], NAMES) is None


def test_two_lines_of_one_name_are_refused() -> None:
    """The raw list of headers is read, so a second line can't hide behind the first."""
    with pytest.raises(KeyInvalid, match="more than once"):
        find([(b"idempotency-key", b"a"), (b"host", b"x"), (b"Idempotency-Key", b"a")], NAMES)


def test_aliases_must_agree() -> None:
    """Two accepted headers with one key are fine, in whatever spelling; with two keys the request is refused."""
    names = (b"idempotency-key", b"x-idempotency-key")
    assert find([(b"idempotency-key", b'"a"'), (b"x-idempotency-key", b"a")], names) == Key("a")
    with pytest.raises(KeyInvalid, match="different idempotency keys"):
        find([(b"x-idempotency-key", b"b"), (b"idempotency-key", b"a")], names)


def test_the_mode_and_the_limit_hold_for_every_header() -> None:
    """Strictness and length are passed on."""
    names = (b"idempotency-key", b"x-idempotency-key")
    with pytest.raises(KeyInvalid, match="Quote it"):
        find([(b"idempotency-key", b'"a"'), (b"x-idempotency-key", b"a")], names, strict=True)
    with pytest.raises(KeyInvalid, match="at most 3"):
        find([(b"idempotency-key", b"abcd")], names, max_length=3)


# The value


@pytest.mark.parametrize("value", ["", " ", "a\tb", "é", "a\n", "x" * (MAX_KEY + 1)])
def test_a_key_can_not_be_built_wrong(value: str) -> None:
    """What no header can carry, or nobody can tell apart, is no Key, wherever it comes from."""
    with pytest.raises(KeyInvalid):
        Key(value)


def test_a_key_does_not_show_itself() -> None:
    """A repr ends up in tracebacks, so it holds a digest; whoever wants the key has to ask for it."""
    key = Key("somebody@example.com")
    assert "somebody" not in repr(key)
    assert key.short() in repr(key)
    assert str(key) == key.value == "somebody@example.com"


def test_the_short_form_is_a_stable_digest() -> None:
    """An operator can find a key in the logs with sha256sum alone."""
    assert Key("abc").short() == "ba7816bf8f01"


@pytest.mark.parametrize(
    "value",
    [
        "bob@example.com",
        "order-7-for-bob.b+x@mail.example.co.uk-retry",
        "+4915112345678",
        "+49 151 1234-5678",
        "pay:+1 (555) 010-9999",
        "(555) 010-9999",
        "555-010-9999",
        "0151 12345678",
        "030/12345678",
    ],
)
def test_a_personal_key_is_told(value: str) -> None:
    """A key that looks like an e-mail address or a phone number works, and can be warned about."""
    assert Key(value).personal


@pytest.mark.parametrize(
    "value",
    [
        UUID,
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "20240131120000",
        "2024-01-31-0001",
        "1234567890",
        "0000000001",
        "user@host",
        "a+1234567",
        "order+12345678abc",
        "@",
        "555-010-99990",
    ],
)
def test_an_impersonal_key_is_not_warned_about(value: str) -> None:
    """Random keys, dates and serial numbers are nobody's address."""
    assert not Key(value).personal


@pytest.mark.parametrize(
    "value, made_at",
    [
        ("017f22e2-79b0-7cc3-98c4-dc0c0c07398f", datetime(2022, 2, 22, 19, 22, 22, tzinfo=UTC)),  # RFC 9562's example
        ("017F22E2-79B0-7CC3-98C4-DC0C0C07398F", datetime(2022, 2, 22, 19, 22, 22, tzinfo=UTC)),
        ("idem_017f22e2-79b0-7cc3-98c4-dc0c0c07398f", datetime(2022, 2, 22, 19, 22, 22, tzinfo=UTC)),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", datetime(2016, 7, 30, 23, 54, 10, 259000, tzinfo=UTC)),  # the ULID readme's
        ("idem_01arz3ndektsv4rrffq69g5fav", datetime(2016, 7, 30, 23, 54, 10, 259000, tzinfo=UTC)),
        ("00000000000000000000000000", None),  # older than ULIDs are
        ("01234567890123456789012345", None),  # a number
        ("01999999999999999999999999", None),
        ("02345678901234567890123456", None),
        ("00000000-0000-7cc3-98c4-dc0c0c07398f", None),  # made by a device without a clock
        ("01ZZZZZZZZTSV4RRFFQ69G5FAV", datetime(2039, 9, 7, 15, 47, 35, 551000, tzinfo=UTC)),  # the last for now
        ("0200000000TSV4RRFFQ69G5FAV", None),
        (UUID, None),
        ("017f22e2-79b0-7cc3-18c4-dc0c0c07398f", None),  # not RFC 9562's variant
        ("81ARZ3NDEKTSV4RRFFQ69G5FAV", None),  # more than 128 bits
        ("01ARZ3NDEKTSV4RRFFQ69G5FAU", None),  # Crockford has no U
        ("7ZZZZZZZZZZZZZZZZZZZZZZZZZ", None),  # the year 10889
        ("ffffffff-ffff-7cc3-98c4-dc0c0c07398f", None),
        ("abc", None),
    ],
)
def test_a_key_may_say_when_it_was_made(value: str, made_at: datetime | None) -> None:
    """A UUIDv7 and a ULID hold a time, so that a key past its retention can be told without a record."""
    assert Key(value).made_at == made_at


@given(st.text("0123456789", min_size=26, max_size=26))
def test_a_number_tells_no_time(digits: str) -> None:
    """No number of 26 digits is taken for a ULID."""
    assert Key(digits).made_at is None


def test_a_key_that_is_late() -> None:
    """A key that tells its time is late from the moment on in which a record that was made with it may be gone."""
    key, day = Key("017f22e2-79b0-7cc3-98c4-dc0c0c07398f"), timedelta(days=1)
    assert key.made_at is not None
    assert not key.is_late(key.made_at + day - timedelta(milliseconds=1), day)
    assert key.is_late(key.made_at + day, day)
    assert not Key("abc").is_late(key.made_at + 9 * day, day)
