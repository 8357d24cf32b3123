"""The story of the report, as ``make report`` tells it; with a report that takes three seconds."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Far longer than three processes take to start.
STORY_SECONDS = 180


def test_the_story_ends_well() -> None:
    """202, a bar that moves, a worker killed half-way: the report is there, and each of its sections was kept once."""
    command = [sys.executable, "-m", "examples.report", "--seconds", "3"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as story:
        try:
            told, complaints = story.communicate(timeout=STORY_SECONDS)
        finally:
            if story.poll() is None:
                story.terminate()  # It ends the processes that it has started.
    assert (story.returncode, complaints) == (0, ""), told + complaints
    assert "processing  Writing" in told
    assert "kill -9" in told
    assert told.rstrip().endswith("10 sections were written, each once, by 2 workers.")
