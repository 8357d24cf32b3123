"""Counts the executed lines of Semel in every thread, and sends this process a signal at the n-th."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import semel
from torture.job import Fault

_SEMEL = str(Path(semel.__file__).parent) + os.sep

Trace = Callable[[FrameType, str, Any], Any]


class Lines:
    """A count of lines. What is counted is a line that is about to be executed."""

    def __init__(self, fault: Fault | None, only_files: Sequence[str] = ()) -> None:
        """Count, and bring about *fault*, where it is at a line."""
        self.count = 0
        self._at = fault.line if fault else 0
        self._signal = fault.signal if fault else 0
        self._files = tuple(only_files) or (_SEMEL,)
        #: A step of the counter is atomic, so threads lose no number.
        self._next = itertools.count(1)
        self._is_on = True

    def start(self) -> None:
        """Count from now on: in this thread from the next call, and in threads that are still to come."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self) -> None:
        """Stop counting."""
        self._is_on = False
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Trace | None:
        return self._step if frame.f_code.co_filename.startswith(self._files) else None

    def _step(self, _frame: FrameType, event: str, _argument: Any) -> Trace:
        if event == "line" and self._is_on:
            number = next(self._next)
            self.count = max(self.count, number)
            if number == self._at:
                os.kill(os.getpid(), self._signal)
        return self._step
