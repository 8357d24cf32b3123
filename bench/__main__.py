"""The command line: ``python -m bench`` measures, ``calls`` counts, ``profile`` shows where the time goes. What is
typed is checked here; nothing is done here.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from bench import calls, console, growth, layout, messages, partitions, proxy, scale, sending, telemetry
from bench.cases import CASES, EXTRAS, NAMES, QUICK, Plan, StoreKind
from bench.load import LoadFailed
from bench.measure import measure
from bench.profiling import profile
from bench.report import as_json
from bench.table import NoReport, comparison, read_facts, table

ALL = (*NAMES, *EXTRAS)
STORES: tuple[StoreKind, ...] = get_args(StoreKind)
GIVEN = ("rounds", "seconds", "connections", "sender", "pins")


def main() -> None:
    """Run the chosen command."""
    asked = _parser().parse_args()
    try:
        asked.do(asked)
    except (LoadFailed, NoReport) as error:
        sys.exit(f"bench: {error}")


def _measure(asked: argparse.Namespace) -> None:
    if asked.compare:
        read_facts(asked.compare)  # before minutes are spent
    report = measure(_plan(asked))
    if asked.json:
        print(as_json(report))
        return
    print(table(report))
    if asked.save:
        asked.save.write_text(as_json(report))
    if asked.compare:
        print(comparison(report, asked.compare))


def _calls(asked: argparse.Namespace) -> None:
    rows = calls.count(asked.stores)
    print(calls.as_json(rows) if asked.json else calls.listed(rows, with_functions=asked.functions))


def _messages(asked: argparse.Namespace) -> None:
    facts = messages.measure_messages()
    print(messages.as_json(facts) if asked.json else messages.listed(facts))


def _client(asked: argparse.Namespace) -> None:
    rows = sending.measure_client()
    print(sending.as_json(rows) if asked.json else sending.listed(rows))


def _proxy(asked: argparse.Namespace) -> None:
    facts = proxy.measure_proxy()
    print(proxy.as_json(facts) if asked.json else proxy.listed(facts))


def _telemetry(asked: argparse.Namespace) -> None:
    rows = telemetry.measure_telemetry()
    print(telemetry.as_json(rows) if asked.json else telemetry.listed(rows))


def _console(asked: argparse.Namespace) -> None:
    found = console.measure_console(asked.rows, asked.stores)
    print(console.as_json(found, asked.rows) if asked.json else console.listed(found, asked.rows))


def _growth(asked: argparse.Namespace) -> None:
    found = growth.Growth([], [])
    for name in asked.store:
        part = growth.measure_growth(asked.rows or growth.SIZES[name], [name], asked.dead)
        found.costs += part.costs
        found.sizes += part.sizes
    print(growth.as_json(found) if asked.json else growth.listed(found))


def _layout(asked: argparse.Namespace) -> None:
    found = layout.measure_layout()
    print(layout.as_json(found) if asked.json else layout.listed(found))


def _partitions(asked: argparse.Namespace) -> None:
    found = partitions.measure_partitions()
    print(partitions.as_json(found) if asked.json else partitions.listed(found))


def _scale(asked: argparse.Namespace) -> None:
    found = scale.measure_scale(asked.processes, asked.options)
    print(scale.as_json(found) if asked.json else scale.listed(found))


def _profile(asked: argparse.Namespace) -> None:
    print(profile(NAMES[asked.case], seconds=asked.seconds))


def _plan(asked: argparse.Namespace) -> Plan:
    plan = QUICK if asked.quick else Plan()
    given = {name: getattr(asked, name) for name in GIVEN if getattr(asked, name) is not None}
    plan = dataclasses.replace(plan, **given)
    if asked.only is None:
        return plan
    wanted = set(asked.only)
    # With those that they are compared with.
    wanted |= {NAMES[name].baseline for name in wanted & NAMES.keys()}
    cases = tuple(case for case in CASES if case.name in wanted)
    return dataclasses.replace(plan, cases=cases, extras=tuple(extra for extra in EXTRAS if extra in wanted))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure what Semel costs, on this machine.")
    parser.set_defaults(do=_measure)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, in about two minutes")
    parser.add_argument("--only", type=_some_of(ALL), metavar="CASES", help=f"some of {','.join(ALL)}")
    parser.add_argument("--rounds", type=_at_least(int, 1), help="how often all cases are gone through")
    parser.add_argument("--seconds", type=_at_least(float, 0.1), help="how long each case runs in each round")
    parser.add_argument("--connections", type=_at_least(int, 1), help="how many send at the same time")
    parser.add_argument("--load", dest="sender", choices=["auto", "wrk", "own"], help="what sends the requests")
    parser.add_argument("--no-pin", dest="pins", action="store_false", default=None, help="let all use all cores")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON to a file, beside the table")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="set this run beside one that was saved")
    commands = parser.add_subparsers(title="instead of measuring")
    counting = commands.add_parser("calls", help="count calls, files, objects and tasks of one request")
    counting.set_defaults(do=_calls)
    counting.add_argument("--stores", type=_some_of(STORES), default=["PostgreSQL"], help=f"some of {','.join(STORES)}")
    counting.add_argument("--functions", action="store_true", help="list every function, too")
    counting.add_argument("--json", action="store_true", help="print JSON in place of the table")
    telling = commands.add_parser("messages", help="measure the outbox and its relay, in some minutes")
    telling.set_defaults(do=_messages)
    telling.add_argument("--json", action="store_true", help="print JSON in place of the lines")
    calling = commands.add_parser("client", help="measure what the client adds to a request, in some seconds")
    calling.set_defaults(do=_client)
    calling.add_argument("--json", action="store_true", help="print JSON in place of the lines")
    forwarding = commands.add_parser("proxy", help="measure the proxy against its bare upstream, in seconds")
    forwarding.set_defaults(do=_proxy)
    forwarding.add_argument("--json", action="store_true", help="print JSON in place of the lines")
    telling_of = commands.add_parser("telemetry", help="measure what metrics and traces add to a request, in seconds")
    telling_of.set_defaults(do=_telemetry)
    telling_of.add_argument("--json", action="store_true", help="print JSON in place of the table")
    looking = commands.add_parser("console", help="measure each page of the console on a large table")
    looking.set_defaults(do=_console)
    looking.add_argument("--rows", type=_at_least(int, 1000), default=1_000_000, help="how many; a million unless told")
    looking.add_argument("--stores", type=_some_of(console.STORES), default=list(console.STORES))
    looking.add_argument("--json", action="store_true", help="print JSON in place of the lines")
    _add_growing(commands)
    profiling = commands.add_parser("profile", help="show in which functions a server spends its time")
    profiling.set_defaults(do=_profile)
    profiling.add_argument("case", choices=NAMES)
    profiling.add_argument("--seconds", type=_at_least(float, 0.1), default=10.0)
    return parser


def _add_growing(commands: Any) -> None:
    """Add what is about large tables and many processes."""
    growing = commands.add_parser("growth", help="measure every operation as the table grows, in minutes")
    growing.set_defaults(do=_growth)
    growing.add_argument("--rows", type=_numbers, help="how many, with commas between; 10000,1000000,10000000")
    growing.add_argument("--store", type=_some_of(growth.STORES), default=["postgres"], help="postgres, sqlite, redis")
    growing.add_argument("--dead", type=_at_least(int, 0), default=0, help="dead rows that an open transaction keeps")
    growing.add_argument("--json", action="store_true", help="print JSON in place of the table")
    laying = commands.add_parser("layout", help="measure what a key takes on PostgreSQL, by the fillfactor")
    laying.set_defaults(do=_layout)
    laying.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parting = commands.add_parser("partitions", help="measure PostgreSQL's two layouts, and hash partitions")
    parting.set_defaults(do=_partitions)
    parting.add_argument("--json", action="store_true", help="print JSON in place of the table")
    scaling = commands.add_parser("scale", help="measure one PostgreSQL under 1, 2, 4 and 8 worker processes")
    scaling.set_defaults(do=_scale)
    scaling.add_argument("--processes", type=_counts, default=list(scale.PROCESSES), help="how many, with commas")
    scaling.add_argument("--options", default="", metavar="QUERY", help="for the store's URL, as connections=2")
    scaling.add_argument("--json", action="store_true", help="print JSON in place of the table")


def _some_of(names: tuple[str, ...]) -> Callable[[str], list[str]]:
    def read(typed: str) -> list[str]:
        wanted = typed.split(",")
        if strange := [name for name in wanted if name not in names]:
            raise argparse.ArgumentTypeError(f"no such thing: {', '.join(strange)}. There are: {', '.join(names)}.")
        return wanted

    return read


def _numbers(typed: str) -> list[int]:
    return [int(_at_least(int, 1000)(each)) for each in typed.split(",")]


def _counts(typed: str) -> list[int]:
    return [int(_at_least(int, 1)(each)) for each in typed.split(",")]


def _at_least(kind: type[int | float], least: float) -> Callable[[str], float]:
    def read(typed: str) -> float:
        try:
            number = kind(typed)
        except ValueError:
            number = None
        if number is None or not number >= least:
            raise argparse.ArgumentTypeError(f"{typed!r} is not a number of {least:g} or more.")
        return number

    return read


if __name__ == "__main__":
    main()
