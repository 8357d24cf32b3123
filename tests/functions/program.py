"""A worker's program: tasks of Celery's and plain functions, each of which can be told to kill its own process.

``SEMEL_STORE`` is the store. Run as ``python -m tests.functions.program FOLDER TASK [die]``; the last line that it
prints is what came of it, as JSON.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from celery import Celery

import semel
from semel.errors import InProgress, SemelError
from semel.functions import idempotent, once

LEASE = timedelta(seconds=1)

app = Celery("shop", broker="memory://", backend="cache+memory://")


class Stage:
    """Where effects are seen, and who dies after one."""

    folder = Path()
    is_doomed = False

    def happen(self, what: str) -> None:
        with (self.folder / "effects").open("a") as file:
            file.write(f"{what}\n")

    def die(self) -> None:
        if self.is_doomed:
            os.kill(os.getpid(), signal.SIGKILL)


stage = Stage()


@app.task(acks_late=True)  # type: ignore[untyped-decorator]  # Celery has no types
@idempotent(key="order", lease=LEASE)
def send(order: int) -> str:
    stage.happen("sent")
    stage.die()
    return f"sent at attempt {semel.current().attempt}"


@idempotent(key="order", lease=LEASE, on_crash="refuse")
def send_carefully(order: int) -> str:
    stage.happen("sent")
    stage.die()
    return "sent"


@idempotent(key="order", lease=LEASE)
async def send_async(order: int) -> str:
    stage.happen("sent")
    stage.die()
    return f"sent at attempt {semel.current().attempt}"


@idempotent(key="order", lease=LEASE)
def book(order: int) -> str:
    operation = semel.current()
    operation.phase("reserved", lambda _: stage.happen("reserved"))
    stage.die()
    operation.effect("charged", lambda *, idempotency_key: stage.happen("charged"))
    return f"booked at attempt {operation.attempt}"


def import_all(month: str) -> str:
    stage.happen("imported")
    stage.die()
    return month


TASKS: dict[str, Callable[[], Any]] = {
    "send": lambda: send.apply((7,), throw=True).get(),
    "send_carefully": lambda: send_carefully(7),
    "send_async": lambda: asyncio.run(send_async(7)),
    "book": lambda: book(7),
    "once": lambda: once("2026-11", import_all, "2026-11", lease=LEASE),
}


def decided(task: Callable[[], Any]) -> str:
    """Do as a queue does: deliver it again and again, until something comes of it."""
    while True:
        try:
            return str(task())
        except InProgress:
            threading.Event().wait(0.02)
        except SemelError as error:
            return type(error).__name__


def in_a_child(task: Callable[[], Any]) -> str:
    """Fork, and return what came of it there."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writing, decided(task).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.wait()
    return said


def main() -> None:
    folder, name, *how = sys.argv[1:]
    stage.folder, stage.is_doomed = Path(folder), "die" in how
    if "fork" in how:
        said = [str(send_carefully(1)), in_a_child(lambda: send_carefully(1)), in_a_child(lambda: send_carefully(2))]
    else:
        said = [decided(TASKS[name]), decided(TASKS[name])]
    print(json.dumps(said))  # noqa: T201 - spoken to a test


if __name__ == "__main__":
    main()
