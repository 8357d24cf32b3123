"""Several clients at once that pay until they are told to stop, and the worker that serves them, in one process.

``Crowd`` is the owner's side, ``main`` the process. A child of ``warm.py`` dies of what a handler raises; here it is
answered with 500, as a server does, and the client insists.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import semel
from semel.stores import async_store, store
from torture.checker import Event
from torture.child import _Async, _Sync, is_final
from torture.job import Job
from torture.provider import ROOT
from torture.witness import open_sqlite
from torture.workload import Api, asgi_entry, given, wsgi_entry

#: A client looks again this soon: it is alone with its request, and has no event to wait for.
RETRY_SECONDS = 0.05
#: And gives up after this long: the checker then finds the key stuck.
INSIST_SECONDS = 90.0
#: Every so-many-th client loses its answer, and asks again.
FORGETFUL = 4

_ROW = "INSERT INTO effects (key, step, attempt, worker) VALUES (?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Order:
    """The work of a crowd."""

    job: Job
    #: The forms of payment, by turns.
    forms: tuple[str, ...]
    #: The number of the first key: no two crowds may have the same keys.
    first: int = 0
    #: How many pay at once.
    clients: int = 3
    #: The URL of the SQLite file that ``guard`` pays in: one that no fault reaches. By default, the store's database.
    elsewhere: str = ""

    def as_json(self) -> str:
        """Write it on one line."""
        return json.dumps({**asdict(self), "job": self.job.as_json()})

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Read it back."""
        read = json.loads(text)
        return cls(**{**read, "job": Job.from_json(read["job"]), "forms": tuple(read["forms"])})


class CrowdFailed(RuntimeError):
    """The clients' process ended in a way that no fault explains."""


class Crowd:
    """Clients in a process of their own, from ``with`` to its end; then they are waited for."""

    def __init__(self, order: Order) -> None:
        """Start no client yet."""
        self._order = order

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "torture.clients", self._order.as_json()]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()
        if kind is None and self._process.returncode:
            raise CrowdFailed(f"It ended with {self._process.returncode}.")

    @property
    def pid(self) -> int:
        """The process id, which a history has with each answer."""
        return self._process.pid

    @property
    def is_paying(self) -> bool:
        """Whether its process lives."""
        return self._process.poll() is None


class _Elsewhere(Api):
    """Pays ``guard`` in a separate file, so that the fault does not hit the handler's own database."""

    def __init__(self, job: Job, url: str) -> None:
        super().__init__(job)
        self._url = url

    def _write_alone(self, step: str) -> None:
        operation = semel.current()
        with closing(open_sqlite(self._url)) as file:
            file.execute(_ROW, (operation.key, step, operation.attempt, "elsewhere"))


class _Paying:
    """What threads and tasks share: which payment is next, and when to stop."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._numbers = itertools.count(order.first)
        self.is_stopping = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> tuple[int, str, str]:
        """Return the number, the form and the key of the next payment."""
        number = next(self._numbers)
        return number, self.order.forms[number % len(self.order.forms)], f"pay-{number:06d}"

    def api(self) -> Api:
        """Return the handlers."""
        return _Elsewhere(self.order.job, self.order.elsewhere) if self.order.elsewhere else Api(self.order.job)

    def _listen(self) -> None:
        sys.stdin.read()
        self.is_stopping.set()


class _Threads(_Sync):
    """Clients in threads, by the WSGI entry point."""

    def __init__(self, paying: _Paying) -> None:
        super().__init__(paying.order.job)
        self.api = paying.api()
        self._paying = paying

    def work(self) -> dict[str, Any]:
        with closing(store(given(self.job))) as opened:
            self._entry = wsgi_entry(self.api, self.job, opened)
            clients = [threading.Thread(target=self._go_on) for _ in range(self._paying.order.clients)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
        return {}

    def _go_on(self) -> None:
        while not self._paying.is_stopping.is_set():
            number, form, key = self._paying.next()
            ends = time.monotonic() + INSIST_SECONDS
            while not is_final(self._once(form, key)) and time.monotonic() < ends:
                time.sleep(RETRY_SECONDS)
            if number % FORGETFUL == 0:
                self._once(form, key)

    def _once(self, form: str, key: str) -> Event:
        self.sent(form, key)
        try:
            return self._send(self._entry, form, key)
        except Exception:  # noqa: BLE001 - a server answers so, whatever it was
            return self.answered(form, key, 500, {}, b"")


class _Tasks(_Async):
    """Clients in tasks, by the ASGI entry point."""

    def __init__(self, paying: _Paying) -> None:
        super().__init__(paying.order.job)
        self.api = paying.api()
        self._paying = paying

    async def work(self) -> dict[str, Any]:
        opened = async_store(given(self.job))
        self._entry = asgi_entry(self.api, self.job, opened)
        await asyncio.gather(*(self._go_on() for _ in range(self._paying.order.clients)))
        await opened.close()
        return {}

    async def _go_on(self) -> None:
        while not self._paying.is_stopping.is_set():
            number, form, key = self._paying.next()
            ends = time.monotonic() + INSIST_SECONDS
            while not is_final(await self._once(form, key)) and time.monotonic() < ends:  # noqa: ASYNC110 - see RETRY_SECONDS
                await asyncio.sleep(RETRY_SECONDS)
            if number % FORGETFUL == 0:
                await self._once(form, key)

    async def _once(self, form: str, key: str) -> Event:
        self.sent(form, key)
        try:
            return await self._send(self._entry, form, key)
        except Exception:  # noqa: BLE001 - a server answers so, whatever it was
            return self.answered(form, key, 500, {}, b"")


def main(arguments: Sequence[str]) -> None:
    """Pay until the input ends, and wait for every answer."""
    paying = _Paying(Order.from_json(arguments[0]))
    if paying.order.job.entry == "asgi":
        asyncio.run(_Tasks(paying).work())
    else:
        _Threads(paying).work()


if __name__ == "__main__":
    main(sys.argv[1:])
