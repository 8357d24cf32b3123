"""The app under its server, one worker, in a process of its own. It prints its port, and ends when its input does."""

from __future__ import annotations

import argparse
import cProfile
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from bench import cpu
from bench.app import app
from bench.load import LOOPBACK
from bench.setup import Setup

#: More than the connections of any case: they come all at once.
BACKLOG = 1024

#: A load that is not full leaves connections idle, and they are to be there when it needs them.
KEEP_ALIVE_SECONDS = 60

STDIN = 0


def main() -> None:
    """Serve until standard input ends, which it does however the bench ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("setup", type=Setup.from_json)
    parser.add_argument("--profile")
    asked = parser.parse_args()
    setup: Setup = asked.setup
    cpu.take_own_core()
    # Uvicorn ends in good order on SIGTERM, then raises it once more for the handler before it.
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_input, daemon=True).start()
    serve = _django(setup) if setup.framework == "Django" else _starlette(setup)
    listening = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
    # From here on connections wait in the backlog, so the server counts as up.
    print(listening.getsockname()[1], flush=True)
    with cProfile.Profile() if asked.profile else _NoProfile() as profile:
        try:
            serve(listening)
        finally:
            if isinstance(profile, cProfile.Profile):
                profile.dump_stats(asked.profile)


def _starlette(setup: Setup) -> Callable[[socket.socket], None]:
    config = uvicorn.Config(
        app(setup),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    return lambda listening: uvicorn.Server(config).run(sockets=[listening])


def _django(setup: Setup) -> Callable[[socket.socket], None]:
    from bench import django_app, django_server  # noqa: PLC0415 - no other case needs them

    if setup.database is None:
        raise ValueError("Django's view writes: it needs a database.")
    view = django_app.app(setup.database, setup.work, is_guarded=setup.place is not None)
    return lambda listening: django_server.serve(view, listening)


class _NoProfile:
    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit


def _end_with_input() -> None:
    # Not through sys.stdin: its lock would never be released in a process that is forked meanwhile.
    while os.read(STDIN, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
