"""Our own load generator: one thread, raw sockets, as little HTTP as will do, in a process of its own. It is no client
for anything else.

It has to outrun the server, so it parses nothing but the status and the length of an answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.load import AFTER_KEY, BEFORE_KEY, KEY_DIGITS, LOOPBACK, Load, Outcome

CREATED = b"HTTP/1.1 201 "
END_OF_HEAD = b"\r\n\r\n"
LENGTH = b"content-length: "
#: More than an answer has: one read nearly always gets the whole of it.
READ_BYTES = 16 * 1024
#: No server that works is silent for so long.
SILENCE_SECONDS = 30.0


class Connection:
    """One connection: it sends a request, and the next one when the answer is there."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((LOOPBACK, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.sent_at = 0
        self.answer = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, key: bytes, before_key: bytes = BEFORE_KEY) -> None:
        """Send one request. It fits into the socket's buffer, so this waits for nothing."""
        self.sent_at = time.perf_counter_ns()
        self._socket.sendall(before_key + key + AFTER_KEY)

    @property
    def is_right(self) -> bool:
        """Whether the last answer is the one that was hoped for."""
        return self.answer.startswith(CREATED)

    def answered(self) -> bool:
        """Take what has come; say whether that is the whole answer."""
        chunk = self._socket.recv(READ_BYTES)
        if not chunk:
            raise ConnectionResetError("The server closed a connection that was to be kept.")
        received = self._received + chunk if self._received else chunk
        end = received.find(END_OF_HEAD)
        if end >= 0 and len(received) == end + len(END_OF_HEAD) + _length(received[:end]):
            self.answer, self._received = received, b""
            return True
        self._received = received
        return False

    def wait(self) -> bytes:
        """Wait for the whole answer."""
        while not self.answered():
            pass
        return self.answer

    def close(self) -> None:
        self._socket.close()


def _length(head: bytes) -> int:
    value = head[head.lower().index(LENGTH) + len(LENGTH) :]
    return int(value.partition(b"\r\n")[0])


def keys_of(load: Load) -> Iterator[bytes]:
    """The keys to send: those of the file, round and round, or new ones for ever."""
    if load.keys is not None:
        return itertools.cycle(Path(load.keys).read_bytes().split())
    return iter(lambda: os.urandom(KEY_DIGITS // 2).hex().encode(), None)


def drive(load: Load) -> Outcome:
    """Send *load*, wait for every answer, and say how it went."""
    keys = itertools.islice(keys_of(load), load.requests)
    connections = [Connection(load.port) for _ in range(load.connections)]
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ, connection)
    took: list[int] = []
    faults = 0
    started = ended = time.perf_counter_ns()
    deadline = started + int(load.seconds * 1e9) if load.seconds is not None else None
    busy = sum(_ask_next(connection, keys) for connection in connections)
    while busy:
        ready = selector.select(SILENCE_SECONDS)
        if not ready:
            raise TimeoutError(f"The server said nothing for {SILENCE_SECONDS} s.")
        for chosen, _ in ready:
            connection = chosen.data
            if not connection.answered():
                continue
            now = time.perf_counter_ns()
            # One answer is counted however late it is, since a rate needs one.
            if deadline is None or now < deadline or not took:
                took.append(now - connection.sent_at)
                faults += not connection.is_right
                ended = now
                busy -= not _ask_next(connection, keys)
            else:
                # Late answers don't count, but are waited for: the next case is to find this server idle.
                busy -= 1
    for connection in connections:
        connection.close()
    return outcome(took, max(load.seconds or 0.0, (ended - started) / 1e9), faults)


def outcome(took: list[int], seconds: float, faults: int) -> Outcome:
    """Sum up how many nanoseconds each answer *took*."""
    took = sorted(took)
    return Outcome(
        requests=len(took),
        seconds=seconds,
        faults=faults,
        p50_ms=statistics.median(took) / 1e6 if took else 0.0,
        p99_ms=took[len(took) * 99 // 100] / 1e6 if took else 0.0,
    )


def _ask_next(connection: Connection, keys: Iterator[bytes]) -> bool:
    key = next(keys, None)
    if key is not None:
        connection.ask(key)
    return key is not None


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(drive(Load(**json.loads(sys.argv[1]))))))
