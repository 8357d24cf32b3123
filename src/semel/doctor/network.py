"""What is judged alike for every server: whether it is this machine, and how far its clock is from ours. It asks
none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address

from semel.doctor.model import Judgement, Limits, ok, wrong


@dataclass(frozen=True, slots=True)
class Skew:
    """How far a server's clock is from this machine's, and how long the question took."""

    seconds: float
    took: float


def judge_skew(seen: Skew, limits: Limits) -> Judgement:
    """Judge how far a server's clock is from this machine's: what the question took is not counted."""
    apart = abs(timedelta(seconds=seen.seconds)) - timedelta(seconds=seen.took / 2)
    said = f"The server is {seen.seconds:+.2f} s from this machine (asked in {seen.took * 1000:.0f} ms)."
    return wrong(said) if apart > limits.clock else ok(said)


def is_local(host: str) -> bool:
    """Whether *host* is this machine: a socket's folder, or an address of loopback."""
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
