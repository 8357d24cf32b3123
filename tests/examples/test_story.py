"""The story of Rocket Rides, as ``make rides`` tells it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: It waits for the completer, which leaves an operation to its client for ten seconds.
STORY_SECONDS = 180


@pytest.mark.slow
def test_the_story_ends_well() -> None:
    """Retries, a lost answer, kill -9, a client that never comes back: each ride has one charge and one receipt."""
    command = [sys.executable, "-m", "examples.rides"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as story:
        try:
            told, complaints = story.communicate(timeout=STORY_SECONDS)
        finally:
            if story.poll() is None:
                os.killpg(story.pid, signal.SIGKILL)  # With the servers it has started.
    assert (story.returncode, complaints) == (0, ""), told + complaints
    assert told.rstrip().endswith("Each ride was paid once and has one receipt; the declined one has neither.")
