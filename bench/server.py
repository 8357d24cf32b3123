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

from bench.app import app
from bench.load import LOOPBACK

#: More than the connections of any case: they come all at once.
BACKLOG = 1024

STDIN = 0


def main() -> None:
    """Serve until standard input ends, which it does however the bench ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--work", default="nothing")
    parser.add_argument("--database")
    parser.add_argument("--framework", default="Starlette")
    parser.add_argument("--profile")
    asked = parser.parse_args()
    # Uvicorn ends in good order on SIGTERM, then raises it once more for whoever was there before it.
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_input, daemon=True).start()
    serve = _django(asked) if asked.framework == "Django" else _starlette(asked)
    listening = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
    # From here on connections wait in the backlog, so nobody has to ask whether we are up.
    print(listening.getsockname()[1], flush=True)
    with cProfile.Profile() if asked.profile else _NoProfile() as profile:
        try:
            serve(listening)
        finally:
            if isinstance(profile, cProfile.Profile):
                profile.dump_stats(asked.profile)


def _starlette(asked: argparse.Namespace) -> Callable[[socket.socket], None]:
    config = uvicorn.Config(
        app(asked.store, asked.work, asked.database),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
    )
    return lambda listening: uvicorn.Server(config).run(sockets=[listening])


def _django(asked: argparse.Namespace) -> Callable[[socket.socket], None]:
    from bench import django_app, django_server  # noqa: PLC0415 - no other case needs them

    view = django_app.app(asked.database, asked.work, is_guarded=asked.store is not None)
    return lambda listening: django_server.serve(view, listening)


class _NoProfile:
    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit


def _end_with_input() -> None:
    # Not through sys.stdin, whose lock a process that is forked meanwhile would never see released.
    while os.read(STDIN, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
