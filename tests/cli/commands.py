"""A process that has imported everything ``python -m semel`` will, and forks one for each command. The command line is
not imitated: a child becomes what ``python -m semel`` would be by then, and ends as that ends.

Run as a program: a line of its standard input is a `Job`, a line of its standard output what the command ended with.
"""

import gc
import importlib
import json
import os
import sys
from dataclasses import dataclass
from typing import IO

from semel.cli.app import COMMANDS
from semel.cli.main import main

# Imported on first use, and by the parent, so that no child has to. typer looks whether there is a pydantic.
FIRST_USED = (
    *("pydantic.type_adapter", "semel.stores.postgres.store", "semel.stores.sqlite.store"),
    *(where.partition(":")[0] for where in COMMANDS.values()),
)


@dataclass(frozen=True)
class Job:
    """A command: what is typed, where, and which files its output goes to."""

    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    stdout: str
    stderr: str


def serve(answers: IO[str]) -> Job | None:
    """Say how each command ended. The parent returns when there are no more of them; a child at once, with its own."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return Job(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    return None


def become(job: Job) -> None:
    """Leave nothing of the parent but what it has imported."""
    for path, number in ((os.devnull, 0), (job.stdout, 1), (job.stderr, 2)):
        opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0)  # noqa: SIM115 - what the parent has read ahead is not the child's; it ends with the child.
    sys.argv = ["semel", *job.arguments]
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)


if __name__ == "__main__":
    for name in FIRST_USED:
        importlib.import_module(name)
    # A child's collector would touch every page that it shares with us, and make a copy of each.
    gc.collect()
    gc.freeze()
    with os.fdopen(os.dup(1), "w") as said:
        mine = serve(said)
    if mine:
        become(mine)
        main()
