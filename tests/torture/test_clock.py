"""The clock of a child can be set off, so that it shows whether anybody goes by it."""

import subprocess
import sys
from datetime import timedelta

import pytest

PROGRAM = """
import datetime, sys, time
before = datetime.datetime.now(datetime.UTC), time.monotonic()
from torture import clock
clock.set_off(float(sys.argv[1]))
print(int((datetime.datetime.now(datetime.UTC) - before[0]).total_seconds() / 60))
print(int((datetime.datetime.fromtimestamp(time.time(), datetime.UTC) - before[0]).total_seconds() / 60))
print(int((time.time_ns() / 1e9 - before[0].timestamp()) / 60))
print(int((time.monotonic() - before[1]) / 60))
"""


@pytest.mark.parametrize("off", [timedelta(days=3650), timedelta(days=-3650)], ids=["ahead", "behind"])
def test_every_reader_sees_the_strange_clock(off: timedelta) -> None:
    """Whoever asks for the time or the date is told one that is off; the monotonic clock is not."""
    asked = [sys.executable, "-c", PROGRAM, str(off.total_seconds())]
    shown = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    minutes = [int(word) for word in shown]
    assert all(abs(each - off / timedelta(minutes=1)) <= 1 for each in minutes[:3])
    assert minutes[3] == 0
