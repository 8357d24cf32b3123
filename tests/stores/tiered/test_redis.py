"""Answers in a real Redis: shared by processes, gone in time, and of no account when anything is wrong with them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import psycopg
import pytest
import redis

from semel import stores
from semel.core.commands import Begin, Claim, Command, Complete, Look, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event, State
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.redis.address import Address
from semel.stores.redis.cluster import Client
from semel.stores.redis.connection import Connections, Failure, Pipeline
from semel.stores.tiered import Tiered
from semel.stores.tiered import cache as cache_module
from semel.stores.tiered.cache import Cache
from semel.stores.tiered.memory import Entry, now
from semel.stores.tiered.store import AsyncTieredStore, TieredStore
from semel.stores.transaction import at_once
from semel.testing.conformance import Handle, handle
from tests.kit import servers

T = TypeVar("T")

CREATED = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')
#: Long enough for a busy machine, so that no test fails for want of it.
PATIENT = timedelta(seconds=5)
LONG = 30.0


def claim_on(key: str = "key", retention: timedelta = timedelta(hours=24)) -> Claim:
    return Claim("scope", key, uuid4().bytes, b"print", timedelta(minutes=30), retention)


def until(what: Callable[[], Any]) -> None:
    """Wait for something that is bound to happen."""
    deadline = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Counted(MemoryStore):
    """One process's view of a durable store, which counts what it is asked."""

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__()
        self._memory = memory
        self.asked = 0

    def act(self, command: Command[T], actor: str | None) -> T:
        self.asked += 1
        return self._memory.act(command, actor)


class Process:
    """What one process has: a tiered store, and a durable one that counts what it is asked."""

    def __init__(self, colour: str, durable: MemoryStore, url: str, **more: Any) -> None:
        said = {"cache_timeout": PATIENT, **more}
        self._counted = Counted(durable)
        self.store: TieredStore | AsyncTieredStore
        if colour == "threads":
            self.store = self._made(stores.store(Tiered(self._counted, url, **said)))
        else:
            self.store = self._made(stores.async_store(Tiered(AsyncMemoryStore(memory=self._counted), url, **said)))
        self.handle: Handle = handle(self.store)

    @property
    def asked(self) -> int:
        """What the durable store was asked."""
        return self._counted.asked

    @staticmethod
    def _made(store: Store | AsyncStore) -> TieredStore | AsyncTieredStore:
        assert isinstance(store, TieredStore | AsyncTieredStore)
        return store

    def complete(self, key: str = "key", answer: Answer = CREATED, **more: Any) -> None:
        hold = self.handle.perform(claim_on(key, **more))
        assert isinstance(hold, Hold)
        assert self.handle.perform(Complete(hold, Event.COMPLETE, answer)) is Verdict.DONE

    def find(self, key: str = "key") -> Found:
        got = self.handle.perform(claim_on(key))
        assert isinstance(got, Found)
        return got

    def flush(self) -> None:
        """Wait until what was written is in Redis, or lost."""
        cache = self.store.cache
        assert cache is not None
        got = cache.flush(LONG)
        if got is not None:
            self.handle._runner.run(got)  # type: ignore[attr-defined]

    def open(self) -> None:
        got = self.store.open()
        if got is not None:
            self.handle._runner.run(got)  # type: ignore[attr-defined]


class World:
    """One durable store, one Redis, any number of processes."""

    def __init__(self, colour: str) -> None:
        self.durable = MemoryStore()
        self._colour = colour
        self._namespace = uuid4().hex
        self._processes: list[Process] = []

    def process(self, url: str, **more: Any) -> Process:
        said = {"namespace": self._namespace, **more}
        self._processes.append(Process(self._colour, self.durable, url, **said))
        return self._processes[-1]

    def close(self) -> None:
        for each in self._processes:
            each.handle.close()


@pytest.fixture(params=["threads", "loop"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as made:
        yield made


def test_another_process_finds_it(world: World, redis_url: str) -> None:
    """What one process has completed, another gives without asking the durable store, and keeps from then on."""
    first, second = world.process(redis_url), world.process(redis_url)
    first.complete()
    first.flush()
    got = second.find()
    assert (got.answer, got.state, got.is_expired, second.asked) == (CREATED, State.COMPLETE, False, 0)
    assert len(second.store.answers) == 1


def test_what_was_found_is_shared(world: World, redis_url: str) -> None:
    """What one process has found in the durable store, the next finds in Redis; in atomic mode, too."""
    hold = world.durable.perform(claim_on())
    assert isinstance(hold, Hold)
    world.durable.perform(Complete(hold, Event.COMPLETE, CREATED))
    first, second = world.process(redis_url), world.process(redis_url)
    assert first.find().answer == CREATED
    first.flush()
    got = second.handle.transaction().perform(Begin(claim_on()))
    assert isinstance(got, Found)
    assert (got.answer, first.asked, second.asked) == (CREATED, 1, 0)


def test_many_at_once(world: World, redis_url: str) -> None:
    """Very many that ask at once are answered from Redis, each with its own answer."""
    first, second = world.process(redis_url), world.process(redis_url, memory=0)
    for number in range(300):
        first.complete(str(number), Answer(200, (), b"%d" % number))
    first.flush()
    got = second.handle.perform_all([claim_on(str(number)) for number in range(300)])
    assert [each.answer for each in got if isinstance(each, Found)] == [
        Answer(200, (), b"%d" % number) for number in range(300)
    ]
    assert second.asked == 0


def test_in_a_cluster(world: World, redis_cluster: servers.RedisCluster) -> None:
    """On a Redis Cluster, answers are where their names belong, whatever the keys look like."""
    url = redis_cluster.url.replace("redis://", "redis+cluster://")
    first, second = world.process(url), world.process(url, memory=0)
    keys = ["{a}", "{a}b", "a\nb", *map(str, range(30))]
    for key in keys:
        first.complete(key, Answer(200, (), key.encode()))
    first.flush()
    assert [second.find(key).answer for key in keys] == [Answer(200, (), key.encode()) for key in keys]
    assert second.asked == 0


def test_large_answers_stay_behind(world: World, redis_url: str, client: Any) -> None:
    """An answer that would hold up others is not shared, and is still kept here."""
    first = world.process(redis_url)
    first.complete(answer=Answer(200, (), bytes(70_000)))
    first.flush()
    assert client.dbsize() == 0
    assert (first.find().answer, first.asked) == (Answer(200, (), bytes(70_000)), 2)


def test_other_namespaces(world: World, redis_url: str) -> None:
    """Two durable stores in one Redis are never given each other's answers."""
    first, second = world.process(redis_url), world.process(redis_url, namespace="staging")
    first.complete()
    first.flush()
    second.find()
    assert second.asked == 1


def test_restarted_memory_store(redis_url: str) -> None:
    """What was in a process that has ended is not found again, even at the same address: memory:// is no other's."""
    first, second = (stores.store(Tiered("memory://", redis_url, cache_timeout=PATIENT)) for _ in range(2))
    hold = first.perform(claim_on())
    assert isinstance(hold, Hold)
    first.perform(Complete(hold, Event.COMPLETE, CREATED))
    first.close()
    assert isinstance(second.perform(claim_on()), Hold)
    second.close()


def spoilt(client: Any, how: str) -> None:
    """Do something to every value there is."""
    for name in client.scan_iter():
        value, left = client.get(name), client.pttl(name)
        match how:
            case "truncated":
                client.set(name, value[:-1], px=left)
            case "empty":
                client.set(name, b"", px=left)
            case "foreign":
                client.set(name, b'{"some": "json"}', px=left)
            case "list":
                client.delete(name)
                client.lpush(name, value)
                client.pexpire(name, left)
            case "eternal":
                client.persist(name)
            case "version":
                client.set(name, b"\x09" + value[1:], px=left)
            case _:
                raise AssertionError(how)


@pytest.mark.parametrize("how", ["truncated", "empty", "foreign", "list", "eternal", "version"])
def test_garbage(world: World, redis_url: str, client: Any, how: str) -> None:
    """A value that is not wholly as it was written is a miss: the durable store answers, and all goes on."""
    first, second = world.process(redis_url), world.process(redis_url, memory=0)
    for key in ("one", "other"):
        first.complete(key, Answer(200, (), key.encode()))
    first.flush()
    spoilt(client, how)
    for _ in range(5):
        for key in ("one", "other"):
            assert second.find(key).answer == Answer(200, (), key.encode())
    assert second.asked > 0
    second.flush()
    before = second.asked
    if how != "list":  # It was written anew.
        assert second.find("one").answer == Answer(200, (), b"one")
        assert second.asked == before


def test_another_keys_value(world: World, redis_url: str, client: Any) -> None:
    """The answer to one key, put under the name of another, is nobody's."""
    first, second = world.process(redis_url), world.process(redis_url, memory=0)
    for key in ("one", "other"):
        first.complete(key, Answer(200, (), key.encode()))
    first.flush()
    names = client.keys()
    values = [client.get(name) for name in names]
    for name, value in zip(names, reversed(values), strict=True):
        client.set(name, value, px=100_000)
    assert [second.find(key).answer for key in ("one", "other")] == [
        Answer(200, (), b"one"),
        Answer(200, (), b"other"),
    ]
    assert second.asked == 2


def test_gone_before_the_record(world: World, redis_url: str, client: Any) -> None:
    """When the durable store finds a record expired, no cache has its answer any more."""
    first, second, third = (world.process(redis_url) for _ in range(3))
    first.complete(retention=timedelta(seconds=1))
    first.flush()
    assert second.find().answer == CREATED

    def is_expired() -> bool:
        record = world.durable.perform(Look("scope", "key"))
        assert record is not None
        return record.is_expired

    until(is_expired)
    assert [each.find().is_expired for each in (first, second, third)] == [True, True, True]
    assert client.keys() == []


class Hanging(Connections):
    """Connections to a server that hangs, once it has told the time, until the moment *until*."""

    def __init__(self, address: Address, pid: int, until: float) -> None:
        super().__init__(address)
        self._pid = pid
        self._until = until
        self._asked = 0

    async def exchange(self, pipeline: Pipeline) -> list[Any] | Failure:
        self._asked += 1
        if self._asked == 1:
            return await super().exchange(pipeline)
        os.kill(self._pid, signal.SIGSTOP)
        try:
            connection = self._send(pipeline)
            until(lambda: now() >= self._until)
        finally:
            os.kill(self._pid, signal.SIGCONT)
        assert not isinstance(connection, Failure)
        return self._receive(connection, pipeline)


def test_a_write_that_comes_late(redis_server: servers.RedisServer, redis_url: str, client: Any) -> None:
    """An answer that reaches Redis after its time, because Redis hung, is gone at once."""
    cache = Cache(redis_url, PATIENT, "test")
    entry = Entry("scope", "key", State.COMPLETE, 1, bytes(16), b"", CREATED, None, False, now() + 0.5)
    with closing(Hanging(cache.address, redis_server.pid, entry.deadline)) as connections:
        at_once(cache.write(Client(cache.address, connections), [entry]))
        assert connections._asked == 2
    assert cache.writing.is_closed
    assert client.keys() == []


def test_old_data_after_a_restart(world: World) -> None:
    """A Redis that comes back with what it had gives what is still good, and not what has expired meanwhile."""
    with servers.redis(settings={"appendonly": "yes", "appendfsync": "always"}) as server:
        first = world.process(server.url)
        first.complete("long")
        first.complete("short", retention=timedelta(seconds=1))
        first.flush()
        server.kill()

        def is_expired() -> bool:
            record = world.durable.perform(Look("scope", "short"))
            assert record is not None
            return record.is_expired

        until(is_expired)
        server.start()
        second = world.process(server.url)
        assert second.find("short").is_expired
        assert (second.find("long").answer, second.asked) == (CREATED, 1)


def test_a_full_redis(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A Redis that takes nothing more is read from all the same; people are told once, and once when it does again."""
    with servers.redis() as server, redis.Redis.from_url(server.url) as client:
        first, second = world.process(server.url, memory=0), world.process(server.url, memory=0)
        first.complete("before")
        first.flush()
        client.config_set("maxmemory", "1")
        for number in range(10):
            first.complete(str(number))
            first.flush()
            assert first.find(str(number)).answer == CREATED
            first.flush()
        assert (second.find("before").answer, second.asked) == (CREATED, 0)
        assert [each for each in caplog.messages if "gets no answers" in each and "OOM" in each] == caplog.messages
        assert len(caplog.messages) == 1
        client.config_set("maxmemory", "0")

        def takes_answers_again() -> bool:
            first.find("1")
            first.flush()
            return len(caplog.messages) > 1

        until(takes_answers_again)
        assert "gets answers again" in caplog.messages[-1]
        assert second.find("1").answer == CREATED
        assert second.asked == 0


def test_an_evicting_redis(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A Redis that evicts is right for a cache: what it has forgotten, the durable store knows."""
    settings = {"maxmemory": "4mb", "maxmemory-policy": "allkeys-lru"}
    with servers.redis(settings=settings) as server, redis.Redis.from_url(server.url) as client:
        first, second = world.process(server.url, memory=0), world.process(server.url, memory=0)
        answers = {str(number): Answer(200, (), b"%d" % number * 10_000) for number in range(300)}
        for key, answer in answers.items():
            first.complete(key, answer)
            first.flush()
        assert client.info("stats")["evicted_keys"] > 0
        # The newest first: what is found is written again, and drives out the oldest.
        assert {key: second.find(key).answer for key in reversed(answers)} == answers
        assert 0 < second.asked < len(answers)
        assert caplog.messages == []


def test_a_dead_redis(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A Redis that dies is left alone, then found again; the answers are the same all the time."""
    with servers.redis() as server:
        first, second = world.process(server.url, memory=0), world.process(server.url, memory=0)
        first.complete()
        first.flush()
        assert (second.find().answer, second.asked) == (CREATED, 0)
        server.kill()
        until(lambda: second.find().answer == CREATED and "is not used" in "".join(caplog.messages))
        server.start()
        until(lambda: second.find().answer == CREATED and "is used again" in "".join(caplog.messages))

        def is_answered_from_redis() -> bool:
            second.flush()
            before = second.asked
            return second.find().answer == CREATED and second.asked == before

        until(is_answered_from_redis)
        assert len(caplog.messages) == 2


def test_a_hanging_redis(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that hangs is waited for once, and then by nobody until it answers again."""
    with servers.redis() as server:
        first = world.process(server.url)
        first.complete()
        first.flush()
        second = world.process(server.url, memory=0, cache_timeout=timedelta(milliseconds=50))
        until(lambda: is_warm(second))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            until(lambda: second.find().answer == CREATED and is_open(second))
            reads: list[Any] = []
            assert second.store.cache is not None
            with monkeypatch.context() as patch:
                patch.setattr(second.store.cache, "read", reads.append)
                assert all(second.find().answer == CREATED for _ in range(200))
            assert reads == []
        finally:
            os.kill(server.pid, signal.SIGCONT)
        until(lambda: second.find().answer == CREATED and not is_open(second))


def is_open(process: Process) -> bool:
    cache = process.store.cache
    assert cache is not None
    return not cache.reading.is_closed


def is_warm(process: Process) -> bool:
    """Whether it answers from Redis."""
    before = process.asked
    process.find()
    return process.asked == before


def test_no_redis_at_all(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An application starts and serves where there is no Redis, and says so in one line."""
    process = world.process(f"redis://127.0.0.1:{servers.free_port()}/0")
    process.open()
    for number in range(20):
        process.complete(str(number))
        assert process.find(str(number)).answer == CREATED
    assert len(caplog.messages) == 1
    assert "can't be reached" in caplog.messages[0]


def test_no_redis_but_something(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """What is at the address may be no Redis at all: the durable store answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = textwrap.dedent("""
            import socket, sys
            server = socket.socket(fileno=int(sys.argv[1]))
            while True:
                connection, _ = server.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n")
        """)
        os.set_inheritable(server.fileno(), True)
        stranger = subprocess.Popen([sys.executable, "-c", code, str(server.fileno())], close_fds=False)
        try:
            process = world.process(f"redis://127.0.0.1:{port}/0")
            for number in range(10):
                process.complete(str(number))
                assert process.find(str(number)).answer == CREATED
        finally:
            stranger.kill()
            stranger.wait()
    assert len(caplog.messages) == 1


def test_a_password_that_is_wrong(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Where Redis does not let us in, the durable store answers, and the password is in no log."""
    with servers.redis() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "right")
        process = world.process(server.url.replace("redis://", "redis://:not-the-one@"))
        for number in range(10):
            process.complete(str(number))
            assert process.find(str(number)).answer == CREATED
    assert len(caplog.messages) == 1
    assert "WRONGPASS" in caplog.text
    assert "not-the-one" not in caplog.text


def test_another_kind_of_redis(
    world: World, redis_url: str, redis_cluster: servers.RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Where an address leads to another kind of Redis, people are told what to write instead."""
    for url in (redis_url.replace("redis://", "redis+cluster://"), redis_cluster.url):
        process = world.process(url)
        for number in range(5):
            process.complete(f"{url} {number}")
    assert len(caplog.messages) == 2
    assert "belongs to no Redis Cluster. Use redis://" in caplog.messages[0]
    assert "belongs to a Redis Cluster. Use redis+cluster://" in caplog.messages[1]


def test_writes_are_bounded(world: World, redis_url: str, monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    """A Redis that is slower than the application gets fewer answers: what waits to be written is bounded."""
    monkeypatch.setattr(cache_module, "MAX_QUEUED", 100)
    process = world.process(redis_url)
    process.complete()
    process.flush()
    assert client.keys() == []
    assert process.find().answer == CREATED


def test_close_writes_what_is_on_its_way(redis_url: str, client: Any) -> None:
    """A process that ends in order leaves behind what it has completed."""
    world = World("threads")
    process = world.process(redis_url)
    for number in range(50):
        process.complete(str(number))
    world.close()
    assert client.dbsize() == 50


async def test_loops_come_and_go(redis_url: str) -> None:
    """A store for an event loop may be used on another one."""
    store = stores.async_store(Tiered("memory://", redis_url, memory=0, cache_timeout=PATIENT))
    assert isinstance(store, AsyncTieredStore)
    assert store.cache is not None

    async def complete_and_find() -> Any:
        key = uuid4().hex
        hold = await store.perform(claim_on(key))
        assert isinstance(hold, Hold)
        await store.perform(Complete(hold, Event.COMPLETE, CREATED))
        assert store.cache is not None
        await store.cache.flush(LONG)
        found = await store.perform(claim_on(key))
        await store.close()
        return found

    for _ in range(2):
        found = await asyncio.to_thread(asyncio.run, complete_and_find())
        assert found.answer == CREATED
    assert (await complete_and_find()).answer == CREATED


@pytest.mark.skipif(not hasattr(os, "fork"), reason="There is no fork here.")
def test_forks(redis_url: str) -> None:
    """A forked child uses the tiers that its parent has opened, by connections of its own."""
    code = textwrap.dedent("""
        import os, sys
        from datetime import timedelta
        from semel import stores
        from semel.core.commands import Claim, Complete
        from semel.core.message import Answer
        from semel.core.state import Event
        from semel.stores.tiered import Tiered

        store = stores.store(Tiered("memory://", sys.argv[1], cache_timeout=timedelta(seconds=5)))

        def claim(key):
            return Claim("scope", key, os.urandom(16), b"", timedelta(minutes=1), timedelta(hours=1))

        def complete(key):
            store.perform(Complete(store.perform(claim(key)), Event.COMPLETE, Answer(200, (), key.encode())))
            store.cache.flush(30)

        complete("parent")
        child = os.fork()
        complete("child" if child == 0 else "parent again")
        store.answers.start_afresh()
        store.durable.perform = None  # Nobody may ask it.
        found = [store.perform(claim(key)).answer.body for key in ("parent", "child" if child == 0 else "parent again")]
        assert found == [b"parent", b"child" if child == 0 else b"parent again"], found
        store.cache.close()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """)
    ran = subprocess.run([sys.executable, "-c", code, redis_url], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_processes_share_a_database(postgres_url: str, redis_url: str) -> None:
    """A process completes and ends; the first replay in another, which names the same database in its own way, comes
    from Redis: the database is not even connected to.
    """
    with closing(stores.store(postgres_url)) as migrated:
        migrated.migrate()
    code = textwrap.dedent("""
        import os, sys
        from datetime import timedelta
        from semel import stores
        from semel.core.commands import Claim, Complete
        from semel.core.message import Answer
        from semel.core.state import Event
        from semel.stores.tiered import Tiered

        with stores.store(Tiered(durable=sys.argv[1], cache=sys.argv[2], cache_timeout=timedelta(seconds=5))) as store:
            claim = Claim("scope", "key", os.urandom(16), b"print", timedelta(minutes=1), timedelta(hours=1))
            store.perform(Complete(store.perform(claim), Event.COMPLETE, Answer(201, (), b"from another")))
    """)
    subprocess.run([sys.executable, "-c", code, postgres_url, redis_url], check=True)
    others = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND application_name = 'semel'"
    )
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        # The server may still be busy with the end of those that the other process had.
        before = {*connection.execute(others).fetchall()}
        store = stores.store(Tiered(stores.store(f"{postgres_url}?audit=off&pool=3"), redis_url, cache_timeout=PATIENT))
        found = store.perform(claim_on())
        assert {*connection.execute(others).fetchall()} <= before
    store.close()
    assert isinstance(found, Found)
    assert found.answer == Answer(201, (), b"from another")


def test_the_rights_that_it_needs(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A user who may do what the page on this says, and no more, is enough."""
    page = Path(__file__).parents[3] / "docs" / "how-to" / "tiered.md"
    (rule,) = [line for line in page.read_text().splitlines() if line.startswith("ACL SETUSER")]
    with servers.redis() as server, redis.Redis.from_url(server.url) as client:
        client.execute_command(*rule.split())
        url = server.url.replace("redis://", "redis://semel:secret@")
        first, second = world.process(url), world.process(url)
        first.complete()
        first.flush()
        assert (second.find().answer, second.asked) == (CREATED, 0)
    assert caplog.messages == []
