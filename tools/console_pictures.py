"""Makes the pictures of the console for the docs: ``python tools/console_pictures.py``. It needs Chromium.

A store is filled with a bad day, the console is served on loopback, and a browser looks at it.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import uvicorn
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from semel.console import Console, Token  # noqa: E402 - after the path
from semel.console.rendering import operation_name  # noqa: E402 - as above
from semel.console.sampling import Sample  # noqa: E402 - as above
from tests.console.world import PARKED, SCOPE, World, fill  # noqa: E402 - as above

TOKEN = "a token for pictures"  # noqa: S105 - of a server that lives for a minute
CHROMIUM = "/usr/bin/chromium"
#: Pixels: enough to see what a page is, in a small file.
HEIGHT = 640
Scheme = Literal["light", "dark"]
#: What the docs show: a name, a path, a width and a scheme.
PICTURES: tuple[tuple[str, str, int, Scheme], ...] = (
    ("overview", "/", 1280, "light"),
    ("operations", "/operations", 1280, "light"),
    ("operation", f"/operation/{operation_name(SCOPE, PARKED)}", 1280, "dark"),
    ("action", f"/operation/{operation_name(SCOPE, PARKED)}/not-applied", 1280, "light"),
)


@contextmanager
def served(url: str) -> Iterator[tuple[str, Console]]:
    console = Console(url, auth=Token(TOKEN, name="ada@example", roles=["read", "act", "bodies"]))
    server = uvicorn.Server(uvicorn.Config(console, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", console
    finally:
        server.should_exit = True
        thread.join()
        console.close()


def an_hour(console: Console, file: Path) -> None:
    """Put an hour of counts into the console, as if it had run for so long, with a pause in it."""
    counts = console.site.samples.now()
    add_counts(file, counts.now)
    chance = random.Random(7)  # noqa: S311 - a picture
    newest = int(counts.now.timestamp()) // 60
    for ago in range(1, 60):
        if 21 <= ago <= 27:
            continue
        made = 40 + chance.randrange(60) + (70 if 8 < ago < 14 else 0)
        parked = 1 if ago < 15 else 0
        sample = Sample(made, 3 + chance.randrange(9), parked, ago % 7, 12 + ago)
        console.site.samples._minutes[newest - ago] = sample  # noqa: SLF001 - a picture


def add_counts(file: Path, now: datetime) -> None:
    """Put an hour of requests into the store, with the same pause in it."""
    chance = random.Random(11)  # noqa: S311 - a picture
    rows = []
    for ago in range(44):
        if 21 <= ago <= 27:
            continue
        busy = 70 if 8 < ago < 14 else 0
        ended = {"added": 6, "ran": 40 + chance.randrange(60) + busy, "replayed": chance.randrange(9) + busy // 4}
        ended |= {"conflict": chance.randrange(4) + busy // 9, "mismatch": int(chance.random() < 0.1)}
        ended |= {"store_failed": 5 if ago == 12 else 0, "unknown": int(ago == 14)}
        ended["passed_on"] = 20 + chance.randrange(9)
        minute = int((now - timedelta(minutes=ago)).timestamp()) // 60 * 60_000
        rows += [(minute, outcome, number) for outcome, number in ended.items() if number]
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.executemany("INSERT INTO semel_counts VALUES (?, ?, ?)", rows)


def look(page: Page, origin: str, path: str, file: Path, *, whole: bool) -> None:
    page.goto(f"{origin}{path}")
    page.wait_for_load_state("networkidle")
    page.screenshot(path=file, full_page=whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--all", action="store_true", help="every page, in both widths and schemes, empty and full")
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name in ("full", "empty") if asked.all else ("full",):
            world = World(f"sqlite:///{folder}/{name}.db")
            world.store.migrate()
            if name == "full":
                fill(world)
            world.close()
            with served(world.url) as (origin, console):
                if name == "full":
                    an_hour(console, Path(folder) / f"{name}.db")
                shots = PICTURES if not asked.all else _every(name)
                for title, path, width, scheme in shots:
                    context = browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
                    page = context.new_page()
                    page.goto(f"{origin}/#{TOKEN}")
                    page.wait_for_selector(".figures")
                    look(page, origin, path, asked.to / f"console-{title}.png", whole=asked.all)
                    context.close()
        browser.close()


def _every(name: str) -> list[tuple[str, str, int, Scheme]]:
    paths = {
        "overview": "/",
        "operations": "/operations",
        "outbox": "/outbox",
        "inbox": "/inbox",
        "webhooks": "/webhooks",
    }
    if name == "full":
        paths |= {"operation": PICTURES[2][1], "action": PICTURES[3][1], "none": "/operations?age=zz"}
    schemes: tuple[Scheme, ...] = ("light", "dark")
    return [
        (f"{name}-{title}-{width}-{scheme}", path, width, scheme)
        for title, path in paths.items()
        for width in (1280, 390)
        for scheme in schemes
    ]


if __name__ == "__main__":
    main()
