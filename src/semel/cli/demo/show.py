"""The demo's output: a live table in a terminal, lines in a pipe, and the summary. It counts nothing itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from semel.cli.demo.referee import Outcome, Referee, Verdict
from semel.cli.demo.storm import CUSTOMERS

#: Lines longer than this are hard to read, however wide the terminal is.
TEXT_WIDTH = 78
FRAMES_PER_SECOND = 8
#: In a pipe, a line this often.
LINE_SECONDS = 2.0
NAMES_SHOWN = 2

MARGIN = 2
#: Columns of the live table with its counts side by side. A narrower terminal gets them one below the other.
TWO_COLUMNS_WIDTH = 76
BAR_WIDTH = 48
#: Beside the bar: "20 s of 20 s".
TIME_WIDTH = 16

GOOD, BAD, QUIET = "bold green", "bold red", "dim"

_STORM = (
    f"{CUSTOMERS} customers pay: they click twice, hang up, lose their connections and ask again. Every second or so, "
    "one of the API's two workers is killed with kill -9 and started again."
)
_PROTECTED = "Each payment has its Idempotency-Key, and Semel guards the API. No customer should pay twice."
_UNPROTECTED = "Each payment has its Idempotency-Key, and the API ignores it: this is the same API without Semel."

_HOW = (
    "A handler that was killed in the middle is run again (the take-overs), and it may have charged the card before it "
    'died. So the API passes semel.current().derive("charge") on to the provider: the same key on every run. The '
    "provider recognised {} repeated calls by it. Semel does the rest: one run at a time, "
    "and one answer to every retry."
)
_HOW_NOT = "Every request was a separate payment: each second click, each retry, each question whether it succeeded."


class Phase(StrEnum):
    """Where the demo is."""

    STORM = "storm"
    SETTLING = "settling: open payments are retried to their end, and no worker is killed any more"
    ASKING = "asking for every payment once more, and comparing the answers"
    OVER = "over"


@dataclass(slots=True)
class Stage:
    """The demo's current state, written by ``run`` and read by the show."""

    referee: Referee
    seconds: float
    seed: str
    is_protected: bool
    phase: Phase = Phase.STORM
    kills: int = 0
    #: How many payments were sent once more at the end.
    asked_again: int = 0
    #: Whether each of the API's workers is up.
    workers: list[bool] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """How long the storm has lasted."""
        return min(time.monotonic() - self.began_at, self.seconds)


class Show:
    """Prints the demo to a terminal or a pipe."""

    def __init__(self, console: Console) -> None:
        """Show it on *console*."""
        self._console = console
        self._last_line_at = time.monotonic()
        self._last_phase = Phase.STORM

    def introduce(self, stage: Stage, port: int, key: str) -> None:
        """Print what is about to happen, and how to take part in it."""
        title = "payments in a storm" if stage.is_protected else "payments in a storm, unprotected"
        self._print(Text.assemble(("semel demo", "bold"), f" - {title}\n"))
        self._paragraph(f"{_STORM} {_PROTECTED if stage.is_protected else _UNPROTECTED}")
        what = "the second answer is a replay, to the byte" if stage.is_protected else "the second is one more charge"
        self._paragraph(f"Take part, from another terminal, while it runs. Send it twice: {what}.")
        self._print_curl(port, key, amount=4200)
        if stage.is_protected:
            self._paragraph("And another payment with the same key, which is a mistake, and refused (422):")
            self._print_curl(port, key, amount=9900)

    @contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Keep a live table of *stage* on the terminal meanwhile; in a pipe, ``tick`` prints lines."""
        if not self._console.is_terminal:
            yield
            return
        picture = _Picture(stage)
        with Live(picture, console=self._console, refresh_per_second=FRAMES_PER_SECOND, transient=True):
            yield

    def tick(self, stage: Stage) -> None:
        """Print a line now and then, if there is no live table."""
        if self._console.is_terminal:
            return
        if stage.phase is not self._last_phase:
            self._last_phase = stage.phase
            self._print(stage.phase)
        now = time.monotonic()
        if now - self._last_line_at >= LINE_SECONDS:
            self._last_line_at = now
            self._print(_line(stage))

    def summarise(self, stage: Stage, verdict: Verdict) -> None:
        """Print the result."""
        self._print(Text(f"\nThe storm is over: {stage.elapsed:.0f} s, seed {stage.seed}.\n", "bold"))
        self._print(_explained(_counts(stage)))
        self._print("")
        for line in _findings(stage, verdict):
            self._print(line)
        self._print("")
        if not stage.is_protected:
            self._paragraph(_HOW_NOT)
            self._print(Text("The same storm with Semel: semel demo", QUIET))
            return
        self._paragraph(_HOW.format(f"{stage.referee.repeated_calls:,}"))
        self._print(Text("The same storm without Semel: semel demo --unprotected", QUIET))

    def _print_curl(self, port: int, key: str, *, amount: int) -> None:
        self._print(Text(f"  curl -i http://127.0.0.1:{port}/payments -H 'Idempotency-Key: {key}' \\", "cyan"))
        self._print(Text(f"""       -d '{{"order": "mine", "amount": {amount}}}'\n""", "cyan"))

    def _paragraph(self, text: str) -> None:
        width = min(self._console.width, TEXT_WIDTH)
        self._console.print(Text(text + "\n"), width=width)

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, soft_wrap=True)


class _Picture:
    """The live table; rich calls it for each frame."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        room = options.max_width - MARGIN
        counts = _counts(self._stage)
        table = _side_by_side(counts) if room >= TWO_COLUMNS_WIDTH else _explained(counts, with_meanings=False)
        lines = [self._progress(room), Text(), table, Text(), self._workers(room)]
        # As narrow as possible: the ^C that a terminal prints after a full line would begin a new line.
        yield Padding(Group(*lines), (0, 0, 0, MARGIN), expand=False)

    def _progress(self, room: int) -> RenderableType:
        stage = self._stage
        if stage.phase is not Phase.STORM:
            return Text(stage.phase, "bold")
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=stage.seconds, completed=stage.elapsed, width=max(min(BAR_WIDTH, room - TIME_WIDTH), 1))
        line.add_row(bar, f"{stage.elapsed:.0f} s of {stage.seconds:.0f} s")
        return line

    def _workers(self, room: int) -> Text:
        lines = []
        for number, is_up in enumerate(self._stage.workers, 1):
            state = ("● serving", "green") if is_up else ("✗ killed, starting again", "red")
            lines.append(Text(f"worker {number} ").append(f"{state[0]:<26}", state[1]))
        return Text("" if room >= TWO_COLUMNS_WIDTH else "\n").join(lines)


@dataclass(frozen=True, slots=True)
class _Count:
    name: str
    number: int
    #: Its meaning, for the summary.
    meaning: str = ""
    style: str = ""


def _counts(stage: Stage) -> list[_Count]:
    referee = stage.referee
    outcomes = referee.outcomes
    doubles = referee.double_charges
    counts = [
        _Count("payments asked for", referee.payments),
        _Count("answered", referee.answered),
        _Count("requests sent", referee.requests, "clicks, retries and questions"),
        _Count("connections lost", outcomes[Outcome.LOST], "the worker was killed"),
        _Count("hung up", outcomes[Outcome.HUNG_UP], "the customer did not wait"),
        _Count("conflicts (409)", outcomes[Outcome.CONFLICT], "still running: wait, and ask again"),
        _Count("replays", referee.replays, "done already: the first answer again"),
        _Count("workers killed (kill -9)", stage.kills),
        _Count("take-overs", referee.take_overs, "a killed worker's payment, run again"),
        _Count("charges made", referee.charges, "counted in the provider's log", "bold"),
        _Count("double charges", doubles, "", BAD if doubles else GOOD),
    ]
    rare = [
        _Count("errors (5xx)", outcomes[Outcome.FAILED], "retried", BAD),
        _Count("refused (4xx)", outcomes[Outcome.REFUSED], "given up", BAD),
        _Count("charges of your own", referee.other_charges, "", "cyan"),
    ]
    return counts + [count for count in rare if count.number]


def _explained(counts: list[_Count], *, with_meanings: bool = True) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=24)
    table.add_column(justify="right", min_width=7)
    table.add_column(style=QUIET)
    for count in counts:
        meaning = count.meaning if count.number and with_meanings else ""
        table.add_row(Text(count.name, count.style), Text(f"{count.number:,}", count.style), meaning)
    return table


def _side_by_side(counts: list[_Count]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(min_width=24)
        table.add_column(justify="right", min_width=7)
        table.add_column(width=2)
    cells = [(Text(count.name, count.style), Text(f"{count.number:,}", count.style), Text()) for count in counts]
    middle = (len(cells) + 1) // 2
    for left, right in zip_longest(cells[:middle], cells[middle:], fillvalue=()):
        table.add_row(*left, *right)
    return table


def _line(stage: Stage) -> str:
    referee = stage.referee
    return (
        f"{stage.elapsed:4.0f} s  payments {referee.payments}  requests {referee.requests}  replays {referee.replays}  "
        f"kills {stage.kills}  charges {referee.charges}  doubles {referee.double_charges}"
    )


def _findings(stage: Stage, verdict: Verdict) -> Iterator[Text]:
    referee = stage.referee
    answered = f"{verdict.answered:,}"
    if not verdict.answered:
        yield Text("✗ No payment was answered, so nothing was proven.", BAD)
        return
    again = f" ({stage.asked_again:,} asked once more)" if stage.asked_again else ""
    wrongs = (
        ("No payment was charged twice.", "charged more than once", verdict.doubled),
        (f"All {answered} answered payments were charged.", "answered but not charged", verdict.uncharged),
        (
            f"All answers to one key were the same, byte for byte{again}.",
            "given different answers",
            verdict.contradicted,
        ),
    )
    for good, bad, orders in wrongs:
        yield (
            Text(f"✗ {len(orders):,} payments were {bad}: {_some(orders)}", BAD) if orders else Text(f"✓ {good}", GOOD)
        )
    if left := referee.payments - referee.answered:
        yield Text(f"  {left:,} payments were still open at the end; without an answer, nothing was promised.", QUIET)


def _some(orders: frozenset[str]) -> str:
    names = sorted(orders)[:NAMES_SHOWN]
    return ", ".join(names) + (", ..." if len(orders) > NAMES_SHOWN else "")
