"""The story: riders, a provider in trouble, and an app that is killed. It ends with a count of what really happened.

python -m examples.rides [URL]      rides and keys in a temporary SQLite file, or in PostgreSQL
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import httpx
from rich.console import Console
from rich.text import Text

from examples.rides.servers import App, app, provider

WAIT_SECONDS = 40.0  # The completer leaves an operation to its client for 10 s, and looks every 5.
POLL_SECONDS = 0.1
MAX_SENTENCE_COLUMNS = 84
ANSWER_COLUMNS = 14  # "201, replayed", and a space before it

INTRODUCTION = """\
[bold]Rocket Rides[/bold] - five riders, a provider in trouble, and an app that is killed

A ride is written down, a card charged, the charge noted, a receipt mailed: four steps. \
On the right is what the rider is answered. \
At the end the rides are compared with the provider's own books: each must be paid once. \
It takes half a minute, since Semel leaves an operation to its client for ten seconds before it finishes it.
"""

console = Console(highlight=False)

RETRY = {httpx.codes.CONFLICT, httpx.codes.SERVICE_UNAVAILABLE}  # "wait", and "the steps so far are kept"
LOST = 0
NO_ANSWER, REPLAYED = "no answer", ", replayed"


class Story:
    """Tells what it does, and remembers what went otherwise than it should."""

    def __init__(self, store: str, api: App, provider: httpx.Client) -> None:
        self._store = store
        self._api = api
        self._provider = provider
        self._threads = ThreadPoolExecutor(1)
        # A key per request, and each rider makes one request only, however often it is sent.
        self._keys: defaultdict[str, str] = defaultdict(lambda: str(uuid4()))
        self._earlier = self.rides()
        self.faults = 0

    def tell(self) -> None:
        """From the first ride to the last receipt."""
        self.say("Ada books a ride.", self.book("Ada"), 201)
        self.say("She clicks again: the same answer, and nothing runs.", self.book("Ada"), 201, replayed=True)
        self.trouble("/charges", "decline")
        self.say("Bob's card is declined. That is an outcome, and kept.", self.book("Bob"), 402)
        self.say("He clicks again: his card is not tried again.", self.book("Bob"), 402, replayed=True)

        self.trouble("/charges", "lose")
        self.say("The provider charges Cleo, and its answer is lost.", self.book("Cleo"), 503)
        cleo = self.where("Cleo")
        self.say_resumed("Cleo retries: {attempt} goes on after {where}. The provider knows the key.", "Cleo", cleo)

        self.trouble("/receipts", "hang")
        lost = self.start_booking("Dan")
        self.wait(lambda: "/receipts" in self.at_provider("/hanging"))
        self._api.kill()
        self.say("Dan is charged, and the app killed (kill -9) before his receipt is sent.", lost.result(), LOST)
        dan = self.where("Dan")
        self._api.start()
        self.say_resumed("The app is back, and Dan retries: {attempt} goes on after {where}.", "Dan", dan)

        # The last one: it is finished without her, and may take the next trouble with it.
        self.trouble("/charges", "fail")
        self.say("The provider is down when Eve books. She leaves, and never comes back.", self.book("Eve"), 503)
        left_at, eve = time.monotonic(), self.where("Eve")
        self.wait(lambda: self.look("Eve")["state"] == "complete")
        waited, answer = f"{time.monotonic() - left_at:.0f} s", self.look("Eve")["status"]
        self.say(f"Eve's is finished without her, {waited} later: {self.attempt('Eve')}, after {eve}.", answer, 201)

    def count(self) -> None:
        """Compare the rides with the provider's own books."""
        charges = Counter(each["ride"] for each in self.at_provider("/charges"))
        receipts = Counter(each["ride"] for each in self.at_provider("/receipts"))
        row = "{:>6}  {:<6} {:<10} {:>7} {:>9}".format
        print("\n" + row("ride", "rider", "status", "charges", "receipts"))
        for ride in self.rides()[len(self._earlier) :]:
            number = ride["id"]
            print(row(number, ride["rider"], ride["status"], charges[number], receipts[number]))
            wanted = 0 if ride["status"] == "declined" else 1
            self.faults += not charges.pop(number, 0) == receipts.pop(number, 0) == wanted
        self.faults += charges.total() + receipts.total()  # for no ride at all

    def say(self, what: str, answer: httpx.Response | int, wanted: int, *, replayed: bool = False) -> None:
        """Print one line of the story, what came of it, and what should have come where that differs."""
        came, should = _said(answer), f"{wanted or NO_ANSWER}{REPLAYED if replayed else ''}"
        self.faults += came != should
        said = Text(came, _style(came)) if came == should else Text(f"{came}, AND NOT {should}", "bold red")
        *lines, last = textwrap.wrap(what, _sentence_columns())
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
        console.print(Text(f"{last:<{_sentence_columns()}} ") + said, soft_wrap=True)

    def say_resumed(self, what: str, rider: str, where: str) -> None:
        """Let a rider retry until there is an answer, and say so."""
        answer = self.insist(rider)
        # On a machine that is so busy that ten seconds have passed, the ride was finished before that.
        is_finished = REPLAYED in _said(answer)
        self.say(what.format(attempt=self.attempt(rider), where=where), answer, 201, replayed=is_finished)

    def book(self, rider: str) -> httpx.Response | int:
        """Send a rider's request: the same each time, with the same key."""
        ride = {"from": "Kourou", "to": "Tranquility Base", "card": f"card_of_{rider}"}
        headers = {"X-Rider": rider, "Idempotency-Key": self._keys[rider]}
        try:
            return httpx.post(f"{self._api.url}/rides", json=ride, headers=headers, timeout=WAIT_SECONDS)
        except httpx.TransportError:
            return LOST

    def start_booking(self, rider: str) -> "Future[httpx.Response | int]":
        """Send it without waiting for the answer."""
        return self._threads.submit(self.book, rider)

    def insist(self, rider: str) -> httpx.Response | int:
        """Do as a good client does: send the same again for as long as the answer says so."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            answer = self.book(rider)
            if isinstance(answer, int) or answer.status_code not in RETRY or time.monotonic() > deadline:
                return answer
            time.sleep(float(answer.headers.get("retry-after", POLL_SECONDS)))

    def look(self, rider: str) -> Any:
        """Ask ``semel keys show`` about a rider's key."""
        command = [sys.executable, "-m", "semel", "keys", "show", self._keys[rider], "--scope", rider, "--json"]
        variables = os.environ | {"SEMEL_STORE": self._store}
        # In a session of its own: Ctrl-C is for us.
        shown = subprocess.run(command, env=variables, stdout=subprocess.PIPE, start_new_session=True, check=True)
        return json.loads(shown.stdout)

    def where(self, rider: str) -> str:
        """Return the recovery point of a rider's request: the last step that is done."""
        return str(self.look(rider)["recovery_point"])

    def attempt(self, rider: str) -> str:
        """Say which attempt it was."""
        return f"attempt {self.look(rider)['attempt']}"

    def rides(self) -> list[Any]:
        """Ask the API, which lists the oldest ride first."""
        return list(httpx.get(f"{self._api.url}/rides").raise_for_status().json())

    def trouble(self, to: str, kind: str) -> None:
        """Let the next call to the provider go wrong."""
        self._provider.post("/trouble", json={"to": to, "kind": kind}).raise_for_status()

    def at_provider(self, path: str) -> list[Any]:
        """Ask the provider itself."""
        return list(self._provider.get(path).raise_for_status().json())

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                raise SystemExit("It takes too long: something is wrong.")
            time.sleep(POLL_SECONDS)


def _sentence_columns() -> int:
    """Return how long a line of the story may be, so that the answer beside it is in the terminal, too."""
    room = console.width if console.is_terminal else MAX_SENTENCE_COLUMNS + ANSWER_COLUMNS
    return max(min(room - ANSWER_COLUMNS, MAX_SENTENCE_COLUMNS), ANSWER_COLUMNS)


def _style(came: str) -> str:
    if came == NO_ANSWER or came.startswith("5"):
        return "yellow"
    return "cyan" if came.endswith(REPLAYED) else "green"


def _said(answer: httpx.Response | int) -> str:
    if isinstance(answer, int):
        return str(answer or NO_ANSWER)
    return f"{answer.status_code}{REPLAYED if 'idempotent-replayed' in answer.headers else ''}"


def main() -> int:
    """Tell the story; 0 when each ride was paid once and each receipt sent once."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the servers are ended too
    console.print(INTRODUCTION, width=min(console.width, MAX_SENTENCE_COLUMNS))
    with TemporaryDirectory(prefix="rides-") as folder:
        store = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{folder}/rides.db"
        subprocess.run([sys.executable, "-m", "semel", "migrate", store], stdout=subprocess.DEVNULL, check=True)
        with provider() as books, app(store, str(books.base_url), Path(folder, "app.log")) as api:
            console.print(Text(f"The API is on {api.url}, its provider on {books.base_url}\n", "dim"), soft_wrap=True)
            story = Story(store, api, books)
            story.tell()
            story.count()
            if story.faults:
                print(f"\n{story.faults} things are not as they should be. The log of the API:\n{api.log.read_text()}")
                return 1
    console.print("\nEach ride was paid once and has one receipt; the declined one has neither.", style="bold green")
    return 0
