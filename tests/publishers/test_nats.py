"""Messages to a real NATS JetStream, read back with a client of its own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, DiscardPolicy, StreamConfig

from semel.core.outbox import Delivered, Failed, Rejected, Unreachable
from semel.errors import ConfigurationError
from semel.publishers.nats import NATS
from tests.kit import servers
from tests.kit.servers import NATSServer, free_port
from tests.publishers.sending import TRACE, cut_off, delivered, full_message, kinds, message, opened, reason
from tests.publishers.sending import through_a_death as through

Answer = TypeVar("Answer")


@asynccontextmanager
async def looking(url: str) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(url.split(","), max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    try:
        yield client.jetstream(timeout=10)
    finally:
        await client.close()


async def make_stream(server: NATSServer, name: str, **config: object) -> None:
    async with looking(server.url) as stream:
        await stream.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], **config))  # type: ignore[arg-type]


async def read(url: str, name: str) -> list[Msg]:
    """Return all that is in the stream."""
    async with looking(url) as stream:
        count = (await stream.stream_info(name)).state.messages
        config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
        reader = await stream.pull_subscribe(f"{name}.>", stream=name, config=config)
        found: list[Msg] = []
        while len(found) < count:
            found += await reader.fetch(min(500, count - len(found)), timeout=10)
        return found


async def answered(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Ask a cluster until it answers: while it elects a leader it refuses, says nothing, or knows no stream."""
    while True:
        try:
            return await ask()
        except nats.errors.Error:
            await asyncio.sleep(0.1)


async def ids_in(url: str, name: str) -> list[str]:
    return [(each.headers or {})["Nats-Msg-Id"] for each in await read(url, name)]


async def test_everything_arrives(nats_server: NATSServer, name: str) -> None:
    """The id is ``Nats-Msg-Id``; the subject ends with the type; content type, headers, key and trace are headers."""
    await make_stream(nats_server, name)
    sent = full_message(payload=b"\x00\xff")
    async with opened(nats_server.url, name) as publisher:
        assert await publisher.publish([sent]) == [Delivered()]
    (found,) = await read(nats_server.url, name)
    assert (found.subject, found.data) == (f"{name}.order.paid", b"\x00\xff")
    assert found.headers == {
        "Nats-Msg-Id": sent.id,
        "type": "order.paid",
        "content-type": "application/vnd.shop+json",
        "tenant": "blue",
        "greeting": "grüß dich",
        "traceparent": TRACE,
        "semel-key": "order-17",
    }


async def test_again(nats_server: NATSServer, name: str) -> None:
    """A message that is published a second time within the duplicate window is confirmed, and stored once."""
    await make_stream(nats_server, name)
    sent = message()
    async with opened(nats_server.url, name) as publisher:
        for _ in range(2):
            assert await publisher.publish([sent]) == [Delivered()]
    assert await ids_in(nats_server.url, name) == [sent.id]


async def test_no_stream(nats_server: NATSServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a stream for its subject a message is rejected, and the reason says what to do; `open` warns of it."""
    async with opened(nats_server.url, name) as publisher:
        assert f"No stream takes subject '{name}.>'" in caplog.text
        (verdict,) = await publisher.publish([message()])
    assert isinstance(verdict, Rejected)
    assert reason(verdict) == (
        f"No stream takes subject '{name}.order.paid'. Make one (nats stream add), then requeue what was rejected."
    )


async def test_one_of_a_hundred_is_wrong(nats_server: NATSServer, name: str) -> None:
    """A type that can't be a subject is rejected alone; the 99 others are delivered."""
    await make_stream(nats_server, name)
    messages = [message(type="order paid" if number == 41 else "order.paid") for number in range(100)]
    async with opened(nats_server.url, name) as publisher:
        verdicts = await publisher.publish(messages)
    assert kinds(verdicts) == ["Rejected" if number == 41 else "Delivered" for number in range(100)]
    assert "is no subject" in reason(verdicts[41])
    assert sorted(await ids_in(nats_server.url, name)) == sorted(delivered(messages, verdicts))


@pytest.mark.parametrize("kind", ["order.*", "order.>", "order..paid", ".", "or\u2003der"])
async def test_no_subject(nats_server: NATSServer, name: str, kind: str) -> None:
    """Wildcards, empty parts and spaces of any kind are no part of a subject."""
    await make_stream(nats_server, name)
    async with opened(nats_server.url, name) as publisher:
        assert kinds(await publisher.publish([message(type=kind), message()])) == ["Rejected", "Delivered"]


async def test_subject(nats_server: NATSServer, name: str) -> None:
    """``subject=`` may hold the type and the ordering key."""
    await make_stream(nats_server, name)
    made = NATS("events", nats_server.url, subject=f"{name}.shop.{{key}}.{{type}}")
    async with opened(made) as publisher:
        assert kinds(await publisher.publish([full_message()])) == ["Delivered"]
    assert [each.subject for each in await read(nats_server.url, name)] == [f"{name}.shop.order-17.order.paid"]


async def test_too_large_for_the_server(nats_server: NATSServer, name: str) -> None:
    """A message over the server's limit, with its headers, is rejected before it is sent: NATS would hang up."""
    await make_stream(nats_server, name)
    limit = 1024 * 1024
    async with opened(nats_server.url, name) as publisher:
        verdicts = await publisher.publish([message(payload=b"x" * (limit - 10)), message()])
        fits = await publisher.publish([message(payload=b"x" * (limit - 200))])
    assert kinds([*verdicts, *fits]) == ["Rejected", "Delivered", "Delivered"]
    assert "raise max_payload" in reason(verdicts[0])


async def test_too_large_for_the_stream(nats_server: NATSServer, name: str) -> None:
    """A message over the stream's own limit is rejected."""
    await make_stream(nats_server, name, max_msg_size=500)
    async with opened(nats_server.url, name) as publisher:
        verdicts = await publisher.publish([message(payload=b"x" * 1000), message()])
    assert kinds(verdicts) == ["Rejected", "Delivered"]
    assert "raise its max_msg_size" in reason(verdicts[0])


async def test_full_stream(nats_server: NATSServer, name: str) -> None:
    """A stream that is full refuses what is too much: a failure, to be tried again."""
    await make_stream(nats_server, name, max_msgs=2, discard=DiscardPolicy.NEW)
    async with opened(nats_server.url, name) as publisher:
        verdicts = await publisher.publish([message() for _ in range(3)])
    assert kinds(verdicts) == ["Delivered", "Delivered", "Failed"]
    assert isinstance(verdicts[2], Failed)
    assert "maximum messages exceeded" in reason(verdicts[2])


async def test_a_header_that_nats_has_no_room_for(nats_server: NATSServer, name: str) -> None:
    """A name of a header with a space in it is rejected alone."""
    await make_stream(nats_server, name)
    async with opened(nats_server.url, name) as publisher:
        verdicts = await publisher.publish([message(headers=(("a b", "c"),)), message()])
    assert kinds(verdicts) == ["Rejected", "Delivered"]


@pytest.mark.parametrize("window, level", [(5.0, logging.WARNING), (120.0, logging.INFO), (3600.0, logging.INFO)])
async def test_duplicate_window(
    nats_server: NATSServer, name: str, caplog: pytest.LogCaptureFixture, window: float, level: int
) -> None:
    """How long the stream tells duplicates is logged at `open`, as a warning if it is under two minutes."""
    caplog.set_level(logging.INFO, "semel")
    await make_stream(nats_server, name, duplicate_window=window)
    async with opened(nats_server.url, name):
        pass
    (said,) = [each for each in caplog.records if each.name == "semel"]
    assert said.levelno == level
    assert f"Stream '{name}' tells duplicates for {window:g} s" in said.getMessage()


async def test_a_stream_that_acknowledges_nothing(nats_server: NATSServer, name: str) -> None:
    """A stream with ``no_ack`` can't be published to: a relay would never know."""
    await make_stream(nats_server, name, no_ack=True)
    with pytest.raises(ConfigurationError, match=r"acknowledges nothing\. Set no_ack to false"):
        await NATS(name, nats_server.url).open()


async def test_down() -> None:
    """Servers that are not there are a connection error, with their addresses."""
    where = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=f"NATS at {where} can't be reached"):
        await NATS("events", f"nats://user:s3cr3t@{where}").open()


async def test_another_server(nats_server: NATSServer, name: str) -> None:
    """Of several servers, one that is down is passed over."""
    await make_stream(nats_server, name)
    async with opened(f"nats://127.0.0.1:{free_port()},127.0.0.1:{nats_server.port}", name) as publisher:
        assert await publisher.publish([message()]) == [Delivered()]


async def test_wrong_password(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong password is said, and not shown."""
    caplog.set_level(logging.DEBUG)
    settings = {"authorization": "{ user: semel, password: right }"}
    with servers.nats(settings=settings) as server:
        made = NATS(name, f"nats://semel:s3cr3t@127.0.0.1:{server.port}")
        with pytest.raises(PermissionError, match="refuses user 'semel': check user, password") as caught:
            await made.open()
        assert "s3cr3t" not in f"{caught.value!r} {made!r} {made._address!r} {caplog.text}"
        async with opened(f"nats://semel:right@127.0.0.1:{server.port}", name) as publisher:
            assert kinds(await publisher.publish([message()])) == ["Rejected"]


async def test_wrong_token(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A token stands where a user's name would, and is a secret: a wrong one is said, and not shown."""
    caplog.set_level(logging.DEBUG)
    with servers.nats(settings={"authorization": "{ token: right }"}) as server:
        made = NATS(name, f"nats://s3cr3t@127.0.0.1:{server.port}")
        with pytest.raises(PermissionError, match="refuses the token") as caught:
            await made.open()
        assert "s3cr3t" not in f"{caught.value!r} {made!r} {made._address!r} {caplog.text}"


async def test_rights(name: str) -> None:
    """A user who may publish, and not read a stream's settings, will do; what it may not publish waits."""
    rights = f'{{ publish: ["{name}.order.paid"], subscribe: ["_INBOX.>"] }}'
    users = f"[{{ user: all, password: right }}, {{ user: relay, password: right, permissions: {rights} }}]"
    with servers.nats(settings={"authorization": f"{{ users: {users} }}"}) as server:
        async with looking(f"nats://all:right@127.0.0.1:{server.port}") as stream:
            await stream.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
        async with opened(f"nats://relay:right@127.0.0.1:{server.port}?timeout=1", name) as publisher:
            verdicts = await publisher.publish([message(), message(type="order.lost")])
    assert kinds(verdicts) == ["Delivered", "Unreachable"]
    assert "permissions violation" in reason(verdicts[1]).lower()


async def test_without_jetstream(name: str) -> None:
    """A NATS server without JetStream is a connection error that says how to start it."""
    with servers.nats(settings={"jetstream": "false"}) as server, pytest.raises(ConnectionError, match="it is off"):
        await NATS(name, server.url, timeout=2).open()


async def test_cancelled(nats_server: NATSServer, name: str) -> None:
    """After a publish that was cancelled, the publisher works."""
    await make_stream(nats_server, name)
    async with opened(nats_server.url, name) as publisher:
        await cut_off(publisher)
        last = message()
        assert await publisher.publish([last]) == [Delivered()]
    assert last.id in await ids_in(nats_server.url, name)


async def test_killed_in_the_middle_of_a_batch(nats_server: NATSServer, name: str) -> None:
    """Of a server that is killed and comes back, everything that was confirmed is there, once."""
    await make_stream(nats_server, name)
    async with opened(nats_server.url, name) as publisher:
        confirmed, everything = await through(publisher, nats_server.kill, nats_server.start)
    found = await ids_in(nats_server.url, name)
    assert confirmed == everything == set(found)
    assert len(found) == len(everything)


async def test_away_between_two_calls(nats_server: NATSServer, name: str) -> None:
    """A server that is gone costs a message nothing, and is found again by `open`."""
    await make_stream(nats_server, name)
    async with opened(nats_server.url, name) as publisher:
        await asyncio.to_thread(nats_server.kill)
        try:
            (verdict,) = await publisher.publish([message()])
            assert isinstance(verdict, Unreachable)
            with pytest.raises(ConnectionError):
                await publisher.open()
        finally:
            await asyncio.to_thread(nats_server.start)
        await publisher.open()
        assert await publisher.publish([message()]) == [Delivered()]


@pytest.mark.slow
async def test_leader_killed() -> None:
    """In a cluster of three, while a stream has no leader its messages wait; what was confirmed outlives the leader."""
    with servers.nats_cluster() as cluster:
        async with looking(cluster.url) as stream:
            config = StreamConfig(name="events", subjects=["events.>"], num_replicas=3)
            await answered(lambda: stream.add_stream(config))
            leader = (await answered(lambda: stream.stream_info("events"))).cluster
            assert leader is not None
            dead = cluster.node(str(leader.leader))
        async with opened(NATS("events", cluster.url, timeout=2)) as publisher:
            confirmed, everything = await through(publisher, dead.kill, lambda: None, batch=50)
        found = await answered(lambda: ids_in(cluster.url, "events"))
        assert confirmed == everything == set(found)
        assert len(found) == len(everything)
