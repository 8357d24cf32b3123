"""Trace contexts as W3C's ``traceparent`` writes them: what is one, and its parts. It starts no trace.

A stored one may be of any age and of any tool, and a sink may return anything: so it is read here before it is used.
"""

from __future__ import annotations

import re

from semel.core.value import value

#: Version ff, and ids of zeros alone, are invalid by the specification.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
#: The bit of the flags that says whether the trace is recorded.
_SAMPLED = 1


@value
class Trace:
    """One span of one trace. The ids are hexadecimal digits."""

    trace_id: str
    span_id: str
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether the trace is recorded, as far as its own process knew."""
        return bool(self.flags & _SAMPLED)


def is_trace(given: object) -> bool:
    """Whether *given* is a traceparent that names a span."""
    return isinstance(given, str) and _TRACEPARENT.fullmatch(given) is not None


def read_trace(given: object) -> Trace | None:
    """Return what *given* names; None where it is not a traceparent, or names nothing."""
    if not isinstance(given, str) or not is_trace(given):
        return None
    _, trace_id, span_id, flags = given.split("-")
    return Trace(trace_id, span_id, int(flags, 16))
