"""What operators are told before they act, and how values are written for them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from semel.core import operator
from semel.core.commands import Left
from semel.core.key import digest_of
from semel.core.message import Answer
from semel.core.record import Record
from semel.core.recovery import Begun, Done, Progress, read_back, written
from semel.core.state import State
from semel.core.text import as_text, as_typed, brief, hex_dump, pasteable, relative, safe, typed

NOW = datetime(2026, 11, 18, 9, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
DONE = Progress((Done("phase", "order_created", 1),))
DOUBT = DONE.plus(Begun("charge_created"))
PARKED = Record(
    scope="acct\tx",
    key="it's",
    state=State.UNKNOWN,
    attempt=1,
    token=bytes(16),
    fingerprint=b"",
    recovery_point="order_created",
    steps=written(DOUBT),
    answer=None,
    created_at=NOW,
    lease_expires_at=None,
    completed_at=None,
    expires_at=NOW + MINUTE,
    lease_left=None,
    retention_left=MINUTE,
)
ENDED = replace(PARKED, state=State.COMPLETE, answer=Answer(200), completed_at=NOW, steps=None)
PENDING = replace(PARKED, state=State.PENDING, is_accepted=True, steps=None)
LIVE = replace(PARKED, state=State.PROCESSING, lease_expires_at=NOW + MINUTE, lease_left=MINUTE)
STUCK = replace(LIVE, lease_left=-MINUTE, steps=None, token=b"t" * 16)
FREE = replace(STUCK, token=bytes(16))


def test_releasing() -> None:
    """It is said what will be done again, what a live worker may still do, and what a client was promised."""
    assert "whatever it has done so far" in operator.release_means(PARKED)[0]
    assert "order_created" in operator.release_means(PARKED)[1]
    assert operator.release_means(PARKED)[2].startswith("charge_created was begun, and may have happened.")
    assert "may be alive (lease 1m)" in operator.release_means(LIVE)[1]
    assert operator.release_means(STUCK) == operator.release_means(replace(PARKED, steps=None))
    assert ["was not begun" in each for each in operator.release_means(PENDING)] == [True, False]


def test_resolving() -> None:
    """It is said after which step an operation goes on, and what does."""
    means = operator.resolving_means
    assert means(PARKED, is_applied=True).startswith("charge_created is done")
    assert "after order_created, and do charge_created" in means(PARKED, is_applied=False)
    plain = replace(PARKED, steps=None)
    assert "ends with status 200" in means(plain, is_applied=True)
    assert "did nothing. A retry" in means(plain, is_applied=False)
    assert "A worker will go on after order_created." in means(
        replace(PARKED, steps=written(DONE), is_accepted=True), is_applied=False
    )


@pytest.mark.parametrize(
    "record, word",
    [(ENDED, "has ended"), (PENDING, "waits"), (STUCK, "No worker"), (FREE, "is free"), (LIVE, "in progress")],
)
def test_nothing_to_resolve(record: Record, word: str) -> None:
    """It is said why there is nothing to resolve."""
    assert word in operator.why_not_resolved(record)


def test_running_again() -> None:
    """A worker can run a parked operation again if its request was stored, and no effect is in doubt."""
    clear = replace(PARKED, steps=written(DONE))
    assert operator.may_run_again(clear, has_request=True)
    assert not operator.may_run_again(clear, has_request=False)
    assert not operator.may_run_again(PARKED, has_request=True)
    assert not operator.may_run_again(LIVE, has_request=True)
    assert operator.again_means(clear) == [
        "A worker will run the stored request, and go on after order_created. Steps that are done stay done."
    ]
    assert "the card may be charged again" in operator.again_means(replace(PARKED, steps=None))[1]


def test_outcomes_of_steps() -> None:
    """An effect that was begun is unknown once its worker is gone, and only begun while it lives."""
    done, begun = read_back(PARKED.steps).steps
    assert [operator.outcome_of(PARKED, each) for each in (done, begun)] == ["done", "unknown"]
    assert operator.outcome_of(LIVE, begun) == "begun"
    assert operator.outcome_of(STUCK, begun) == "unknown"


def test_commands() -> None:
    """What can be typed is quoted for any shell, and only what applies is named."""
    name = "'it'\"'\"'s' --scope 'acct\\tx'"
    assert operator.commands_for(ENDED) == [f"semel keys show {name}"]
    assert operator.commands_for(PARKED)[1:] == [
        f"semel keys resolve {name} --applied RESULT",
        f"semel keys resolve {name} --not-applied",
        f"semel keys release {name}",
    ]
    without_effect = replace(PARKED, steps=None)
    assert operator.commands_for(without_effect)[1] == f"semel keys resolve {name} --applied RESULT --status 200"
    assert operator.commands_for(STUCK)[-1] == "semel sweep"
    assert "semel sweep" not in operator.commands_for(FREE), "it was swept"
    assert operator.commands_for(PENDING)[-1] == "semel work --app MODULE:NAME"


def test_durations() -> None:
    """A duration is spelled in its largest unit."""
    assert [brief(timedelta(seconds=each)) for each in (0.4, 59, -60, 7200, 86400)] == ["0s", "59s", "1m", "2h", "1d"]
    assert (relative(MINUTE), relative(-MINUTE)) == ("in 1m", "1m ago")


def test_untrusted_text() -> None:
    """What could move a cursor, or turn text around, is escaped; what was escaped is read back."""
    unseen = "\u061c\u200b\u2028\u2029\u2060\ufeff"
    assert typed(unseen) == "\\u061c\\u200b\\u2028\\u2029\\u2060\\ufeff", "each breaks a line, or is not seen"
    assert (as_typed(typed(unseen)), len(safe(unseen).splitlines())) == (unseen, 1)
    text = "a\tb\\\x1b\u202e\ud800"
    assert safe(text) == "a b\\\\x1b\\x202e\\xd800"
    assert typed(text) == "a\\tb\\\\\\x1b\\u202e\\ud800"
    assert as_typed(typed(text)) == text
    assert as_typed("C:\\dir") == "C:\\dir"
    assert pasteable("it's") == "'it'\"'\"'s'"
    assert (pasteable("-x"), as_typed(r"\x2dx")) == (r"'\x2dx'", "-x"), "it would be an option"


def test_bodies() -> None:
    """A body is text if it can be shown as it is, else bytes."""
    assert as_text(b"a\nb") == "a\nb"
    assert as_text(b"\xff") is None
    assert as_text(b"\x1b[2J") is None
    assert hex_dump(b"ab\x00") == "00000000  61 62 00                                         |ab.|"


def test_what_an_erasure_leaves() -> None:
    """Operations that are left are named by their digests, a few of them, each with what to do."""
    left = [Left("acme", f"key-{number}", State.PENDING) for number in range(operator.MAX_LISTED + 2)]
    lines = operator.left_lines(left)
    assert lines[0] == f"Operations that stay as they are: {operator.MAX_LISTED + 2}."
    assert lines[1].startswith(f"{digest_of('key-0')[:12]}  pending: a worker runs it.")
    assert lines[-1] == "and 2 more"
    assert len(lines) == operator.MAX_LISTED + 2
    assert operator.left_lines(()) == []


def test_what_an_erasure_means() -> None:
    """Counts are said, and what a retry gets."""
    assert operator.erasing_means(0, 0) == ["There is nothing to erase."]
    assert "A retry of one is refused, and runs nothing, until its retention ends." in operator.erasing_means(0, 1)


@pytest.mark.parametrize(
    "to, says",
    [
        ("acme", "semel relay --webhooks"),
        ("globex", "semel webhooks enable globex"),
        ("events", "semel relay --to events=URL"),
        ("acmee", "There is an endpoint acme"),
    ],
)
def test_why_a_message_waits(to: str, says: str) -> None:
    """A message that waits for long is explained: by its endpoint, by the relay, or by a name that is nearly one."""
    assert says in operator.why_unsent(to, {"acme": True, "globex": False})
