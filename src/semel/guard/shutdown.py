"""Whether this process takes on new operations. It ends none of those under way."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from semel.errors import ShuttingDown
from semel.flows.handle import SHUTDOWN_RETRY_AFTER_SECONDS


class Gate:
    """Whether this process takes on new operations. A server that is about to stop finishes what it has begun."""

    def __init__(self) -> None:
        """Open."""
        self.is_closed = False
        self._is_listening = False

    def close(self) -> None:
        """Take on nothing new from now on."""
        self.is_closed = True

    def check(self) -> None:
        """Refuse a request that comes too late."""
        if self.is_closed:
            raise ShuttingDown(retry_after=SHUTDOWN_RETRY_AFTER_SECONDS)

    def close_on_sigterm(self) -> None:
        """Close when the server is told to stop, before it does whatever it does about that.

        Only where the signal has a handler: by default it ends the process at once, and the lease does the rest.
        """
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            return
        servers = signal.getsignal(signal.SIGTERM)
        if not callable(servers):
            return
        self._is_listening = True

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            self.close()
            servers(number, frame)

        signal.signal(signal.SIGTERM, on_sigterm)
