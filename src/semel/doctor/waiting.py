"""What waits in a store: for a person, for a worker, for a relay, for the reaper. How it is counted, each session
says.
"""

from __future__ import annotations

from datetime import timedelta

from semel.core.text import pasteable
from semel.doctor.model import Group, Judgement, Kind, Limits, Severity, cannot_tell, ok, wrong
from semel.doctor.session import Handled, Session, Some

GROUP = Group(
    Kind.STORE,
    "Operations and messages",
    "how-to/run-the-services.md",
    ("postgres-tables", "postgres-schema", "sqlite-file", "sqlite-schema", "redis-reachable", "redis-kind"),
)


def _parked(session: Session) -> Some:
    return session.parked()


def _stuck(session: Session) -> Some:
    return session.stuck()


def _pending(session: Session) -> Some:
    return session.pending()


def _expired(session: Session) -> Some:
    return session.expired()


def _waiting_messages(session: Session) -> Some:
    return session.waiting_messages()


def _dead_letters(session: Session) -> Some:
    return session.dead_letters()


def _parked_messages(session: Session) -> Some:
    return session.parked_messages()


def _closed_endpoints(session: Session) -> list[tuple[str, str]]:
    return session.closed_endpoints()


def _handled(session: Session) -> Handled:
    return session.handled()


@GROUP.check(
    "parked",
    Severity.WARNING,
    title="No operation waits for a person",
    why="Its outcome is unknown, and every retry of it is refused until a person says what happened.",
    mend="semel keys list --state unknown   # then: semel keys resolve KEY",
    look=_parked,
    page="how-to/run-the-services.md#resolve-by-hand",
)
def parked(seen: Some, _limits: Limits) -> Judgement:
    """Judge whether any is parked."""
    return _none(seen, "operations are parked", "operation is parked")


@GROUP.check(
    "stuck",
    Severity.WARNING,
    title="No operation is left by a dead worker",
    why="Its worker died or was cut off, and no retry and no sweeper has come for it: its client does not know the "
    "outcome.",
    mend="semel keys list --state stuck   # and run: semel work",
    look=_stuck,
    page="how-to/production.md#a-stuck-key",
)
def stuck(seen: Some, limits: Limits) -> Judgement:
    """Judge how long leases have been over."""
    return _old(seen, limits.stuck, "are past their lease", "the longest for")


@GROUP.check(
    "accepted",
    Severity.ERROR,
    title="Accepted operations are run",
    why="Clients were answered 202: a worker would run it. No worker takes it, or too few do.",
    mend="semel work --app module:app   # or work=True in the middleware",
    look=_pending,
    page="how-to/long-work.md",
)
def accepted(seen: Some, limits: Limits) -> Judgement:
    """Judge how long the oldest waits."""
    return _old(seen, limits.accepted, "were accepted and not begun", "the oldest waits for")


@GROUP.check(
    "outbox",
    Severity.WARNING,
    title="Messages of the outbox are sent",
    why="No relay takes them, or it can't keep up: what was promised to others does not reach them.",
    mend="semel relay --to …   # one for each destination",
    look=_waiting_messages,
    page="how-to/outbox.md",
)
def outbox(seen: Some, limits: Limits) -> Judgement:
    """Judge how long the oldest waits."""
    return _old(seen, limits.outbox, "messages wait to be sent", "the oldest for")


@GROUP.check(
    "dead-letters",
    Severity.WARNING,
    title="No message is a dead letter",
    why="It was tried as often as it may be. Others of its key wait behind it.",
    mend="semel outbox list --state dead   # then: semel outbox requeue ID",
    look=_dead_letters,
    page="how-to/dead-letters.md",
)
def dead_letters(seen: Some, _limits: Limits) -> Judgement:
    """Judge whether there is any."""
    return _none(seen, "messages are dead letters", "message is a dead letter")


@GROUP.check(
    "inbox",
    Severity.WARNING,
    title="No message of the inbox is parked",
    why="Its handler failed as often as it may. No delivery of it runs anything.",
    mend="semel inbox list   # then: semel inbox requeue",
    look=_parked_messages,
    page="how-to/handle-messages-once.md#parked-messages",
)
def inbox(seen: Some, _limits: Limits) -> Judgement:
    """Judge whether any is parked."""
    return _none(seen, "messages are parked", "message is parked")


@GROUP.check(
    "webhooks",
    Severity.WARNING,
    title="Every endpoint of webhooks is on",
    why="An endpoint that is off gets no more webhooks: those for it wait.",
    mend="semel webhooks enable NAME",
    look=_closed_endpoints,
    page="how-to/send-webhooks.md",
)
def webhooks(seen: list[tuple[str, str]], _limits: Limits) -> Judgement:
    """Judge whether one is off."""
    if not seen:
        return ok("None is off.")
    said = "; ".join(f"{name} is off" + (f" ({reason})" if reason else "") for name, reason in seen)
    return wrong(f"{said}.", f"semel webhooks enable {pasteable(seen[0][0])}")


@GROUP.check(
    "expired",
    Severity.WARNING,
    title="The reaper keeps up",
    why="Records past their retention stay until they are reaped: the table grows, and so do backups.",
    mend="semel reap   # from cron, or run: semel work",
    look=_expired,
    page="how-to/production.md#cleaning-up",
)
def expired(seen: Some, limits: Limits) -> Judgement:
    """Judge how long the oldest is past its retention."""
    return _old(seen, limits.expired, "records are past their retention", "the oldest for")


@GROUP.check(
    "not-kept",
    Severity.WARNING,
    title="Answers can be kept",
    why="An answer that is too large, or a stream, is sent once. A retry of it gets 409, and never the answer.",
    mend="Raise max_response_body in the policy, or answer with less: a link to what was made. Of a function, "
    "annotate what it returns, or give codec=.",
    look=_handled,
    page="reference/policy.md",
)
def not_kept(seen: Handled, _limits: Limits) -> Judgement:
    """Judge whether the newest records have answers."""
    said = f"{seen.unkept} of the newest {seen.count} answers could not be kept."
    return wrong(said) if seen.unkept else ok(said)


def _none(seen: Some, several: str, one: str) -> Judgement:
    if seen.count:
        age = f", the oldest since {_age(seen.age)}" if seen.age is not None else ""
        return wrong(f"{seen} {several if seen.count > 1 else one}{age}.")
    return ok("None.") if seen.is_all else cannot_tell("There are too many records to look at all of them.")


def _old(seen: Some, limit: timedelta, what: str, how_long: str) -> Judgement:
    if not seen.count or seen.age is None:
        return ok("None.") if seen.is_all else cannot_tell("There are too many records to look at all of them.")
    said = f"{seen} {what}, {how_long} {_age(seen.age)}."
    return wrong(said) if seen.age > limit else ok(said)


def _age(age: timedelta | None) -> str:
    return str(timedelta(seconds=round(age.total_seconds()))) if age is not None else "?"
