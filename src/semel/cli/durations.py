"""Durations as people type them. How they are printed is in ``output.py``."""

from semel.work.durations import duration

__all__ = ["duration"]
