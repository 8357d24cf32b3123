"""Clients that can't send a key, through both entry points: the same body within the window is the same operation."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from semel import BodyHash, Policy
from tests.web.harness import Api, AsgiWorld, Gate, Reply, Response, WsgiWorld, wait_until
from tests.web.scenarios import assert_problem, assert_replayed

SECOND = timedelta(seconds=1)
WINDOW = timedelta(minutes=10)
RECIPE = BodyHash(fields=["amount", "card.number"], window=WINDOW, unless_header="X-Intent")
POLICY = Policy(key_from=RECIPE)


@pytest.fixture
def hashing(world: AsgiWorld | WsgiWorld) -> Api:
    """A shop whose clients need not send a key."""
    return Api(world, POLICY)


def order(api: Api, body: bytes = b'{"amount": 5, "at": 1}', **request: Any) -> Response:
    return api.send(key=request.pop("key", None), body=body, **request)


def test_same_body_is_the_same_operation(hashing: Api) -> None:
    """A retry gets the first answer, however it spells its fields and whatever else it says."""
    first = order(hashing)
    assert_replayed(first, order(hashing, b'{ "at": 2, "amount": 5.0 }'))
    assert hashing.runs == 1
    assert hashing.shop.runs[0].key is not None
    assert hashing.shop.runs[0].key.startswith("body:")


def test_other_fields_are_another_operation(hashing: Api) -> None:
    """A field that differs, another tenant, another path or another intent is another operation."""
    order(hashing)
    order(hashing, b'{"amount": 6}')
    order(hashing, b'{"amount": 5, "card": {"number": "42"}}')
    order(hashing, lines=[("X-Account", "bob")])
    order(hashing, target="/pay/elsewhere")
    order(hashing, lines=[("X-Intent", "again")])
    assert hashing.runs == 6
    assert order(hashing, lines=[("X-Intent", "again")]).is_replay


def test_forms(hashing: Api) -> None:
    """A form makes a key too."""
    form = {"content_type": "application/x-www-form-urlencoded"}
    first = order(hashing, b"amount=5&at=1", **form)
    assert_replayed(first, order(hashing, b"at=2&amount=5", **form))


def test_after_the_window(world: AsgiWorld | WsgiWorld) -> None:
    """The record of such a key lives for its window, from the first sight; that of a key that was sent, as usual."""
    api = Api(world, POLICY)
    order(api)
    order(api, key="key-1")
    made, sent = sorted(api.records(), key=lambda record: record.key)
    # A clock is read once for each of the two times.
    assert round((made.expires_at - made.created_at) / SECOND) == WINDOW / SECOND
    assert round((sent.expires_at - sent.created_at) / SECOND) == POLICY.retention / SECOND


def test_a_new_operation_after_the_window(world: AsgiWorld | WsgiWorld) -> None:
    """The same body after the window runs again."""
    short = timedelta(milliseconds=300)
    api = Api(world, Policy(key_from=replace(RECIPE, window=short), lease=short))
    order(api)
    wait_until(lambda: not order(api).is_replay)
    assert api.runs == 2


def test_a_key_that_is_sent_wins(hashing: Api) -> None:
    """A client that sends a key is guarded by its key: the same body under two keys runs twice, and mismatches show."""
    assert [order(hashing, key=key).is_replay for key in ("key-1", "key-2", "key-1")] == [False, False, True]
    assert_problem(order(hashing, b'{"amount": 6}', key="key-1"), 422, "idempotency-key-reused")
    assert hashing.runs == 2


@pytest.mark.parametrize(
    "body, content_type",
    [(b"{", "application/json"), (b'{"sum": 5}', "application/json"), (b"amount=5", "text/plain"), (b"", None)],
)
def test_a_body_that_makes_no_key_is_not_run(hashing: Api, body: bytes, content_type: str | None) -> None:
    """A body that says none of the fields is refused, with what is wanted."""
    refused = order(hashing, body, content_type=content_type)
    assert_problem(refused, 400, "idempotency-key-missing")
    assert "amount, card.number" in refused.json()["detail"]
    assert hashing.runs == 0


def test_a_body_that_is_too_long(hashing: Api) -> None:
    """A body that is too long to be read for its key is refused, unless it comes with one."""
    body = b'{"amount": 5, "note": "%s"}' % (b"x" * RECIPE.max_body)
    assert_problem(order(hashing, body), 413, "request-body-too-large")
    assert order(hashing, body, key="key-1").status == 201


def test_two_at_once(hashing: Api) -> None:
    """Two equal bodies at once run once: a double click is one order."""
    with Gate() as gate:
        hashing.shop.handler = gate
        first = hashing.start(key=None)
        gate.wait()
        assert_problem(order(hashing, b'{"amount": 5}'), 409, "idempotency-key-in-progress")
        gate.open()
        assert first.result().status == Reply().status
    assert hashing.runs == 1
