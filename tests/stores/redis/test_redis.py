"""What is special to Redis: what is stored and for how long, what a replay costs, which servers are refused."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from semel import stores
from semel.core.commands import (
    Browse,
    Claim,
    Complete,
    FindStuck,
    Look,
    Now,
    Park,
    ReadRequest,
    ReadTrail,
    Reap,
    Reaped,
    ReapTrail,
    Release,
    Renew,
    Save,
    TakeOver,
    Verdict,
)
from semel.core.message import Answer, Head, Request
from semel.core.record import AfterRetention, Found, Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event, State
from semel.errors import StoreError, StoreNotReady, StoreReadOnly, StoreUnavailable
from semel.stores.redis import connection
from semel.stores.redis.address import Address
from semel.stores.redis.cluster import Client
from semel.stores.redis.connection import AsyncConnections
from semel.stores.redis.protocol import Call, packed
from semel.stores.redis.store import RedisStore
from semel.testing.process import ServerDidNotStart
from tests.kit import servers
from tests.stores.redis.world import Asking, ageing

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')
ABANDONED = Answer(408, (), b"{}")

#: Said aloud, so that no server named in the environment is used.
OURS = {"appendonly": "no"}


def claim(
    key: str = "key", lease: timedelta = LEASE, retention: timedelta = RETENTION, keep: AfterRetention = "delete"
) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", lease, retention, after_retention=keep)


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    with RedisStore(redis_url) as opened:
        yield opened


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as opened:
        yield opened


def held(store: RedisStore, asked: Claim | None = None) -> Hold:
    hold = store.perform(asked or claim())
    assert isinstance(hold, Hold), hold
    return hold


def finished(store: RedisStore, asked: Claim | None = None) -> Hold:
    hold = held(store, asked)
    assert store.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
    return hold


def one_record(client: Any) -> str:
    (name,) = client.scan_iter("semel:*", _type="hash")
    return str(name)


class TestRecord:
    def test_people_can_read_it(self, store: RedisStore, client: Any) -> None:
        """A record is one hash, whose fields are text; its name is a digest, whatever the client's key is."""
        finished(store, claim("{a}\r\nb"))
        name = one_record(client)
        assert len(name) == len("semel:") + 64
        fields = client.hgetall(name)
        assert (fields["scope"], fields["key"], fields["state"], fields["attempt"]) == (
            "alice",
            "{a}\r\nb",
            "complete",
            "1",
        )
        assert (fields["status"], fields["headers"], fields["body"]) == (
            "201",
            '[["content-type","application/json"]]',
            '{"id": 1}',
        )

    @pytest.mark.parametrize("what", ["in flight", "parked", "pending"])
    def test_what_has_not_ended_has_no_ttl(self, store: RedisStore, client: Any, what: str) -> None:
        """No clock frees a key that still runs, or that waits for a worker or an operator."""
        asked = claim()
        if what == "pending":
            asked = Claim("alice", "key", os.urandom(16), b"", LEASE, RETENTION, is_accepted=True)
        hold = held(store, asked)
        if what == "in flight":
            store.perform(Renew(((hold, LEASE),)))
        if what == "parked":
            store.perform(Park(hold))
        assert client.pttl(one_record(client)) == -1

    def test_an_answer_has_the_ttl_of_its_retention(self, store: RedisStore, client: Any) -> None:
        """Redis deletes an answer by itself when its retention is over, and not before."""
        finished(store)
        name = one_record(client)
        left = int(client.hget(name, "expires_at")) - _now(client)
        assert abs(client.pttl(name) - left / 1000) < 1000

    def test_a_late_answer_is_there_to_be_found(self, store: RedisStore, client: Any) -> None:
        """An operation that ended past its retention is kept for a minute, so that its end may be said twice."""
        hold = held(store, claim(retention=timedelta(milliseconds=1)))
        assert store.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
        # A millisecond more where both are done within one: then it ends just before its retention.
        assert 0 < client.pttl(one_record(client)) <= 60_001
        assert store.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE

    @pytest.mark.parametrize("keep", ["strip", "keep"])
    def test_what_leaves_a_tombstone_has_no_ttl(self, store: RedisStore, client: Any, keep: AfterRetention) -> None:
        """Where a late retry is to be refused Redis must not forget: the reaper strips the answer, the rest stays."""
        finished(store, claim(keep=keep))
        assert client.pttl(one_record(client)) == -1

    def test_a_take_over_takes_the_ttl_away(self, store: RedisStore, client: Any, redis_url: str) -> None:
        """An answer that expired and is taken over is in flight: its TTL is gone."""
        hold = finished(store)
        ageing(redis_url)(RETENTION)
        assert isinstance(store.perform(TakeOver(claim(), hold)), Hold)
        assert client.pttl(one_record(client)) == -1

    def test_redis_reaps_by_itself(self, store: RedisStore, client: Any) -> None:
        """When the TTL is over the key is new, though no reaper ran."""
        hold = finished(store)
        client.pexpire(one_record(client), 1)
        while client.exists(f"semel:{_digest()}"):
            pass
        assert store.perform(Look("alice", "key")) is None
        assert held(store).token != hold.token

    def test_trails_are_asked_for(self, store: RedisStore, client: Any, redis_url: str) -> None:
        """Without ?audit= there is no trail; with it a trail goes by itself in the end."""
        store.perform(Park(held(store)))
        assert list(client.scan_iter("semel:trail:*")) == []
        with RedisStore(f"{redis_url}?audit=on") as audited:
            audited.perform(Park(held(audited, claim("another"))))
        (trail,) = client.scan_iter("semel:trail:*")
        assert client.llen(trail) == 1
        assert client.pttl(trail) > 0

    def test_the_request_line_is_kept(self, store: RedisStore, client: Any) -> None:
        """What the client asked for stands in the record, for people; where it is not known there is no field."""
        held(store, claim("unknown"))
        assert client.hget(one_record(client), "request_line") is None
        asked = replace(claim("known"), request_line="POST /payments")
        finished(store, asked)
        seen = store.perform(Look("alice", "known"))
        assert seen is not None
        assert seen.request_line == "POST /payments"
        assert [each.request_line for each in store.perform(Browse(10))] == ["POST /payments", ""]

    def test_an_expired_record_gets_the_new_request_line(self, store: RedisStore, redis_url: str) -> None:
        """A record that was taken over after its retention says what was asked for this time."""
        hold = finished(store, replace(claim(), request_line="POST /old"))
        ageing(redis_url)(RETENTION)
        assert isinstance(store.perform(TakeOver(replace(claim(), request_line="POST /new"), hold)), Hold)
        seen = store.perform(Look("alice", "key"))
        assert seen is not None
        assert seen.request_line == "POST /new"

    def test_prefixes_are_apart(self, store: RedisStore, redis_url: str) -> None:
        """Two applications with prefixes of their own share a server, and none of their keys."""
        held(store)
        with RedisStore(f"{redis_url}?prefix=shop") as other:
            held(other)

    def test_a_prefix_may_begin_with_anothers(self, redis_url: str) -> None:
        """Of two applications, one's prefix the beginning of the other's, neither sees or clears away a record or a
        trail of the other's.
        """
        with RedisStore(f"{redis_url}?prefix=shop:eu&audit=all") as other:
            finished(other, claim("expired", LEASE, timedelta(microseconds=1)))
            held(other, claim("stuck", timedelta(microseconds=1)))
        with RedisStore(f"{redis_url}?prefix=shop&audit=on") as ours:
            assert ours.perform(Browse(10)) == ()
            assert ours.perform(FindStuck(10)) == ()
            assert ours.perform(Reap(10, ABANDONED)) == Reaped()
            assert ours.perform(ReapTrail(10, timedelta(0))) == 0
        with RedisStore(f"{redis_url}?prefix=shop:eu&audit=all") as other:
            assert {each.key for each in other.perform(Browse(10))} == {"expired", "stuck"}


def events(store: RedisStore, key: str = "key") -> list[str]:
    return [line.event for line in store.perform(ReadTrail("alice", key))]


class TestTrail:
    def test_the_record_tells_the_ordinary(self, redis_url: str) -> None:
        """With ?audit=on a claim and an answer leave no line; what the record does not tell has one."""
        with RedisStore(f"{redis_url}?audit=on") as store:
            finished(store)
            assert events(store) == []
            store.perform(Park(held(store, claim("parked"))))
            assert events(store, "parked") == ["parked"]
            dead = held(store, claim("dead"))
            ageing(redis_url)(LEASE)
            assert isinstance(store.perform(TakeOver(claim("dead"), dead)), Hold)
            assert events(store, "dead") == ["taken over"]

    @pytest.mark.parametrize("audit", ["all", "replays"])
    def test_everything_on_request(self, redis_url: str, audit: str) -> None:
        """With ?audit=all, and with replays, every change has its line, and so has each record that was reaped."""
        with RedisStore(f"{redis_url}?audit={audit}") as store:
            finished(store, claim(keep="strip"))
            ageing(redis_url)(RETENTION)
            store.perform(Reap(10, ABANDONED))
            assert events(store) == ["claimed", "completed", "stripped"]
            assert store.perform(ReadTrail("", "")) == ()
            assert store.notes_replays == (audit == "replays")

    def test_reaping_is_summed_up(self, redis_url: str) -> None:
        """With ?audit=on one line, which is about no key, says what a batch of the reaper deleted and stripped; there
        is none where it did neither.
        """
        with RedisStore(f"{redis_url}?audit=on") as store:
            store.perform(Reap(10, ABANDONED))
            assert store.perform(ReadTrail("", "")) == ()
            finished(store, claim("stripped", keep="strip"))
            held(store, claim("abandoned"))
            ageing(redis_url)(RETENTION)
            store.perform(Reap(10, ABANDONED))
            (line,) = store.perform(ReadTrail("", ""))
            assert (line.attempt, line.event, line.detail) == (0, "reaped", "1 stripped")
            assert (events(store, "stripped"), events(store, "abandoned")) == ([], ["abandoned"])


class TestCost:
    def test_one_script_for_a_batch(self, store: RedisStore, client: Any, redis_url: str) -> None:
        """Claims that are asked for together, under the same terms, are one call of a script, and so are answers."""
        finished(store, claim("warm"))

        def calls() -> int:
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

        keys = [f"key {number}" for number in range(50)]
        with Asking(redis_url, "loop") as crowd:
            crowd(claim("first"))
            before = calls()
            holds = crowd.all([claim(key) for key in keys])
            crowd.all([Complete(each, Event.COMPLETE, ANSWER) for each in holds])
            found = crowd.all([claim(key) for key in keys])
            assert calls() - before < 10
        assert [each.answer for each in found] == [ANSWER] * len(keys)

    def test_terms_of_one_batch(self, redis_url: str) -> None:
        """Of claims that go out together, each has its own lease, retention and what else its policy says."""
        head = Request(Head("POST", "/", b"", ()), b"body", "alice")
        claims = [
            claim("plain"),
            claim("short", lease=timedelta(seconds=1), retention=timedelta(minutes=1)),
            replace(claim("kept", keep="strip"), on_crash="refuse", request_line="POST /kept"),
            replace(claim("requested"), request=head),
            replace(claim("accepted"), request=head, is_accepted=True),
            claim("plain too"),
        ]
        with Asking(redis_url, "loop") as crowd:
            assert all(isinstance(each, Hold) for each in crowd.all(claims))
            seen = {each.key: each for each in crowd(Browse(10))}
            left = {key: round(each.retention_left / timedelta(minutes=1)) for key, each in seen.items()}
            day = RETENTION // timedelta(minutes=1)
            assert left == dict.fromkeys(seen, day) | {"short": 1}
            assert [key for key, each in seen.items() if each.is_accepted] == ["accepted"]
            assert [key for key, each in seen.items() if each.request_line] == ["kept"]
            for number, key in enumerate(("requested", "accepted"), 3):
                assert crowd(ReadRequest(Hold("alice", key, 1, claims[number].token))) == head
            holds = [Hold("alice", each.key, 1, each.token) for each in claims if not each.is_accepted]
            tombstone = Answer(201, (), None)
            answers = [tombstone if hold.key == "short" else ANSWER for hold in holds]
            ended = [Complete(hold, Event.COMPLETE, answer) for hold, answer in zip(holds, answers, strict=True)]
            assert set(crowd.all(ended)) == {Verdict.DONE}
            assert [crowd(Look("alice", hold.key)).answer for hold in holds] == answers
            assert crowd(ReadRequest(holds[3])) is None

    def test_a_replay_writes_nothing(self, store: RedisStore, client: Any) -> None:
        """Any number of replays leave the server's data, and so its replicas and its append-only file, as they were."""
        finished(store)
        store.perform(claim())
        before = client.info("persistence")["rdb_changes_since_last_save"]
        for _ in range(50):
            found = store.perform(claim())
            assert isinstance(found, Found)
            assert found.answer == ANSWER
        assert client.info("persistence")["rdb_changes_since_last_save"] == before

    async def test_a_crowd_goes_out_together(self, redis_url: str, client: Any) -> None:
        """Many claims at once are few round trips: what is asked while one is under way goes out in the next."""
        async with stores.async_store(redis_url) as crowded:
            await crowded.perform(Now())
            before = client.info("stats")["total_reads_processed"] if _is_7(client) else None
            got = await asyncio.gather(*[crowded.perform(claim(f"key {number}")) for number in range(200)])
            assert all(isinstance(each, Hold) for each in got)
            if before is not None:
                assert client.info("stats")["total_reads_processed"] - before < 50

    def test_short_operations_are_not_listed(self, store: RedisStore, client: Any) -> None:
        """What ends at once costs a claim and an answer, and leaves no trace on the list of those to look at."""
        for number in range(20):
            finished(store, claim(f"key {number}"))
        assert _listed(client) == 0

    def test_scripts_that_the_server_forgot_are_sent_again(self, store: RedisStore, client: Any) -> None:
        """A server that was restarted, or told to forget its scripts, is told them again."""
        finished(store)
        client.script_flush()
        finished(store, claim("another"))


class TestList:
    def test_the_dead_are_found(self, store: RedisStore, redis_url: str, client: Any) -> None:
        """An operation whose process was killed is found by another, though it was never listed, and then it is."""
        with _child(f"open({redis_url!r}).perform(claim())", "os.kill(os.getpid(), 9)") as child:
            assert child.wait(60) == -signal.SIGKILL
        assert _listed(client) == 0
        ageing(redis_url)(LEASE)
        (stuck,) = store.perform(FindStuck(10))
        assert stuck.hold.key == "key"
        assert _listed(client) == 1

    def test_what_runs_for_a_while_is_listed(self, store: RedisStore, redis_url: str, client: Any) -> None:
        """A long operation is on the list once its lease is renewed, and is struck off when it has ended."""
        hold = held(store)
        while not _listed(client):
            store.perform(Renew(((hold, LEASE),)))
        assert store.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
        while _listed(client):
            store.perform(Renew(((hold, LEASE),)))

    def test_backlog_hides_no_other_scope(self, store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where one scope has more to do than one look reads, later looks find what other scopes have behind it."""
        monkeypatch.setattr("semel.stores.redis.upkeep.PAGE", 2)
        for scope, count in (("many", 200), ("other", 1)):
            for number in range(count):
                request = Request(Head("POST", "/", b"", ()), b"", "alice")
                asked = Claim(
                    scope, f"{number}", os.urandom(16), b"", LEASE, RETENTION, request=request, is_accepted=True
                )
                assert isinstance(store.perform(asked), Hold)
        wanted = FindStuck(3, with_request=True, with_no_token=True, with_pending=True, only_due=True)
        looks = [[each.hold.scope for each in store.perform(wanted)] for _ in range(20)]
        assert all(len(look) == 3 for look in looks)
        assert sum("other" in look for look in looks) > 0

    def test_what_is_listed_is_looked_at(self, store: RedisStore, redis_url: str, client: Any) -> None:
        """The list decides nothing: what is on it and has ended, or is alive, is struck off or put off."""
        ended, alive = held(store, claim("ended")), held(store, claim("alive"))
        store.perform(FindStuck(10))
        assert _listed(client) == 2
        with RedisStore(redis_url) as other:
            other.perform(Complete(ended, Event.COMPLETE, ANSWER))
        ageing(redis_url)(LEASE)
        with RedisStore(redis_url) as other:
            other.perform(Renew(((alive, LEASE),)))
            assert other.perform(FindStuck(10)) == ()
        assert _listed(client) == 1

    def test_what_was_accepted_is_listed_at_once(self, store: RedisStore, client: Any) -> None:
        """Nobody runs what was only accepted: it is on the list before its client is told."""
        held(store, Claim("alice", "key", os.urandom(16), b"", LEASE, RETENTION, is_accepted=True))
        assert _listed(client) == 1

    def test_a_tombstone_to_be_is_listed_when_its_process_ends(self, redis_url: str, client: Any) -> None:
        """An answer that is to be stripped is on the list by the time the store is closed, and is stripped when due."""
        with RedisStore(redis_url) as first:
            finished(first, claim(keep="strip"))
        assert _listed(client) == 1
        ageing(redis_url)(RETENTION)
        with RedisStore(redis_url) as reaping:
            assert reaping.perform(Reap(10, ABANDONED)).stripped == 1
        assert _listed(client) == 0


class TestClock:
    def test_only_the_servers_clock_decides(self, store: RedisStore, client: Any) -> None:
        """Every time in a record is the server's, to the microsecond, whatever this process believes."""
        before = _now(client)
        finished(store)
        fields = client.hgetall(one_record(client))
        after = _now(client)
        assert before <= int(fields["created_at"]) <= int(fields["completed_at"]) <= after
        assert int(fields["expires_at"]) - int(fields["created_at"]) == RETENTION // timedelta(microseconds=1)

    def test_this_process_has_no_say(self, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process whose clock is a year ahead sees the same leases and the same time as any other."""
        with RedisStore(redis_url) as store:
            held(store)
            monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
            found = store.perform(claim())
            assert isinstance(found, Found)
            assert (found.lease_is_over, found.is_expired) == (False, False)
            now = store.perform(Now())
        assert abs(now - datetime.now(UTC)) < timedelta(minutes=5)  # noqa: TID251 - the server's machine is this one


class TestProcesses:
    def test_one_of_two_hundred(self, redis_url: str) -> None:
        """200 claims on one key from two processes: one of them is a hold."""
        crowd = (
            "with ThreadPoolExecutor(100) as threads:",
            "    got = list(threads.map(lambda _: type(store.perform(claim())).__name__, range(100)))",
            "print(got.count('Hold'), got.count('Found'))",
        )
        children = [_child(f"store = open({redis_url!r})", "input()", *crowd) for _ in range(2)]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        said = [[int(word) for word in child.communicate(timeout=60)[0].split()] for child in children]
        assert sum(holds for holds, _ in said) == 1
        assert sum(found for _, found in said) == 199

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_forked_child(self, store: RedisStore) -> None:
        """A forked child opens connections of its own, and its parent's go on working."""
        finished(store, claim("before"))
        child = os.fork()
        if not child:
            try:
                finished(store, claim("in the child"))
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        finished(store, claim("after"))
        assert store.perform(Look("alice", "in the child")) is not None

    async def test_another_loop(self, redis_url: str) -> None:
        """A store that was used on one loop serves the next one."""
        used = stores.async_store(redis_url)

        async def use(key: str) -> Any:
            outcome = await used.perform(claim(key))
            await used.close()
            return outcome

        first = await use("a")
        second = await asyncio.to_thread(lambda: asyncio.run(use("b")))
        assert isinstance(first, Hold)
        assert isinstance(second, Hold)


class TestServers:
    @pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
    def test_a_server_that_evicts_is_refused(self, policy: str) -> None:
        """A server that may forget records is refused, when the store is opened and when it is only used."""
        with servers.redis(settings={"maxmemory-policy": policy}) as server:
            with closing(RedisStore(server.url)) as store, pytest.raises(StoreNotReady, match=policy):
                store.open()
            with closing(RedisStore(server.url)) as store, pytest.raises(StoreNotReady, match=policy):
                store.perform(claim())
            with redis.Redis.from_url(server.url) as client:
                assert client.dbsize() == 0
                client.config_set("maxmemory-policy", "noeviction")
            with RedisStore(server.url) as store:
                held(store)

    def test_a_server_set_to_evict_later_is_refused_at_the_next_connection(self) -> None:
        """It is asked at every new connection, since a server may have been set up anew."""
        with servers.redis(settings=OURS) as server, RedisStore(server.url) as store:
            held(store)
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory-policy", "allkeys-lru")
                client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(StoreNotReady, match="allkeys-lru"):
                store.perform(claim())

    @pytest.mark.parametrize("colour", ["threads", "loop"])
    def test_a_server_set_to_evict_while_it_is_used(self, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that begins to evict is noticed within seconds: what has begun ends, nothing new begins, and once it
        is set back all is as before.
        """
        monkeypatch.setattr(connection, "LOOK_SECONDS", 0.0)
        with servers.redis(settings=OURS) as server, Asking(server.url, colour) as ask:
            running = ask(claim("running"))
            ask(Renew(((running, LEASE),)))
            ask(Complete(ask(claim("ended")), Event.COMPLETE, ANSWER))  # So that there is a connection for answers.
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory-policy", "allkeys-lru")
                ask(claim("before it was noticed"))
                with pytest.raises(StoreNotReady, match="allkeys-lru"):
                    ask(claim("new"))
                assert ask(Renew(((running, LEASE),))) == frozenset()
                assert ask(Complete(running, Event.COMPLETE, ANSWER)) is Verdict.DONE
                client.config_set("maxmemory-policy", "noeviction")
            assert isinstance(ask(claim("new")), Hold)

    def test_no_persistence_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """A server that keeps nothing on disk is warned of, once; one with snapshots or a log is not."""
        for settings, count in (({"appendonly": "yes"}, 0), ({"save": "60 1000"}, 0), (OURS, 1)):
            connection._warned.clear()
            caplog.clear()
            with servers.redis(settings=settings) as server, caplog.at_level(logging.WARNING, "semel"):
                for _ in range(2):
                    with RedisStore(server.url) as store:
                        held(store, claim(os.urandom(8).hex()))
            assert [record.name for record in caplog.records] == ["semel"] * count

    def test_a_replica_is_refused(self, redis_server: servers.RedisServer) -> None:
        """A read-only replica is an error that says so; and so is a server that becomes one while it is used."""
        settings = {"replicaof": f"127.0.0.1 {redis_server.port}", "repl-diskless-sync-delay": "0"}
        with servers.redis(settings=settings) as replica, closing(RedisStore(replica.url)) as store:
            with pytest.raises(StoreReadOnly, match="primary"):
                store.open()
            with pytest.raises(StoreReadOnly, match="primary"):
                store.perform(claim())
        with servers.redis(settings=OURS) as server, RedisStore(server.url) as store:
            held(store)
            with redis.Redis.from_url(server.url) as client:
                client.execute_command("REPLICAOF", "127.0.0.1", redis_server.port)
            with pytest.raises(StoreReadOnly, match="primary"):
                store.perform(claim("another"))

    def test_a_full_server_lets_end_what_has_begun(self) -> None:
        """When memory is full no operation begins, and those under way end: their leases, steps and answers are stored,
        and what is there is replayed.
        """
        settings = {"maxmemory": "3mb", "maxmemory-policy": "noeviction"}
        with servers.redis(settings=settings) as server, RedisStore(server.url) as store:
            finished(store)
            running, parked, given_up = (held(store, claim(key)) for key in ("running", "parked", "given up"))
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory", "1")
                with pytest.raises(StoreUnavailable, match="memory is full") as raised:
                    store.perform(claim("new"))
                assert (raised.value.was_sent, raised.value.has_no_space) == (False, True)
                found = store.perform(claim())
                assert isinstance(found, Found)
                assert found.answer == ANSWER
                assert store.perform(Renew(((running, LEASE),))) == frozenset()
                for hold in (running, given_up):
                    assert store.perform(Save(hold, Progress((Done("effect", "paid", 1),)))) is Verdict.DONE
                assert store.perform(Complete(running, Event.COMPLETE, ANSWER)) is Verdict.DONE
                assert store.perform(Park(parked)) is Verdict.DONE
                assert store.perform(Release(given_up)) is Verdict.DONE
                client.config_set("maxmemory", "0")
            states = {key: store.perform(Look("alice", key)) for key in ("new", "running", "parked", "given up")}
            assert {key: record and record.state for key, record in states.items()} == {
                "new": None,
                "running": State.COMPLETE,
                "parked": State.UNKNOWN,
                "given up": State.PROCESSING,
            }
            assert states["running"] is not None
            assert states["running"].answer == ANSWER

    def test_logins(self) -> None:
        """A wrong password, or none, is an error that says what to do, and shows neither."""
        with servers.redis(settings=OURS) as server:
            host = server.url.partition("//")[2]
            with redis.Redis.from_url(server.url) as client:
                client.config_set("requirepass", "right")
            for url, told in ((f"redis://{host}", "password"), (f"redis://:wrong-one@{host}", "WRONGPASS")):
                with closing(RedisStore(url)) as store, pytest.raises(StoreUnavailable, match=told) as raised:
                    store.open()
                assert "wrong-one" not in str(raised.value)
            with RedisStore(f"redis://:right@{host}") as store:
                held(store)

    def test_the_acl_rule_of_the_documentation_is_enough(self) -> None:
        """A user with the commands that the documentation names, and no others, is enough for all there is to do."""
        with servers.redis(settings=OURS) as server:
            with redis.Redis.from_url(server.url) as client:
                client.execute_command("ACL", "SETUSER", "semel", *_acl())
            host = server.url.partition("//")[2]
            with RedisStore(f"redis://semel:secret@{host}?audit=all") as store:
                finished(store)
                store.perform(Release(held(store, claim("freed"))))
                store.perform(Complete(held(store, claim("told")), Event.COMPLETE, ANSWER, wakes=True))
                store.perform(FindStuck(10))
                store.perform(Reap(10, ABANDONED))

    @pytest.mark.parametrize("colour", ["threads", "loop"])
    def test_tls(self, certificate: Path, colour: str) -> None:
        """rediss:// is encrypted, and a server whose certificate nobody vouches for is refused."""
        port = servers.free_port()
        settings = OURS | {
            "tls-port": str(port),
            "tls-cert-file": str(certificate),
            "tls-key-file": str(certificate),
            "tls-ca-cert-file": str(certificate),
            "tls-auth-clients": "no",
        }
        try:
            server = servers.redis(settings=settings)
            with server:
                url = f"rediss://localhost:{port}/0"
                with Asking(f"{url}?ssl_ca_certs={certificate}", colour) as ask:
                    assert isinstance(ask(claim()), Hold)
                with Asking(url, colour) as ask, pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                    ask(claim())
        except ServerDidNotStart:
            pytest.skip("This redis-server was built without TLS.")

    def test_no_server(self) -> None:
        """Where nobody listens, nothing was sent, and the error names the address without the password."""
        url = f"redis://zoe:secret@127.0.0.1:{servers.free_port()}/0"
        with closing(RedisStore(url)) as store, pytest.raises(StoreUnavailable, match="zoe@127") as raised:
            store.perform(claim())
        assert not raised.value.was_sent
        assert "secret" not in str(raised.value)

    def test_a_server_that_is_silent(self, paused: "Paused") -> None:
        """A server that does not answer in time may have done it: the error says so, and it is not asked again."""
        with RedisStore(f"{paused.url}?timeout=0.3") as store:
            held(store)
            with paused, pytest.raises(StoreUnavailable) as raised:
                store.perform(claim("another"))
            assert raised.value.was_sent
            found = store.perform(claim("another"))
            assert isinstance(found, Found | Hold)

    async def test_a_silent_server_on_a_loop(self, paused: "Paused") -> None:
        """The same on an event loop."""
        async with stores.async_store(f"{paused.url}?timeout=0.3") as store:
            first = await store.perform(claim())
            assert isinstance(first, Hold)
            with paused, pytest.raises(StoreUnavailable) as raised:
                await store.perform(claim("another"))
            assert raised.value.was_sent
            found = await store.perform(claim("another"))
            assert isinstance(found, Found | Hold)

    async def test_no_request_reads_anothers_answer(self, paused: "Paused") -> None:
        """A request that is cancelled in the middle leaves no answer behind for the next on its connection."""
        address = Address.of(paused.url)
        connections = AsyncConnections(address)
        asked = Client(address, connections)
        with redis.Redis.from_url(paused.url) as client:
            client.mset({"mine": "my secret", "yours": "your answer"})
        assert await asked.execute([Call(b"", packed("PING"))]) == [b"PONG"]
        with paused:
            asking = asyncio.ensure_future(asked.execute([Call(b"mine", packed("GET", "mine"))]))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        assert await asked.execute([Call(b"yours", packed("GET", "yours"))]) == [b"your answer"]
        connections.drop()

    @pytest.mark.parametrize("colour", ["threads", "loop"])
    def test_a_server_that_comes_back_is_used_again(self, colour: str) -> None:
        """After a kill -9, what was acknowledged is there, where the append-only file is synced always."""
        settings = {"appendonly": "yes", "appendfsync": "always"}
        with servers.redis(settings=settings) as server:  # noqa: SIM117 - the server outlives the store
            with Asking(server.url, colour) as ask:
                holds = [ask(claim(f"key {number}")) for number in range(50)]
                for hold in holds[:25]:
                    assert ask(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
                server.kill()
                with pytest.raises(StoreUnavailable):
                    ask(claim("another"))
                server.start()
                for number, hold in enumerate(holds):
                    found = ask(claim(f"key {number}"))
                    assert isinstance(found, Found)
                    assert found.token == hold.token
                    assert found.answer == (ANSWER if number < 25 else None)

    def test_acknowledged_in_a_crowd(self) -> None:
        """A server killed in the middle of a crowd has kept every answer that it acknowledged."""
        with servers.redis(settings={"appendonly": "yes", "appendfsync": "always"}) as server:
            acknowledged: list[str] = []

            def work(number: int) -> None:
                with closing(RedisStore(server.url)) as store:
                    for count in range(10_000):
                        key = f"{number}-{count}"
                        try:
                            finished(store, claim(key))
                        except (StoreError, AssertionError):
                            return
                        acknowledged.append(key)

            with ThreadPoolExecutor(4) as threads:
                running = [threads.submit(work, number) for number in range(4)]
                while len(acknowledged) < 100:
                    assert not any(each.done() and each.exception() for each in running)
                server.kill()
            server.start()
            with RedisStore(server.url) as store:
                for key in acknowledged:
                    found = store.perform(claim(key))
                    assert isinstance(found, Found)
                    assert found.answer == ANSWER


@pytest.fixture
def certificate() -> Iterator[Path]:
    """A key and a certificate of localhost that nobody vouches for but itself, in one file."""
    with tempfile.TemporaryDirectory(prefix="semel-tls-") as name:
        file = Path(name) / "localhost.pem"
        words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        try:
            subprocess.run(
                ["openssl", *words.split(), "-keyout", file, "-out", file.with_suffix(".crt")],  # noqa: S607 - any
                check=True,
                capture_output=True,
            )
        except FileNotFoundError:
            pytest.skip("There is no openssl to make a certificate with.")
        file.write_text(file.read_text() + file.with_suffix(".crt").read_text())
        # The server runs as somebody else.
        file.chmod(0o644)
        file.parent.chmod(0o755)
        yield file


def _acl() -> list[str]:
    """The rule that the documentation has, in its own words."""
    page = Path("docs/how-to/redis.md").read_text("utf-8")
    (rule,) = re.findall(r"^ACL SETUSER semel (.*?)\n```", page, re.DOTALL | re.MULTILINE)
    return str(rule).replace("\\\n", " ").split()


class Paused:
    """A server that stands still while one is inside."""

    def __init__(self, server: servers.RedisServer) -> None:
        self.url = server.url
        assert server.pid is not None
        self._pid = server.pid

    def __enter__(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGCONT)


@pytest.fixture
def paused() -> Iterator[Paused]:
    with servers.redis(settings=OURS) as server:
        yield Paused(server)


def _child(*lines: str) -> "subprocess.Popen[str]":
    program = (
        "import os",
        "from concurrent.futures import ThreadPoolExecutor",
        "from datetime import timedelta",
        "from semel.core.commands import Claim",
        "from semel.stores import store as open",
        "def claim(): return Claim('alice', 'key', os.urandom(16), b'', timedelta(seconds=30), timedelta(hours=24))",
        *lines,
    )
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _listed(client: Any) -> int:
    return sum(client.zcard(name) for name in client.scan_iter("semel:due:*"))


def _now(client: Any) -> int:
    seconds, microseconds = client.time()
    return int(seconds * 1_000_000 + microseconds)


def _digest() -> str:
    from semel.stores.redis.records import digest_of  # noqa: PLC0415

    return digest_of("alice", "key").decode()


def _is_7(client: Any) -> bool:
    return not str(client.info("server")["redis_version"]).startswith("6")
