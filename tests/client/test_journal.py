"""The journal: what is written before anything is sent, what outlives a process, and what is refused."""

import asyncio
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from semel.client import Journal
from semel.client.httpx import AsyncIdempotentTransport
from semel.client.journal import VERSION
from semel.client.leases import Held, Leases
from semel.client.options import Quotas
from semel.core.intent import Begun, Lapsed, Outgoing, Wish
from semel.core.message import Answer
from semel.core.retrying import Origin
from semel.errors import (
    AnswerNotKept,
    ConfigurationError,
    IntentBusy,
    IntentDiffers,
    JournalError,
    JournalFull,
    JournalNewer,
    RequestOutcomeUnknown,
)
from tests.client.callers import Caller
from tests.client.served import Say, Served
from tests.web.harness import wait_until

Call = Callable[..., Caller]

INTENT = "invoice 17"
DAY = 86_400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "payments.journal"


class NoRetries(Quotas):
    """A host that has had all of its retries."""

    def spend(self, host: Origin) -> bool:
        return False


def wish(intent: str = INTENT, body: bytes = b"{}") -> Wish:
    return Wish(intent, "k-1", Outgoing("POST", "http://here/pay", (), body), retention=DAY, deadline=60)


def modes(path: Path) -> set[int]:
    return {stat.S_IMODE(each.stat().st_mode) for each in path.parent.glob(f"{path.name}*")}


def test_stored_answer(server: Served, call: Call, path: Path) -> None:
    """The same intent gets the stored answer, without a request, in another process's client as well."""
    first = call(journal=path).post(f"{server.url}/pay", INTENT, json={"amount": 5})
    again = call(journal=path).post(f"{server.url}/pay", INTENT, json={"amount": 5})
    assert (again.status, again.body) == (201, first.body)
    assert again.headers["content-type"] == "application/json"
    assert len(server.seen) == 1
    assert server.seen[0].header("semel-intent") is None
    (entry,) = Journal(path).entries()
    assert (entry.intent, entry.key, entry.state, entry.status) == (INTENT, server.keys[0], "done", 201)


def test_on_disk_before_it_is_sent(server: Served, call: Call, path: Path) -> None:
    """When the request arrives, the journal has it."""
    server.go.clear()
    caller = call(journal=path)
    with ThreadPoolExecutor(1) as threads, Journal(path) as other:
        sending = threads.submit(caller.post, server.url, INTENT, json={})
        wait_until(lambda: server.effects.total() == 1)
        (entry,) = other.pending()
        assert (entry.key, entry.is_leased) == (server.keys[0], True)
        server.go.set()
        assert sending.result().status == 201
        assert not other.pending()


def test_synchronous(path: Path) -> None:
    """The first write of an intent waits for the disk; its answer does not have to."""
    with Journal(path) as journal:
        said: list[str] = []
        opened = journal._connection.opened
        assert opened is not None
        opened.set_trace_callback(said.append)
        journal.begin(wish(), b"t")
        assert not [each for each in said if "synchronous" in each]
        ((level,),) = opened.execute("PRAGMA synchronous").fetchall()
        assert level == 2
        journal.release(INTENT, b"t")
        ((level,),) = opened.execute("PRAGMA synchronous").fetchall()
        assert level == 2


def test_after_a_lost_answer(server: Served, call: Call, path: Path) -> None:
    """An intent with an unknown outcome is sent again another day, with the same key and the same bytes."""
    server.outage = "lose after"
    with pytest.raises(RequestOutcomeUnknown) as caught:
        call(journal=path, quotas=NoRetries()).post(server.url, INTENT, content=b'{"a": 1, "b": 2}')
    assert caught.value.intent == INTENT
    (entry,) = Journal(path).pending()
    assert entry.key == caught.value.key
    server.outage = None
    assert call(journal=path).post(server.url, INTENT, content=b'{"a": 1, "b": 2}').status == 201
    assert len({(each.key, each.body) for each in server.seen}) == 1
    assert list(server.effects.values()) == [1]


def test_the_stored_bytes_are_sent(server: Served, call: Call, path: Path, tmp_path: Path) -> None:
    """A form that is built anew has another boundary; what is sent is what was sent before."""
    file = tmp_path / "a.txt"
    file.write_bytes(b"receipt")
    server.faults.append(Say(401))
    for status in (401, 201):
        with file.open("rb") as opened:
            assert call(journal=path).post(server.url, INTENT, files={"receipt": opened}).status == status
    first, second = server.seen
    assert (first.key, first.body) == (second.key, second.body)
    assert first.header("content-type") == second.header("content-type")
    assert second.header("content-length") == str(len(second.body))


@pytest.mark.parametrize("status", [201, 401])
def test_another_content(server: Served, call: Call, path: Path, status: int) -> None:
    """Another request under the same intent, or under another key, is refused in every state, and not sent."""
    server.faults.append(Say(status))
    caller = call(journal=path)
    caller.post(f"{server.url}/pay", INTENT, json={"amount": 5})
    with pytest.raises(IntentDiffers):
        caller.post(f"{server.url}/pay", INTENT, json={"amount": 6})
    with pytest.raises(IntentDiffers):
        caller.post(f"{server.url}/other", INTENT, json={"amount": 5})
    with pytest.raises(IntentDiffers):
        caller.post(f"{server.url}/pay", INTENT, json={"amount": 5}, headers={"Idempotency-Key": "another"})
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "change",
    [
        "body = CAST(replace(CAST(body AS TEXT), '100', '500') AS BLOB)",
        "method = 'PATCH'",
        "url = replace(url, '/pay', '/pax')",
        "headers = replace(headers, 'json', 'xml')",
        "headers = 'no JSON'",
        "fingerprint = x'00'",
    ],
)
def test_altered_bytes(server: Served, call: Call, path: Path, change: str) -> None:
    """A request whose stored bytes are not those that were written down is not sent, and neither is it resumed."""
    server.faults.append(Say(401))
    caller = call(journal=path)
    given: dict[str, Any] = {"content": b'{"amount": 100}', "headers": {"Content-Type": "application/json"}}
    assert caller.post(f"{server.url}/pay", INTENT, **given).status == 401
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"UPDATE semel_journal SET {change}")
    with pytest.raises((JournalError, IntentDiffers), match="Nothing was sent"):
        caller.post(f"{server.url}/pay", INTENT, **given)
    (resumed,) = caller.resume()
    assert isinstance(resumed.error, JournalError | IntentDiffers)
    assert len(server.seen) == 1


def test_another_account(server: Served, call: Call, path: Path) -> None:
    """An intent of one account is no other's: a client with the credentials of another gets neither its answer nor its
    request, and a new token of the same account changes nothing.
    """
    server.faults += [Say(422), Say(401)]
    first, other, none = (call(journal=path, account=account) for account in ("a", "b", None))
    assert first.post(server.url, INTENT, json={}).status == 422
    assert first.post(server.url, "invoice 18", json={}).status == 401
    for caller in (other, none):
        for intent in (INTENT, "invoice 18"):
            with pytest.raises(IntentDiffers, match="account"):
                caller.post(server.url, intent, json={})
        assert [type(each.error) for each in caller.resume()] == [IntentDiffers]
    assert len(server.seen) == 2
    again = call(journal=path, account="a")
    assert again.post(server.url, INTENT, json={}, headers={"Authorization": "Bearer new"}).status == 422
    assert [each.status for each in again.resume()] == [201]
    with pytest.raises(ConfigurationError, match="account"):
        call(journal=path, account="")


def test_intents_that_can_not_be_kept(server: Served, call: Call, path: Path) -> None:
    """An intent without a journal, to a host without keys, or of a GET, is refused before it is sent."""
    with pytest.raises(ConfigurationError, match="no journal"):
        call().post(server.url, INTENT)
    with pytest.raises(ConfigurationError, match="without a key"):
        call(journal=path, hosts=["api.example.com"]).post(server.url, INTENT)
    with pytest.raises(ConfigurationError, match="without a key"):
        call(journal=path).request("GET", server.url, INTENT)
    with pytest.raises(ConfigurationError, match="one line"):
        call(journal=path).post(server.url, "x" * 501)
    assert not server.seen


def test_final_and_other_answers(server: Served, call: Call, path: Path) -> None:
    """A 422 ends an intent; a 401 does not: with other credentials it may succeed."""
    server.faults.extend([Say(422), Say(401), Say(307, {"Location": "/"})])
    caller = call(journal=path)
    assert caller.post(server.url, "wrong", json={}).status == 422
    assert caller.post(server.url, "unauthorised", json={}).status == 401
    assert caller.post(server.url, "moved", json={}).status == 307
    assert caller.journal is not None
    assert {entry.intent for entry in caller.journal.pending()} == {"unauthorised", "moved"}
    assert caller.post(server.url, "wrong", json={}).status == 422
    assert caller.post(server.url, "unauthorised", json={}).status == 201
    assert server.keys[1] == server.keys[-1]


def test_redirected_intent(server: Served, call: Call, path: Path) -> None:
    """An intent is one operation, also where the server sends it on to another path."""
    moved = Say(307, {"Location": "/moved"})
    server.faults.extend([moved, "lose after"])
    caller = call(journal=path)
    for _ in range(2):
        assert caller.post(f"{server.url}/pay", INTENT, json={}, follow_redirects=True).status == 201
    assert [each.path for each in server.seen] == ["/pay", "/moved", "/moved"]
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize("method", ["PATCH", "PUT"])
def test_redirects_that_keep_the_method(server: Served, call: Call, path: Path, method: str) -> None:
    """A 301 leaves a PATCH and a PUT as they are, so it is not their answer: the intent goes on to the next URL."""
    server.faults.append(Say(301, {"Location": "/moved"}))
    caller = call(journal=path)
    for _ in range(2):
        assert caller.request(method, f"{server.url}/pay", INTENT, json={}, follow_redirects=True).status == 201
    assert [(each.method, each.path) for each in server.seen] == [(method, "/pay"), (method, "/moved")]
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize("said", [Say(403), Say(404), Say(302, {"Location": "/login"}), Say(501)], ids=str)
def test_answers_that_say_nothing_of_it(server: Served, call: Call, path: Path, said: Say) -> None:
    """After a lost try, an answer that is not the operation's leaves the intent pending, and it can be resumed."""
    server.faults.extend(["lose after", said])
    caller = call(journal=path)
    with pytest.raises(RequestOutcomeUnknown) as caught:
        caller.post(server.url, INTENT, json={}, follow_redirects=True)
    assert caught.value.response.status_code == said.status
    (resumed,) = caller.resume()
    assert (resumed.status, resumed.key) == (201, caught.value.key)
    assert list(server.effects.values()) == [1]


def test_no_doubt_after_a_challenge(server: Served, call: Call, path: Path) -> None:
    """An intent that was refused, and can't have taken effect, is not in doubt in the next call."""
    server.faults.extend([Say(401), Say(404)])
    assert [call(journal=path).post(server.url, INTENT, json={}).status for _ in range(3)] == [401, 404, 404]
    assert len(server.seen) == 2


def test_many_at_once(server: Served, call: Call, path: Path, kind: str) -> None:
    """Of many that send one intent at once, one sends; all get its answer."""
    callers = [call(journal=path) for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        shared = [] if kind.startswith("async") else callers
        sending = [threads.submit(each.post, server.url, INTENT, json={}) for each in (*callers, *shared)]
        got = [each.result() for each in sending]
    assert len({(each.status, each.body) for each in got}) == 1
    assert len(server.seen) == 1


def test_resume(server: Served, call: Call, path: Path) -> None:
    """What was pending is sent after a crash, with the client's credentials, and with its own key and bytes."""
    with Journal(path, lease=timedelta(milliseconds=1)) as crashed:
        for number, content in enumerate([b'{"n": 0}', b""]):
            headers = ((b"content-type", b"application/json"), (b"x-tenant", b"a"))
            outgoing = Outgoing("POST", f"{server.url}/pay?n={number}", headers, content)
            crashed.begin(Wish(f"n {number}", f"k-{number}", outgoing, DAY, 60), b"dead")
    caller = call(journal=path)
    caller.client.headers["Authorization"] = "Bearer fresh"
    server.faults.append("lose after")
    assert [(each.intent, each.key, each.status) for each in caller.resume()] == [
        ("n 0", "k-0", 201),
        ("n 1", "k-1", 201),
    ]
    assert server.keys == ["k-0", "k-0", "k-1"]
    assert [each.body for each in server.seen] == [b'{"n": 0}', b'{"n": 0}', b""]
    assert {(each.header("authorization"), each.header("x-tenant")) for each in server.seen} == {("Bearer fresh", "a")}
    assert {each.header("content-type") for each in server.seen} == {"application/json"}
    assert caller.resume() == []


def test_resume_goes_on_after_an_error(server: Served, call: Call, path: Path) -> None:
    """What can't be sent now stays pending, and does not stop the others."""
    with Journal(path, lease=timedelta(milliseconds=1)) as crashed:
        crashed.begin(Wish("nowhere", "k-0", Outgoing("POST", "http://127.0.0.1:1/", (), b""), DAY, 60), b"dead")
        crashed.begin(Wish("here", "k-1", Outgoing("POST", server.url, (), b""), DAY, 60), b"dead")
    caller = call(journal=path, quotas=NoRetries())
    nowhere, here = caller.resume(hosts=["127.0.0.1"])
    assert isinstance(nowhere.error, RequestOutcomeUnknown)
    assert here.status == 201
    assert caller.journal is not None
    assert [entry.intent for entry in caller.journal.pending()] == ["nowhere"]


def test_resume_to_several_hosts(server: Served, call: Call, path: Path) -> None:
    """Where requests to several hosts are pending, none is sent before it is said which of them this client is for:
    its credentials are not for all of them.
    """
    elsewhere = f"http://localhost:{server.port}/"
    with Journal(path, lease=timedelta(milliseconds=1)) as crashed:
        for intent, url in (("here", f"{server.url}/"), ("elsewhere", elsewhere)):
            crashed.begin(Wish(intent, f"k-{intent}", Outgoing("POST", url, (), b""), DAY, 60), b"dead")
    caller = call(journal=path)
    caller.client.headers["Authorization"] = "Bearer here"
    with pytest.raises(ConfigurationError, match=rf"{server.url} and http://localhost:{server.port}.*hosts=\["):
        caller.resume()
    assert not server.seen
    assert [each.intent for each in caller.resume(hosts=["127.0.0.1"])] == ["here"]
    assert [(each.key, each.header("host")) for each in server.seen] == [("k-here", server.host)]
    assert caller.journal is not None
    assert [entry.intent for entry in caller.journal.pending()] == ["elsewhere"]
    with pytest.raises(ConfigurationError, match="names"):
        caller.resume(hosts=[elsewhere])
    if caller.kind != "requests":
        caller.client.base_url = server.url  # So it is for that one.
        with pytest.raises(ConfigurationError, match=server.url):
            caller.resume()
    assert len(server.seen) == 1
    assert [each.status for each in caller.resume(hosts=[f"localhost:{server.port}"])] == [201]


def test_resume_through_another_client(server: Served, call: Call, path: Path, tmp_path: Path) -> None:
    """A client without this journal is refused, and nothing is sent."""
    caller = call(journal=path)
    assert caller.journal is not None
    caller.journal.begin(wish(), b"t")
    with pytest.raises(ConfigurationError, match="journal"):
        caller.resume(call().client)
    with pytest.raises(ConfigurationError, match="journal"):
        caller.resume(call(journal=tmp_path / "other.journal").client)


def test_not_past_retention_by_another_deadline(path: Path) -> None:
    """A process that would need longer, or that knows of a shorter retention, leaves an intent alone in time."""
    now = 1_000_000.0
    outgoing = Outgoing("POST", "http://here/pay", (), b"")
    with Journal(path, clock=lambda: now) as journal:
        journal.begin(Wish(INTENT, "k-1", outgoing, DAY, 60), b"dead")
        now += DAY - 120
        assert journal.begin(Wish(INTENT, "k-2", outgoing, DAY, 3600), b"slow") == Lapsed("k-1")
        assert journal.begin(Wish(INTENT, "k-2", outgoing, DAY / 2, 60), b"short") == Lapsed("k-1")
        assert journal.begin(Wish(INTENT, "k-2", outgoing, DAY, 60), b"own") == Begun("k-1", outgoing, is_resumed=True)


def test_another_header(path: Path) -> None:
    """The key of an intent is sent in no other header than before: the server would not know it."""
    now = 1_000_000.0
    outgoing = Outgoing("POST", "http://here/pay", (), b"")
    with Journal(path, clock=lambda: now) as journal:
        journal.begin(Wish(INTENT, "k-1", outgoing, DAY, 60, header="X-My-Key"), b"dead")
        now += 60
        with pytest.raises(ConfigurationError, match="header='x-my-key'"):
            journal.begin(Wish(INTENT, "k-2", outgoing, DAY, 60), b"other")
        own = journal.begin(Wish(INTENT, "k-2", outgoing, DAY, 60, header="x-my-key"), b"own")
    assert own == Begun("k-1", outgoing, is_resumed=True)


def test_past_retention(server: Served, call: Call, path: Path) -> None:
    """An intent past the server's retention is unknown for good: it is not sent, and not resumed."""
    now = 1_000_000.0
    with Journal(path, clock=lambda: now) as journal:
        outgoing = Outgoing("POST", f"{server.url}/", (), b"")
        journal.begin(Wish(INTENT, "k-1", outgoing, DAY, 60), b"dead")
        now += DAY - 60 - 1
        assert [entry.intent for entry in journal.pending()] == [INTENT]
        now += 1
        caller = call(journal=journal)
        with pytest.raises(RequestOutcomeUnknown, match="past the server's retention") as caught:
            caller.post(server.url, INTENT)
        assert caught.value.key == "k-1"
        assert (journal.pending(), caller.resume(), server.seen) == ([], [], [])
        assert [entry.state for entry in journal.entries()] == ["unknown"]
        assert journal.request(INTENT) is None
        with pytest.raises(RequestOutcomeUnknown):
            caller.post(server.url, INTENT)
        assert journal.forget(INTENT)
        assert not journal.forget(INTENT)


def test_leases(path: Path, server: Served, call: Call) -> None:
    """An intent that another process has is waited for, and taken over when its lease is over."""
    now = 1_000_000.0
    with Journal(path, clock=lambda: now) as journal:
        journal.begin(Wish(INTENT, "k-1", Outgoing("POST", f"{server.url}/", (), b""), DAY, 60), b"other")
        caller = call(journal=journal, deadline=timedelta(seconds=0.3))
        with pytest.raises(IntentBusy) as caught:
            caller.post(server.url, INTENT)
        assert (caught.value.key, server.seen, journal.forget(INTENT)) == ("k-1", [], False)
        now += 10
        assert call(journal=journal).post(server.url, INTENT).status == 201
        assert server.keys == ["k-1"]


def test_the_lease_outlives_a_try(path: Path, server: Served, call: Call) -> None:
    """While a try is under way, its lease is renewed: the intent is neither free nor forgotten."""
    now = 1_000_000.0
    lease = timedelta(milliseconds=60)
    caller = call(journal=Journal(path, lease=lease, clock=lambda: now))
    server.go.clear()
    with ThreadPoolExecutor(1) as threads, Journal(path, lease=lease, clock=lambda: now) as other:
        sending = threads.submit(caller.post, server.url, INTENT, json={})
        wait_until(lambda: server.effects.total() == 1)
        now += 3600
        wait_until(lambda: other.pending()[0].is_leased)
        assert not other.forget(INTENT)
        assert other.pending()[0].attempts == 1
        server.go.set()
        assert sending.result().status == 201
    assert len(server.seen) == 1


def test_leases_end_with_the_thread(path: Path) -> None:
    """A lease is renewed while something is sent, and no longer than that may take; then the thread ends."""
    extended: list[Sequence[Held]] = []
    others = set(threading.enumerate())
    leases = Leases(0.001, extended.append)
    leases.hold(INTENT, b"t", 60)
    leases.hold("late", b"t", 0)
    wait_until(lambda: len(extended) > 1)
    assert {tuple(each) for each in extended} == {((INTENT, b"t"),)}
    leases.stop()
    count = len(extended)
    wait_until(lambda: len(extended) > count)
    leases.drop(INTENT, b"t")
    leases.stop()
    assert not set(threading.enumerate()) - others
    leases.hold(INTENT, b"t", 60)
    leases.drop(INTENT, b"t")
    wait_until(lambda: not set(threading.enumerate()) - others)


def test_a_lease_that_can_not_be_renewed(caplog: pytest.LogCaptureFixture) -> None:
    """A journal that fails while a try is under way is told in the log, and tried again."""

    def fail(_: Sequence[Held]) -> None:
        raise JournalError

    with caplog.at_level(logging.WARNING, "semel"):
        leases = Leases(0.001, fail)
        leases.hold(INTENT, b"t", 60)
        wait_until(lambda: caplog.text.count("could not renew 1 intents") > 1)
        leases.drop(INTENT, b"t")
        leases.stop()


def test_the_clock_is_set_back(path: Path) -> None:
    """A lease that begins long after now is over: an intent is not blocked by a clock that was set back."""
    now = 1_000_000.0
    with Journal(path, clock=lambda: now) as journal:
        journal.begin(wish(), b"dead")
        now -= 3600
        assert not journal.pending()[0].is_leased
        assert journal.begin(wish(), b"own") == Begun("k-1", wish().outgoing, is_resumed=True)
        assert journal.pending()[0].is_leased


def test_removed_while_it_is_open(server: Served, call: Call, path: Path) -> None:
    """A file that is removed, or replaced, under an open journal is an error before anything is sent."""
    caller = call(journal=path)
    assert caller.journal is not None
    caller.journal.begin(wish("before"), b"t")
    path.rename(path.with_name("other"))
    with pytest.raises(JournalError, match="removed or replaced"):
        caller.post(server.url, INTENT, json={})
    Journal(path).close()
    with pytest.raises(JournalError, match="removed or replaced"):
        caller.post(server.url, INTENT, json={})
    assert not server.seen
    caller.journal.close()
    assert caller.post(server.url, INTENT, json={}).status == 201


def test_stored_answers_know_their_time(server: Served, call: Call, path: Path) -> None:
    """A stored answer is like one that came over the wire: it has a time, a length and a request."""
    caller = call(journal=path)
    first = caller.post(server.url, INTENT, json={})
    given = {"headers": {"Semel-Intent": INTENT}} if caller.kind == "requests" else {}
    extensions = {} if given else {"extensions": {"semel.intent": INTENT}}
    stored = caller.wait(caller.client.post, server.url, json={}, **given, **extensions)
    assert (stored.content, stored.headers["content-length"]) == (first.body, str(len(first.body)))
    assert timedelta(0) < stored.elapsed < timedelta(minutes=1)
    assert stored.request.method == "POST"


def test_a_late_answer_counts(path: Path) -> None:
    """An answer that comes after the lease was lost is the operation's answer all the same."""
    now = 1_000_000.0
    with Journal(path, clock=lambda: now) as journal:
        journal.begin(wish(), b"slow")
        now += 11
        journal.begin(wish(), b"quick")
        journal.release(INTENT, b"slow")  # It is not its own any more.
        assert journal.pending()[0].is_leased
        journal.settle(INTENT, "k-1", Answer(201, (), b"paid"))
        assert journal.entries()[0].status == 201


def test_credentials_are_not_stored(server: Served, call: Call, path: Path) -> None:
    """No credential of a request or an answer is in the file, and nothing of a body that was forgotten."""
    caller = call(journal=path)
    caller.client.cookies.set("session", "cookie-secret")
    headers = {"Authorization": "Bearer bearer-secret", "X-Api-Key": "api-secret", "X-Plain": "plain-header"}
    url = server.url.replace("http://", "http://bob:url-secret@")
    server.faults.append(Say(401))
    for _ in range(2):
        caller.post(url, INTENT, content=b"the-body", headers=headers)
    assert caller.journal is not None
    assert b"plain-header" in b"".join(each.read_bytes() for each in path.parent.glob(f"{path.name}*"))
    caller.journal.close()
    everything = b"".join(each.read_bytes() for each in path.parent.glob(f"{path.name}*"))
    for secret in (b"bearer-secret", b"api-secret", b"cookie-secret", b"url-secret", b"hush", b"the-body"):
        assert secret not in everything
    assert modes(path) == {0o600}


def test_private(path: Path) -> None:
    """The file, and its log, are for this user alone; one that was open to others is made private."""
    path.touch(0o644)
    Journal(path).close()
    for each in (path, path.with_name(f"{path.name}-wal")):
        each.touch()
        each.chmod(0o644)
    with Journal(path) as journal:
        journal.begin(wish(), b"t")
        assert len(list(path.parent.glob(f"{path.name}*"))) > 1
        assert modes(path) == {0o600}


def test_newer_version(server: Served, call: Call, path: Path) -> None:
    """A journal of a newer version is refused, and stays as it is."""
    Journal(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(JournalNewer, match="Update Semel"):
        call(journal=path).post(server.url, INTENT)
    assert not server.seen


@pytest.mark.parametrize("content", [b"not a database" * 100, "of another program", "no folder", "a folder"])
def test_unreadable(path: Path, content: bytes | str) -> None:
    """A file that is no journal is refused with words, and is not changed."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "a folder":
        path.mkdir()
    elif content == "no folder":
        path = path.parent / "nowhere" / "payments.journal"
    else:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE orders (id)")
    with pytest.raises(JournalError, match="Nothing was sent"):
        Journal(path)
    if isinstance(content, bytes):
        assert path.read_bytes() == content


def test_full(server: Served, call: Call, path: Path) -> None:
    """A journal that is full refuses new intents before anything is sent, and still ends the old ones."""
    caller = call(journal=Journal(path, max_entries=1))
    server.faults.append(Say(401))
    caller.post(server.url, "first", json={})
    with pytest.raises(JournalFull, match="max_entries"):
        caller.post(server.url, "second", json={})
    assert caller.post(server.url, "first", json={}).status == 201
    with pytest.raises(JournalFull, match="max_bytes"):
        call(journal=Journal(path, max_bytes=20_000)).post(server.url, "third", content=bytes(20_000))
    assert len(server.seen) == 2


def test_full_disk(server: Served, call: Call, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk is an error before anything is sent; an answer that finds no room is returned all the same."""
    journal = Journal(path)
    caller = call(journal=journal)

    def limit(more: int) -> None:
        opened = journal._connection.opened
        assert opened is not None
        ((pages,),) = opened.execute("PRAGMA page_count").fetchall()
        opened.execute(f"PRAGMA max_page_count = {pages + more}")

    limit(0)
    with pytest.raises(JournalFull, match="disk is full"):
        caller.post(server.url, INTENT, content=bytes(50_000))
    assert not server.seen

    limit(1)
    server.faults.append(Say(201, {}, bytes(50_000)))
    with caplog.at_level(logging.WARNING, "semel"):
        assert len(caller.post(server.url, INTENT, json={}).body) == 50_000
    assert "could not keep the answer" in caplog.text
    assert "Nothing was sent" not in caplog.text
    assert [entry.state for entry in journal.entries()] == ["pending"]


def test_answers_that_are_too_large(server: Served, call: Call, path: Path) -> None:
    """An answer that is too large to be kept ends its intent; the next call is told so, and nothing is sent."""
    caller = call(journal=path, max_answer=10)
    server.faults.append(Say(201, {}, bytes(100)))
    assert caller.post(server.url, INTENT, json={}).body == bytes(100)
    with pytest.raises(AnswerNotKept):
        caller.post(server.url, INTENT, json={})
    assert len(server.seen) == 1


def test_old_answers_are_removed(path: Path) -> None:
    """Answers are kept for their time, and what is pending or unknown for ever."""
    now = 1_000_000.0
    with Journal(path, keep=timedelta(days=7), clock=lambda: now) as journal:
        for intent in ("done", "pending"):
            journal.begin(wish(intent), b"t")
        journal.settle("done", "k-1", Answer(201))
        now += 8 * DAY
        journal.begin(wish("new"), b"t")
        assert [(entry.intent, entry.state) for entry in journal.entries()] == [
            ("pending", "unknown"),
            ("new", "pending"),
        ]


def test_fork(path: Path) -> None:
    """A journal that was opened before a fork works on both sides of it."""
    with Journal(path) as journal:
        journal.begin(wish("before"), b"t")
        child = os.fork()
        if child == 0:
            journal.begin(wish("in the child"), b"t")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        journal.begin(wish("after"), b"t")
        assert [entry.intent for entry in journal.entries()] == ["before", "in the child", "after"]


def test_threads(path: Path) -> None:
    """Threads share a journal."""
    with Journal(path) as journal, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: journal.begin(wish(f"n {number}"), b"t"), range(50)))
        assert len(journal.pending()) == 50


@pytest.mark.parametrize(
    "given",
    [
        {"lease": timedelta(0)},
        {"lease": 10},
        {"keep": timedelta(-1)},
        {"keep": "90d"},
        {"max_entries": 0},
        {"max_bytes": 1.5},
        {"path": ""},
        {"path": "a\0b"},
        {"path": "\ud800"},
        {"path": None},
    ],
    ids=str,
)
def test_configuration(path: Path, given: dict[str, Any]) -> None:
    """What can't be a journal is refused with words."""
    with pytest.raises(ConfigurationError, match=next(iter(given))):
        Journal(**{"path": path, **given})


def test_cancelled(server: Served, path: Path) -> None:
    """A task that is cancelled gives its intent back at once, and another sends it with the same key."""

    async def called() -> None:
        transport = AsyncIdempotentTransport(httpx2.AsyncHTTPTransport(verify=False), journal=path)
        async with httpx2.AsyncClient(transport=transport) as client:
            given: dict[str, Any] = {"extensions": {"semel.intent": INTENT}}
            sending = asyncio.create_task(client.post(server.url, **given))
            await asyncio.to_thread(wait_until, lambda: server.effects.total() == 1)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert transport.journal is not None
            assert [entry.is_leased for entry in transport.journal.pending()] == [False]
            server.go.set()
            assert (await client.post(server.url, **given)).status_code == 201

    server.go.clear()
    asyncio.run(called())
    assert list(server.effects.values()) == [1]
    assert len(set(server.keys)) == 1
