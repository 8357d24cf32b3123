"""Which requests are the same request. What the answer to another one is, is tested with the decision."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import pickle
from mmap import mmap
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.fingerprint import (
    CANONICAL_LIMIT,
    MIN_SECRET,
    Fingerprinter,
    Subject,
    fingerprint_of,
    is_same_request,
)
from semel.errors import ConfigurationError

PLAIN = Fingerprinter()
OLD_SECRET, SECRET = b"o" * MIN_SECRET, b"n" * MIN_SECRET
Headers = tuple[tuple[bytes, bytes], ...]


def typed(content_type: str, *more: tuple[bytes, bytes]) -> Headers:
    return ((b"content-type", content_type.encode()), *more)


JSON = typed("application/json")
FORM = typed("application/x-www-form-urlencoded")
CHARGE = Subject("POST", "/charges", b"", JSON, b'{"amount":1000,"currency":"eur"}')


def charge(**changes: Any) -> Subject:
    return dataclasses.replace(CHARGE, **changes)


def same(one: Subject, other: Subject, recipe: Fingerprinter = PLAIN) -> bool:
    """Whether *other* passes as a retry of *one*, which has to be so both ways."""
    first, second = recipe.of(one), recipe.of(other)
    assert recipe.matches(first, second, other) == recipe.matches(second, first, one)
    return recipe.matches(first, second, other)


# What counts


def test_a_retry_is_the_same_request() -> None:
    """The same bytes under the same method and path match."""
    assert same(CHARGE, charge())


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "PATCH"},
        {"path": "/refunds"},
        {"path": "/charges/"},
        {"path": "/Charges"},
        {"query": b"to=mallory"},
        {"body": b'{"amount":9000,"currency":"eur"}'},
        {"body": b""},
        {"headers": typed("application/vnd.api+json")},
        {"headers": ()},
        {"headers": typed("application/json", (b"content-encoding", b"gzip"))},
    ],
)
def test_another_request_is_another(changes: dict[str, Any]) -> None:
    """Method, path, query, media type, encoding and body always count."""
    assert not same(CHARGE, charge(**changes))


def test_other_headers_do_not_count() -> None:
    """A retry has another date, trace and signature, and maybe a new access token."""
    more = ((b"authorization", b"Bearer 2"), (b"date", b"today"), (b"traceparent", b"00-1"), (b"x-version", b"2"))
    assert same(CHARGE, charge(headers=JSON + more))


def test_a_path_is_compared_as_sent() -> None:
    """Decoding a path can make one resource of two, so ``%2f`` is not ``%2F``, and neither is a slash."""
    assert not same(charge(path="/a%2fb"), charge(path="/a%2Fb"))
    assert not same(charge(path="/a%2fb"), charge(path="/a/b"))


def test_a_path_may_hold_anything() -> None:
    """A server that hands on undecodable bytes as surrogates is no reason to fail."""
    assert not same(charge(path="/\udcff"), charge(path="/\udcfe"))


def test_query_order_does_not_count() -> None:
    """Proxies and dictionaries reorder names; escapes have two spellings."""
    assert same(charge(query=b"a=1&b=%2f"), charge(query=b"b=%2F&a=1"))


def test_the_order_of_a_repeated_name_counts() -> None:
    """``a=1&a=2`` is a list, and another one than ``a=2&a=1``."""
    assert not same(charge(query=b"a=1&a=2"), charge(query=b"a=2&a=1"))
    assert same(charge(query=b"a=1&b=0&a=2"), charge(query=b"b=0&a=1&a=2"))


def test_the_query_is_never_left_out() -> None:
    """``?to=alice`` was replayed for ``?to=mallory`` by libraries that forgot it."""
    assert not same(charge(query=b"to=alice"), charge(query=b"to=mallory"))
    assert not same(charge(query=b"dry_run=1"), charge(query=b""))


def test_the_spelling_of_a_media_type_does_not_count() -> None:
    """Case, spacing and the charset of JSON, which has but one, are the client library's business."""
    assert same(CHARGE, charge(headers=typed("Application/JSON ; charset=utf-8")))


def test_the_charset_of_a_text_counts() -> None:
    """The same bytes are another text in another charset."""
    text = typed("text/plain; charset=utf-8")
    assert same(charge(headers=text), charge(headers=typed('text/plain;charset="UTF-8"')))
    assert not same(charge(headers=text), charge(headers=typed("text/plain; charset=latin1")))


def test_two_content_types_are_compared_as_they_are() -> None:
    """A repeated header is nobody's normal request: all of it counts, and nothing is parsed."""
    twice = charge(headers=JSON + typed("text/plain"))
    assert same(twice, charge(headers=JSON + typed("text/plain")))
    assert not same(twice, CHARGE)
    assert not same(twice, dataclasses.replace(twice, body=b'{"currency":"eur","amount":1000}'))


def test_identity_is_no_encoding() -> None:
    """``Content-Encoding: identity`` says nothing."""
    assert same(CHARGE, charge(headers=typed("application/json", (b"content-encoding", b" Identity"))))


def test_a_compressed_body_is_compared_as_bytes() -> None:
    """What nobody below us decoded counts as it came, with its encoding."""
    headers = typed("application/json", (b"content-encoding", b"gzip"))
    packed = charge(headers=headers, body=gzip.compress(b"{}", mtime=1))
    assert same(packed, charge(headers=headers, body=gzip.compress(b"{}", mtime=1)))
    assert not same(packed, charge(headers=headers, body=gzip.compress(b"{}", mtime=2)))


def test_a_decoded_body_is_compared_as_what_it_is() -> None:
    """What something below us has decoded is parsed, though the header still speaks of gzip."""
    headers = typed("application/json", (b"content-encoding", b"gzip"))
    assert same(charge(headers=headers, body=b'{"a":1,"b":2}'), charge(headers=headers, body=b'{"b":2,"a":1}'))


# Bodies


def test_member_order_does_not_count() -> None:
    """A client that rebuilds its JSON is not told that it asked for something else."""
    assert same(CHARGE, charge(body=b'{ "currency": "eur", "amount": 1000 }'))
    problem = typed("application/problem+json")
    assert same(charge(headers=problem), charge(headers=problem, body=b'{"currency":"eur","amount":1000}'))


def test_member_order_counts_where_json_is_not_declared() -> None:
    """Without the media type, bytes are bytes."""
    assert not same(charge(headers=()), charge(headers=(), body=b'{"currency":"eur","amount":1000}'))


@pytest.mark.parametrize(
    "one, other, alike",
    [
        (b'{"a":1}', b'{"a":1.0}', True),
        (b'{"a":null}', b"{}", False),
        (b"[1,2]", b"[2,1]", False),
        (b"", b"{}", False),
        (b'{"a":1,"a":2}', b'{"a":2}', False),
        (b'{"a":1,"a":2}', b'{"a":1, "a":2}', False),
        (b'{"n":NaN}', b'{"n": NaN}', False),
        (b'{"n":1e400}', b'{"n":1e401}', False),
        (b'{"n":9007199254740992}', b'{"n":9007199254740993}', False),
        (b'{"n":9007199254740993,"m":1}', b'{"m":1,"n":9007199254740993}', True),
        (b'{"a":', b'{"a": ', False),
        (b'{"a":', b'{"a":', True),
    ],
)
def test_json_is_compared_by_value(one: bytes, other: bytes, alike: bool) -> None:
    """``1`` is ``1.0``, null is not absent, arrays have an order; doubtful JSON is compared as bytes."""
    assert same(charge(body=one), charge(body=other)) == alike


def test_a_form_is_compared_by_its_pairs() -> None:
    """The spelling of an escape does not count, the order of the fields does."""
    assert same(charge(headers=FORM, body=b"a=x+y&b=2"), charge(headers=FORM, body=b"a=x%20y&b=2"))
    assert not same(charge(headers=FORM, body=b"a=1&b=2"), charge(headers=FORM, body=b"b=2&a=1"))


def test_a_body_over_the_limit_is_compared_as_bytes() -> None:
    """Long JSON is not parsed: that would hold up the event loop."""
    filler = b" " * CANONICAL_LIMIT
    assert not same(charge(body=b"[1]" + filler), charge(body=b"[ 1]" + filler))
    assert same(charge(body=b"[1]" + filler), charge(body=b"[1]" + filler))
    assert same(
        charge(body=b"[1]" + filler), charge(body=b"[ 1]" + filler), Fingerprinter(canonical_limit=2 * CANONICAL_LIMIT)
    )


def upload(content: bytes) -> Subject:
    file = ("x.bin", content, "image/png")
    request = httpx.Request("POST", "http://api/files", data={"a": "1"}, files={"file": file})
    return Subject("POST", "/files", b"", [(b"content-type", request.headers["content-type"].encode())], request.read())


@pytest.mark.parametrize("size", [1, 2 * CANONICAL_LIMIT])
def test_a_new_boundary_is_the_same_upload(size: int) -> None:
    """A client such as httpx draws a boundary for every try: the parts are compared, whatever their length."""
    one, other = upload(b"x" * size), upload(b"x" * size)
    assert one.body != other.body
    assert same(one, other)
    assert not same(one, upload(b"y" * size))


def test_a_mapped_file_is_a_body() -> None:
    """A large body may lie in a file: it is hashed where it lies, and can be closed afterwards."""
    one = upload(b"x" * CANONICAL_LIMIT)
    with mmap(-1, len(one.body)) as mapped:
        mapped[:] = bytes(one.body)
        assert same(one, dataclasses.replace(one, body=mapped))
    assert mapped.closed


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(-2, 2), st.text(max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)


def backwards(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: backwards(value[name]) for name in reversed(value)}
    return [backwards(element) for element in value] if isinstance(value, list) else value


def told_apart(value: Any) -> Any:
    """*value* in a form in which Python does not take True for 1."""
    if isinstance(value, dict):
        return {name: told_apart(member) for name, member in value.items()}
    if isinstance(value, list):
        return [told_apart(element) for element in value]
    return (isinstance(value, bool), value)


@given(json_values)
def test_reordered_members_always_match(value: Any) -> None:
    """No order of members, at any depth, makes another request."""
    assert same(charge(body=json.dumps(value).encode()), charge(body=json.dumps(backwards(value), indent=1).encode()))


@given(json_values, json_values)
def test_values_match_only_if_they_are_equal(one: Any, other: Any) -> None:
    """Two values match exactly if they are equal."""
    alike = same(charge(body=json.dumps(one).encode()), charge(body=json.dumps(other).encode()))
    assert alike == (told_apart(one) == told_apart(other))


short = st.text("ab/", max_size=3)
subjects = st.builds(
    Subject,
    method=short,
    path=short,
    query=st.just(b""),
    headers=st.lists(st.tuples(st.sampled_from([b"content-type", b"content-encoding", b"x"]), short.map(str.encode))),
    body=short.map(str.encode),
)


@given(subjects, subjects)
def test_nothing_slides_from_one_part_into_the_next(one: Subject, other: Subject) -> None:
    """A path that ends where a body starts is never taken for another division of the same bytes."""

    def parts(subject: Subject) -> tuple[object, ...]:
        kinds, encodings, chosen = (
            [value for each, value in subject.headers if each == name]
            for name in (b"content-type", b"content-encoding", b"x")
        )
        return (subject.method, subject.path, b", ".join(kinds), b", ".join(encodings), chosen, subject.body)

    assert same(one, other, Fingerprinter(headers=("x",))) == (parts(one) == parts(other))


# Recipes


def test_chosen_headers_count() -> None:
    """An API version may be part of what is asked; absent, empty and repeated are three different things."""
    recipe = Fingerprinter(headers=("Api-Version", "x-mode"))
    versions: list[Headers] = [
        (),
        ((b"api-version", b""),),
        ((b"api-version", b"1"),),
        ((b"api-version", b"2"),),
        ((b"api-version", b"1"), (b"api-version", b"2")),
        ((b"x-mode", b"1"),),
    ]
    requests = [charge(headers=JSON + version) for version in versions]
    for row, one in enumerate(requests):
        for column, other in enumerate(requests):
            assert same(one, other, recipe) == (row == column)


def test_omitted_members_do_not_count() -> None:
    """A client that stamps the time of sending into its body can still retry."""
    recipe = Fingerprinter(omit=("sent_at", "meta.trace"))
    one = charge(body=b'{"amount":1,"sent_at":1,"meta":{"trace":"a","user":1}}')
    assert same(one, charge(body=b'{"amount":1,"sent_at":2,"meta":{"user":1}}'), recipe)
    assert not same(one, charge(body=b'{"amount":2,"sent_at":1,"meta":{"trace":"a","user":1}}'), recipe)
    assert not same(one, charge(body=b'{"amount":1,"sent_at":1,"meta":{"trace":"a","user":2}}'), recipe)


def amount_only(subject: Subject) -> bytes:
    return str(json.loads(bytes(subject.body))["amount"]).encode()


def test_a_select_replaces_the_body() -> None:
    """Your own function decides what of the body counts; method, path and query count all the same."""
    recipe = Fingerprinter(select=amount_only)
    one = charge(body=b'{"amount":1,"note":"a"}')
    assert same(one, charge(body=b'{"amount":1,"note":"b"}'), recipe)
    assert not same(one, charge(body=b'{"amount":2,"note":"a"}'), recipe)
    assert not same(one, charge(path="/refunds", body=b'{"amount":1,"note":"a"}'), recipe)


def test_the_stored_form() -> None:
    """Version, recipe, and two digests, whether or not there is a canonical form: other versions can read it."""
    stored = PLAIN.of(CHARGE)
    assert (len(stored), stored[0]) == (37, 3)
    assert len(PLAIN.of(charge(headers=()))) == 37
    assert len(Fingerprinter(select=amount_only).of(CHARGE)) == 37
    assert len(fingerprint_of(None, CHARGE)) == 21


def test_a_canonical_form_is_not_taken_for_a_body() -> None:
    """A body that is sent in the canonical form of another, and has none itself, is another body."""
    assert CHARGE.body == b'{"amount":1000,"currency":"eur"}'
    assert PLAIN.of(CHARGE)[21:] != Fingerprinter(canonical_limit=0).of(CHARGE)[21:]


def test_version_2_is_still_compared() -> None:
    """A record of before, which has a digest of the body as it came and one of its canonical form, answers the retries
    that it answered then.
    """
    as_it_came = Fingerprinter(canonical_limit=0).of(CHARGE)[21:]
    now = PLAIN.of(CHARGE)
    before = b"\x02" + now[1:21] + as_it_came + now[21:]
    rebuilt, other = charge(body=b'{"currency":"eur","amount":1000}'), charge(body=b"{}")
    assert PLAIN.matches(before, now, CHARGE)
    assert PLAIN.matches(before, PLAIN.of(rebuilt), rebuilt)
    assert not PLAIN.matches(before, PLAIN.of(other), other)
    bare = charge(headers=())
    assert PLAIN.matches(b"\x02" + PLAIN.of(bare)[1:], PLAIN.of(bare), bare)
    assert is_same_request(None, b"\x02" + fingerprint_of(None, CHARGE)[1:], fingerprint_of(None, other), other)


def test_the_stored_form_never_changes_by_accident() -> None:
    """Records outlive a deploy: whoever changes a byte of this has to raise the version."""
    request = Subject("POST", "/a", b"b=2&a=1", typed("application/json", (b"x-v", b"1")), b'{"b":1.0,"a":[null]}')
    plain = Fingerprinter(headers=("X-V",), omit=("c",)).of(request)
    keyed = Fingerprinter(secret=SECRET).of(request)
    assert [hashlib.sha256(stored).hexdigest()[:16] for stored in (plain, keyed)] == [
        "2442a025abc0fe5c",
        "f1d5c0e58795d303",
    ]


def test_a_secret_changes_every_digest() -> None:
    """With a secret the digest of a small body can't be found by trying bodies."""
    plain, keyed = PLAIN.of(CHARGE), Fingerprinter(secret=SECRET).of(CHARGE)
    assert plain[5:21] != keyed[5:21]
    assert plain[21:37] != keyed[21:37]
    assert same(CHARGE, charge(body=b'{"currency":"eur","amount":1000}'), Fingerprinter(secret=SECRET))
    assert not same(CHARGE, charge(body=b"{}"), Fingerprinter(secret=SECRET))


@pytest.mark.parametrize(
    "before, now",
    [
        (Fingerprinter(secret=OLD_SECRET), Fingerprinter(secret=SECRET, previous_secrets=(b"x" * 16, OLD_SECRET))),
        (PLAIN, Fingerprinter(secret=SECRET)),
        (Fingerprinter(secret=OLD_SECRET), Fingerprinter(previous_secrets=(OLD_SECRET,))),
    ],
    ids=["rotated", "turned on", "turned off"],
)
def test_a_secret_can_be_rotated(before: Fingerprinter, now: Fingerprinter) -> None:
    """Records written under an earlier secret, or under none, are still compared, and a mismatch is still found."""
    stored = before.of(CHARGE)
    for body, alike in ((CHARGE.body, True), (b'{"currency":"eur","amount":1000}', True), (b"{}", False)):
        retry = charge(body=body)
        assert now.matches(stored, now.of(retry), retry) == alike


RECIPES = {
    "none": None,
    "headers": Fingerprinter(headers=("x-version",)),
    "omit": Fingerprinter(omit=("amount",)),
    "select": Fingerprinter(select=amount_only),
    "limit": Fingerprinter(canonical_limit=0),
}


@pytest.mark.parametrize("now", [PLAIN, Fingerprinter(secret=SECRET)], ids=["plain", "keyed"])
@pytest.mark.parametrize("before", RECIPES.values(), ids=RECIPES)
def test_an_unknown_recipe_passes_the_body_over(before: Fingerprinter | None, now: Fingerprinter) -> None:
    """After a change of recipe the body is not compared: a deploy must not refuse the retries of what went before."""
    stored, retry = fingerprint_of(before, CHARGE), charge(body=b"{}")
    assert is_same_request(now, stored, now.of(retry), retry)


@pytest.mark.parametrize("now", [*RECIPES.values(), PLAIN, Fingerprinter(secret=SECRET)])
@pytest.mark.parametrize("before", [*RECIPES.values(), PLAIN, Fingerprinter(secret=OLD_SECRET)])
@pytest.mark.parametrize("changes", [{"method": "PATCH"}, {"path": "/refunds"}, {"query": b"to=mallory"}])
def test_two_endpoints_never_match(
    before: Fingerprinter | None, now: Fingerprinter | None, changes: dict[str, Any]
) -> None:
    """Method, path and query are compared whatever the recipes are, unless neither endpoint compares anything."""
    stored, another = fingerprint_of(before, CHARGE), charge(**changes)
    alike = is_same_request(now, stored, fingerprint_of(now, another), another)
    assert alike == (before is None and now is None)


def test_an_unknown_secret_is_a_mismatch() -> None:
    """Under a secret that is not known nothing can be compared, so it has to be named: ``previous_secrets``."""
    stored = Fingerprinter(secret=OLD_SECRET, omit=("amount",)).of(CHARGE)
    for now, alike in (
        (PLAIN, False),
        (None, False),
        (Fingerprinter(secret=SECRET), False),
        (Fingerprinter(secret=SECRET, previous_secrets=(OLD_SECRET,)), True),
    ):
        assert is_same_request(now, stored, fingerprint_of(now, CHARGE), CHARGE) == alike


def test_a_record_without_a_fingerprint() -> None:
    """What was stored without a fingerprint is given only to requests of which nothing but the key is compared."""
    assert is_same_request(None, b"", fingerprint_of(None, CHARGE), CHARGE)
    assert not is_same_request(PLAIN, b"", PLAIN.of(CHARGE), CHARGE)


@pytest.mark.parametrize("now", [None, PLAIN])
@pytest.mark.parametrize("stored", [b"\x01" + b"\x00" * 68, b"\x04" + b"\x00" * 36, b"another scheme"])
def test_an_unknown_version_is_a_mismatch(stored: bytes, now: Fingerprinter | None) -> None:
    """Of a record of another version not even the path can be compared, and it is given to no one."""
    assert not is_same_request(now, stored, fingerprint_of(now, CHARGE), CHARGE)


@given(subjects, subjects, st.sampled_from([*RECIPES.values(), PLAIN]), st.sampled_from([*RECIPES.values(), PLAIN]))
def test_whatever_the_recipes_another_place_is_another_request(
    one: Subject, other: Subject, before: Fingerprinter | None, now: Fingerprinter | None
) -> None:
    """No pair of recipes makes one request of two with different methods, paths or queries."""
    if any(recipe is not None and recipe.select is not None for recipe in (before, now)):
        one, other = (dataclasses.replace(each, body=b'{"amount":1}') for each in (one, other))
    alike = is_same_request(now, fingerprint_of(before, one), fingerprint_of(now, other), other)
    if (before, now) != (None, None) and (one.method, one.path) != (other.method, other.path):
        assert not alike


def test_one_canonical_form_is_not_enough() -> None:
    """A request without a canonical form matches only its own bytes, from either side."""
    assert not same(CHARGE, charge(body=b'{"amount":1000,"currency":"eur"'))


def test_equal_recipes_are_equal_however_they_are_written() -> None:
    """The order in which headers and members are named does not make another recipe, nor does a list."""
    one = Fingerprinter(headers=("A", "b"), omit=("c", "d"))
    other = Fingerprinter(headers=["B", "a", "A"], omit=["d", "c"])  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)
    assert one.of(CHARGE) == other.of(CHARGE)


class Chooser:
    def __call__(self, subject: Subject) -> bytes:
        return b"chosen"


@pytest.mark.parametrize("select", [Chooser(), functools.partial(amount_only)])
def test_any_callable_can_select(select: Any) -> None:
    """A callable without a name of its own goes by that of its class."""
    recipe = Fingerprinter(select=select)
    assert same(CHARGE, charge(), recipe)
    assert recipe.of(CHARGE)[:5] != PLAIN.of(CHARGE)[:5]


def test_secrets_are_not_shown() -> None:
    """A policy ends up in logs and tracebacks."""
    shown = repr(Fingerprinter(secret=SECRET, previous_secrets=(OLD_SECRET,)))
    assert "nnn" not in shown
    assert "ooo" not in shown


def test_a_recipe_can_be_sent_to_another_process() -> None:
    """A policy may travel to a worker; it arrives as the same recipe."""
    recipe = Fingerprinter(secret=SECRET, headers=("x-version",), select=amount_only)
    assert pickle.loads(pickle.dumps(recipe)).of(CHARGE) == recipe.of(CHARGE)  # noqa: S301 - our own pickle


@pytest.mark.parametrize(
    "name, value",
    [
        ("secret", b""),
        ("secret", b"short"),
        ("secret", "text that is long enough"),
        ("previous_secrets", OLD_SECRET),
        ("previous_secrets", None),
        ("previous_secrets", (b"short",)),
        ("previous_secrets", (None,)),
        ("headers", "x-version"),
        ("headers", (b"x-version",)),
        ("headers", None),
        ("headers", ("x version",)),
        ("headers", ("Content-Type",)),
        ("omit", "sent_at"),
        ("omit", ("",)),
        ("omit", ("a..b",)),
        ("omit", (1,)),
        ("select", "amount"),
        ("canonical_limit", -1),
        ("canonical_limit", "64k"),
    ],
)
def test_a_wrong_recipe_names_its_field(name: str, value: object) -> None:
    """A mistake shows at start-up, with the name of the field."""
    with pytest.raises(ConfigurationError, match=f"Fingerprinter.{name} must be"):
        Fingerprinter(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "Authorization",
        "Proxy-Authorization",
        "Cookie",
        "Date",
        "Signature",
        "Signature-Input",
        "Stripe-Signature",
        "X-Hub-Signature",
        "Traceparent",
        "Tracestate",
        "X-B3-TraceId",
        "X-Amzn-Trace-Id",
        "X-Request-Id",
        "Idempotency-Key",
        "X-Idempotency-Key",
        "Content-Length",
        "X-Forwarded-For",
    ],
)
def test_headers_that_change_between_retries_are_refused(name: str) -> None:
    """Counting them would make every retry another request, or keep a digest of a secret."""
    with pytest.raises(ConfigurationError, match="headers"):
        Fingerprinter(headers=(name,))


def test_a_select_and_omit_contradict_each_other() -> None:
    """Where a function chooses what counts, there is nothing left to leave out."""
    with pytest.raises(ConfigurationError, match="omit"):
        Fingerprinter(omit=("a",), select=amount_only)
