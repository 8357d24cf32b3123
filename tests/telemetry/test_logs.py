"""Happenings as log records."""

import logging

import pytest

from semel.core.events import Reported, ReportFailed, StoreFailed, TookOver
from semel.core.key import Key
from semel.telemetry.logs import log


@pytest.mark.parametrize(
    "happening",
    [
        StoreFailed("0123", "syntax error\nLINE 1: forged"),
        ReportFailed(None, "application", "no user \x1b[31m in\r\n/pay"),
        Reported(None, "replay", "POST /pay/\u2028forged"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_one_line(happening: StoreFailed | ReportFailed | Reported, caplog: pytest.LogCaptureFixture) -> None:
    """What came from a request, or from a database that repeats it, can't begin a line of its own in the log."""
    with caplog.at_level("DEBUG", logger="semel"):
        log(happening)
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    facts = [value for name, value in vars(record).items() if name.startswith("semel_") and isinstance(value, str)]
    assert all(each.isprintable() for each in facts)


def test_a_record_begins_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """A log record can be found, and alerted on, by the name of its event, whatever formats it."""
    with caplog.at_level(logging.INFO, logger="semel"):
        log(TookOver(Key("order-17").short(), 2))
    (record,) = caplog.records
    assert record.getMessage().startswith("TookOver: An earlier attempt died")
    assert record.getMessage().endswith(f"key={Key('order-17').short()} attempt=2")
    assert vars(record)["semel_event"] == "TookOver"
