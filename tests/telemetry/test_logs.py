"""What a log shows of a happening."""

import logging

import pytest

from semel.core.events import TookOver
from semel.core.key import Key
from semel.telemetry.logs import log


def test_a_record_begins_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """A log record can be found, and alerted on, by the name of its event, whatever formats it."""
    with caplog.at_level(logging.INFO, logger="semel"):
        log(TookOver(Key("order-17").short(), 2))
    (record,) = caplog.records
    assert record.getMessage().startswith("TookOver: An earlier attempt died")
    assert record.getMessage().endswith(f"key={Key('order-17').short()} attempt=2")
    assert vars(record)["semel_event"] == "TookOver"
