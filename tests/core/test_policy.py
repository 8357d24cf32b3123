"""A policy is checked when it is made, and a mistake names its field."""

import datetime as dt
from dataclasses import FrozenInstanceError, fields, replace
from datetime import timedelta
from typing import Any

import pytest

from semel.core.body_hash import BodyHash
from semel.core.fingerprint import Fingerprinter
from semel.core.policy import FINAL_STATUSES, NEVER_GUARDED, Policy, WhileInProgress
from semel.core.vendors import VENDORS, VendorName
from semel.errors import ConfigurationError, UnknownField

SECOND = timedelta(seconds=1)


def test_careful_by_default() -> None:
    """The defaults are those of the IETF preset."""
    policy = Policy()
    assert policy == Policy.ietf()
    assert policy.methods == {"POST", "PATCH"}
    assert (policy.dialect, policy.server_errors, policy.on_crash, policy.late) == ("ietf", "auto", "rerun", "rerun")
    assert policy.lease <= timedelta(seconds=90)
    assert policy.retention == timedelta(hours=24)


@pytest.mark.parametrize(
    "policy, said",
    [
        (Policy(), "Policy()"),
        (Policy.ietf(lease=SECOND, required=True), "Policy(required=True, lease=timedelta(seconds=1))"),
        (Policy(keep=FINAL_STATUSES | {425}), "Policy(keep=FINAL_STATUSES | {425})"),
        (Policy(keep=FINAL_STATUSES - {404}), "Policy(keep=FINAL_STATUSES - {404})"),
        (Policy(keep={201}), "Policy(keep={201})"),
        (Policy.stripe(), None),
    ],
)
def test_said_by_what_differs(policy: Policy, said: str | None) -> None:
    """A policy is written by what differs from the default, on one line, and can be typed as it is written."""
    assert said is None or repr(policy).replace("datetime.", "") == said
    assert len(repr(policy)) < 500
    names = {"Policy": Policy, "FINAL_STATUSES": FINAL_STATUSES, "datetime": dt}
    assert eval(repr(policy), names) == policy  # noqa: S307 - that it can be typed is the point


def test_stripe() -> None:
    """The Stripe preset guards POST only, keeps server errors and speaks Stripe's dialect; overrides win."""
    policy = Policy.stripe(lease=SECOND)
    assert (policy.methods, policy.server_errors, policy.dialect, policy.lease) == ({"POST"}, "keep", "stripe", SECOND)
    assert Policy.stripe(server_errors="auto").server_errors == "auto"


def test_frozen() -> None:
    """A policy is a value: it can't be changed, only replaced, and equal ones are equal."""
    policy = Policy()
    with pytest.raises(FrozenInstanceError):
        policy.required = True  # type: ignore[misc]  # on purpose
    assert replace(policy, header="X-Key").header_names == (b"x-key",)
    assert replace(policy) == policy


@pytest.mark.parametrize(
    "name, hint", [("leese", "Did you mean 'lease'"), ("zzz", "There are: header, methods")], ids=["close", "far"]
)
@pytest.mark.parametrize("preset", [Policy.ietf, Policy.stripe])
def test_unknown_fields_are_errors(preset: Any, name: str, hint: str) -> None:
    """A setting that does not exist is refused, with the nearest that does."""
    with pytest.raises(UnknownField, match=hint):
        preset(**{name: 1})
    with pytest.raises(TypeError):
        Policy(**{name: 1})  # type: ignore[arg-type]  # on purpose


def test_collections_take_one_form() -> None:
    """Methods, statuses and headers may come in any collection and any case."""
    policy = Policy(methods=["post", "Put"], keep=range(200, 300), replay_headers=("X-Ride", "x-ride"))
    assert policy.methods == frozenset({"POST", "PUT"})
    assert policy.keep == frozenset(range(200, 300))
    assert policy.replay_headers == frozenset({"x-ride"})


def test_several_headers() -> None:
    """A policy may accept several names; the first is the one to recommend."""
    assert Policy(header=("Idempotency-Key", "X-Request-Key")).header_names == (b"idempotency-key", b"x-request-key")


def test_no_fingerprint() -> None:
    """A policy may compare nothing but the key."""
    assert Policy(fingerprint=None).fingerprint is None
    secret = Fingerprinter(secret=b"s" * 32)
    assert Policy(fingerprint=secret).fingerprint is secret


def test_rungs_of_the_ladder() -> None:
    """Guard is the default and needs nothing of the handler; atomic is said aloud, and so is keeping requests."""
    assert (Policy().mode, Policy().store_request) == ("guard", False)
    assert Policy.stripe(mode="atomic").mode == "atomic"
    assert Policy(store_request=True).store_request


@pytest.mark.parametrize("how", [{"in_progress": "accept"}, {"preferences": ["respond-async"]}])
def test_accepted_handlers_are_not_atomic(how: dict[str, Any]) -> None:
    """What is accepted is answered before any commit, so it can't be had with atomic mode; the message says so."""
    assert Policy(**how).may_accept
    with pytest.raises(ConfigurationError, match=r'Policy\.mode can.t be .*"guard" if requests are accepted'):
        Policy(mode="atomic", **how)


@pytest.mark.parametrize("in_progress, hints", [("conflict", False), ("wait", True), ("accept", True)])
def test_ends_are_announced_where_somebody_waits(in_progress: WhileInProgress, hints: bool) -> None:
    """Nobody is told of an end unless the policy has others wait for it: it is not for nothing."""
    policy = Policy(in_progress=in_progress)
    assert (policy.gives_hints, policy.may_accept) == (hints, in_progress == "accept")


def test_report_mode_has_no_atomic_handlers() -> None:
    """Report mode can't be had with atomic mode, whose handlers need their transaction; the message says what to do."""
    with pytest.raises(ConfigurationError, match='Report with mode="guard" first'):
        Policy(enforcement="report", mode="atomic")
    assert Policy(enforcement="report").enforcement == "report"


def test_keys_of_bodies() -> None:
    """A key that is made of the body is kept for its window, and compared with no fingerprint."""
    body = BodyHash(fields=["amount"], window=timedelta(minutes=10), unless_header="X-Intent")
    policy = Policy(key_from=body, store_request=True)
    assert policy.by_body == Policy(fingerprint=None, retention=body.window, store_request=True)
    assert replace(policy, lease=SECOND).by_body.lease == SECOND


def test_keys_of_bodies_have_no_past() -> None:
    """After its window the same body is a new operation: it can't be refused for being late."""
    with pytest.raises(ConfigurationError, match=r"Policy\.late can't be 'refuse'.*after its window"):
        Policy(late="refuse", key_from=BodyHash(fields=["amount"], window=timedelta(hours=1)))


@pytest.mark.parametrize("name", VENDORS)
def test_vendors(name: VendorName) -> None:
    """A vendor's preset reads keys where its clients put them, as long as they may be; all else is as usual."""
    policy = Policy.vendor(name, required=True)
    known = VENDORS[name]
    assert policy == Policy(header=known.header, max_key_length=known.max_key_length, required=True)
    assert policy.header_names == (known.header.lower().encode(),)


def test_vendor_and_the_standard() -> None:
    """A preset's own settings can be overridden: an API may accept the standard's header as well."""
    policy = Policy.vendor("paypal", header=("PayPal-Request-Id", "Idempotency-Key"))
    assert (policy.header_names, policy.max_key_length) == ((b"paypal-request-id", b"idempotency-key"), 108)


@pytest.mark.parametrize(
    "name, hint", [("paypall", "Did you mean 'paypal'"), ("zzz", "There are: adyen"), ([], "There are: adyen")]
)
def test_unknown_vendors_are_errors(name: Any, hint: str) -> None:
    """A vendor that is not known is refused, with the nearest that is."""
    with pytest.raises(ConfigurationError, match=hint):
        Policy.vendor(name)


def test_vendor_with_unknown_fields() -> None:
    """A setting that does not exist is refused here too."""
    with pytest.raises(UnknownField, match="Did you mean 'lease'"):
        Policy.vendor("wise", leese=1)  # type: ignore[call-arg]


def test_final_statuses() -> None:
    """Kept are final answers; "not now" and "not you" are not, nor what a handler never gave."""
    assert {200, 201, 204, 303, 400, 404, 409, 422} <= FINAL_STATUSES
    assert not {401, 407, 408, 421, 425, 429, 500, 503, 206, 304, 405, 413, 415} & FINAL_STATUSES


WRONG: list[tuple[str, Any]] = [
    ("header", ""),
    ("header", "bad header"),
    ("header", ()),
    ("header", ("Idempotency-Key", "")),
    ("header", (b"key",)),
    ("header", None),
    ("methods", ()),
    ("methods", "POST"),
    ("methods", None),
    ("methods", [1]),
    *[("methods", [method]) for method in ("", "*", "POST ", "POST, PATCH", "POST|PUT")],
    *[("methods", [method]) for method in sorted(NEVER_GUARDED)],
    ("required", None),
    ("key_from", "body"),
    ("key_from", BodyHash(fields=["amount"], window=SECOND)),
    ("key_from", BodyHash(fields=["amount"], window=timedelta(hours=1), unless_header="X-Intent-Key")),
    ("strict", 1),
    ("max_key_length", 0),
    ("max_key_length", 1025),
    ("max_key_length", True),
    ("max_key_length", "255"),
    ("scope_by", "tenant"),
    ("fingerprint", "body"),
    ("mode", "fast"),
    ("in_progress", None),
    ("preferences", "wait"),
    ("preferences", ["return=minimal"]),
    ("wait", 10),
    ("wait", timedelta(0)),
    ("max_waiters", -1),
    ("max_waiters", True),
    ("max_waiters_per_key", None),
    ("max_waiters_per_key", 1.5),
    ("lease", 30),
    ("lease", timedelta(0)),
    ("lease", timedelta(days=2)),
    ("retention", None),
    ("retention", -SECOND),
    ("retention", timedelta.max),
    ("keep", "2xx"),
    ("keep", 200),
    ("keep", [199]),
    ("keep", [500]),
    ("keep", ["200"]),
    ("keep", [True]),
    ("server_errors", "drop"),
    ("on_crash", ""),
    ("late", "never"),
    ("max_request_body", -1),
    ("max_response_body", 1.5),
    ("max_response_time", timedelta(0)),
    ("max_response_time", 10),
    ("store_request", "yes"),
    ("store_headers", "X-Ride"),
    ("store_headers", ["Cookie"]),
    ("omit_headers", 7),
    ("omit_headers", ["x ride"]),
    ("replay_headers", "X-Ride"),
    ("replay_headers", ["Set-Cookie"]),
    ("enforcement", "sometimes"),
    ("dialect", "paypal"),
    ("problem_base", "/problems/"),
    ("problem_base", None),
]


@pytest.mark.parametrize("field, value", WRONG)
def test_mistakes_name_their_field(field: str, value: Any) -> None:
    """A wrong value is refused at start-up, and the message says which field and what it must be."""
    with pytest.raises(ConfigurationError, match=rf"Policy\.{field} can't be .*: it must be "):
        Policy(**({"header": "X-Intent-Key"} | {field: value}))


def test_durations_are_told_as_such() -> None:
    """A duration is not shown as Python spells it: it may have been set in a file, or in an environment."""
    with pytest.raises(ConfigurationError, match=r"Policy\.lease can't be 0:00:30: .* retention \(0:00:02\)"):
        Policy(retention=timedelta(seconds=2))


def test_every_field_is_checked() -> None:
    """There is no field whose mistakes go unseen."""
    assert {field for field, _ in WRONG} == {each.name for each in fields(Policy)}
