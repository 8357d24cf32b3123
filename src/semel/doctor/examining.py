"""Runs the checks: which apply, in what order, for how long. What is wrong with what, they say themselves.

A check that fails by itself (a permission is missing, a server hangs) is *cannot tell*, with the reason; and one that
depends on another that is wrong is skipped.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from semel.doctor.app.application import Application, opened_by
from semel.doctor.catalogue import CHECKS
from semel.doctor.model import Check, Finding, Judgement, Kind, Limits, Report, Verdict, cannot_tell
from semel.doctor.session import Session, Unavailable
from semel.doctor.sessions import session_at, session_of
from semel.errors import ConfigurationError

_LIMITS = Limits()
_HIDDEN = "***"
#: After so many looks without an answer no more are tried: a server that hangs would take minutes for all of them.
MAX_LATE = 2
_SILENT = "It was not tried: others before it got no answer."
_SAID = {Verdict.WRONG: "is wrong", Verdict.CANNOT_TELL: "could not be told"}
_PLACE = re.compile(r"\b(URL|FILE|FOLDER|ROLE_NAME|DATABASE_NAME)\b")


def examine(url: str | None = None, *, app: Any = None, only: Sequence[str] = (), limits: Limits = _LIMITS) -> Report:
    """Run every check that applies to the store at *url*, and to *app*, an application object.

    Without *url*, the store of *app* is examined. *only* are names of checks, or patterns such as ``postgres-*``; a
    check that they depend on is run as well, and told if it is not ok. Nothing is written, and no table is made.

    Raises ``ConfigurationError`` for a URL that can't be read, and for a name that no check has.
    """
    wanted = _named(only)
    application = None if app is None else opened_by(app)
    session = _session(url, application, limits)
    if application is not None:
        application.session = session
    try:
        subjects = _subjects(session, application)
        applicable = [each for each in CHECKS if each.kind in subjects]
        findings = _run(_with_needed(applicable, wanted), subjects, limits)
    finally:
        if session is not None:
            session.close()
    told = [
        _without(session.secrets if session else (), each)
        for each in findings
        if each.check.name in wanted or each.verdict is not Verdict.OK
    ]
    return Report(session.where if session else str(application), tuple(told))


@dataclass(slots=True)
class _Looked:
    """What was seen, so that several checks can share one look."""

    value: Any = None
    error: Exception | None = None
    #: Whether it was left behind, because it did not end in time.
    is_late: bool = False


def _session(url: str | None, application: Application | None, limits: Limits) -> Session | None:
    if url is not None:
        return session_at(url, limits.seconds)
    if application is None:
        raise ConfigurationError("Give the URL of a store, or an app.")
    return None if application.store is None else session_of(application.store, limits.seconds)


def _subjects(session: Session | None, application: Application | None) -> dict[Kind, Any]:
    subjects: dict[Kind, Any] = {}
    if session is not None:
        subjects[session.kind] = session
        if session.has_records:
            subjects[Kind.STORE] = session
    if application is not None:
        subjects[Kind.APP] = application
    return subjects


def _named(only: Sequence[str]) -> frozenset[str]:
    names = frozenset(each.name for each in CHECKS)
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(f"There is no check {pattern!r}. See: semel doctor list")
    return frozenset(name for name in names if not only or any(fnmatchcase(name, each) for each in only))


def _with_needed(checks: list[Check], wanted: Iterable[str]) -> list[Check]:
    by_name = {each.name: each for each in checks}
    needed: set[str] = set()
    left = [name for name in wanted if name in by_name]
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += [each for each in by_name[name].after if each in by_name]
    return [each for each in checks if each.name in needed]


def _run(checks: Iterable[Check], subjects: dict[Kind, Any], limits: Limits) -> list[Finding]:
    findings: dict[str, Finding] = {}
    seen: dict[tuple[Kind, Any], _Looked] = {}
    for check in checks:
        broken = _broken(check, findings)
        if broken:
            root = _root(broken, findings)
            reason = f"Skipped, because {root} {_SAID[findings[root].verdict]}."
            findings[check.name] = Finding(check, Verdict.CANNOT_TELL, reason, check.mend, is_skipped=True)
            continue
        judged = _judged(check, subjects[check.kind], seen, limits)
        mend = _typed(judged.mend or check.mend, subjects[check.kind])
        findings[check.name] = Finding(check, judged.verdict, judged.evidence, mend)
    return list(findings.values())


def _without(secrets: tuple[str, ...], finding: Finding) -> Finding:
    evidence = finding.evidence
    for secret in secrets:
        evidence = evidence.replace(secret, _HIDDEN)
    return finding if evidence == finding.evidence else replace(finding, evidence=evidence)


def _typed(mend: str, subject: Any) -> str:
    """What to type names this very store."""
    if not isinstance(subject, Session):
        return mend
    mend = mend.replace(Session.migrate, subject.migrate)
    return _PLACE.sub(lambda match: subject.words.get(match[0], match[0]), mend)


def _broken(check: Check, findings: dict[str, Finding]) -> str | None:
    """Return a check that keeps *check* from being run. One that could not be told does so only if it is the first of
    all: where no server answers, there is nothing to ask.
    """
    for name in check.after:
        found = findings.get(name)
        if found is None or found.verdict is Verdict.OK:
            continue
        if found.is_wrong or found.is_skipped or not found.check.after:
            return name
    return None


def _root(name: str, findings: dict[str, Finding]) -> str:
    """The first cause of it all."""
    while findings[name].is_skipped:
        name = _broken(findings[name].check, findings) or name
    return name


def _judged(check: Check, subject: Any, seen: dict[tuple[Kind, Any], _Looked], limits: Limits) -> Judgement:
    place = check.kind, check.look
    if place not in seen:
        if sum(each.is_late for each in seen.values()) >= MAX_LATE:
            return cannot_tell(_SILENT)
        seen[place] = _look(check.look, subject, limits)
    looked = seen[place]
    if looked.error is not None:
        return cannot_tell(_one_line(looked.error))
    try:
        return check.judge(looked.value, limits)
    except Unavailable as reason:
        return cannot_tell(str(reason))
    except Exception as error:  # noqa: BLE001 - a server may answer with what no check has thought of
        return cannot_tell(f"The answer can't be read: {_one_line(error)}")


def _look(look: Callable[[Any], Any], subject: Any, limits: Limits) -> _Looked:
    """Look in a thread of its own: what no driver ends in time is left behind."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(look(subject))
        except BaseException as error:  # noqa: BLE001 - it is this check's alone
            future.set_exception(error)

    threading.Thread(target=run, name="semel-doctor", daemon=True).start()
    try:
        return _Looked(future.result(limits.seconds + limits.grace))
    except TimeoutError as error:
        if future.done():
            return _Looked(error=error)
        with suppress(Exception):
            subject.abandon()
        return _Looked(error=Unavailable(f"There was no answer within {limits.seconds:g} s."), is_late=True)
    except Exception as error:  # noqa: BLE001 - as above
        return _Looked(error=error)
    except (SystemExit, asyncio.CancelledError) as error:
        # An application's own code was looked into, and wanted to end the program.
        return _Looked(error=Unavailable(f"It ended with {type(error).__name__}: {_one_line(error)}"))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
