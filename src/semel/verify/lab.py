"""What an experiment works with: it sends, counts effects, and writes down what was found. No rule is known here.

Every request that is sent is recorded, so that a finding can tell what it rests on.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from uuid import uuid4

from semel.core.text import safe
from semel.verify.connection import Client
from semel.verify.counting import Counter, CountFailed
from semel.verify.message import Answer, NoAnswer, Outcome, Request
from semel.verify.model import Check, Finding, KeyHeader, NotRun, Profile, Undecided, Verdict
from semel.verify.telling import Step, Teller
from semel.verify.variants import others

TOO_MANY = 429
BUSY = 409
#: What a request that is told to come back later waits at most.
MAX_PAUSE = 5.0
#: Between two looks at an operation that is not finished.
POLL_SECONDS = (0.05, 1.0)
UUID_LENGTH = 36
#: How long the counter is watched for effects that come late, as a multiple of the time to settle, and at most.
LATE_FACTOR = 10
MAX_LATE = 1.0
#: How long the counter may take to rise with the very first effect.
MAX_LAG = 5.0
#: How much longer than the slowest effect so far the next may take.
LAG_MARGIN = 2.0
#: How many other bodies are tried until one is accepted.
MAX_TRIED = 4

DETERMINISTIC = (
    "Two operations with two keys get the same answer, so no answer shows whether it ran again. "
    "Give --count, or answer with a field that varies, such as an id."
)

_ID = re.compile(r"(?:^|.*[_-])(?:id|uuid|guid|number|no|ref|reference)$|.*[a-z](?:Id|ID|Uuid|Number|Ref)$")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the person who verifies has given."""

    profile: Profile
    key_header: KeyHeader = field(default_factory=KeyHeader)
    #: Headers of a second principal, in place of those of the same names.
    other: tuple[tuple[str, str], ...] = ()
    #: Whether the letter of RFC 9651 is asked for.
    is_strict: bool = False
    #: Whether PUT and PATCH may be sent where a POST was given: they may replace what is there.
    may_replace: bool = False
    restart_cmd: str | None = None
    #: Whether what it restarts is behind a gateway, which goes on.
    is_behind_gateway: bool = False
    #: A request for another operation of the same kind, and one that the handler answers with an error.
    other_request: Request | None = None
    failing: Request | None = None
    #: Seconds between the end of a request and the reading of the counter, or more if effects are seen to take longer.
    settle: float = 0.05
    #: Seconds after which an operation that is still "in progress" is stuck: without a crash, and after one.
    patience: float = 15.0
    recovery: float = 45.0
    #: Seconds between two requests.
    interval: float = 0.0


@dataclass(frozen=True, slots=True)
class Watch:
    """The counter before an experiment; None if there is no counter."""

    before: int | None


@dataclass(frozen=True, slots=True)
class Runs:
    """How often the operation took effect, and how that is known."""

    count: int
    how: str


@dataclass(frozen=True, slots=True)
class Early:
    """An operation that was finished early in a run: its answer, that to its first retry, and when that was."""

    request: Request
    first: Answer
    retry: Answer
    at: float


class Lab:
    """One server, one request, and what has been found out about both."""

    def __init__(
        self, client: Client, request: Request, settings: Settings, counter: Counter | None, teller: Teller
    ) -> None:
        self.client = client
        self.request = request
        self.settings = settings
        self.profile = settings.profile
        self.findings: list[Finding] = []
        self.not_run: list[NotRun] = []
        #: How much the counter rises with one effect.
        self.rise = 1
        #: Why nothing that looks right in this experiment proves anything. What looks wrong is wrong all the same.
        self.doubt: str | None = None
        #: Seconds that the handler takes.
        self.latency = 0.0
        self._counter = counter
        self._teller = teller
        self._steps: list[Step] = []
        self._varying: tuple[str, ...] | None = None
        self._is_located = False
        self._is_compared = False
        self._sent_at = 0.0
        #: Seconds from an answer until the counter shows its effect, where that is longer than the time to settle.
        self._lag = 0.0
        #: When the last answer came; and what the counter said since then, if it was read.
        self.heard_at = 0.0
        self._said: int | None = None
        #: By how much the counter has changed while nothing was sent.
        self.strays: list[int] = []
        self._other = settings.other_request
        #: An operation that was finished early in the run.
        self.early: Early | None = None
        teller.learn(request)
        teller.learn(request.having(*settings.other))

    # Keys

    def new_key(self) -> str:
        """Return a fresh key: a UUID where it fits, with a letter in it."""
        key = f"a{str(uuid4())[1:]}"
        return key if self.settings.key_header.max_length >= UUID_LENGTH else key.replace("-", "")

    def spelled(self, key: str) -> str:
        """Return *key* as the profile writes it in a header."""
        return f'"{key}"' if self.profile.is_quoted else key

    def keyed(self, key: str, request: Request | None = None) -> Request:
        """Return *request*, or else the given one, with *key*."""
        return self.raw(self.spelled(key), request)

    def raw(self, value: str, request: Request | None = None) -> Request:
        """Return *request*, or else the given one, with this very *value* in the header of the key."""
        return (request or self.request).having((self.settings.key_header.name, value))

    def is_secret(self, name: str) -> bool:
        """Whether the header *name* holds a credential."""
        return self._teller.is_secret(name)

    def quoted(self, answer: Answer) -> str:
        """Return what *answer* says in words, without credentials."""
        return self._teller.quoted(answer)

    # Sending

    async def send(self, request: Request) -> Outcome:
        """Send *request*. One that is told that there are too many is sent once more, later."""
        outcome = await self._sent(request)
        self._record(Step((request,), (outcome,)))
        return outcome

    async def answered(self, request: Request) -> Answer:
        """Send *request*, and return its answer; without one, nothing is decided."""
        outcome = await self.send(request)
        if isinstance(outcome, NoAnswer):
            raise Undecided(f"There is no answer: {outcome.reason}.")
        if outcome.status == TOO_MANY:
            raise Undecided("The server limits the rate of requests (429). Give a lower --rate.")
        return outcome

    async def first(self, request: Request) -> Answer:
        """Send *request* for the first time; it must succeed, or nothing can be seen by it."""
        answer = await self.answered(request)
        if not answer.is_success:
            raise Undecided(f"A request with a new key is answered with {answer.status}.")
        return answer

    async def race(self, requests: Sequence[Request], delays: list[float] | None = None) -> list[Outcome]:
        """Send *requests* at once, each on a connection of its own, with the last byte held back."""
        await self._pace()
        outcomes = await self.client.race(list(requests), delays)
        self._record(Step(tuple(requests), tuple(outcomes), is_race=True))
        return outcomes

    async def leave(self, request: Request, *, is_whole: bool) -> None:
        """Send *request*, all of it or all but its last byte, and hang up."""
        await self._pace()
        after = min(self.latency / 3, 1.0) if is_whole else self.settings.settle
        outcome = await self.client.leave(request, after=after, is_whole=is_whole)
        self._record(Step((request,), (outcome,), note=outcome.reason))

    async def finished(self, request: Request, patience: float) -> Outcome:
        """Send *request* until it is not told any more that its operation is in progress, or *patience* is over."""
        pause, deadline = POLL_SECONDS[0], time.monotonic() + patience
        while True:
            outcome = await self.client.send(request)
            if not _is_later(outcome) or time.monotonic() > deadline:
                break
            await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0.01)))
            pause = min(2 * pause, POLL_SECONDS[1])
        self._record(
            Step(
                (request,),
                (outcome,),
                note=f"repeated while it is answered with 409 or not at all, for up to {patience:g} s",
            )
        )
        return outcome

    def note(self, text: str) -> None:
        """Record that something happened between two requests."""
        self._record(Step((), (), note=text))

    def record(self, step: Step) -> None:
        """Record a step that an experiment has made by itself."""
        self._record(step)

    # Effects

    async def watch(self) -> Watch:
        """Read the counter before something is sent, and after what was sent before has had its effect."""
        if self._counter is None:
            return Watch(None)
        said = self._said
        await asyncio.sleep(max(self.heard_at + LAG_MARGIN * self._lag - time.monotonic(), 0) if self._lag else 0)
        now = await self._read()
        if said is not None and now != said:
            self.strays.append(now - said)
        return Watch(now)

    async def runs(self, watch: Watch, answers: Sequence[Outcome], expected: int) -> Runs:
        """Say how often the operation took effect since *watch*. Without a counter, by what the *answers* name."""
        if watch.before is not None and self._counter is not None:
            count = await self._risen(watch.before)
            if count != expected:
                # It may still move: an effect that is late, or one of other traffic.
                again = await self._risen(watch.before)
                if again != count:
                    self.strays.append((again - count) * self.rise)
                    raise Undecided(f"The counter {self._counter.name} moves while nothing is sent.")
            return Runs(count, f"the counter rose by {count * self.rise}")
        successes = [each for each in answers if isinstance(each, Answer) and each.is_success]
        identities = {self.identity(each) for each in successes}
        return Runs(len(identities), f"{self._compared()}: {len(identities)} different among {len(successes)}")

    def identity(self, answer: Answer) -> object:
        """Return what tells the operation of *answer* from others."""
        if self._varying is None:
            raise Undecided(DETERMINISTIC)
        if self._is_located:
            return answer.header("location")
        if self._varying:
            leaves = dict(_leaves(answer.json()))
            return tuple(leaves.get(path) for path in self._varying)
        return answer.body

    def is_same(self, one: Answer, other: Answer) -> bool | None:
        """Whether two successes name one operation; None if answers name none."""
        return None if self._varying is None else self.identity(one) == self.identity(other)

    @property
    def url(self) -> str:
        """What is verified, for the report."""
        return self._teller.clean(f"{self._teller.base}{self.request.target}")

    @property
    def has_counter(self) -> bool:
        """Whether effects are counted."""
        return self._counter is not None

    @property
    def evidence(self) -> str:
        """How effects are counted, for the report."""
        if self._counter is not None:
            return f"effects are counted by {self._counter.name}"
        if not self._is_compared:
            return "no counter"
        if self._varying is None:
            return "no counter, and answers do not vary: effects can't be seen"
        return f"no counter: {self._compared()}, so effects that no answer names are not seen"

    def compare(self, one: Answer, other: Answer) -> None:
        """Learn from the answers to two operations what tells one from the other."""
        self._is_compared = True
        places = one.header("location"), other.header("location")
        if places[0] != places[1] and all(places):
            self._varying, self._is_located = (), True
            return
        if one.body == other.body:
            return
        mine, others = dict(_leaves(one.json())), dict(_leaves(other.json()))
        varying = tuple(path for path in mine if path in others and mine[path] != others[path])
        named = tuple(path for path in varying if _ID.fullmatch(path.rpartition(".")[2]))
        self._varying = named or varying

    async def learn_rise(self, watch: Watch) -> int:
        """Return how much the counter has risen since *watch*, and learn how long that takes."""
        if watch.before is None:
            return 0
        answered = time.monotonic()
        deadline = answered + min(self.settings.patience, MAX_LAG)
        await asyncio.sleep(self.settings.settle)
        while (now := await self._read()) == watch.before and time.monotonic() < deadline:
            await asyncio.sleep(self.settings.settle)
            self._lag = time.monotonic() - answered
        return now - watch.before

    async def learn_lag(self, since: float) -> None:
        """See whether something comes late, of what was answered *since* then."""
        said = await self._read()
        while time.monotonic() < self.heard_at + self._late:
            await asyncio.sleep(self.settings.settle)
            if (now := await self._read()) != said:
                said = now
                late = time.monotonic() - since
                if late > LAG_MARGIN * self.settings.settle:
                    self._lag = max(self._lag, late)

    async def reconcile(self) -> None:
        """Look once more at the counter, after all: nothing may have come late that no check has counted."""
        if self._counter is None:
            return
        if self._said is None:
            await asyncio.sleep(self._wait)
            await self._read()
        await asyncio.sleep(self._late)
        await self.watch()

    async def must_be_still(self) -> None:
        """Go on only if the counter stays as it is while nothing is sent."""
        if self._counter is None:
            return
        before = await self._read()
        await asyncio.sleep(self.settings.settle)
        if await self._read() != before:
            raise Undecided("The counter moves while nothing is sent: there is other traffic.")

    @property
    def _wait(self) -> float:
        """Seconds from an answer until its effect was counted."""
        return self.settings.settle + LAG_MARGIN * self._lag

    @property
    def _late(self) -> float:
        """Seconds after which nothing comes any more, of what is late."""
        return max(self._wait, min(LATE_FACTOR * self.settings.settle, MAX_LATE))

    async def other(self) -> Request:
        """Return a request for another operation of the same kind, which the API has accepted once."""
        if self._other is None:
            tried = []
            for each in islice(others(self.request), MAX_TRIED):
                answer = await self._sent(self.keyed(self.new_key(), each))
                if isinstance(answer, NoAnswer):
                    raise Undecided(f"There is no answer to another body: {answer.reason}.")
                if answer.is_success:
                    self._other = each
                    return each
                tried.append(answer.status)
            if not tried:
                raise Undecided("The request has no body that could be changed.")
            raise Undecided(
                f"No other body was accepted (tried {len(tried)}, got {tried[0]}). Give one with --other-request."
            )
        return self._other

    # Findings

    def passed(self, check: Check, reason: str) -> None:
        """Write down that *check* has passed; or that it can't be decided, where what was seen proves nothing."""
        if self.doubt is not None:
            self._find(check, Verdict.INCONCLUSIVE, self.doubt)
        else:
            self._find(check, Verdict.PASS, reason)

    def failed(self, check: Check, reason: str) -> None:
        """Write down that *check* has failed."""
        self._find(check, Verdict.FAIL, reason)

    def undecided(self, check: Check, reason: str) -> None:
        """Write down that *check* could not be decided."""
        self._find(check, Verdict.INCONCLUSIVE, reason)

    def judge(self, check: Check, *, ok: bool, good: str, bad: str) -> None:
        """Write down that *check* has passed, or failed."""
        (self.passed if ok else self.failed)(check, good if ok else bad)

    def skipped(self, check: Check, reason: str) -> None:
        """Write down that *check* was not run."""
        self.not_run.append(NotRun(check, reason))

    def has(self, check: Check) -> bool:
        """Whether something is written down about *check*."""
        return check in {each.check for each in self.findings} | {each.check for each in self.not_run}

    def begin(self) -> None:
        """Begin another experiment."""
        self._steps = []
        self.doubt = None

    # Inside

    def _find(self, check: Check, verdict: Verdict, reason: str) -> None:
        steps = [each for each in self._steps if each.requests or each.note]
        self.findings.append(
            Finding(
                check,
                verdict,
                safe(self._teller.clean(reason)),
                self._teller.sent(steps),
                self._teller.received(steps),
                self._teller.curl(steps),
            )
        )

    def _record(self, step: Step) -> None:
        self._steps.append(step)
        self._heard()

    def _heard(self) -> None:
        self.heard_at, self._said = time.monotonic(), None

    async def _sent(self, request: Request) -> Outcome:
        await self._pace()
        outcome = await self.client.send(request)
        if isinstance(outcome, Answer) and outcome.status == TOO_MANY:
            await asyncio.sleep(min(_seconds(outcome.header("retry-after")), MAX_PAUSE))
            outcome = await self.client.send(request)
        self._heard()
        return outcome

    async def _pace(self) -> None:
        wait = self._sent_at + self.settings.interval - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        self._sent_at = time.monotonic()

    async def _read(self) -> int:
        if self._counter is None:
            raise Undecided("There is no counter.")
        try:
            self._said = await self._counter.read()
        except CountFailed as failed:
            raise Undecided(f"The counter {self._counter.name} can't be read: {failed}.") from None
        return self._said

    async def _risen(self, before: int) -> int:
        await asyncio.sleep(self._wait)
        delta = await self._read() - before
        count, rest = divmod(delta, self.rise)
        if rest or delta < 0:
            raise Undecided(f"The counter changed by {delta}, and one effect is {self.rise}.")
        return count

    def _compared(self) -> str:
        if self._is_located:
            return "Location is compared"
        return f"{', '.join(self._varying[:3])} compared" if self._varying else "bodies are compared"


def _leaves(content: Any, path: str = "$") -> list[tuple[str, str]]:
    if isinstance(content, dict):
        return [leaf for name, value in content.items() for leaf in _leaves(value, f"{path}.{name}")]
    if isinstance(content, list):
        return [leaf for number, value in enumerate(content) for leaf in _leaves(value, f"{path}[{number}]")]
    return [] if content is None and path == "$" else [(path, repr(content))]


def _is_later(outcome: Outcome) -> bool:
    if isinstance(outcome, NoAnswer):
        return outcome.is_unsent or "closed" in outcome.reason or "lost" in outcome.reason
    if outcome.status not in {BUSY, 425, TOO_MANY, 503}:
        return False
    # A refusal that says of itself that a retry will not help is final, and so is a stored answer.
    problem = outcome.json()
    is_final = isinstance(problem, dict) and problem.get("retryable") is False
    return not (is_final or outcome.is_marked or outcome.header("stripe-should-retry") == "false")


def _seconds(text: str | None) -> float:
    return float(text) if text and text.strip().isdigit() else 1.0
