"""The referee: counts and judges by the clients' answers and the provider's log. It never asks Semel."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    """How one request ended, as its client saw it."""

    PAID = "paid"
    CONFLICT = "conflict"  #: 409: the first is still running
    REFUSED = "refused"  #: any other 4xx, which no well-behaved client should see
    FAILED = "failed"  #: 5xx
    LOST = "lost"  #: the connection broke
    HUNG_UP = "hung up"  #: the client did not wait


@dataclass(frozen=True, slots=True)
class Heard:
    """One request of the storm, and its answer."""

    order: str
    outcome: Outcome
    answer: bytes = b""
    is_replay: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The faults, by order. Empty is good."""

    #: Charged more than once.
    doubled: frozenset[str]
    #: Answered, but the charge that the answer names was never made.
    uncharged: frozenset[str]
    #: Given two answers that are not the same bytes.
    contradicted: frozenset[str]
    #: How many payments were checked.
    answered: int

    @property
    def is_good(self) -> bool:
        """Whether each was charged once and got the same answer each time. With no payments nothing is proven."""
        return self.answered > 0 and not (self.doubled or self.uncharged or self.contradicted)


class Referee:
    """Takes the clients' answers, and reads the provider's log."""

    def __init__(self, log: Path) -> None:
        """Read the provider's *log*; it may not be there yet."""
        self._log = log
        self._read_bytes = 0
        self._answers: dict[str, set[bytes]] = defaultdict(set)
        self._charges: dict[str, set[str]] = defaultdict(set)
        self._orders: set[str] = set()
        self.outcomes: Counter[Outcome] = Counter()
        self.replays = 0
        self.take_overs = 0
        #: Calls that the provider knew already: a payment was run again after its charge had been made.
        self.repeated_calls = 0
        #: Charges for orders that are not from the storm: a person sent them by hand.
        self.other_charges = 0

    def expect(self, order: str) -> None:
        """Note that a client is about to pay for *order*."""
        self._orders.add(order)

    def hear(self, heard: Heard) -> None:
        """Note a client's answer."""
        self.outcomes[heard.outcome] += 1
        self.replays += heard.is_replay
        if heard.outcome is Outcome.PAID:
            answers = self._answers[heard.order]
            if not answers:
                self.take_overs += json.loads(heard.answer)["attempt"] > 1
            answers.add(heard.answer)

    def read_log(self) -> None:
        """Read what the provider has written since."""
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._read_bytes)
            *lines, rest = log.read().split(b"\n")
            self._read_bytes = log.tell() - len(rest)
        for line in lines:
            call = json.loads(line)
            if call["order"] not in self._orders:
                self.other_charges += call["is_new"]
                continue
            self._charges[call["order"]].add(call["charge"])
            self.repeated_calls += not call["is_new"]

    @property
    def payments(self) -> int:
        """How many orders were to be paid for."""
        return len(self._orders)

    @property
    def requests(self) -> int:
        """How many requests were sent for them."""
        return self.outcomes.total()

    @property
    def answered(self) -> int:
        """How many payments got an answer."""
        return len(self._answers)

    @property
    def charges(self) -> int:
        """How many charges were made for them."""
        return sum(map(len, self._charges.values()))

    @property
    def double_charges(self) -> int:
        """How many charges were one too many."""
        return sum(len(charges) - 1 for charges in self._charges.values())

    def verdict(self) -> Verdict:
        """Judge."""
        return Verdict(
            doubled=frozenset(order for order, charges in self._charges.items() if len(charges) > 1),
            uncharged=frozenset(
                order for order, answers in self._answers.items() if not self._is_covered(order, answers)
            ),
            contradicted=frozenset(order for order, answers in self._answers.items() if len(answers) > 1),
            answered=self.answered,
        )

    def _is_covered(self, order: str, answers: set[bytes]) -> bool:
        named = {json.loads(answer)["charge"] for answer in answers}
        return named <= self._charges.get(order, set())
