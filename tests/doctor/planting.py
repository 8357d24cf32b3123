"""Which checks have a planted fault. A test that plants one says so where it stands."""

from collections.abc import Callable
from typing import TypeVar

from semel.doctor import CHECKS, Finding, Limits, Report, Verdict, examine

T = TypeVar("T")

#: The names of checks that some test makes go wrong.
PLANTED: set[str] = set()
NAMES = frozenset(each.name for each in CHECKS)


def plants(*names: str) -> Callable[[T], T]:
    """Say that a test plants a fault for each of these checks."""
    unknown = set(names) - NAMES
    assert not unknown, f"There is no check {unknown}."
    PLANTED.update(names)
    return lambda test: test


def finding(report: Report, name: str) -> Finding:
    return next(each for each in report.findings if each.check.name == name)


def examined(url: str, name: str, *, limits: Limits | None = None) -> Finding:
    """What one check says about a store."""
    return finding(examine(url, only=[name], limits=limits or Limits()), name)


def not_ok(report: Report) -> list[tuple[str, str, str]]:
    return [
        (each.check.name, each.verdict, each.evidence) for each in report.findings if each.verdict is not Verdict.OK
    ]
