"""Helpers for tests, yours and Semel's own. Production code imports nothing from here."""

from semel.stores import migrate
from semel.testing.clock import Clock
from semel.testing.everywhere import Answer, CrashReport, Point, Request, acrash_everywhere, crash_everywhere

__all__ = ["Answer", "Clock", "CrashReport", "Point", "Request", "acrash_everywhere", "crash_everywhere", "migrate"]
