"""The client: sends its request, follows ``Location`` as often as ``Retry-After`` says, and draws a progress bar.

    python -m examples.report.client http://127.0.0.1:8000

It needs to know nothing of the server's insides, and may itself be killed: started again with the same ``--key`` it
finds the same operation.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx

#: Far longer than a report takes, and short enough to end.
PATIENCE_SECONDS = 300.0
MAX_BAR_WIDTH, MIN_BAR_WIDTH = 40, 10
NOTES_WIDTH = 38  # what stands to the right of the bar: the share, the state and a note

#: "Come back later": the server restarts, or its database does.
LATER = {httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS, httpx.codes.BAD_GATEWAY}

State = dict[str, Any]


def order(client: httpx.Client, key: str, month: str, on_state: Callable[[State], None]) -> httpx.Response:
    """Order a report, and return the answer when there is one. *on_state* is told of every state on the way."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    where: str | None = None
    while time.monotonic() < deadline:
        pause = 1.0
        try:
            if where is None:
                # Safe to send again for as long as there is no answer: the key is the same.
                answer = client.post("/reports", json={"month": month}, headers={"Idempotency-Key": key})
            else:
                answer = client.get(where)
        except httpx.TransportError:
            on_state({"state": "unreachable", "progress": None, "note": "The server does not answer"})
        else:
            if answer.status_code not in {httpx.codes.ACCEPTED, *LATER}:
                return answer
            pause = float(answer.headers.get("retry-after", pause))
            if answer.status_code == httpx.codes.ACCEPTED:
                where = answer.headers["location"]
                on_state(answer.json())
        time.sleep(pause)
    raise SystemExit("It takes too long: something is wrong.")


class Bar:
    """A progress bar on one line of a terminal; elsewhere, a line for each change."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last = ""

    def draw(self, state: State) -> None:
        """Draw *state*. One that says nothing of its progress leaves the bar where it is."""
        share = state["progress"] or 0.0
        # A line that is longer than the terminal would wrap, and could not be drawn over.
        columns = shutil.get_terminal_size().columns if self._is_terminal else MAX_BAR_WIDTH + NOTES_WIDTH
        width = max(MIN_BAR_WIDTH, min(MAX_BAR_WIDTH, columns - NOTES_WIDTH))
        full = round(share * width)
        bar, rest = "━" * full, "━" * (width - full) if self._is_terminal else " " * (width - full)
        if self._is_terminal:
            bar, rest = f"\x1b[32m{bar}\x1b[0m", f"\x1b[2m{rest}\x1b[0m"
        line = f"{bar}{rest} {share:4.0%}  {state['state']:<10}  {state['note'] or ''}"
        if line != self._last:
            print(f"\r\x1b[K{line}" if self._is_terminal else line, end="" if self._is_terminal else "\n", flush=True)
            self._last = line

    def end(self) -> None:
        """Go to the next line."""
        if self._is_terminal and self._last:
            print()
        self._last = ""


def main() -> int:
    """Order one report from the command line."""
    parser = argparse.ArgumentParser(description="Order a report, and wait for it.")
    parser.add_argument("url")
    parser.add_argument("--key", default=str(uuid4()), help="of an earlier order, to find it again")
    parser.add_argument("--month", default="November")
    said = parser.parse_args()
    print(f"key {said.key}")
    bar = Bar()
    with httpx.Client(base_url=said.url, headers={"X-User": "Ada"}) as client:
        answer = order(client, said.key, said.month, bar.draw)
    bar.end()
    print(answer.status_code, answer.text)
    return 0 if answer.is_success else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
