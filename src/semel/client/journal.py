"""The journal of a client: a SQLite file with the operations that it means to carry out, each written down before the
first byte leaves. It sends nothing; ``resuming.py`` has what goes on after a crash.

What it has under an intent outlives the process: the key, the bytes, and in the end the answer. One write for each
operation waits for the disk, the first. The answer's does not: if it is lost in a power cut, the operation is pending
again, and the same key gets the same answer from the server.
"""

from __future__ import annotations

import glob
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from semel.client.leases import Held, Leases
from semel.core.intent import (
    TOO_LATE,
    Beginning,
    Begun,
    Ended,
    Entry,
    EntryState,
    Lapsed,
    Outgoing,
    Taken,
    Wish,
    checked,
    fingerprint,
    is_same,
    kept_headers,
    without_login,
)
from semel.core.message import Answer
from semel.errors import (
    ConfigurationError,
    IntentDiffers,
    JournalError,
    JournalFull,
    JournalNewer,
    RequestOutcomeUnknown,
    StoreError,
)
from semel.stores.headers import read_back, written
from semel.stores.sqlite.file import Connection, Place, connect, explained
from semel.stores.statement import Names, load_queries

if TYPE_CHECKING:
    from semel.client.resuming import Resumed

T = TypeVar("T")

#: "Smlj": tells the file from other SQLite files.
APPLICATION_ID = 0x536D6C6A
VERSION = 1

#: It is renewed while its process lives. While it lasts, other processes wait. They may send as well after it: the key
#: is the same, and the server sees to it.
LEASE = timedelta(seconds=10)
#: How long answers are kept. In this time the same intent is not sent again.
KEEP = timedelta(days=90)
MAX_ENTRIES = 100_000
MAX_BYTES = 256 * 2**20
#: An answer needs room, too, when its time comes.
_ROOM_FOR_AN_ANSWER = 4096

#: Counting reads the whole table.
_COUNT_SECONDS = 60.0

_PRIMARY = 0xFF
_OTHERS = 0o077
_NOT_KEPT_OF_ANSWERS = ("content-length",)


class Journal:
    """The operations of a client, in one file, for any number of processes on this machine."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lease: timedelta = LEASE,
        keep: timedelta = KEEP,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file, or make it: only this user can read it. A file that can't be used is an error at once.

        Answers are kept for *keep*; at *max_entries*, or *max_bytes*, new intents are refused.
        """
        _check(path, {"lease": lease, "keep": keep}, {"max_entries": max_entries, "max_bytes": max_bytes})
        self.path = Path(path).absolute()
        #: What this process is sending.
        self.leases = Leases(lease.total_seconds(), self._extend)
        self._lease = lease.total_seconds()
        self._keep = keep.total_seconds()
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._count, self._counts_at = 0, 0.0
        self._connection = Connection(Place(self.path, Names()))
        #: Tells the file that is open from another of the same name.
        self._file = (0, 0)
        #: Whether the connection is as it was opened: in no transaction, and every commit waits for the disk.
        self._is_clean = True
        self._use(lambda _: None)

    def close(self) -> None:
        """Close the file. It is opened again by the next use."""
        self.leases.stop()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, wish: Wish, token: bytes) -> Beginning:
        """Write down what is about to be sent, or return what is there: committed, and on the disk.

        *token* is the sender's own: it has the intent from now on.
        """
        sent = wish.outgoing
        own = Outgoing(sent.method, without_login(sent.url), sent.headers, sent.body)

        def begun(connection: sqlite3.Connection) -> Beginning:
            now = self._clock()  # After the wait for others, which may have taken it meanwhile.
            lease = {"intent": wish.intent, "token": token, "now": now, "leased_to": now + self._lease}
            found = connection.execute(SQL["find"], {"intent": wish.intent}).fetchone()
            if found is None:
                self._make_room(connection, len(own.body), now)
                row = {
                    "key": wish.key,
                    "method": own.method,
                    "url": own.url,
                    "headers": written(kept_headers(own.headers)),
                    "body": own.body,
                    "fingerprint": fingerprint(own, wish.account),
                    "header": wish.header.lower(),
                    # What begins before this has ended before the server forgets the key.
                    "not_after": now + wish.retention - wish.deadline,
                    "forgotten_at": now + wish.retention,
                }
                connection.execute(SQL["insert"], row | lease)
                return Begun(wish.key, own, is_resumed=False)
            stored = _Stored(*found)
            is_another_key = wish.is_key_given and wish.key != stored.key
            if is_another_key or not (wish.is_redirected or is_same(stored.fingerprint, own, wish.account)):
                raise IntentDiffers(key=stored.key, intent=wish.intent)
            if stored.state == "done":
                return Ended(stored.key, stored.answered)
            if stored.is_leased(now):
                return Taken(stored.key)
            if stored.state == "unknown" or stored.not_after <= now:
                connection.execute(SQL["lapse"], {"now": now})
                return Lapsed(stored.key)
            if now + wish.deadline > min(stored.forgotten_at, stored.first_at + wish.retention):
                return Lapsed(stored.key)  # For this process: one with a shorter deadline may still send it.
            if stored.header != wish.header.lower():
                raise ConfigurationError(
                    f"The key of {wish.intent!r} is sent in the header {stored.header}, and this client sends keys in "
                    f"{wish.header}: the server would take it for another operation. Nothing was sent. Make the client "
                    f"with header={stored.header!r}."
                )
            outgoing = own if wish.is_redirected else stored.intact(self.path, wish)
            connection.execute(SQL["take"], lease)
            return Begun(stored.key, outgoing, is_resumed=stored.in_doubt)

        return self._use(lambda connection: _in_transaction(connection, begun))

    def renew(self, intent: str, token: bytes) -> bool:
        """Keep the intent for one more try; False: it is another sender's, or has ended. Past the server's retention,
        its outcome is unknown.
        """
        leased = self._leased()
        given = {"intent": intent, "token": token, **leased, "tries": 1}
        if self._write("renew", given) > 0:
            return True
        found = self._use(lambda connection: connection.execute(SQL["find"], given).fetchone(), is_synced=False)
        stored = _Stored(*found) if found else None
        is_late = stored is not None and stored.state == "pending" and stored.forgotten_at <= leased["now"]
        if stored is not None and (is_late or stored.state == "unknown"):
            raise RequestOutcomeUnknown(TOO_LATE, key=stored.key, intent=intent)
        return False

    def is_held(self, intent: str, token: bytes) -> bool:
        """Whether the intent is still that sender's: no other can have sent it since it began."""
        given = {"intent": intent, "token": token}
        found = self._use(lambda connection: connection.execute(SQL["held"], given).fetchone(), is_synced=False)
        return found is not None

    def _extend(self, held: Sequence[Held]) -> None:
        """Keep what is being sent, from a thread."""

        def extended(connection: sqlite3.Connection) -> None:
            for intent, token in held:
                connection.execute(SQL["renew"], {"intent": intent, "token": token, **self._leased(), "tries": 0})

        self._use(lambda connection: _in_transaction(connection, extended), is_synced=False)

    def _leased(self) -> dict[str, float]:
        now = self._clock()
        return {"now": now, "leased_to": now + self._lease}

    def release(self, intent: str, token: bytes, *, in_doubt: bool = True) -> None:
        """Give the intent back: it is still to be sent. Without *in_doubt*, it can't have taken effect."""
        self._write("release", {"intent": intent, "token": token, "in_doubt": in_doubt})

    def settle(self, intent: str, key: str, answer: Answer, *, token: bytes | None = None) -> bool:
        """Write the answer down, and return whether it was. The request's bytes are no longer kept.

        With *token*, it is written only while the intent is that sender's.
        """
        given = {
            "intent": intent,
            "key": key,
            "token": token,
            "status": answer.status,
            "headers": written(kept_headers(answer.headers, *_NOT_KEPT_OF_ANSWERS)),
            "body": answer.body,
            "now": self._clock(),
        }
        return self._write("settle", given) > 0

    def pending(self) -> list[Entry]:
        """Return what has no answer yet and can still be sent, the oldest first."""
        return self.entries("pending")

    def entries(self, state: EntryState | None = None, *, after: float = 0.0) -> list[Entry]:
        """Return all entries, or those in one *state*, the oldest first; none that began before *after*."""
        now = self._clock()
        self._write("lapse", {"now": now})
        given = {"state": state, "after": after, "now": now}
        rows = self._use(lambda connection: connection.execute(SQL["list"], given).fetchall())
        return [
            Entry(intent, key, of, method, url, tries, first, last, bool(leased), status, ended, header)
            for intent, key, of, method, url, tries, first, last, leased, status, ended, header in rows
        ]

    def request(self, intent: str) -> Outgoing | None:
        """Return what is to be sent for *intent*, without credentials; None: nothing is."""
        found = self._use(lambda connection: connection.execute(SQL["find"], {"intent": intent}).fetchone())
        stored = _Stored(*found) if found else None
        if stored is None or stored.state != "pending":
            return None
        try:
            return stored.outgoing
        except ValueError as error:
            raise JournalError(
                f"What {self.path} has of {intent!r} can't be read: {error}. Nothing was sent."
            ) from error

    def forget(self, intent: str) -> bool:
        """Remove an entry, unless a process has it at this moment: sent again, its intent is a new operation.

        It returns whether there was one.
        """
        given = {"intent": checked(intent), "now": self._clock()}
        return self._use(lambda connection: connection.execute(SQL["forget"], given).rowcount) > 0

    def resume(self, client: Any, *, hosts: Collection[str] | None = None) -> list[Resumed]:
        """Send what is pending through *client*, which has this journal: an ``httpx.Client``, ``requests.Session``.

        With *hosts*, as ``name`` or ``name:port``, only what is for them. Without, all of it must be for one.
        """
        from semel.client.resuming import resume  # noqa: PLC0415 - it needs this module

        return resume(self, client, hosts=hosts)

    async def aresume(self, client: Any, *, hosts: Collection[str] | None = None) -> list[Resumed]:
        """Send what is pending through *client*, an ``httpx.AsyncClient`` that has this journal."""
        from semel.client.resuming import aresume  # noqa: PLC0415 - as above

        return await aresume(self, client, hosts=hosts)

    def _make_room(self, connection: sqlite3.Connection, size: int, now: float) -> None:
        """Remove what is too old, and see that there is room. Other processes' entries are counted once a minute."""
        if now >= self._counts_at or self._count >= self._max_entries:
            connection.execute(SQL["expire"], {"before": now - self._keep})
            ((self._count,),) = connection.execute(SQL["count"]).fetchall()
            self._counts_at = now + _COUNT_SECONDS
        pages, free, page = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        used = (pages - free) * page
        if self._count >= self._max_entries or used + size + _ROOM_FOR_AN_ANSWER > self._max_bytes:
            raise JournalFull(
                f"{self.path} has {self._count} entries in {used} bytes. Nothing was sent. Remove what is no longer "
                f"needed (semel journal forget), or raise max_entries and max_bytes."
            )
        self._count += 1

    def _write(self, name: str, given: Mapping[str, Any]) -> int:
        """Execute one statement, and return how many rows it changed. What gets lost in a power cut is found out again
        from the server.
        """
        return self._use(lambda connection: connection.execute(SQL[name], given).rowcount, is_synced=False)

    def _use(self, work: Callable[[sqlite3.Connection], T], *, is_synced: bool = True) -> T:
        """Do *work* with the connection, in this thread alone; say in words what is wrong with the file. Without
        *is_synced*, a commit does not wait for the disk.

        An exception from a signal handler may come between any two lines. So this is no context manager, which may be
        left entered, with the lock; and the block has one line.
        """
        with self._connection.lock:
            done = self._locked(work, is_synced=is_synced)
        return done  # noqa: RET504 - in the block, the lock would not be released at this line

    def _locked(self, work: Callable[[sqlite3.Connection], T], *, is_synced: bool) -> T:
        try:
            opened = self._ready()
            self._is_clean = False
            try:
                if not is_synced:
                    opened.execute("PRAGMA synchronous = NORMAL")
                return work(opened)
            finally:
                self._clean(opened, is_synced=is_synced)
        except sqlite3.Error as error:
            # What need not wait for the disk is written while the request is on its way, or after it.
            raise self._explained(error, end=" Nothing was sent." if is_synced else "") from error

    def _ready(self) -> sqlite3.Connection:
        """Return the connection, opened and clean."""
        opened = self._connection.opened
        if opened is None or self._connection.opened_by != os.getpid():
            opened = self._open()
            self._file = self._identity()
            self._connection.keep(opened)
        elif self._identity() != self._file:
            raise JournalError(
                f"{self.path} was removed or replaced while it was open, and what it had is lost. Nothing was "
                "sent. Find out what became of its intents; then make a new journal."
            )
        if not self._is_clean:
            self._clean(opened, is_synced=False)
        return opened

    def _clean(self, opened: sqlite3.Connection, *, is_synced: bool) -> None:
        _roll_back(opened)
        if not is_synced:
            opened.execute("PRAGMA synchronous = FULL")
        self._is_clean = True

    def _identity(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError:
            return 0, 0
        return found.st_dev, found.st_ino

    def _open(self) -> sqlite3.Connection:
        is_new = not self.path.exists()
        try:
            # Before it is opened: SQLite makes its log with the same permissions.
            for file in [] if is_new else [self.path, *self.path.parent.glob(f"{glob.escape(self.path.name)}-*")]:
                if file.is_file() and file.stat().st_mode & _OTHERS:
                    file.chmod(0o600)
        except OSError as error:
            raise JournalError(f"The journal can't be made private: {error}. Nothing was sent.") from error
        try:
            opened = connect(self.path)
        except StoreError as error:  # Of a client: the server's own kinds are answered with statuses.
            raise JournalError(f"The journal can't be used: {error} Nothing was sent.") from error
        try:
            _prepare(opened, self.path)
        except BaseException:
            opened.close()
            raise
        if is_new:
            _sync_folder(self.path.parent)
        return opened

    def _explained(self, error: sqlite3.Error, *, end: str) -> JournalError:
        if getattr(error, "sqlite_errorcode", 0) & _PRIMARY == sqlite3.SQLITE_FULL:
            return JournalFull(f"{self.path} can't grow: the disk is full.{end}")
        return JournalError(f"The journal can't be used: {explained(error, self._connection.place)}{end}")


class _Stored:
    """A row, as ``find`` returns it."""

    def __init__(self, *columns: Any) -> None:
        self.key: str = columns[0]
        self.state: str = columns[1]
        self._url, self._method, self._headers, self._body = columns[2:6]
        self.fingerprint: bytes = columns[6]
        self.not_after: float = columns[7]
        self._leased_to: float = columns[8]
        self._status, self._answer_headers, self._answer = columns[9:12]
        self.header: str = columns[12]
        self.first_at: float = columns[13]
        self.forgotten_at: float = columns[14]
        self._leased_at: float = columns[15]
        self.in_doubt: bool = bool(columns[16])

    def is_leased(self, now: float) -> bool:
        # A clock that was set back by more than the length of a lease must not make it longer.
        return 2 * self._leased_at - self._leased_to <= now < self._leased_to

    @property
    def outgoing(self) -> Outgoing:
        return Outgoing(self._method, self._url, read_back(self._headers), self._body)

    def intact(self, path: Path, wish: Wish) -> Outgoing:
        """Return what is sent, which must be what was written down."""
        with suppress(ValueError):  # The headers are not even JSON.
            if is_same(self.fingerprint, self.outgoing, wish.account):
                return self.outgoing
        raise JournalError(
            f"What {path} has of {wish.intent!r} (key {self.key}) is not what was written down: the disk or another "
            "program has altered it. Nothing was sent. Look the operation up; then: semel journal forget."
        )

    @property
    def answered(self) -> Answer | None:
        if self._answer is None:
            return None
        return Answer(self._status, read_back(self._answer_headers), self._answer)


def _check(path: object, durations: Mapping[str, object], limits: Mapping[str, object]) -> None:
    """Refuse what can't work, in words."""
    try:
        name = os.fsencode(path)  # type: ignore[arg-type]  # which is what is found out
    except (TypeError, ValueError):
        name = b""
    if not name or b"\0" in name:
        raise ConfigurationError(f"A journal has the path of a file, not {path!a}.")
    for setting, given in durations.items():
        if not isinstance(given, timedelta) or given <= timedelta(0):
            raise ConfigurationError(f"{setting} is a timedelta above zero, not {given!r}.")
    for setting, given in limits.items():
        if not isinstance(given, int) or given < 1:
            raise ConfigurationError(f"{setting} is a whole number above zero, not {given!r}.")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the table in an empty file; refuse a file that is another program's, or a newer version's."""
    # What is deleted was a request: its bytes must not stay in the file.
    connection.execute("PRAGMA secure_delete = ON").close()

    def prepared(connection: sqlite3.Connection) -> None:
        ((owner,),) = connection.execute("PRAGMA application_id").fetchall()
        ((version,),) = connection.execute("PRAGMA user_version").fetchall()
        ((objects,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        if owner != APPLICATION_ID and (owner or objects):
            raise JournalError(f"{path} is no journal, but another program's database. Nothing was sent.")
        if version > VERSION:
            raise JournalNewer(
                f"{path} has version {version}, and this Semel knows version {VERSION}. Nothing was sent. Update Semel."
            )
        if version < VERSION:
            connection.execute(SQL["create"])
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")

    _in_transaction(connection, prepared)


def _in_transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    try:
        connection.execute("BEGIN IMMEDIATE")
        done = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise
    return done


def _roll_back(connection: sqlite3.Connection) -> None:
    """End a transaction that is open: it would keep other processes out."""
    with suppress(sqlite3.Error):  # One that failed with a full disk has rolled itself back.
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _sync_folder(folder: Path) -> None:
    """Have the name of a new file on the disk, too."""
    with suppress(OSError):  # not where folders can't be opened
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


SQL: Mapping[str, str] = {
    name: query.text for name, query in load_queries("semel.client", Names(), "journal.sql").items()
}
