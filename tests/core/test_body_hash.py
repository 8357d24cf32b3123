"""Keys that are made of what a body asks for: the same operation has the same key, and no other has."""

import json
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.body_hash import BodyHash, is_made
from semel.core.fingerprint import CANONICAL_LIMIT, Subject
from semel.core.key import Key
from semel.errors import BodyTooLarge, ConfigurationError, KeyInvalid, KeyMissing, Refusal

WINDOW = timedelta(minutes=10)
RECIPE = BodyHash(fields=["amount", "card.number", "lines.sku"], window=WINDOW, unless_header="X-Intent")
ORDER = {"amount": 5, "card": {"number": "42", "name": "Ada"}, "lines": [{"sku": "tea", "at": 1}, {"sku": "cake"}]}
FORM = "application/x-www-form-urlencoded"

# Written down once. Should they change, so must VERSION.
PINNED = "body:6bef9fee13fd1fdf33e5a678922f99d51779494dd19ebf69721d778748d3405c"
PINNED_FORM = "body:4f9c00fac7b30733d53eff8f9a6fb9942c46d71c95a12bdcc284c91f858344be"

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


def subject(body: object, *, media: str = "application/json", intent: str | None = None, **other: Any) -> Subject:
    headers = [(b"content-type", media.encode())]
    if intent is not None:
        headers.append((b"x-intent", intent.encode()))
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Subject(other.get("method", "POST"), other.get("path", "/orders"), other.get("query", b""), headers, raw)


def key(body: object, recipe: BodyHash = RECIPE, scope: str = "alice", **other: Any) -> Key:
    return recipe.key(scope, subject(body, **other))


def without(name: str) -> dict[str, Any]:
    return {each: value for each, value in ORDER.items() if each != name}


def test_people_can_tell() -> None:
    """Such a key says what it is, and tells nothing of the body."""
    made = key(ORDER)
    assert made.value.startswith("body:")
    assert len(made.value) == len("body:") + 64
    assert is_made(made)
    assert not is_made(Key("key-1"))
    assert not made.personal
    assert made.made_at is None


def test_stored_keys_stay_known() -> None:
    """A new version makes the same keys as the one before it: a deploy in the middle of retries loses none."""
    assert key({"amount": 5}).value == PINNED
    form = key(b"amount=5&amount=6", media=FORM)
    assert form.value == PINNED_FORM


@given(values=st.dictionaries(st.text(), VALUES, max_size=5), seed=st.randoms(use_true_random=False))
def test_spelling_does_not_count(values: dict[str, Any], seed: Any) -> None:
    """The order of members, white space and escapes make no other key."""
    whole = values | {"amount": values}
    shuffled = list(whole.items())
    seed.shuffle(shuffled)
    respelled = json.dumps(dict(shuffled), indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass")
    spelled = json.dumps(whole).encode()
    if b"\xed" not in respelled:  # a lone surrogate can be escaped, and not sent as it is
        assert key(spelled) == key(respelled)


@pytest.mark.parametrize("spelling", [b"5.0", b"5.00", b"50e-1", b"0.5E1", b"5e0", b"0.05e+2"])
def test_spelling_of_numbers_does_not_count(spelling: bytes) -> None:
    """5, 5.0 and 50e-1 are one amount; and so are the zeros."""
    assert key(b'{"amount": %s}' % spelling) == key(b'{"amount": 5}')
    assert len({key(b'{"amount": %s}' % zero) for zero in (b"0", b"-0", b"0.00", b"0e7")}) == 1


@given(one=st.decimals(allow_nan=False, allow_infinity=False), other=st.decimals(allow_nan=False, allow_infinity=False))
def test_numbers_are_exact(one: Decimal, other: Decimal) -> None:
    """Two amounts have one key if they are equal to the last digit, however large or small."""
    keys = [key(b'{"amount": %s}' % f"{each:E}".encode()) for each in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@given(others=st.dictionaries(st.text().filter(lambda name: name not in ORDER), VALUES, max_size=4))
def test_other_fields_do_not_count(others: dict[str, Any]) -> None:
    """What is not among the fields may differ on a retry: the time of sending, a trace."""
    assert key(ORDER | others) == key(ORDER)
    assert key(ORDER | {"card": {"number": "42"} | {f"x{name}": each for name, each in others.items()}}) == key(ORDER)


@given(value=VALUES)
def test_each_field_counts(value: Any) -> None:
    """Another value of any field is another operation."""
    changes: list[Callable[[Any], dict[str, Any]]] = [
        lambda new: ORDER | {"amount": new},
        lambda new: ORDER | {"card": {"number": new}},
        lambda new: ORDER | {"lines": [{"sku": new}, {"sku": "cake"}]},
        lambda new: ORDER | {"lines": [{"sku": "tea"}, {"sku": "cake"}, {"sku": new}]},
    ]
    keys = [key(change([value, "another"])) for change in changes]
    assert len({key(ORDER), *keys}) == 1 + len(changes)


@given(one=VALUES, other=VALUES)
def test_values_are_not_taken_for_each_other(one: Any, other: Any) -> None:
    """Values of different types, or differently nested, never make one key."""

    def exact(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(exact, value))
        if isinstance(value, dict):
            return frozenset((name, exact(each)) for name, each in value.items())
        return repr(value) if isinstance(value, bool | str | None) else Decimal(json.dumps(value))

    assert (key({"amount": one}) == key({"amount": other})) == (exact(one) == exact(other))


def test_absent_is_not_null() -> None:
    """A field that is not there, one that is null and one that is empty are three operations."""
    rest = without("amount")
    assert len({key(rest), key(rest | {"amount": None}), key(rest | {"amount": ""}), key(rest | {"amount": []})}) == 4


def test_paths_go_on_through_arrays() -> None:
    """A path through an array is each element's own; their order counts, and so does which of them has none."""
    bodies = [[{"sku": 1}, {"sku": 2}], [{"sku": 2}, {"sku": 1}], [{"sku": 1}, {}], [{}, {"sku": 1}], [[{"sku": 1}]]]
    assert len({key({"lines": lines}) for lines in bodies}) == len(bodies)
    assert key([{"amount": 1}, 7]) != key([{"amount": 1}])


@given(scopes=st.lists(st.text(min_size=1, alphabet=st.characters(min_codepoint=32)), min_size=2, unique=True))
def test_tenants_never_share_a_key(scopes: list[str]) -> None:
    """The same body of two tenants has two keys."""
    assert len({key(ORDER, scope=scope) for scope in scopes}) == len(scopes)


def test_where_it_is_sent_counts() -> None:
    """Method, path and query are part of the key; the order of a query's names is not."""
    other: list[dict[str, Any]] = [
        {"method": "PATCH"},
        {"path": "/refunds"},
        {"query": b"to=bob"},
        {"query": b"to=eve"},
    ]
    assert len({key(ORDER), *(key(ORDER, **each) for each in other)}) == 1 + len(other)
    assert key(ORDER, query=b"a=1&b=2") == key(ORDER, query=b"b=2&a=1")


def test_intents() -> None:
    """By the header a client says that it means another operation; a retry repeats it."""
    assert len({key(ORDER), key(ORDER, intent="1"), key(ORDER, intent="2")}) == 3
    assert key(ORDER, intent="2") == key(ORDER, intent=" 2 ")
    silent = BodyHash(fields=RECIPE.fields, window=WINDOW)
    assert key(ORDER, silent, intent="1") == key(ORDER, silent, intent="2") == key(ORDER)


def test_empty_intent_is_refused() -> None:
    """A header without a value says neither one nor the other."""
    with pytest.raises(KeyInvalid, match="X-Intent is empty"):
        key(ORDER, intent=" ")


def test_secret() -> None:
    """With a secret nobody can try out which amount it was; another secret makes other keys."""
    secrets = [None, b"s" * 16, b"t" * 16]
    recipes = [BodyHash(fields=["amount"], window=WINDOW, secret=secret) for secret in secrets]
    assert len({key(ORDER, recipe) for recipe in recipes}) == len(recipes)
    assert "ssss" not in repr(recipes[1])


def test_order_of_fields_does_not_count() -> None:
    """The recipe is a set of fields: reordering or repeating them in the code makes no other key."""
    assert BodyHash(fields=("a", "b"), window=WINDOW) == BodyHash(fields=["b", "a", "b"], window=WINDOW)
    assert len({key(ORDER, BodyHash(fields=[field], window=WINDOW)) for field in ("amount", "card")}) == 2


def test_forms() -> None:
    """A form's fields are chosen by name; all values of one name count, in order, and the others do not."""
    one = key(b"amount=5&card.number=4+2&at=1", media=FORM)
    assert one == key(b"at=2&card.number=4%202&amount=5", media=f"{FORM}; charset=utf-8")
    others = [
        b"amount=5",
        b"amount=5&card.number=",
        b"amount=5&amount=5&card.number=4+2",
        b"amount=5.0&card.number=4+2",
    ]
    assert len({one, *(key(other, media=FORM) for other in others)}) == 5


def test_json_by_other_names() -> None:
    """A media type that ends in +json is JSON."""
    assert key(ORDER, media="application/vnd.shop+json") == key(ORDER)


NOTHING: list[tuple[object, str, type[Refusal], str]] = [
    (b"", "application/json", KeyMissing, "does not match its content type"),
    (b"{", "application/json", KeyMissing, "does not match its content type"),
    (b'{"amount": NaN}', "application/json", KeyMissing, "does not match its content type"),
    (b'{"amount": 1, "amount": 2}', "application/json", KeyMissing, "has a field twice"),
    (b'{"amount": 1e99999999999999999999}', "application/json", KeyMissing, "does not match its content type"),
    (b"[" * 20_000, "application/json", KeyMissing, "does not match its content type"),
    (b"\xff", "application/json", KeyMissing, "does not match its content type"),
    (b"amount=\xff", FORM, KeyMissing, "does not match its content type"),
    ({"sum": 5}, "application/json", KeyMissing, "none of: amount, card.number, lines.sku"),
    ({"lines": [], "card": "42"}, "application/json", KeyMissing, "none of"),
    (7, "application/json", KeyMissing, "none of"),
    (b"sum=5", FORM, KeyMissing, "none of"),
    (b"amount=5", "text/plain", KeyMissing, "Send a JSON body or a form with some of: amount"),
    (b"amount=5", "multipart/form-data; boundary=b", KeyMissing, "Send a JSON body or a form"),
    (b'"%s"' % (b"x" * CANONICAL_LIMIT), "application/json", BodyTooLarge, f"at most {CANONICAL_LIMIT} bytes"),
]


@pytest.mark.parametrize("body, media, refusal, words", NOTHING)
def test_body_that_makes_no_key(body: object, media: str, refusal: type[Refusal], words: str) -> None:
    """A body that says none of the fields is refused with what is wanted: it is never run without a key."""
    with pytest.raises(refusal, match=words) as refused:
        key(body, media=media)
    assert "in a header" in refused.value.detail


def test_the_limit_is_the_recipes() -> None:
    """How long a body may be is for the recipe to say."""
    recipe = BodyHash(fields=["amount"], window=WINDOW, max_body=13)
    assert is_made(key(b'{"amount": 5}', recipe))
    with pytest.raises(BodyTooLarge):
        key(b'{"amount": 50}', recipe)


WRONG: list[tuple[str, Any]] = [
    ("fields", ()),
    ("fields", "amount"),
    ("fields", b"amount"),
    ("fields", None),
    ("fields", [""]),
    ("fields", ["card..number"]),
    ("fields", [1]),
    ("window", timedelta(0)),
    ("window", -WINDOW),
    ("window", 600),
    ("unless_header", "bad header"),
    ("unless_header", 7),
    ("unless_header", "Content-Type"),
    ("unless_header", "X-Request-ID"),
    ("unless_header", "Idempotency-Key"),
    ("secret", "s" * 16),
    ("secret", b"short"),
    ("max_body", 0),
    ("max_body", True),
    ("max_body", "64"),
]


@pytest.mark.parametrize("field, value", WRONG)
def test_mistakes_name_their_field(field: str, value: Any) -> None:
    """A wrong value is refused at start-up, and the message says which field and what it must be."""
    with pytest.raises(ConfigurationError, match=rf"BodyHash\.{field} must be "):
        BodyHash(**{"fields": ["amount"], "window": WINDOW, field: value})
