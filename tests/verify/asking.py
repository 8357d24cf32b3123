"""A verification, without the command line. It asserts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from semel.verify import runner
from semel.verify.counting import Counter, counter
from semel.verify.lab import Lab, Settings
from semel.verify.message import Request
from semel.verify.model import PROFILES, Report, Verdict
from semel.verify.target import Target, request_of
from semel.verify.telling import Teller

ACCOUNT = ("X-Account", "alice")
OTHER = (("X-Account", "bob"),)
BODY = b'{"amount": 500}'
HANG_SECONDS = 20.0
#: What was said before each verification: how many operations it creates at most, and if keys are not honoured.
bounds: list[tuple[int, int]] = []


async def verified(
    url: str,
    *only: str,
    count: str | None = "/count#$.n",
    profile: str = "ietf",
    skip: Sequence[str] = (),
    request: Request | None = None,
    hang: float = HANG_SECONDS,
    **given: Any,
) -> Report:
    """Verify the API at *url*, which takes payments."""
    target = Target(url, timeout=hang)
    json = (("Content-Type", "application/json"), ACCOUNT)
    asked = request_of(
        target, file=None, content=None, headers=(), found=request or Request("POST", "/payments", json, BODY)
    )
    times: dict[str, Any] = {"settle": 0.001, "patience": 1.0, "recovery": 5.0, "other": OTHER, "may_replace": True}
    settings = replace(Settings(PROFILES[profile]), **times | given)
    effects: Counter | None = counter(count, target.base, (ACCOUNT,), target.client_for) if count else None
    lab = Lab(target.client, asked, settings, effects, Teller(target.origin, key_header="Idempotency-Key"))
    checks = runner.chosen(only, skip)
    plan = runner.plan(lab, checks)
    report = await runner.verify(lab, plan, checks, effects)
    bounds.append((plan.creates, plan.sends))
    return report


def verdicts(report: Report) -> dict[str, str]:
    return {each.check.name: str(each.verdict) for each in report.findings}


def told(report: Report, verdict: Verdict) -> dict[str, str]:
    return {each.check.name: each.reason for each in report.findings if each.verdict is verdict}
