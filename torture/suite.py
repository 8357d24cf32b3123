"""The scenarios of ``make torture``, in the order in which they are run. Add yours here."""

from __future__ import annotations

from dataclasses import replace

from torture.accepted import Accepted
from torture.duels import TEN_YEARS_SECONDS, Planted, Rivals
from torture.failover import ChainedFailOvers, FailOvers, LossyFailOvers, Outliving, StrictFailOvers
from torture.forwarded import KilledProxies
from torture.instant import InstantTakeOver
from torture.lines import KillAtLines
from torture.lost_commits import LostCommits
from torture.messages import MessageLines, Messages, PlantedMessages
from torture.proxied import ProxiedFailOvers
from torture.restarts import RedisRestarts, Restarts
from torture.scenario import Outcome, Plan, Scenario, Worlds
from torture.split_brain import SplitBrain
from torture.zombies import Zombies


class StrangeClocks:
    """The workers' clocks are off by ten years, either way, while they are killed: it changes nothing."""

    name = "clock off by ten years, kill -9"
    minimum = 200
    #: A sample of the lines: what matters is that every operation ends well with such a clock.
    stride = 37

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Kill with a clock that is ahead, and with one that is behind."""
        outcome = Outcome(0)
        for seconds in (TEN_YEARS_SECONDS, -TEN_YEARS_SECONDS):
            sample = replace(plan, stride=self.stride * plan.stride, tell=lambda _: None)
            outcome += KillAtLines(clock_seconds=seconds).run(worlds, sample)
            plan.tell(f"  {self.name}: {seconds:+.0f} s: {outcome.reached} points reached so far")
        return outcome


SCENARIOS: tuple[Scenario, ...] = (
    *(Planted(), KillAtLines(), Rivals(), StrangeClocks()),
    *(Zombies(), LostCommits(), Restarts(), InstantTakeOver()),
    *(FailOvers(), LossyFailOvers(), Outliving()),
    *(ProxiedFailOvers(), ChainedFailOvers(), StrictFailOvers()),
    *(RedisRestarts(), SplitBrain(), Accepted(), KilledProxies()),
    *(PlantedMessages(), Messages(), MessageLines()),
)
