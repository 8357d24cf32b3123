"""The story of the parcels, as ``make parcels`` tells it; with fewer kills, and Redis, which starts sooner."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Far longer than six processes take to start.
STORY_SECONDS = 180


@pytest.mark.slow
@pytest.mark.timeout(STORY_SECONDS + 20)
def test_the_story_ends_well() -> None:
    """API, relay and consumer are each killed at work: each order that was committed has one parcel."""
    command = [sys.executable, "-m", "examples.parcels", "--kills", "3", "--broker", "redis"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as story:
        try:
            told, complaints = story.communicate(timeout=STORY_SECONDS)
        finally:
            if story.poll() is None:
                story.terminate()  # It ends the processes that it has started.
    assert (story.returncode, complaints) == (0, ""), told + complaints
    assert told.count("kill -9") == 3
    assert "kills                               3 (api 1, relay 1, consumer 1)" in told
    committed, packed = (int(found) for found in re.findall(r"(?:orders committed|parcels packed) +(\d+)", told))
    assert committed == packed > 0
    assert told.rstrip().endswith("Each order has one parcel, and each parcel its order.")
