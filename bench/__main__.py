"""The command line: ``python -m bench`` measures; ``python -m bench profile CASE`` shows where the time goes."""

from __future__ import annotations

import argparse
import dataclasses

from bench.cases import CASES, EXTRAS, QUICK, Plan
from bench.measure import measure
from bench.profiling import profile
from bench.report import as_json, table

NAMES = {case.name: case for case in CASES}
ALL = (*NAMES, *EXTRAS)


def main() -> None:
    """Do what was typed."""
    asked = _parser().parse_args()
    if asked.what == "profile":
        print(profile(NAMES[asked.case], seconds=asked.seconds))
        return
    report = measure(_plan(asked))
    print(as_json(report) if asked.json else table(report))


def _plan(asked: argparse.Namespace) -> Plan:
    plan = QUICK if asked.quick else Plan()
    given = {name: getattr(asked, name) for name in ("rounds", "seconds", "sender") if getattr(asked, name) is not None}
    return dataclasses.replace(_chosen(plan, asked.only), **given)


def _chosen(plan: Plan, only: str | None) -> Plan:
    """Choose the cases, and those they are compared with."""
    if only is None:
        return plan
    wanted = set(only.split(","))
    if strange := wanted - {*ALL}:
        raise SystemExit(f"No such case: {', '.join(sorted(strange))}. There are: {', '.join(ALL)}.")
    wanted |= {NAMES[name].baseline for name in wanted & NAMES.keys()}
    cases = tuple(case for case in CASES if case.name in wanted)
    return dataclasses.replace(plan, cases=cases, extras=tuple(extra for extra in EXTRAS if extra in wanted))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure what Semel costs, on this machine.")
    parser.set_defaults(what="measure")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, for a first look")
    parser.add_argument("--seconds", type=float, help="how long each case runs in each round")
    parser.add_argument("--rounds", type=int, help="how often all cases are gone through")
    parser.add_argument("--only", metavar="CASES", help=f"some of {','.join(ALL)}")
    parser.add_argument("--load", dest="sender", choices=["auto", "wrk", "own"], help="who sends the requests")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    commands = parser.add_subparsers(title="instead of measuring")
    profiling = commands.add_parser("profile", help="show in which functions a server spends its time")
    profiling.set_defaults(what="profile")
    profiling.add_argument("case", choices=NAMES)
    profiling.add_argument("--seconds", type=float, default=10.0)
    return parser


if __name__ == "__main__":
    main()
