"""The words of a verification: check, verdict, finding, profile. Nothing is sent here, and nothing is judged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from semel.core.key import DEFAULT_MAX_LENGTH


class Verdict(StrEnum):
    """What a check has come to."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Check:
    """One fact about an API: its name, the rule with its source, and why it matters."""

    name: str
    rule: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has come to, and what was sent and received for it."""

    check: Check
    verdict: Verdict
    #: What was seen, or why it could not be decided, in one sentence.
    reason: str
    sent: str = ""
    received: str = ""
    curl: str = ""


@dataclass(frozen=True, slots=True)
class NotRun:
    """A check that does not apply to this request, or needs something that was not given."""

    check: Check
    reason: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the standards differ."""

    name: str
    #: Whether a key is sent as a Structured Field String, ``"abc"``.
    is_quoted: bool
    #: The status for a key that was used for another request.
    mismatch: int
    #: Whether PATCH takes keys too, beside POST.
    guards_patch: bool
    #: Whether a replay must be marked with ``Idempotent-Replayed: true``.
    marks_replays: bool
    #: Whether a key of 255 characters must be accepted.
    takes_long_keys: bool
    #: Whether errors of the handler, also server errors, must be kept and replayed.
    keeps_errors: bool
    #: Whether refusals are problems of RFC 9457; else ``{"error": {"type": …}}``.
    has_problems: bool


IETF = Profile(
    name="ietf",
    is_quoted=True,
    mismatch=422,
    guards_patch=True,
    marks_replays=False,
    takes_long_keys=False,
    keeps_errors=False,
    has_problems=True,
)
STRIPE = Profile(
    name="stripe",
    is_quoted=False,
    mismatch=400,
    guards_patch=False,
    marks_replays=True,
    takes_long_keys=True,
    keeps_errors=True,
    has_problems=False,
)
PROFILES = {each.name: each for each in (IETF, STRIPE)}


@dataclass(frozen=True, slots=True)
class KeyHeader:
    """The header that a key is sent in, and how long a key may be."""

    name: str = "Idempotency-Key"
    max_length: int = DEFAULT_MAX_LENGTH


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a verification has found."""

    url: str
    profile: str
    #: How effects were counted.
    evidence: str
    findings: tuple[Finding, ...]
    not_run: tuple[NotRun, ...] = ()

    def count(self, verdict: Verdict) -> int:
        """Return how many checks have come to *verdict*."""
        return sum(each.verdict is verdict for each in self.findings)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the whole: one failure is a failure, and nothing decided is not a pass."""
        if self.count(Verdict.FAIL):
            return Verdict.FAIL
        if self.count(Verdict.INCONCLUSIVE) or not self.findings:
            return Verdict.INCONCLUSIVE
        return Verdict.PASS


class Undecided(Exception):
    """What was seen does not decide a check. The message is the reason."""
