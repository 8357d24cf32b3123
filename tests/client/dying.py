"""A process that sends intents in children, which kill themselves at a line of the client: ``python -m
tests.client.dying``. A line of its standard input is a job, a line of its standard output what became of the child.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import httpcore
import httpcore2

from semel import client as package
from semel.client import Journal
from semel.client.leases import Leases
from semel.flows import send
from tests.client.callers import KINDS, Caller
from torture.job import Fault
from torture.tracing import Lines

FILES = (os.path.dirname(package.__file__) + os.sep, send.__file__)  # noqa: PTH120 - beginnings of names, as strings
#: So that a dead process's intents are free soon.
LEASE = timedelta(milliseconds=20)
#: Seconds: longer than any of them lives.
RENEWED_ONCE_IN = 3600.0


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Send one intent, or resume what is pending; count the lines, and die where it is said."""
    fault = Fault(signal.SIGKILL, line=job["line"]) if job["line"] else None
    lines = Lines(fault, FILES)
    lines.start()
    journal = Journal(job["journal"], lease=LEASE)
    # How often a lease is renewed is a matter of time, and the lines of a run would not be the same twice.
    journal.leases = Leases(RENEWED_ONCE_IN, journal._extend)
    caller = Caller(job["kind"], journal=journal)
    if job["resumes"]:
        status = {each.status or str(each.error) for each in caller.resume()}
        lines.stop()
        return {"lines": lines.count, "status": sorted(map(str, status)), "body": ""}
    got = caller.post(job["url"], job["intent"], json={"intent": job["intent"]})
    caller.close()
    lines.stop()
    return {"lines": lines.count, "status": got.status, "body": got.body.decode()}


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            said = json.dumps(work(job)).encode()
            os.write(writing, said)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        _, status = os.waitpid(child, 0)
        answer = {"exit": os.waitstatus_to_exitcode(status), "said": json.loads(told or b"null")}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def warm_up() -> None:
    """Import what is imported at first use: in the parent, so that no child has to."""
    for kind in KINDS:
        caller = Caller(kind, deadline=timedelta(milliseconds=1))
        with suppress(caller.Lost, httpcore.ConnectError, httpcore2.ConnectError):
            caller.post("http://127.0.0.1:1/")
        caller.close()


if __name__ == "__main__":
    warm_up()
    main()
