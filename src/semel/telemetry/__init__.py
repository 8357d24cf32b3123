"""What Semel tells of itself: a log, counts, and, where the application asks for it, metrics and traces."""

from semel.telemetry.stream import Sink, drop, sinks, use

__all__ = ["Sink", "drop", "sinks", "use"]
