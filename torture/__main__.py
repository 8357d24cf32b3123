"""The command line: ``python -m torture`` runs every scenario; ``--only`` some of them, ``--stride`` a part of each."""

from __future__ import annotations

import argparse
import sys
import time

from torture.report import is_good, sights, table, troubles, versions
from torture.scenario import Outcome, Plan, Scenario, worlds
from torture.suite import SCENARIOS


def main() -> None:
    """Run the chosen scenarios; exit with 1 unless all counts are zero and enough faults were reached."""
    asked = _parser().parse_args()
    plan = Plan(asked.seed, asked.stride, asked.line, lambda line: print(line, flush=True))
    chosen = [each for each in SCENARIOS if not asked.only or asked.only in each.name]
    if not chosen:
        raise SystemExit(f"No such scenario. There are: {', '.join(each.name for each in SCENARIOS)}.")
    outcomes: dict[Scenario, Outcome] = {}
    began = time.monotonic()
    with worlds() as given:
        print(f"{versions(given.server.version)}\nseed {plan.seed}, stride {plan.stride}", flush=True)
        for scenario in chosen:
            print(scenario.name, flush=True)
            outcomes[scenario] = scenario.run(given, plan)
            print(f"  seen: {sights(outcomes[scenario])}; {time.monotonic() - began:.0f} s so far", flush=True)
    print(f"\n{table(outcomes, plan)}\n{troubles(outcomes, plan)}")
    sys.exit(not all(is_good(scenario, outcome, plan) for scenario, outcome in outcomes.items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torture", description="Break Semel on purpose, and count.")
    parser.add_argument("--seed", type=int, default=1, help="of every random choice; the same seed makes the same run")
    parser.add_argument("--stride", type=int, default=1, help="try only every n-th fault point")
    parser.add_argument(
        "--line", type=int, default=0, help="try this fault point only: a key in the report ends with it"
    )
    parser.add_argument("--only", metavar="WORDS", help="the scenarios with these words in their name")
    return parser


if __name__ == "__main__":
    main()
