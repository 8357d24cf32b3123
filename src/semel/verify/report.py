"""A report for programs and for pages: JSON, JUnit's XML, Markdown. The table for a terminal is the command line's."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

from semel.verify.model import Finding, Report, Verdict

MARKS = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.INCONCLUSIVE: "❔"}
#: What XML 1.0 can't hold, not even escaped.
_NOT_IN_XML = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 0xFFFE, 0xFFFF, *range(0xD800, 0xE000)), "?")


def as_json(report: Report) -> str:
    """Return the report as JSON: ``checks`` has an object for each check that was run."""
    facts = {
        "url": report.url,
        "profile": report.profile,
        "verdict": report.verdict,
        "evidence": report.evidence,
        "counts": {str(each): report.count(each) for each in Verdict},
        "checks": [_facts(each) for each in report.findings],
        "not_run": [{"name": each.check.name, "rule": each.check.rule, "why": each.reason} for each in report.not_run],
    }
    return json.dumps(facts, indent=2, ensure_ascii=False)


def as_junit(report: Report) -> str:
    """Return the report as JUnit's XML: inconclusive is an error, and what was not run is skipped."""
    suite = ET.Element(
        "testsuite",
        name=f"semel verify {_xml(report.url)} ({report.profile})",
        tests=str(len(report.findings) + len(report.not_run)),
        failures=str(report.count(Verdict.FAIL)),
        errors=str(report.count(Verdict.INCONCLUSIVE)),
        skipped=str(len(report.not_run)),
    )
    for finding in report.findings:
        case = ET.SubElement(suite, "testcase", classname="semel.verify", name=finding.check.name)
        if finding.verdict is not Verdict.PASS:
            kind = "failure" if finding.verdict is Verdict.FAIL else "error"
            told = ET.SubElement(case, kind, message=_xml(finding.reason), type=finding.verdict)
            told.text = _xml(_details(finding))
    for each in report.not_run:
        case = ET.SubElement(suite, "testcase", classname="semel.verify", name=each.check.name)
        ET.SubElement(case, "skipped", message=_xml(each.reason))
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suites, encoding="unicode")


def as_markdown(report: Report) -> str:
    """Return the report as a page: a table of all checks, and the details of those that have not passed."""
    lines = [
        f"# {MARKS[report.verdict]} {_cell(report.url)}",
        "",
        f"{summary(report)}. Profile `{report.profile}`; {_cell(report.evidence)}.",
        "",
        "| | check | what was seen |",
        "|---|---|---|",
        *(f"| {MARKS[each.verdict]} | `{each.check.name}` | {_cell(each.reason)} |" for each in report.findings),
        *(f"| – | `{each.check.name}` | Not run: {_cell(each.reason)} |" for each in report.not_run),
    ]
    for finding in report.findings:
        if finding.verdict is not Verdict.PASS:
            fence = "~" * 4
            title = f"## {MARKS[finding.verdict]} {finding.check.name}"
            lines += ["", title, "", f"{fence}text", _details(finding), fence]
    return "\n".join(lines) + "\n"


def summary(report: Report) -> str:
    """Say in a line what came of it."""
    counted = [f"{report.count(each)} {word}" for each, word in _WORDS.items()]
    return ", ".join([*counted, f"{len(report.not_run)} not run"])


_WORDS = {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.INCONCLUSIVE: "inconclusive"}


def _facts(finding: Finding) -> dict[str, str]:
    return {
        "name": finding.check.name,
        "verdict": finding.verdict,
        "rule": finding.check.rule,
        "sent": finding.sent,
        "received": finding.received,
        "why": f"{finding.reason} {finding.check.why}",
        "reason": finding.reason,
        "curl": finding.curl,
    }


def _details(finding: Finding) -> str:
    facts = _facts(finding)
    names = ("rule", "why", "sent", "received", "curl")
    return "\n".join(f"{name}: {facts[name]}" for name in names if facts[name])


def _xml(text: str) -> str:
    return text.translate(_NOT_IN_XML)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
