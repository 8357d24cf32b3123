"""``semel doctor``: what is wrong with a store and with the application around it. How that is found out is in
``semel.doctor``.

It exits with 0 if nothing is wrong, with 1 if something is, with 2 if nothing is and something could not be told, and
with 3 if the command line is wrong. ``--fail-on`` says which checks count.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from difflib import get_close_matches
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from semel.cli import address
from semel.cli.address import USUAL_FILE, VARIABLE, checked, named
from semel.cli.application import imported
from semel.cli.judging import USAGE, JudgingCommand, end
from semel.cli.output import JsonOption, put, safe, unfolded
from semel.doctor import CHECKS, Check, Finding, Report, Severity, Verdict, examine
from semel.errors import ConfigurationError

STATUSES = {Verdict.OK: 0, Verdict.WRONG: 1, Verdict.CANNOT_TELL: 2}
COLOURS = {Verdict.OK: "green", Verdict.WRONG: "bold red", Verdict.CANNOT_TELL: "yellow"}
SEVERITIES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow"}
#: How long an application may take to be imported: longer than any server waits for one.
IMPORT_SECONDS = 60.0
#: The command that is meant where none is named.
USUAL = "run"


class DoctorGroup(TyperGroup):
    """The commands of the doctor: what names none of them is for the examination."""

    usual = USUAL

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the usual command in front of what names none."""
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [self.usual, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=DoctorGroup,
    help="Find what is wrong with a store and with the application around it. semel doctor URL is short for "
    "semel doctor run URL.",
)

CheckArgument = Annotated[str, typer.Argument(metavar="CHECK", help="The name of a check, such as postgres-fsync.")]


@app.command(USUAL, cls=JudgingCommand)
def run(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help=f"The store; else that of --app, else {VARIABLE}, else ./{USUAL_FILE}."),
    ] = None,
    app_name: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="MODULE:NAME",
            help="An application to look into, too, or what makes it: 'shop:create_app()'.",
        ),
    ] = None,
    fail_on: Annotated[
        Severity, typer.Option("--fail-on", metavar="error|warning", help="Which checks the exit status counts.")
    ] = Severity.ERROR,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Only these checks: postgres-*. Repeatable.")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Examine a store, and an application. Nothing is written.

    Exits with 0 if nothing is wrong, 1 if something is, 2 if it could not be told, 3 if the usage is wrong.
    """
    project = address.project if app_name is None and url is None else None
    if project is not None:
        app_name = project.application_name()
    try:
        with _kept_apart() if app_name else nullcontext():
            application = _imported(app_name) if app_name else None
            if project is not None and application is None:
                application = project.application()
            report = examine(_store(url, has_app=application is not None), app=application, only=only or ())
    except (ConfigurationError, ImportError) as error:
        end(error)
    except SystemExit as ended:
        # Nothing was examined, whatever status it wanted to end with.
        end(ConfigurationError(f"{app_name} ended the program (SystemExit: {ended.code}) when it was looked into."))
    if as_json:
        print(json.dumps(_as_json(report, fail_on), indent=2))
    else:
        _print(report)
    raise typer.Exit(STATUSES[report.worst(fail_on)])


@app.command("list", cls=JudgingCommand)
def listing(*, as_json: JsonOption = False) -> None:
    """List every check."""
    if as_json:
        print(json.dumps([_facts(each) for each in CHECKS], indent=2))
        return
    table = Table("check", "severity", "what is so when all is well", box=None, pad_edge=False)
    for check in CHECKS:
        table.add_row(Text(check.name, no_wrap=True), Text(check.severity), Text(check.title))
    put(table)


@app.command("explain", cls=JudgingCommand)
def explain(name: CheckArgument, *, as_json: JsonOption = False) -> None:
    """Explain one check: what it is about, why it matters, and what to type."""
    check = next((each for each in CHECKS if each.name == name), None)
    if check is None:
        names = [each.name for each in CHECKS]
        close = [each for each in names if name in each][:5] or get_close_matches(name, names, n=3)
        hint = f" Did you mean {', '.join(close)}?" if close else " See: semel doctor list"
        end(ConfigurationError(f"There is no check {safe(name)}.{hint}"))
    if as_json:
        print(json.dumps(_facts(check), indent=2))
        return
    after = ", ".join(check.after)
    rows = [
        ("severity", check.severity),
        ("why", check.why),
        ("type", check.mend),
        ("read", f"docs/{check.page}"),
        *([("needs", after)] if after else []),
    ]
    put(Text(f"{check.name}: {check.title}", style="bold"), *_pairs(rows))


@contextmanager
def _kept_apart() -> Iterator[None]:
    """Keep an application out of the report, and from waiting for a person: what it prints, and what its children
    print, goes to stderr; it has nothing to read; and a child that it forks does not go on here.
    """
    process = os.getpid()
    sys.stdout.flush()
    kept = []
    with suppress(OSError):  # One of them may be closed.
        kept = [(stream, os.dup(stream)) for stream in (0, 1)]
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if os.getpid() != process:
            os._exit(0)
        sys.stdout.flush()
        for stream, copy in kept:
            os.dup2(copy, stream)
            os.close(copy)


def _give_up(module: str) -> None:
    """End the program: a thread that hangs in an import can't be stopped otherwise."""
    said = f"semel: {module} is not imported after {IMPORT_SECONDS:g} s. What does it wait for, at its top level?\n"
    os.write(2, said.encode(errors="replace"))
    os._exit(USAGE)


def _imported(name: str) -> Any:
    module = name.partition(":")[0]
    # The import is in this thread, since an application may handle signals; so it is another one that keeps the time.
    timer = threading.Timer(IMPORT_SECONDS, _give_up, [module])
    timer.daemon = True
    timer.start()
    try:
        return imported(name)
    except (ConfigurationError, ImportError):
        raise
    except Exception as error:
        # It is the application's own, and may be anything: a database that is away, a variable that is not set.
        raise ConfigurationError(f"{module} can't be imported: {type(error).__name__}: {error}") from error
    finally:
        timer.cancel()


def _store(url: str | None, *, has_app: bool) -> str | None:
    if url is not None:
        return checked(url)
    if has_app:
        return None
    if given := named(None):
        return given
    if USUAL_FILE.exists():
        return f"sqlite:///{USUAL_FILE}"
    raise ConfigurationError(f"Which store? Give its URL, or set {VARIABLE}: there is no {USUAL_FILE} here.")


def _print(report: Report) -> None:
    parts: list[Any] = [Text(safe(report.where), style="bold")]
    bad = sorted(
        (each for each in report.findings if each.is_wrong), key=lambda each: each.check.severity is Severity.WARNING
    )
    for each in bad:
        parts += ["", *_in_full(each)]
    others = [each for each in report.findings if not each.is_wrong and not each.is_skipped]
    if others:
        parts += ["", *_brief(others)]
    parts.append("")
    for reason, count in Counter(each.evidence for each in report.findings if each.is_skipped).items():
        words = "1 check was" if count == 1 else f"{count} checks were"
        parts.append(Text(f"{words} {reason[0].lower()}{reason[1:]}", style="dim"))
    put(*parts, _summary(report))


def _in_full(finding: Finding) -> tuple[Any, ...]:
    check = finding.check
    head = Text.assemble((f"{check.severity} ", SEVERITIES[check.severity]), (check.name, "bold"))
    rows = [
        ("want", f"{check.title}."),
        ("seen", finding.evidence),
        ("why", check.why),
        ("type", finding.mend),
        ("read", f"docs/{check.page}"),
    ]
    return head, *_pairs(rows)


def _brief(findings: list[Finding]) -> Iterator[Any]:
    """One table for each subject: a line for what is ok; as many as it takes for what can't be told."""
    names = max(len(each.check.name) for each in findings)
    for subject, several in groupby(findings, key=lambda each: each.check.subject):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=len(Verdict.OK))
        table.add_column(no_wrap=True, min_width=names)
        table.add_column(overflow="fold")
        for each in several:
            is_ok = each.verdict is Verdict.OK
            text = Text(safe(each.evidence if is_ok else f"{each.verdict}: {each.evidence}"))
            if is_ok:
                text.no_wrap, text.overflow = True, "ellipsis"
            table.add_row(Text("ok" if is_ok else "?", style=COLOURS[each.verdict]), Text(each.check.name), text)
        yield Text(subject, style="bold")
        yield Padding(table, (0, 0, 0, 2))


def _pairs(rows: list[tuple[str, str]]) -> Iterator[Any]:
    """A line for each: what is to be typed is not folded."""
    names = max(len(name) for name, _ in rows)
    for name, value in rows:
        if name == "type":
            yield unfolded("  ", (name.ljust(names), "dim"), "  ", (safe(value), "cyan"))
            continue
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="dim", min_width=names)
        table.add_column(overflow="fold")
        table.add_row(name, Text(safe(value)))
        yield Padding(table, (0, 0, 0, 2))


def _summary(report: Report) -> Text:
    skipped = sum(each.is_skipped for each in report.findings)
    by_severity = [
        (severity, sum(each.is_wrong and each.check.severity is severity for each in report.findings))
        for severity in Severity
    ]
    said = Text()
    for severity, count in by_severity:
        said.append(f"{count} {severity}{'' if count == 1 else 's'}", style=SEVERITIES[severity] if count else "")
        said.append(", ")
    said.append(f"{report.count(Verdict.OK)} ok, {report.count(Verdict.CANNOT_TELL) - skipped} cannot tell")
    said.append(f", {skipped} skipped." if skipped else ".")
    return said


def _as_json(report: Report, fail_on: Severity) -> dict[str, Any]:
    return {
        "store": report.where,
        "verdict": report.worst(fail_on),
        "counts": {str(verdict): report.count(verdict) for verdict in Verdict},
        "findings": [
            {
                **_facts(each.check),
                "mend": each.mend,
                "verdict": each.verdict,
                "evidence": each.evidence,
                "skipped": each.is_skipped,
            }
            for each in report.findings
        ],
    }


def _facts(check: Check) -> dict[str, Any]:
    return {
        "check": check.name,
        "subject": check.subject,
        "severity": check.severity,
        "title": check.title,
        "why": check.why,
        "mend": check.mend,
        "page": f"docs/{check.page}",
    }
