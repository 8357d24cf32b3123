"""A load that does not adapt itself to the server: so many requests a second, each sent when it is due. Not for
throughput: it shows how long answers take while something else goes on. It runs in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import selectors
import sys
import time

from bench.client import SILENCE_SECONDS, Connection, keys_of, outcome
from bench.load import Load, Outcome


def drive(load: Load) -> Outcome:
    """Send *load*, wait for every answer, and say how it went."""
    if load.seconds is None or load.per_second is None:
        raise ValueError("A paced load is so many a second, for a number of seconds.")
    interval = 1e9 / load.per_second
    wanted = round(load.seconds * load.per_second)
    keys = keys_of(load)
    idle = [Connection(load.port) for _ in range(load.connections)]
    connections = tuple(idle)
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ, connection)
    took: list[int] = []
    faults = sent = 0
    started = time.perf_counter_ns()
    while len(took) < wanted:
        had_to_wait = not idle
        may_send = bool(idle) and sent < wanted
        pause = max(0.0, (started + sent * interval - time.perf_counter_ns()) / 1e9) if may_send else SILENCE_SECONDS
        ready = selector.select(pause)
        if not ready and not may_send:
            raise TimeoutError(f"The server said nothing for {SILENCE_SECONDS} s.")
        for chosen, _ in ready:
            if chosen.data.answered():
                took.append(time.perf_counter_ns() - chosen.data.sent_at)
                faults += not chosen.data.is_right
                idle.append(chosen.data)
        while idle and sent < wanted and (due := int(started + sent * interval)) <= time.perf_counter_ns():
            connection = idle.pop()
            connection.ask(next(keys))
            if had_to_wait:
                # It could not be sent when it was due, because the server was slow: that is part of what it took.
                connection.sent_at = due
            sent += 1
    for connection in connections:
        connection.close()
    return outcome(took, load.seconds, faults)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(drive(Load(**json.loads(sys.argv[1]))))))
