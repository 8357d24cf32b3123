"""What is a trace context, and what is not."""

import pytest

from semel.core.trace import Trace, read_trace

IDS = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"


@pytest.mark.parametrize("flags, is_sampled", [("01", True), ("00", False), ("03", True), ("02", False)])
def test_a_trace(flags: str, is_sampled: bool) -> None:
    """Its ids are read, and whether it is recorded."""
    trace = read_trace(f"00-{IDS}-{flags}")
    trace_id, _, span_id = IDS.partition("-")
    assert trace == Trace(trace_id, span_id, int(flags, 16))
    assert trace.is_sampled is is_sampled


@pytest.mark.parametrize(
    "given",
    [
        *(None, 7, b"00", "", "junk", f"00-{IDS}", f"00-{IDS}-01\n", f"00-{IDS.upper()}-01", f"ff-{IDS}-01"),
        *(f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"),
    ],
)
def test_no_trace(given: object) -> None:
    """Whatever else was stored, or sent, names none."""
    assert read_trace(given) is None
