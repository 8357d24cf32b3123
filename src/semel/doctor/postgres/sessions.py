"""What the role's own settings do to a handler's transactions: isolation and time-outs. Sessions of Semel's own set
what they need by themselves.
"""

from __future__ import annotations

from semel.core.policy import LEASE
from semel.doctor.model import Group, Judgement, Kind, Limits, Severity, ok, wrong
from semel.doctor.postgres.durability import Setting, Settings, settings
from semel.stores.postgres.address import LOCK_SECONDS, STATEMENT_SECONDS

GROUP = Group(Kind.POSTGRES, "PostgreSQL: sessions", "how-to/atomic.md", ("postgres-reachable", "postgres-genuine"))

_WHY = (
    "Semel's own sessions set theirs. A handler's transaction in atomic mode or a phase has the role's, and is cut "
    "off: "
    "the request fails, and its retry fails in the same way."
)


@GROUP.check(
    "isolation",
    Severity.WARNING,
    title="Transactions are READ COMMITTED unless they ask for more",
    why="In a stricter level, handlers that run at the same time fail with serialization errors, and have to be "
    "retried.",
    mend="ALTER ROLE ROLE_NAME SET default_transaction_isolation = 'read committed';   # and ask for more where needed",
    look=settings,
)
def isolation(seen: Settings, _limits: Limits) -> Judgement:
    """Judge the usual isolation."""
    said = f"default_transaction_isolation = {seen['default_transaction_isolation']}."
    return ok(said) if seen["default_transaction_isolation"].value == "read committed" else wrong(said)


@GROUP.check(
    "statement-timeout",
    Severity.WARNING,
    title="Statements of handlers are not cut off early",
    why=_WHY,
    mend=f"ALTER ROLE ROLE_NAME SET statement_timeout = '{STATEMENT_SECONDS}s';   # or more",
    look=settings,
)
def statement_timeout(seen: Settings, _limits: Limits) -> Judgement:
    """Judge statement_timeout."""
    return _long_enough("statement_timeout", seen, STATEMENT_SECONDS)


@GROUP.check(
    "lock-timeout",
    Severity.WARNING,
    title="Locks are waited for",
    why=_WHY,
    mend=f"ALTER ROLE ROLE_NAME SET lock_timeout = '{LOCK_SECONDS}s';   # or more",
    look=settings,
)
def lock_timeout(seen: Settings, _limits: Limits) -> Judgement:
    """Judge lock_timeout."""
    return _long_enough("lock_timeout", seen, LOCK_SECONDS)


@GROUP.check(
    "idle-timeout",
    Severity.WARNING,
    title="A handler's transaction may wait for what the handler does beside it",
    why="In atomic mode the transaction is idle while the handler calls another service. A time-out shorter than a "
    "lease "
    "ends it in the middle.",
    mend=f"ALTER ROLE ROLE_NAME SET idle_in_transaction_session_timeout = '{LEASE.total_seconds():.0f}s';   # or more",
    look=settings,
)
def idle_timeout(seen: Settings, _limits: Limits) -> Judgement:
    """Judge the time-outs of whole transactions."""
    needed = LEASE.total_seconds()
    names = [name for name in ("idle_in_transaction_session_timeout", "transaction_timeout") if name in seen]
    judged = [_long_enough(name, seen, needed) for name in names]
    evidence = " ".join(each.evidence for each in judged)
    bad = next((each for each in judged if each.verdict != "ok"), None)
    return ok(evidence) if bad is None else wrong(evidence)


def _long_enough(name: str, seen: Settings, seconds: float) -> Judgement:
    setting = seen[name]
    # pg_settings has these in milliseconds, and 0 is none.
    said = f"{name} = {_shown(setting)}."
    return wrong(said) if 0 < int(setting.value) < seconds * 1000 else ok(said)


def _shown(setting: Setting) -> str:
    length = int(setting.value)
    return f"{f'{length} ms' if length else '0 (none)'}, set by: {setting.source}"
