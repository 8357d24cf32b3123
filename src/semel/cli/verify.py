"""``semel verify``: whether an HTTP API in any language honours idempotency keys. How that is found out is in
``semel.verify``.

It exits with 0 if every check has passed, with 1 if one has failed, with 2 if one is inconclusive, and with 3 if the
command line or the set-up is wrong.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from semel.cli.judging import end
from semel.cli.output import put, safe
from semel.errors import ConfigurationError
from semel.verify import report as reports
from semel.verify import runner, target
from semel.verify.connection import connected
from semel.verify.counting import counter
from semel.verify.lab import Lab, Settings
from semel.verify.model import PROFILES, KeyHeader, Report, Verdict
from semel.verify.openapi import found_in, load
from semel.verify.telling import Teller
from semel.work.plan import duration

STATUSES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}
COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "yellow"}
#: Requests in a second to a host that is not this machine, unless told otherwise.
POLITE_RATE = 10.0
#: Rows of a table that may have one reason.
MAX_ALIKE = 6


class Format(StrEnum):
    """How a report is printed."""

    TABLE = "table"
    JSON = "json"
    JUNIT = "junit"
    MARKDOWN = "markdown"


class ProfileName(StrEnum):
    """Where the standards differ, which is followed."""

    IETF = "ietf"
    STRIPE = "stripe"


def verify(  # noqa: PLR0917 - typer makes an option of each
    url: Annotated[str | None, typer.Argument(metavar="URL", help="Where the API is: http://localhost:8000")] = None,
    request: Annotated[
        Path | None,
        typer.Option("--request", metavar="FILE", help="The request: POST /path, headers, a blank line, the body."),
    ] = None,
    json_body: Annotated[
        str | None, typer.Option("--json", metavar="BODY", help="The request: this JSON, posted to URL.")
    ] = None,
    openapi: Annotated[
        str | None,
        typer.Option("--openapi", metavar="FILE|URL", help="The request: the example of an operation, and its header."),
    ] = None,
    operation: Annotated[
        str | None, typer.Option("--operation", metavar="'POST /path'", help="Which operation of --openapi.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            "-H",
            metavar="'NAME: VALUE'",
            help="A header of the request; or a vendor. Repeatable.",
        ),
    ] = None,
    key_header: Annotated[
        str | None,
        typer.Option("--key-header", metavar="NAME", help="The header of the key, or a vendor: paypal, adyen …"),
    ] = None,
    other_header: Annotated[
        list[str] | None,
        typer.Option("--other-header", metavar="'NAME: VALUE'", help="A header of a second principal. Repeatable."),
    ] = None,
    other_request: Annotated[
        Path | None, typer.Option("--other-request", metavar="FILE", help="Another valid request to the same path.")
    ] = None,
    failing_request: Annotated[
        Path | None, typer.Option("--failing-request", metavar="FILE", help="A request that the handler fails on.")
    ] = None,
    count: Annotated[
        str | None,
        typer.Option(
            "--count",
            metavar="URL#PATH",
            help="Counts effects: URL#$.path, URL#header:NAME, or sqlite:///file#SELECT …",
        ),
    ] = None,
    profile: Annotated[ProfileName, typer.Option("--profile", help="Which standard to follow.")] = ProfileName.IETF,
    restart_cmd: Annotated[
        str | None, typer.Option("--restart-cmd", metavar="CMD", help="Kills the server and starts it again.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Only these checks: race-*. Repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="CHECK", help="Not these checks. Repeatable.")
    ] = None,
    output: Annotated[Format, typer.Option("--format", help="How to print the report.")] = Format.TABLE,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.01, help="Requests in a second at most. On hosts that are not local: 10."),
    ] = None,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long an answer may take.")] = "10s",
    settle: Annotated[
        str,
        typer.Option("--settle", metavar="TIME", help="How long an effect takes until it is counted; more, if seen."),
    ] = "50ms",
    patience: Annotated[
        str, typer.Option("--patience", metavar="TIME", help="How long an operation may be in progress.")
    ] = "15s",
    recovery: Annotated[
        str, typer.Option("--recovery", metavar="TIME", help="The same after a crash: longer than the server's lease.")
    ] = "45s",
    *,
    strict: Annotated[
        bool, typer.Option("--strict", help="The letter of the standards, and what they only recommend.")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept any certificate.")] = False,
    show_credentials: Annotated[
        bool, typer.Option("--show-credentials", help="Print credentials in the report, as they were sent.")
    ] = False,
    behind_gateway: Annotated[
        bool, typer.Option("--behind-gateway", help="What --restart-cmd kills is behind a proxy, which goes on.")
    ] = False,
    may_replace: Annotated[
        bool,
        typer.Option("--may-replace", help="Send PUT and PATCH to the path, too, which may replace what is there."),
    ] = False,
    details: Annotated[bool, typer.Option("--details", help="Show what was sent and received for each check.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before requests are sent to a host that is not local.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name every check, and send nothing.")] = False,
) -> None:
    """Verify from outside that an HTTP API in any language honours idempotency keys. It creates what it is to count.

    Exits with 0 if every check has passed, 1 if one has failed, 2 if one is inconclusive, 3 if the usage is wrong.
    """
    if listing:
        _list()
        return
    try:
        given = _Given(
            url, openapi, operation, header or [], key_header=key_header, timeout=timeout, is_checked=not insecure
        )
        lab_request = target.request_of(
            given.target, file=request, content=json_body, headers=given.headers, found=given.found
        )
        settings = Settings(
            profile=PROFILES[profile],
            key_header=given.key_header,
            other=tuple(map(target.header, other_header or [])),
            is_strict=strict,
            may_replace=may_replace,
            restart_cmd=restart_cmd,
            is_behind_gateway=behind_gateway,
            other_request=given.prepared(other_request),
            failing=given.prepared(failing_request),
            settle=_seconds(settle),
            patience=_seconds(patience),
            recovery=_seconds(recovery),
            interval=_interval(rate, is_local=given.target.is_local),
        )
        teller = Teller(
            given.target.origin,
            key_header=given.key_header.name,
            shows_credentials=show_credentials,
        )
        teller.hide(*(unquote(part) for part in (urlsplit(count or "").password,) if part))
        effects = counter(count, given.target.base, lab_request.headers, given.target.client_for) if count else None
        lab = Lab(given.target.client, lab_request.lacking(given.key_header.name), settings, effects, teller)
        checks = runner.chosen(only or (), skip or ())
        plan = runner.plan(lab, checks)
        _announce(lab, plan, is_local=given.target.is_local, is_agreed=yes)
        found = asyncio.run(_verified(lab, plan, checks, effects, given.target.origin))
    except ConfigurationError as error:
        end(error)
    _show(found, output, is_detailed=details)
    raise typer.Exit(STATUSES[found.verdict])


class _Given:
    """What was typed about the server and its headers."""

    def __init__(
        self,
        url: str | None,
        openapi: str | None,
        operation: str | None,
        headers: list[str],
        *,
        key_header: str | None,
        timeout: str,
        is_checked: bool,
    ) -> None:
        if url is None:
            raise ConfigurationError("Which API? Give its URL: semel verify http://localhost:8000 --request FILE")
        if operation and not openapi:
            raise ConfigurationError("--operation is one of --openapi.")
        # A header without a colon is the name of a preset, which is easily mistaken for one.
        presets = [each for each in headers if ":" not in each]
        self.headers = [target.header(each) for each in headers if ":" in each]
        self.target = target.Target(url, timeout=_seconds(timeout), is_checked=is_checked)
        described = None
        if openapi:
            described = found_in(asyncio.run(load(openapi, self.target.client_for)), operation)
        self.found = described.request if described else None
        name = key_header or next(iter(presets), None) or (described.key_header if described else None)
        self.key_header = target.key_header(name) if name else KeyHeader()

    def prepared(self, file: Path | None) -> Any:
        """Return the request in *file*, for this server and with the headers that were typed."""
        if file is None:
            return None
        request = target.request_of(self.target, file=file, content=None, headers=self.headers, found=None)
        return request.lacking(self.key_header.name)


async def _verified(lab: Lab, plan: runner.Plan, checks: frozenset[Any], effects: Any, origin: str) -> Report:
    await connected(lab.client, origin)
    console = Console(stderr=True)
    if not console.is_terminal:
        return await runner.verify(lab, plan, checks, effects)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(plan.experiments))
        return await runner.verify(
            lab,
            plan,
            checks,
            effects,
            lambda done, total, name: bar.update(task, completed=done, total=total, description=name),
        )


def _announce(lab: Lab, plan: runner.Plan, *, is_local: bool, is_agreed: bool) -> None:
    noun = _noun(lab.request.target)
    print(
        f"Sends requests to {safe(lab.url)}. Creates at most {plan.creates} {noun},"
        f" or {plan.sends} if keys are not honoured."
        + (" Sends PUT and PATCH, too, which may replace what is there." if lab.settings.may_replace else ""),
        file=sys.stderr,
    )
    if plan.experiments and not is_local and not is_agreed:
        if not sys.stdin.isatty():
            raise ConfigurationError("This host is not local. Say --yes if it may be changed.")
        if not typer.confirm("This host is not local. Go on?", err=True):
            raise ConfigurationError("Nothing was sent.")


def _show(report: Report, output: Format, *, is_detailed: bool) -> None:
    match output:
        case Format.JSON:
            print(reports.as_json(report))
        case Format.JUNIT:
            print(reports.as_junit(report))
        case Format.MARKDOWN:
            print(reports.as_markdown(report), end="")
        case Format.TABLE:
            _show_table(report, is_detailed=is_detailed)


def _show_table(report: Report, *, is_detailed: bool) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("verdict", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("what was seen")
    for verdict, name, reason in _rows(report):
        table.add_row(Text(verdict, COLOURS[verdict]), name, Text(safe(reason)))
    for missing in report.not_run:
        table.add_row(Text("not run", "dim"), Text(missing.check.name, "dim"), Text(safe(missing.reason), "dim"))
    put(table)
    console = Console(highlight=False, soft_wrap=True)
    for each in report.findings:
        if is_detailed or each.verdict is Verdict.FAIL:
            console.print()
            console.print(Text.assemble((each.verdict, COLOURS[each.verdict]), " ", (each.check.name, "bold")))
            for name, text in (
                ("seen", each.reason),
                ("rule", each.check.rule),
                ("why", each.check.why),
                ("sent", each.sent if is_detailed else ""),
                ("received", each.received if is_detailed else ""),
                ("repeat", each.curl),
            ):
                for number, line in enumerate(text.splitlines()):
                    console.print(Text.assemble((f"  {name if not number else '':<9}", "dim"), safe(line)))
    console.print()
    colour = COLOURS[report.verdict]
    console.print(f"[{colour}]{report.verdict}[/]: {reports.summary(report)}; profile {report.profile};", end=" ")
    console.print(f"{escape(safe(report.evidence))}.")


def _rows(report: Report) -> Iterator[tuple[Verdict, str, str]]:
    """Yield a row for each check; two for many that are inconclusive for the same reason."""
    counted = Counter(each.reason for each in report.findings if each.verdict is Verdict.INCONCLUSIVE)
    told: set[str] = set()
    for each in report.findings:
        if each.verdict is not Verdict.INCONCLUSIVE or counted[each.reason] <= MAX_ALIKE:
            yield each.verdict, each.check.name, each.reason
        elif each.reason not in told:
            told.add(each.reason)
            yield each.verdict, each.check.name, each.reason
            yield each.verdict, f"and {counted[each.reason] - 1} more", "For the same reason."


def _list() -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("check", no_wrap=True)
    table.add_column("rule")
    for each in runner.CHECKS:
        table.add_row(each.name, Text(each.rule))
    put(table)


def _noun(path: str) -> str:
    """Return what a path such as ``/v1/payments`` makes, as its last plural says."""
    words = [each for each in path.partition("?")[0].split("/") if each.isascii() and each.isalpha()]
    return words[-1] if words and words[-1].endswith("s") else "operations"


def _interval(rate: float | None, *, is_local: bool) -> float:
    if rate is None:
        return 0.0 if is_local else 1 / POLITE_RATE
    if not math.isfinite(rate):
        raise ConfigurationError("--rate is a number of requests in a second.")
    return 1 / rate


def _seconds(text: str) -> float:
    return duration(text).total_seconds()
