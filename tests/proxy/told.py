"""``semel proxy``, to which SIGTERM comes at one point of its start: ``test_processes.py`` runs this file.

``TOLD_AT`` names the point, a method of the server. With ``--workers`` each process runs this file again, and the
signal comes there, from the parent. At ``deaf`` a process then takes no notice of it.
"""

import os
import signal
import sys
from typing import Any

from semel.cli.main import main
from semel.proxy import server

IS_WORKER = __name__ == "__mp_main__"


def told(serving: server.Server) -> None:
    if not IS_WORKER:
        signal.raise_signal(signal.SIGTERM)
        return
    # The parent is told to stop, and its signal comes here and nowhere else.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.kill(os.getppid(), signal.SIGTERM)
    while not serving.should_exit and signal.SIGTERM not in signal.sigpending():
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def told_before(name: str) -> None:
    real = getattr(server.Server, name)

    def patched(serving: server.Server, **settings: Any) -> Any:
        told(serving)
        return real(serving, **settings)

    setattr(server.Server, name, patched)


point = os.environ["TOLD_AT"]
if ("--workers" in sys.argv) == IS_WORKER:
    told_before("startup" if point == "deaf" else point)
if point == "deaf":
    server.Server.handle_exit = lambda *_: None  # type: ignore[method-assign]
    server._CLOSING = 0

if __name__ == "__main__":
    main()
