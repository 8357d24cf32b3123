"""A client that is interrupted, stopped or overtaken: what its journal says of the operation afterwards. What it says
after a process was killed is in ``test_killed.py``.
"""

import asyncio
import gc
import linecache
import sqlite3
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import pytest

import semel
from semel.client import Journal
from semel.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from semel.client.leases import Held, Leases
from semel.client.options import Quotas
from semel.core.intent import Wish
from semel.core.message import Answer
from semel.core.retrying import Origin
from semel.errors import JournalError, RequestOutcomeUnknown
from tests.client.callers import Caller
from tests.client.served import Say, Served
from tests.web.harness import wait_until

INTENT = "invoice 17"
URL = "http://here/pay"
DAY = 86_400.0
SOURCE = str(Path(semel.__file__).parent)
GIVEN: dict[str, Any] = {"json": {}, "extensions": {"semel.intent": INTENT}}

Call = Callable[..., Caller]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "payments.journal"


class Interrupted(BaseException):
    """What a signal handler raises."""


class Interrupt:
    """Raises at one of the lines that are run, as a signal handler may."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.is_raised = False

    def __call__(self, frame: FrameType, event: str, _: object) -> "Interrupt | None":
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE):
            return None
        # A block that ends is traced as its first line, where no signal is handled: the lock would not be released.
        if linecache.getline(name, frame.f_lineno).lstrip().startswith("with ") or event == "call":
            return self
        self._left -= 1
        if self._left < 0 and not self.is_raised:
            self.is_raised = True
            raise Interrupted
        return self

    def run(self, function: Callable[[], object]) -> None:
        before = sys.gettrace()
        gc.disable()  # What it would call belongs to other tests, and nothing can be raised there.
        sys.settrace(self)
        try:
            function()
        except (Interrupted, RequestOutcomeUnknown):
            pass
        finally:
            sys.settrace(before)
            gc.enable()


def pending_in_doubt(path: Path, *, is_sent: bool) -> None:
    """Have an earlier process leave the intent in the journal."""
    with (
        Journal(path) as journal,
        httpx2.Client(transport=transport(journal, lambda _: httpx2.Response(502))) as client,
    ):
        with pytest.raises(RequestOutcomeUnknown):
            client.post(URL, **GIVEN)
        if not is_sent:
            assert journal.forget(INTENT)


def transport(journal: Journal, answer: Callable[[httpx2.Request], httpx2.Response]) -> IdempotentTransport:
    return IdempotentTransport(httpx2.MockTransport(answer), journal=journal, deadline=timedelta(seconds=0.05))


def taken_over(path: Path, clock: Callable[[], float]) -> None:
    """Have another process take the intent, send it, and lose its answer."""
    with Journal(path, clock=clock) as other:
        (entry,) = other.pending()
        outgoing = other.request(INTENT)
        assert outgoing is not None
        other.begin(Wish(INTENT, entry.key, outgoing, DAY, 1), b"other")
        other.release(INTENT, b"other", in_doubt=True)


def row(path: Path) -> tuple[str, int, int | None] | None:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT state, in_doubt, status FROM semel_journal").fetchone()
    return None if found is None else tuple(found)


@pytest.mark.filterwarnings("ignore:coroutine .send. was never awaited")  # It is cut before its first line.
@pytest.mark.parametrize("is_sent", [True, False], ids=["sent before", "new"])
def test_interrupted_at_any_line(path: Path, is_sent: bool) -> None:
    """An exception from a signal handler, at any line, takes no doubt back, and leaves no other process locked out."""
    pending_in_doubt(path, is_sent=is_sent)
    seen: list[object] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(404)

    with (
        Journal(path) as journal,
        httpx2.Client(transport=transport(journal, answer)) as client,
        closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other,
    ):
        number = 0
        interrupt = Interrupt(number)
        while number == 0 or interrupt.is_raised:
            seen.clear()
            interrupt = Interrupt(number)
            interrupt.run(lambda: client.post(URL, **GIVEN))
            state, in_doubt = other.execute("SELECT state, in_doubt FROM semel_journal").fetchone() or ("none", 0)
            if is_sent:
                assert (state, in_doubt) == ("pending", 1), number
                other.execute("UPDATE semel_journal SET token = NULL, leased_to = 0")
            else:
                assert in_doubt or not seen, number
                other.execute("DELETE FROM semel_journal")
            journal.request(INTENT)
            opened = journal._connection.opened
            assert opened is not None
            assert (opened.in_transaction, opened.execute("PRAGMA synchronous").fetchone()) == (False, (2,)), number
            number += 1
        assert number > 100


def test_cancelled_while_the_journal_is_busy(path: Path) -> None:
    """A task that is cancelled before the journal has said anything takes back no doubt of an earlier process."""
    pending_in_doubt(path, is_sent=True)

    async def called() -> None:
        inner = httpx2.MockTransport(lambda _: httpx2.Response(404))
        guarded = AsyncIdempotentTransport(inner, journal=path)
        assert guarded.journal is not None
        async with httpx2.AsyncClient(transport=guarded) as client:
            other.execute("BEGIN IMMEDIATE")
            sending = asyncio.create_task(client.post(URL, **GIVEN))
            await asyncio.to_thread(wait_until, guarded.journal._connection.lock.locked)
            sending.cancel()
            # When it is cancelled, the loop waits for the journal.
            threading.Timer(0.05, other.execute, ["COMMIT"]).start()
            with pytest.raises(asyncio.CancelledError):
                await sending

    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        asyncio.run(called())
    assert row(path) == ("pending", 1, None)


@pytest.mark.parametrize("moment", ["spend", "answered"])
def test_a_process_that_lost_its_lease(server: Served, call: Call, path: Path, moment: str) -> None:
    """After its lease was lost, in a pause or during the last try, an answer that a gateway may have given is not
    written down as the operation's: the process that took it over may have had an effect.
    """
    now = 1_000_000.0

    class Stopped(Quotas):
        def spend(self, host: Origin) -> bool:
            return super().spend(host) and self._stop("spend")

        def answered(self, host: Origin) -> None:
            super().answered(host)
            self._stop("answered")

        def _stop(self, here: str) -> bool:
            nonlocal now
            if here == moment:
                now += 11
                taken_over(path, lambda: now)
            return True

    with Journal(path, clock=lambda: now) as journal:
        caller = call(journal=journal, quotas=Stopped())
        server.faults += [Say(429, {"Retry-After": "0"}), Say(404)]
        with pytest.raises(RequestOutcomeUnknown) as caught:
            caller.post(server.url, INTENT, json={})
        assert caught.value.response.status_code == 404
        assert row(path) == ("pending", 1, None)
        assert call(journal=journal).post(server.url, INTENT, json={}).status == 201
        assert len(set(server.keys)) == 1


@pytest.mark.parametrize("is_seen", [False, True], ids=["", "lapsed"])
def test_the_journal_says_that_it_is_too_late(server: Served, call: Call, path: Path, is_seen: bool) -> None:
    """Past the server's retention by the journal's clock, no further try is sent, whatever the process thinks of it."""
    now = 1_000_000.0

    class Stopped(Quotas):
        def spend(self, host: Origin) -> bool:
            nonlocal now
            now += DAY
            if is_seen:  # by another process, which says that it is unknown
                with Journal(path, clock=lambda: now) as other:
                    assert other.pending() == []
            return super().spend(host)

    with Journal(path, clock=lambda: now) as journal:
        server.faults.append("lose after")
        with pytest.raises(RequestOutcomeUnknown, match="past the server's retention") as caught:
            call(journal=journal, quotas=Stopped()).post(server.url, INTENT, json={})
        assert server.keys == [caught.value.key]
        assert [entry.state for entry in journal.entries()] == ["unknown"]


def test_settled_with_a_token(path: Path) -> None:
    """An answer that is written with a token needs the lease; without one, it ends the intent in any case."""
    now = 1_000_000.0
    with Journal(path, clock=lambda: now) as journal:
        pending_in_doubt(path, is_sent=True)
        (entry,) = journal.pending()
        outgoing = journal.request(INTENT)
        assert outgoing is not None
        now = entry.first_at
        journal.begin(Wish(INTENT, entry.key, outgoing, DAY, 1), b"slow")
        assert journal.is_held(INTENT, b"slow")
        assert journal.renew(INTENT, b"slow")
        now += 11
        taken_over(path, lambda: now)
        assert not journal.is_held(INTENT, b"slow")
        assert not journal.renew(INTENT, b"slow")
        assert not journal.settle(INTENT, entry.key, Answer(404), token=b"slow")
        assert journal.settle(INTENT, entry.key, Answer(201))
        assert not journal.settle(INTENT, entry.key, Answer(201))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died() -> None:
    """Leases are renewed again after the thread that did it has ended by an error."""
    extended: list[Sequence[Held]] = []

    def extend(held: Sequence[Held]) -> None:
        extended.append(held)
        if len(extended) == 1:
            sys.exit()

    others = set(threading.enumerate())
    leases = Leases(0.001, extend)
    leases.hold(INTENT, b"t", 60)
    wait_until(lambda: not set(threading.enumerate()) - others)
    leases.hold("next", b"t", 60)
    wait_until(lambda: len(extended) > 1)
    for intent in (INTENT, "next"):
        leases.drop(intent, b"t")
    leases.stop()


def test_a_journal_that_can_not_tell(server: Served, call: Call, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the journal is gone when an answer comes, no process can be ruled out: the outcome is unknown."""

    class Removed(Quotas):
        def spend(self, host: Origin) -> bool:
            path.rename(path.with_name("gone"))
            return super().spend(host)

    server.faults += [Say(429, {"Retry-After": "0"}), Say(404)]
    with pytest.raises(RequestOutcomeUnknown) as caught:
        call(journal=path, quotas=Removed()).post(server.url, INTENT, json={})
    assert caught.value.response.status_code == 404
    assert "could not renew" in caplog.text
    with pytest.raises(JournalError):
        call(journal=path / "nowhere").post(server.url, INTENT, json={})
