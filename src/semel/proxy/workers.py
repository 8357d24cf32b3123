"""Several processes of one proxy, on one socket: started, replaced when one dies, and stopped together. None is guarded
by another: what they share is the store.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from semel.telemetry.logs import logger

#: Seconds between the death of a process and its successor: one that can't start must not be started in a loop.
PAUSE = 1.0

Serve = Callable[[Any, socket.socket], None]


def set_up_logs() -> None:
    """Log to standard error, as every process of a command does."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    for each in ("uvicorn", "uvicorn.error"):
        logging.getLogger(each).setLevel(logging.WARNING)


def run_workers(
    number: int, serve: Serve, settings: object, listener: socket.socket, said: str, *, patience: float
) -> None:
    """Run *number* processes that each ``serve(settings, listener)``, until SIGTERM or SIGINT. Print what is *said*
    once those are heard. A process that has not ended so many seconds after that is killed.
    """
    spawn = multiprocessing.get_context("spawn")
    stopped, stopping = os.pipe()

    def stop(*_: object) -> None:
        os.write(stopping, b".")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    print(said, flush=True)  # noqa: T201 - the command line's own line

    def start() -> SpawnProcess:
        process = spawn.Process(target=_run, args=(serve, settings, listener))
        process.start()
        return process

    processes = [start() for _ in range(number)]
    while stopped not in wait([stopped, *(each.sentinel for each in processes)]):
        for at, each in enumerate(processes):
            if not each.is_alive():
                logger.error("Process %s has ended with %s; another is started.", each.pid, each.exitcode)
                if wait([stopped], timeout=PAUSE):
                    break
                processes[at] = start()
    for each in processes:
        each.terminate()
    until = time.monotonic() + patience
    for each in processes:
        each.join(max(0.0, until - time.monotonic()))
        if each.is_alive():
            logger.error("Process %s has not ended in %g seconds, and is killed.", each.pid, patience)
            each.kill()
            each.join()


def _run(serve: Serve, settings: object, listener: socket.socket) -> None:
    set_up_logs()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # As the server does once it hears signals.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(settings, listener)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
