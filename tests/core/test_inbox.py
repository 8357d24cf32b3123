"""Verdicts on deliveries, and what a receipt decides."""

import dataclasses

import pytest

from semel.core.inbox import (
    MAX_ERROR,
    Busy,
    Duplicate,
    Parked,
    Ran,
    Receipt,
    ReceiptState,
    Seen,
    Verdict,
    check_id,
    digest_of,
    digest_of_arguments,
    judge,
    said,
)
from semel.errors import ConfigurationError, MessageDiffers, MessageUnidentified

ONE, OTHER = digest_of(b"one"), digest_of(b"other")


@pytest.mark.parametrize("verdict, is_acked", [(Ran(7), True), (Duplicate(), True), (Busy(), False), (Parked(5), True)])
def test_a_verdict_knows_its_ack(verdict: Verdict[int], is_acked: bool) -> None:
    """Each verdict says whether the broker may forget the delivery, and can't be changed."""
    assert verdict.ack is is_acked
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError, AttributeError)):
        verdict.ack = not is_acked  # type: ignore[misc]


@pytest.mark.parametrize("has_lock", [True, False])
@pytest.mark.parametrize(
    "receipt, verdict",
    [
        (None, None),
        (Receipt(ReceiptState.FAILING, 2, ONE, "boom"), None),
        (Receipt(ReceiptState.PARKED, 5, ONE, "boom"), Parked(5, "boom")),
        (Receipt(ReceiptState.DONE, 0, ONE), Duplicate()),
    ],
    ids=["new", "failing", "parked", "done"],
)
def test_what_a_receipt_decides(receipt: Receipt | None, verdict: Verdict[int] | None, has_lock: bool) -> None:
    """A new or failing message is run under its lock, else it is busy; what has ended needs no lock."""
    expected = Busy() if verdict is None and not has_lock else verdict
    assert judge(Seen(receipt, has_lock=has_lock), ONE) == expected


@pytest.mark.parametrize("state", ReceiptState)
@pytest.mark.parametrize("has_lock", [True, False])
def test_another_payload_is_refused_first(state: ReceiptState, has_lock: bool) -> None:
    """Another payload under the same id is refused in every state, before *busy*, and both digests are shown."""
    assert ONE is not None
    assert OTHER is not None
    with pytest.raises(MessageDiffers) as refused:
        judge(Seen(Receipt(state, 0, ONE), has_lock=has_lock), OTHER)
    assert (refused.value.stored, refused.value.received) == (ONE.hex(), OTHER.hex())
    assert ONE.hex() in str(refused.value)
    assert OTHER.hex() in str(refused.value)


def test_an_unknown_payload_is_not_compared() -> None:
    """A delivery without a payload matches any, and so does a receipt without one."""
    assert judge(Seen(Receipt(ReceiptState.DONE, 0, ONE)), None) == Duplicate()
    assert judge(Seen(Receipt(ReceiptState.DONE, 0, None)), ONE) == Duplicate()


def test_payloads_are_digested() -> None:
    """Bytes are taken as they are, text as UTF-8, the rest as JSON with its names in order."""
    assert digest_of(None) is None
    assert digest_of(b"one") == digest_of("one") == digest_of(bytearray(b"one")) == digest_of(memoryview(b"one"))
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) == digest_of(b'{"a":1,"b":[2]}')
    assert digest_of(b"") is not None
    with pytest.raises(ConfigurationError, match="not object"):
        digest_of(object())


@pytest.mark.parametrize("bad", [None, "", 7, "a\nb", "\0", "x" * 256, "\ud800", b"bytes"])
def test_an_id_can_be_stored(bad: object) -> None:
    """What can't be an id is refused with the reason, and shown in ASCII."""
    with pytest.raises(MessageUnidentified, match="printable") as refused:
        check_id(bad)
    assert str(refused.value).isascii()
    assert check_id("orders/0/17") == "orders/0/17"


def test_a_long_id_is_cut_in_the_message() -> None:
    """A message about an id that is far too long is short."""
    with pytest.raises(MessageUnidentified) as refused:
        check_id("x" * 100_000)
    assert len(str(refused.value)) < 500


def test_an_error_is_one_bounded_line() -> None:
    """Of an error its type and words are stored, on one line that no driver refuses, and not more than a few lines."""
    assert said(ValueError("no\n  such\0order")) == "ValueError: no such\\x00order"
    assert said(ValueError()) == "ValueError"
    assert len(said(ValueError("x" * 10_000))) <= MAX_ERROR + len("...")

    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert said(Wordless()) == "Wordless"


def test_what_a_handler_is_called_with_is_compared() -> None:
    """Data is, bytes included, whatever the order of its names; what is no data is not, nor is nothing at all."""
    made = digest_of_arguments(({"a": 1, "b": [2, b"three"]},), {"more": None})
    assert made is not None
    assert made == digest_of_arguments(({"b": [2, b"three"], "a": 1},), {"more": None})
    assert made != digest_of_arguments(({"a": 1, "b": [2, b"four"]},), {"more": None})
    assert digest_of_arguments((object(),), {}) is None
    assert digest_of_arguments((), {}) is None


@pytest.mark.parametrize("payload", [b"one", "one", '{"a":1}', {"b": [2], "a": 1}, 17])
def test_one_argument_is_a_payload(payload: object) -> None:
    """What a handler is called with alone has the digest that it has as a payload."""
    assert digest_of_arguments((payload,), {}) == digest_of(payload)
    assert digest_of_arguments((payload, 1), {}) != digest_of(payload)
