"""Traces and metrics by OpenTelemetry, and a sink of one's own: any function of one event."""

import semel.telemetry
from semel.core.events import Event, NotStored, ParkedUnknown
from semel.telemetry.opentelemetry import OpenTelemetry

semel.telemetry.use(OpenTelemetry())


def page(event: Event) -> None:
    """Page the operator on call."""
    match event:
        case NotStored(key, _, reason):
            print(f"The answer of {key} could not be stored: {reason}")
        case ParkedUnknown(key, _, step):
            print(f"It is not known whether {step} of {key} took effect.")
        case _:
            pass


semel.telemetry.use(page)
