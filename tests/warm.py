"""A process that is kept warm: it has imported what it needs, and answers each line with a line. What it makes of
one is its program's affair.
"""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[1]


class Warm:
    """A program that tests take turns to ask, started for the first of them."""

    def __init__(self, module: str, environment: dict[str, str] | None = None) -> None:
        """Run *module*, in the *environment* of the tests or another."""
        self._command = [sys.executable, "-m", module]
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process:
            self._process.communicate()  # It ends when there is nothing more to read.

    def ask(self, line: str) -> str:
        """Return the line that is the answer."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BaseException:  # Above all a time limit: what is still to be said is not for the next test.
            self._process = None
            process.kill()
            process.communicate()
            raise
        assert answer, "It has ended."
        return answer

    def _started(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
