"""Durations as options take them. How they are printed is in ``output.py``."""

from semel.work.durations import duration

__all__ = ["duration"]
