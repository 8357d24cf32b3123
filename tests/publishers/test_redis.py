"""Messages to real Redis Streams, read back with the plain client."""

import asyncio
import json
import logging
from typing import Any

import pytest
import redis

from semel.core.outbox import Delivered, Failed, Rejected, Unreachable
from semel.errors import ConfigurationError
from semel.publishers.redis import RedisStreams
from tests.kit import servers
from tests.kit.servers import RedisServer, free_port
from tests.kit.servers.base import until
from tests.kit.servers.resp import ask, ask_facts
from tests.publishers.sending import TRACE, cut_off, full_message, kinds, message, opened, reason
from tests.publishers.sending import through_a_death as through


def read(url: str, stream: str) -> list[dict[str, Any]]:
    """Return the fields of every entry of the stream."""
    with redis.Redis.from_url(url) as client:
        entries: Any = client.xrange(stream)
    return [
        {name.decode(): text if name == b"payload" else text.decode() for name, text in fields.items()}
        for _, fields in entries
    ]


def ids_in(url: str, stream: str) -> list[str]:
    return [fields["id"] for fields in read(url, stream)]


async def test_everything_arrives(redis_url: str, name: str) -> None:
    """An entry has five fields; the content type and the trace are among the headers, which are a JSON object."""
    sent = full_message(payload=b"\x00\xff")
    async with opened(redis_url, name) as publisher:
        assert await publisher.publish([sent]) == [Delivered()]
    (found,) = read(redis_url, name)
    headers = json.loads(found.pop("headers"))
    assert found == {"id": sent.id, "type": "order.paid", "payload": b"\x00\xff", "key": "order-17"}
    assert headers == {
        "tenant": "blue",
        "greeting": "grüß dich",
        "content-type": "application/vnd.shop+json",
        "traceparent": TRACE,
    }


async def test_a_plain_message(redis_url: str, name: str) -> None:
    """Where a message has no key the field is empty, and its headers have the content type alone."""
    async with opened(redis_url, name) as publisher:
        await publisher.publish([message()])
    (found,) = read(redis_url, name)
    assert (found["key"], json.loads(found["headers"])) == ("", {"content-type": "application/json"})


async def test_again(redis_url: str, name: str) -> None:
    """A message that is published a second time has the same id: a consumer can tell."""
    sent = message()
    async with opened(redis_url, name) as publisher:
        for _ in range(2):
            assert await publisher.publish([sent]) == [Delivered()]
    assert ids_in(redis_url, name) == [sent.id, sent.id]


async def test_in_order(redis_url: str, name: str) -> None:
    """The entries of a call are in its order."""
    messages = [message() for _ in range(300)]
    async with opened(redis_url, name) as publisher:
        assert await publisher.publish(messages) == [Delivered()] * 300
    assert ids_in(redis_url, name) == [each.id for each in messages]


async def test_stream_and_database(redis_url: str, name: str) -> None:
    """``stream=`` is another key than the destination's name; the path is the number of the database."""
    third = f"{redis_url.removesuffix('/0')}/3"
    async with opened(f"{third}?stream={name}:x", name) as publisher:
        await publisher.publish([message()])
    assert len(ids_in(third, f"{name}:x")) == 1
    assert ids_in(redis_url, f"{name}:x") == []


async def test_trimmed(redis_url: str, name: str) -> None:
    """With ``maxlen=`` the oldest entries are deleted, read or not, about when there are more; without it, none is."""
    messages = [message() for _ in range(500)]
    async with opened(f"{redis_url}?maxlen=100", name) as publisher:
        await publisher.publish(messages)
    kept = ids_in(redis_url, name)
    assert 100 <= len(kept) < 500
    assert kept == [each.id for each in messages][-len(kept) :]


async def test_no_stream(redis_url: str, name: str) -> None:
    """A key that holds something else than a stream is rejected, with what to do."""
    with redis.Redis.from_url(redis_url) as client:
        client.set(name, "a text")
    async with opened(redis_url, name) as publisher:
        (verdict,) = await publisher.publish([message()])
    assert isinstance(verdict, Rejected)
    assert f"'{name}' is no stream at Redis. Rename it, or set stream=" in reason(verdict)


async def test_out_of_memory(name: str) -> None:
    """A server without memory refuses what is too much, each message by itself: a failure, to be tried again."""
    with servers.redis(settings={"maxmemory": "3mb", "maxmemory-policy": "noeviction"}) as server:
        messages = [message(payload=b"x" * 100_000) for _ in range(100)]
        async with opened(server.url, name) as publisher:
            verdicts = await publisher.publish(messages)
        taken = [each.id for each, verdict in zip(messages, verdicts, strict=True) if isinstance(verdict, Delivered)]
        assert isinstance(verdicts[-1], Failed)
        assert "out of memory: raise maxmemory" in reason(verdicts[-1])
        assert set(kinds(verdicts)) == {"Delivered", "Failed"}
        assert ids_in(server.url, name) == taken


async def test_a_replica(name: str) -> None:
    """A server that became a replica takes no writes: unreachable, and the reason names the way out."""
    with servers.redis(settings={"appendonly": "no"}) as server:
        async with opened(server.url, name) as publisher:
            ask(server.port, "REPLICAOF", "127.0.0.1", str(free_port()))
            (verdict,) = await publisher.publish([message()])
    assert isinstance(verdict, Unreachable)
    assert "is a replica: name its master" in reason(verdict)


async def test_replicas_that_do_not_confirm(name: str) -> None:
    """With ``wait=1`` a message is not delivered before a replica has it."""
    quick = {"repl-diskless-sync-delay": "0"}
    with servers.redis(settings=quick) as master, servers.redis(settings=quick) as other:
        async with opened(f"{master.url}?wait=1&timeout=4", name) as publisher:
            (alone,) = await publisher.publish([message()])
        assert isinstance(alone, Unreachable)
        assert "0 of 1 replicas" in reason(alone)
        ask(other.port, "REPLICAOF", "127.0.0.1", str(master.port))
        async with opened(f"{master.url}?wait=1", name) as publisher:
            last = message()
            until("the replica is in step", lambda: ask_facts(other.port, "INFO").get("master_link_status") == "up")
            assert await publisher.publish([last]) == [Delivered()]
        assert last.id in ids_in(other.url, name)


async def test_down() -> None:
    """A server that is not there is a connection error, with its address."""
    port = free_port()
    with pytest.raises(ConnectionError, match=f"Redis at 127.0.0.1:{port} can't be used"):
        await RedisStreams("events", f"redis://:s3cr3t@127.0.0.1:{port}/0").open()


async def test_wrong_password(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong password is said, and not shown."""
    caplog.set_level(logging.DEBUG)
    with servers.redis(settings={"appendonly": "no"}) as server:
        ask(server.port, "CONFIG", "SET", "requirepass", "right")
        made = RedisStreams(name, f"redis://:s3cr3t@127.0.0.1:{server.port}/0")
        with pytest.raises(PermissionError, match="refuses user 'default': check password") as caught:
            await made.open()
        assert "s3cr3t" not in f"{caught.value!r} {made!r} {made._address!r} {caplog.text}"
        async with opened(f"redis://:right@127.0.0.1:{server.port}/0", name) as publisher:
            assert await publisher.publish([message()]) == [Delivered()]
        ask_with_password = redis.Redis(port=server.port, password="right")
        ask_with_password.config_set("requirepass", "")
        ask_with_password.close()


async def test_rights(redis_url: str, name: str) -> None:
    """The rights that the documentation names are enough; without one to the stream, a message waits."""
    with redis.Redis.from_url(redis_url) as client:
        client.execute_command(f"ACL SETUSER relay on >right ~{name} resetchannels +ping +select +xadd +wait")
        try:
            url = redis_url.replace("redis://", "redis://relay:right@")
            async with opened(url, name) as publisher:
                assert await publisher.publish([message()]) == [Delivered()]
            async with opened(url, "another") as publisher:
                (verdict,) = await publisher.publish([message()])
            assert isinstance(verdict, Unreachable)
            assert "give it +xadd on the stream" in reason(verdict)
        finally:
            client.acl_deluser("relay")


@pytest.mark.parametrize("after", [0.0, 0.001, 0.002, 0.005, 0.01, 0.05])
async def test_cancelled(redis_server: RedisServer, redis_url: str, name: str, after: float) -> None:
    """A publish that was cancelled closes the publisher; opened again, it confirms nothing that it should not."""
    async with opened(redis_url, name) as publisher:
        ask(redis_server.port, "CLIENT", "PAUSE", "60000", "WRITE")
        await cut_off(publisher, after=after)
        ask(redis_server.port, "CLIENT", "UNPAUSE")
        (verdict,) = await publisher.publish([message()])
        assert isinstance(verdict, Unreachable)
        await publisher.open()
        last = message()
        assert await publisher.publish([last]) == [Delivered()]
    assert ids_in(redis_url, name)[-1] == last.id


async def test_killed_in_the_middle_of_a_batch(name: str) -> None:
    """Of a server that writes each entry to disk, everything that was confirmed is there after kill -9."""
    with servers.redis(settings={"appendonly": "yes", "appendfsync": "always"}) as server:
        async with opened(server.url, name) as publisher:
            confirmed, everything = await through(publisher, server.kill, server.start)
        assert confirmed == everything
        assert confirmed <= set(ids_in(server.url, name))


async def test_away_between_two_calls(name: str) -> None:
    """A server that is gone costs a message nothing."""
    with servers.redis(settings={"appendonly": "no"}) as server:
        async with opened(server.url, name) as publisher:
            await asyncio.to_thread(server.kill)
            assert kinds(await publisher.publish([message(), message()])) == ["Unreachable", "Unreachable"]
            await asyncio.to_thread(server.start)
            await publisher.open()
            assert await publisher.publish([message()]) == [Delivered()]


async def test_no_number_of_a_database(redis_server: RedisServer) -> None:
    """A database of Redis is a number."""
    with pytest.raises(ConfigurationError, match="a Redis database is a number"):
        RedisStreams("events", "redis://127.0.0.1/orders")
