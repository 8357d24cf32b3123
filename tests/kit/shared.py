"""One server for all the processes of a test run, for one that takes long to start: the first process that asks starts
it, and ends it when the last has ended. What servers there are is not known here.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path


@contextmanager
def shared(folder: Path, name: str, start: Callable[[], AbstractContextManager[str]]) -> Iterator[str]:
    """Lend the URL that *start* lends here or in another process; *folder* is known to all of them."""
    where = folder / name
    with ExitStack() as ends:
        turn = ends.enter_context((folder / f"{name}.turn").open("a"))
        users = ends.enter_context((folder / f"{name}.users").open("a"))
        fcntl.flock(turn, fcntl.LOCK_EX)
        # Behind one that is ending it: there is none then.
        fcntl.flock(users, fcntl.LOCK_SH)
        if where.exists():
            url = where.read_text()
        else:
            url = ends.enter_context(start())
            where.write_text(url)
            ends.callback(where.unlink)
            ends.callback(fcntl.flock, users, fcntl.LOCK_EX)  # First of all: when no other uses it any more.
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield url
