"""The Django app under gunicorn: one process, as many threads as the other app has connections to its database."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from gunicorn.app.base import BaseApplication

from bench.app import POOL


class Server(BaseApplication):  # type: ignore[misc]  # gunicorn ships no types
    """Gunicorn, told everything here and nothing by a file or a command line."""

    def __init__(self, app: Any, listening: socket.socket) -> None:
        self._app = app
        self._listening = listening
        super().__init__()

    def load_config(self) -> None:
        """Listen where the bench expects it."""
        for name, value in {
            "bind": f"fd://{self._listening.fileno()}",
            "workers": 1,
            "worker_class": "gthread",
            "threads": POOL,
            "keepalive": 60,
            "loglevel": "warning",
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Return the app."""
        return self._app


def serve(app: Any, listening: socket.socket) -> None:
    """Serve until this process is told to stop."""
    os.set_inheritable(listening.fileno(), True)  # noqa: FBT003 - the standard library's own
    threading.current_thread().name = "gunicorn"
    Server(app, listening).run()
