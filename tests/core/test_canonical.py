"""Which bodies have one form, and which have none. That a form decides about a retry is tested with the fingerprint."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from mmap import mmap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.formparser import MultiPartParser

from semel.core.canonical import MAX_FIELDS, MAX_PART_HEAD, Buffer, canonical, media_type, pack, pairs

LIMIT = 64 * 1024
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def form_of(body: Buffer, content_type: str = JSON, *, omit: tuple[tuple[str, ...], ...] = ()) -> bytes | None:
    return canonical(media_type(content_type), body, limit=LIMIT, omit=omit)


# Parts


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_packing_keeps_parts_apart(one: list[bytes], other: list[bytes]) -> None:
    """Two lists of parts never give the same bytes: ``ab, c`` is not ``a, bc``."""
    assert (pack(one) == pack(other)) == (one == other)


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_packing_can_be_undone(parts: list[bytes]) -> None:
    """Nothing is lost in packing, so nothing can be mixed up."""
    packed, unpacked = pack(parts), []
    while packed:
        end = 8 + int.from_bytes(packed[:8], "big")
        unpacked.append(packed[8:end])
        packed = packed[end:]
    assert unpacked == parts


# Media types


@pytest.mark.parametrize(
    "content_type, name",
    [
        ("application/json", "application/json"),
        ("Application/JSON", "application/json"),
        (" application/json ; charset=UTF-8", "application/json"),
        ("application/vnd.api+json;version=2", "application/vnd.api+json"),
        ("text/plain", "text/plain"),
        ("text/plain; format=flowed", "text/plain"),
        ("text/plain;Charset=UTF-8", "text/plain;charset=utf-8"),
        ('Text/CSV; header=present; charset="Latin1"', "text/csv;charset=latin1"),
        ("multipart/form-data; boundary=abc", "multipart/form-data"),
        ("application/x-www-form-urlencoded; charset=UTF-8", "application/x-www-form-urlencoded"),
        ("application/x-www-form-urlencoded; charset=Latin1", "application/x-www-form-urlencoded;charset=latin1"),
        ("", ""),
        ("a/b, c/d", "a/b, c/d"),
    ],
)
def test_media_types_are_normalised(content_type: str, name: str) -> None:
    """Case, spacing and parameters are how it is written; the charset of a text is what it says."""
    assert media_type(content_type).name == name


@pytest.mark.parametrize(
    "content_type, boundary",
    [
        ("multipart/form-data; boundary=abc", "abc"),
        ('multipart/form-data; charset=utf-8; Boundary="a b:c"', "a b:c"),
        ("multipart/form-data", None),
        ("multipart/form-data; charset=utf-8", None),
        ("application/json; boundary=abc", None),
    ],
)
def test_a_boundary_is_read_where_it_means_something(content_type: str, boundary: str | None) -> None:
    """Only multipart bodies have a boundary, quoted or not."""
    assert media_type(content_type).boundary == boundary


# Queries and forms


@pytest.mark.parametrize(
    "query, decoded",
    [
        (b"", []),
        (b"a=1&b=2", [(b"a", b"1"), (b"b", b"2")]),
        (b"a=%2f&a=%2F", [(b"a", b"/"), (b"a", b"/")]),
        (b"a=x+y&a=x%20y&a=x%2By", [(b"a", b"x y"), (b"a", b"x y"), (b"a", b"x+y")]),
        (b"a&b=&=c&&", [(b"a", b""), (b"b", b""), (b"", b"c")]),
        (b"a=1=2;b", [(b"a", b"1=2;b")]),
    ],
)
def test_pairs_are_decoded_as_browsers_do(query: bytes, decoded: list[tuple[bytes, bytes]]) -> None:
    """``+`` and ``%20`` are a space, case of an escape is nothing, and a semicolon separates nothing."""
    assert pairs(query) == decoded


def test_a_form_is_its_pairs_in_order() -> None:
    """Escapes can be written in two ways; order can mean something to a handler."""
    assert form_of(b"a=%2f&b=x+y", FORM) == form_of(b"a=%2F&b=x%20y", FORM) is not None
    assert form_of(b"a=1&b=2", FORM) != form_of(b"b=2&a=1", FORM)


def test_a_form_that_is_not_ascii_has_no_form() -> None:
    """A form escapes everything else, so these bytes are something else: compressed, perhaps."""
    assert form_of("a=é".encode(), FORM) is None


def test_a_form_of_very_many_fields_has_no_form() -> None:
    """Time is bounded by fields, not only by bytes."""
    assert form_of(b"&".join([b"a"] * MAX_FIELDS), FORM) is not None
    assert form_of(b"&".join([b"a"] * (MAX_FIELDS + 1)), FORM) is None


# JSON


@pytest.mark.parametrize(
    "one, other",
    [
        (b'{"a":1,"b":[2,{"c":3,"d":4}]}', b' { "b" : [ 2, {"d":4,"c":3} ] , "a" : 1 } '),
        (b"1", b"1.0"),
        (b"100", b"1e2"),
        (b"0", b"-0.0"),
        (b"12.5", b"12.50"),
        (b"0.00001", b"1E-5"),
        ('"é"'.encode(), b'"\\u00e9"'),
        ('"😀"'.encode(), b'"\\ud83d\\ude00"'),
        (b'"/"', b'"\\/"'),
    ],
)
def test_one_value_has_one_form(one: bytes, other: bytes) -> None:
    """Member order, white space, escapes and the spelling of a number are the client's, not the request's."""
    assert form_of(one) == form_of(other) is not None


@pytest.mark.parametrize(
    "one, other",
    [
        (b'{"a":null}', b"{}"),
        (b"[1,2]", b"[2,1]"),
        (b"1", b'"1"'),
        (b"1", b"true"),
        (b"0", b"false"),
        (b"{}", b"[]"),
        (b'"a"', b'"A"'),
        (b'"\\u00e9"', b'"e\\u0301"'),
        (b"9007199254740992", b"9007199254740993"),
        (b"12345678901234567890", b"12345678901234567891"),
        (b"0.1", b"0.10000000000000001"),
    ],
)
def test_two_values_have_two_forms(one: bytes, other: bytes) -> None:
    """Null is not absent, order in an array counts, and neither types nor large integers run into each other."""
    assert form_of(one) != form_of(other)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{} {}",
        b"{'a': 1}",
        b'{"a":1,"a":1}',
        b'[{"a":{"b":1,"b":2}}]',
        b"NaN",
        b"[-Infinity]",
        b"1e400",
        b"1e-400",
        b"1e-99999999999999999999",
        b"0.1234567890123456789",
        b"9" * 5000,
        b'"\xff"',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b"\x1f\x8b\x08\x00",
    ],
)
def test_doubtful_json_has_no_form(body: bytes) -> None:
    """What is not JSON, or what two parsers would read differently, is compared as bytes."""
    assert form_of(body) is None


@pytest.mark.parametrize("depth", [900, 30_000])
@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"":', b"}")], ids=["arrays", "objects"])
def test_deep_nesting_is_no_error(opening: bytes, closing: bytes, depth: int) -> None:
    """A body nested deeper than this Python follows is compared as bytes; how deep that is, is its own affair."""
    body = opening * depth + b"1" + closing * depth
    assert canonical(media_type(JSON), body, limit=len(body)) in (None, body)


def test_every_json_type_is_json() -> None:
    """A suffix of ``+json`` says it; a similar name does not."""
    assert form_of(b"{ }", "application/vnd.api+json; v=1") == form_of(b"{}") is not None
    assert form_of(b"{}", "application/jsonlines") is None
    assert form_of(b"{}", "text/plain") is None
    assert form_of(b"{}", "") is None


def test_a_long_body_has_no_form() -> None:
    """Over the limit neither JSON nor a form is parsed: an event loop waits for this."""
    for kind in (JSON, FORM):
        assert canonical(media_type(kind), b"10", limit=2) is not None
        assert canonical(media_type(kind), b"100", limit=2) is None


@pytest.mark.parametrize(
    "body, path, same_as",
    [
        (b'{"a":1,"sent_at":2}', "sent_at", b'{"a":1}'),
        (b'{"a":1}', "sent_at", b'{"a":1}'),
        (b'{"meta":{"trace":1,"b":2}}', "meta.trace", b'{"meta":{"b":2}}'),
        (b'{"meta":[{"trace":1},[{"trace":2}],3]}', "meta.trace", b'{"meta":[{},[{}],3]}'),
        (b'[{"a":1}]', "a", b"[{}]"),
        (b'{"meta":1}', "meta.trace", b'{"meta":1}'),
        (b'{"other":{"trace":1}}', "meta.trace", b'{"other":{"trace":1}}'),
        (b'"a"', "a", b'"a"'),
    ],
)
def test_omitted_members_do_not_count(body: bytes, path: str, same_as: bytes) -> None:
    """A path names members, through arrays too; where there are none it does nothing."""
    assert form_of(body, omit=(tuple(path.split(".")),)) == form_of(same_as) is not None


numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
scalars = st.one_of(st.none(), st.booleans(), numbers, st.sampled_from(["", "a", "1", "é"]), st.text(max_size=3))
names = st.one_of(st.sampled_from("ab"), st.text(max_size=3))
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=8,
)


def reordered(value: Any, backwards: bool) -> Any:
    if isinstance(value, dict):
        members = sorted(value.items(), reverse=backwards)
        return {name: reordered(member, backwards) for name, member in members}
    if isinstance(value, list):
        return [reordered(element, backwards) for element in value]
    return value


def meaning(text: str | bytes) -> Any:
    """What JSON means, by other means: numbers are exact, and are not booleans."""

    def number(text: str) -> tuple[str, Decimal]:
        return ("number", Decimal(text))

    return json.loads(text, parse_float=number, parse_int=number)


@given(json_values, st.booleans(), st.sampled_from([None, 2]))
def test_a_rebuilt_body_has_the_same_form(value: Any, ascii_only: bool, indent: int | None) -> None:
    """Whatever order, white space and escapes a client's encoder picks, the form is the same."""
    one = json.dumps(reordered(value, backwards=False), separators=(",", ":")).encode()
    other = json.dumps(reordered(value, backwards=True), ensure_ascii=ascii_only, indent=indent).encode()
    assert form_of(one) == form_of(other) is not None


@given(json_values, json_values)
def test_two_forms_are_equal_only_if_the_values_are(one: Any, other: Any) -> None:
    """Different values never share a form, and a form reads back as its own value."""
    first, second = json.dumps(one), json.dumps(other)
    if meaning(first) != meaning(second):
        assert form_of(first.encode()) != form_of(second.encode())
    form = form_of(first.encode())
    assert form is not None
    assert meaning(form) == meaning(first)


number_texts = st.from_regex(r"-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,19})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@given(number_texts, number_texts)
def test_numbers_are_exact_or_nothing(one: str, other: str) -> None:
    """A number either keeps its exact value in its form or has none: no two amounts become one by rounding."""
    first, second = form_of(one.encode()), form_of(other.encode())
    assert first is None or Decimal(first.decode()) == Decimal(one)
    assert first is None or first != second or Decimal(one) == Decimal(other)


# Multipart

Part = tuple[str, bytes]


def multipart(parts: list[Part], boundary: str = "xYzZY", end: bytes = b"\r\n") -> bytes:
    mark = b"--" + boundary.encode()
    encoded = [mark + b"\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, content in parts]
    return b"".join(encoded) + mark + b"--" + end


def multipart_form(body: Buffer, boundary: str = "xYzZY") -> bytes | None:
    return form_of(body, f'multipart/form-data; boundary="{boundary}"')


TEXT_PART = ('Content-Disposition: form-data; name="a"', b"1")
FILE_PART = (
    'Content-Disposition: form-data; name="file"; filename="x.bin"\r\nContent-Type: image/png',
    b"\x89PNG\r\n\x1a\n--xYz\r\n",
)

part_names = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E, exclude_characters='"\\'), max_size=5)
part_heads = st.one_of(
    part_names.map(lambda name: f'Content-Disposition: form-data; name="{name}"'),
    part_names.map(lambda name: f'{FILE_PART[0]}\r\nX-Note: "{name}"'),
)
part_lists = st.lists(st.tuples(part_heads, st.binary(max_size=30)), min_size=1, max_size=4)
boundaries = st.from_regex(r"[0-9a-zA-Z'+_,./:=?-]{30,40}", fullmatch=True)


@given(part_lists, boundaries, boundaries)
def test_a_new_boundary_does_not_change_the_form(parts: list[Part], one: str, other: str) -> None:
    """Clients draw a new boundary for every try; the parts are the request."""
    assert multipart_form(multipart(parts, one), one) == multipart_form(multipart(parts, other), other) is not None


@given(part_lists, part_lists)
def test_other_parts_have_another_form(one: list[Part], other: list[Part]) -> None:
    """Whatever a handler can see of the parts counts: heads, contents, number and order."""
    boundary = "0123456789" * 4
    first, second = (multipart_form(multipart(parts, boundary), boundary) for parts in (one, other))
    assert first is not None
    assert (first == second) == (one == other)


@pytest.mark.parametrize(
    "head",
    [
        'content-disposition:form-data;name=file;filename="x.bin"\r\ncontent-type:IMAGE/PNG',
        'Content-Type: image/png; x=y\r\nContent-Disposition: Form-Data; FileName="x.bin"; Name="file"',
    ],
)
def test_the_spelling_of_a_part_does_not_count(head: str) -> None:
    """Case, quotes and the order of headers and parameters are the client library's business."""
    assert multipart_form(multipart([(head, b"1")])) == multipart_form(multipart([(FILE_PART[0], b"1")])) is not None


@pytest.mark.parametrize(
    "head",
    [
        'Content-Disposition: form-data; name="file"; filename="y.bin"\r\nContent-Type: image/png',
        'Content-Disposition: form-data; name="other"; filename="x.bin"\r\nContent-Type: image/png',
        'Content-Disposition: form-data; name="file"\r\nContent-Type: image/png',
        'Content-Disposition: form-data; name="file"; filename="x.bin"\r\nContent-Type: image/gif',
        'Content-Disposition: form-data; name="file"; filename="x.bin"',
        'Content-Disposition: form-data; name="file"; filename="x.bin"; filename*=y\r\nContent-Type: image/png',
        FILE_PART[0] + "\r\nContent-Transfer-Encoding: base64",
    ],
)
def test_what_a_part_says_of_itself_counts(head: str) -> None:
    """Name, file name, type and any further header are part of the request."""
    form = multipart_form(multipart([(head, b"1")]))
    assert form is not None
    assert form != multipart_form(multipart([(FILE_PART[0], b"1")]))


def test_a_backslash_in_a_file_name_stays() -> None:
    r"""Some parsers unescape a file name and others do not, so ``C:\new`` and ``C:new`` are two."""
    one, other = (
        multipart_form(multipart([(f'Content-Disposition: form-data; name="f"; filename="{name}"', b"")]))
        for name in ("C:\\new", "C:new")
    )
    assert None not in (one, other)
    assert one != other


GOOD = multipart([TEXT_PART, FILE_PART])


def test_an_empty_line_before_the_first_part_says_nothing() -> None:
    """Some clients begin a multipart body with an empty line, and the same parts are the same parts."""
    assert multipart_form(b"\r\n" + GOOD) == multipart_form(GOOD) is not None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--xYzZY--\r\n",
        GOOD[:-4],
        GOOD[:-30],
        b"preamble\r\n" + GOOD,
        GOOD + b"epilogue",
        GOOD.replace(b"\r\n", b"\n"),
        multipart([('Content-Disposition: form-data; name="a"', b"\r\n--xYzZYandmore")]),
        multipart([("Content-Type: text/plain", b"1")]),
        multipart([('Content-Disposition: attachment; name="a"', b"1")]),
        multipart([("Content-Disposition: form-data", b"1")]),
        multipart([('Content-Disposition: form-data; filename="a"', b"1")]),
        multipart([('Content-Disposition: form-data; name="a"; name="b"', b"1")]),
        multipart([('Content-Disposition: form-data; name="a" b', b"1")]),
        multipart([('Content-Disposition: form-data; name="a', b"1")]),
        multipart([(TEXT_PART[0] + "\r\n" + TEXT_PART[0], b"1")]),
        multipart([(TEXT_PART[0] + "\r\n folded", b"1")]),
        multipart([(TEXT_PART[0] + "\r\nX: " + "x" * MAX_PART_HEAD, b"1")]),
        b"--xYzZY\r\n" + TEXT_PART[0].encode() + b"\r\n--xYzZY--",
        multipart([TEXT_PART] * (MAX_FIELDS + 1)),
    ],
)
def test_doubtful_multipart_has_no_form(body: bytes) -> None:
    """Cut off, dressed up or ambiguous bodies are compared as bytes."""
    assert multipart_form(body) is None


def parsed(body: bytes, boundary: str) -> object:
    """What Flask makes of *body*, which also takes bare CR and LF for ends of lines."""
    parser = MultiPartParser()
    try:
        form, files = parser.parse(io.BytesIO(body), boundary.encode(), len(body))
    except ValueError:
        return None
    return (
        list(form.items(multi=True)),
        [(name, file.filename, file.content_type, file.read()) for name, file in files.items(multi=True)],
    )


SMUGGLED = 'Content-Disposition: form-data; name="b"'


@pytest.mark.parametrize("line", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
def test_a_boundary_inside_a_part_leaves_no_form(line: bytes) -> None:
    """Where another parser may find one more part than we do, there is no form to match another body's."""
    one, other = (
        multipart([(TEXT_PART[0], line.join([b"1", b"--one", SMUGGLED.encode(), b"", b"2"]))], boundary)
        for boundary in ("one", "two")
    )
    if line != b"\r\n":
        assert parsed(one, "one") != parsed(other, "two")
    assert multipart_form(one, "one") is None or multipart_form(one, "one") != multipart_form(other, "two")


pieces = st.sampled_from(
    [b"\r\n", b"\n", b"\r", b"--one", b"--two", b"--", b" ", b"\t", b"1", SMUGGLED.encode(), b"X-Odd: 1", b":", b"\x0b"]
)
odd_bytes = st.lists(pieces, max_size=8).map(b"".join)


@given(odd_bytes, odd_bytes, odd_bytes, odd_bytes)
def test_bodies_of_one_form_are_parsed_alike(head: bytes, content: bytes, preamble: bytes, epilogue: bytes) -> None:
    """Two bodies with the same form are the same to a parser that is less strict than ours."""

    def body(boundary: bytes) -> bytes:
        lines = [b"--" + boundary, TEXT_PART[0].encode() + head, b"", content, b"--" + boundary + b"--"]
        return preamble + b"\r\n".join(lines) + epilogue

    one, other = body(b"one"), body(b"two")
    form = multipart_form(one, "one")
    if form is not None and form == multipart_form(other, "two"):
        assert parsed(one, "one") == parsed(other, "two")


@given(odd_bytes, odd_bytes, odd_bytes, odd_bytes)
def test_odd_bodies_of_one_form_are_parsed_alike(one: bytes, two: bytes, three: bytes, four: bytes) -> None:
    """The same of two different bodies under one boundary."""

    def body(head: bytes, content: bytes) -> bytes:
        return multipart([(TEXT_PART[0] + head.decode(), content)], "one")

    first, second = body(one, two), body(three, four)
    form = multipart_form(first, "one")
    if form is not None and form == multipart_form(second, "one"):
        assert parsed(first, "one") == parsed(second, "one")


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary=one; boundary=two",
        'multipart/form-data; boundary="o\\ne"',
        "multipart/form-data; boundary=one; charset=latin1",
    ],
)
def test_a_boundary_in_doubt(content_type: str) -> None:
    """Of two boundaries, of one with an escape and of another charset parsers make this or that: there is no form."""
    assert form_of(multipart([TEXT_PART], "one"), content_type) is None


def test_a_part_of_parts_has_no_form() -> None:
    """What is inside of a part depends on a boundary that is no part of the form."""
    mixed = ('Content-Disposition: form-data; name="a"\r\nContent-Type: multipart/mixed; boundary=i', b"--i--")
    assert multipart_form(multipart([mixed])) is None


def test_many_parts_are_allowed() -> None:
    """The limit is the limit, and not one less; the line end after the last boundary may be missing."""
    assert multipart_form(multipart([TEXT_PART] * MAX_FIELDS, end=b"")) is not None


def test_multipart_needs_its_boundary() -> None:
    """A content type without one leaves nothing to split at."""
    assert form_of(GOOD, "multipart/form-data") is None
    assert form_of(GOOD, "multipart/form-data; boundary=other") is None


def test_multipart_is_read_whatever_its_length() -> None:
    """Uploads are long, and a new boundary would make every one of them another request."""
    assert canonical(media_type("multipart/form-data; boundary=xYzZY"), GOOD, limit=0) is not None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(kind: type[bytes]) -> None:
    """A body may be held in memory in whatever way the server likes."""
    assert form_of(kind(b'{"a": 1}')) == b'{"a":1}'
    assert form_of(kind(b"a=1"), FORM) is not None
    assert multipart_form(kind(GOOD)) == multipart_form(GOOD) is not None


@pytest.mark.parametrize("body", [GOOD, GOOD + b"epilogue", GOOD[:-30]])
def test_a_mapped_file_can_be_closed_afterwards(body: bytes) -> None:
    """A large upload lies in a mapped file; no view of it is left behind, whether it had a form or not."""
    with mmap(-1, len(body)) as mapped:
        mapped[:] = body
        assert multipart_form(mapped) == multipart_form(body)
    assert mapped.closed
