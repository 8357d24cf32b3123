"""A guarded request through the proxy: one effect, one answer, and what becomes of the key when the upstream fails."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from semel.core.state import State
from semel.proxy.app import _tell_of_kept_503
from tests.proxy.kit import BOB, HANG, KEY, Answer, Origin, Seen, created, gathered, proxied, replying

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


async def test_replay(tmp_path: Path) -> None:
    """The upstream runs once, and a retry gets its answer, marked."""
    async with proxied(tmp_path) as world:
        first, again = await world.pay(), await world.pay()
    assert (first.status, first.is_replay, again.status, again.is_replay) == (201, False, 201, True)
    assert first.body == again.body
    assert len(world.origin.seen) == 1


async def test_race(tmp_path: Path) -> None:
    """Of ten at once, the upstream gets one; the others are told to retry."""
    arrived, go = asyncio.Event(), asyncio.Event()

    async def held(seen: Seen, reader: Reader, writer: Writer) -> None:
        arrived.set()
        await go.wait()
        await created(seen, reader, writer)

    async with proxied(tmp_path, Origin(held)) as world:
        first = asyncio.create_task(world.pay())
        await arrived.wait()
        others = await gathered(world.pay() for _ in range(9))
        go.set()
        assert (await first).status == 201
    assert {(each.status, each.code) for each in others} == {(409, "idempotency-key-in-progress")}
    assert len(world.origin.seen) == 1


async def test_waiting(tmp_path: Path) -> None:
    """A duplicate can wait for the first, and gets its answer."""
    async with proxied(tmp_path, rules={"in_progress": "wait", "wait": "10s"}) as world:
        answers = await gathered(world.pay() for _ in range(5))
    assert sorted(each.is_replay for each in answers) == [False, True, True, True, True]
    assert len(world.origin.seen) == 1


async def test_mismatch_and_tenants(tmp_path: Path) -> None:
    """The same key with another body is refused; the same key of another user is another operation."""
    async with proxied(tmp_path) as world:
        await world.pay()
        assert (await world.pay(body=b"[]")).status == 422
        other = await world.pay(user="eve")
    assert (other.status, other.is_replay) == (201, False)
    assert len(world.origin.seen) == 2


async def test_key_and_attempt_are_passed_on(tmp_path: Path) -> None:
    """The upstream is told the key and the number of the attempt; what a client says of that is dropped."""
    async with proxied(tmp_path) as world:
        await world.send(KEY, BOB, "Semel-Attempt: 9")
        await world.send(BOB, "Semel-Attempt: 9", "Semel_Attempt: 9")
    guarded, free = world.origin.seen
    assert guarded.values("idempotency-key") == ["key-1"]
    assert guarded.values("semel-attempt") == ["1"]
    assert free.values("semel-attempt") == []
    assert free.values("semel_attempt") == []


async def test_key_can_be_hidden(tmp_path: Path) -> None:
    """A hop behind the proxy that repeats keyed requests can be kept from knowing the key."""
    async with proxied(tmp_path, pass_key=False) as world:
        await world.pay()
    assert world.origin.seen[0].values("idempotency-key") == []


@pytest.mark.parametrize("server_errors", ["auto", "release", "keep"])
async def test_nothing_ran(tmp_path: Path, server_errors: str) -> None:
    """If the upstream can't be connected to, the key is freed, whatever the policy says of server errors."""
    rules = {"server_errors": server_errors}
    async with proxied(tmp_path, upstream="http://127.0.0.1:1", rules=rules) as world:
        got = await world.pay()
        assert (got.status, got.code, got.values("retry-after")) == (503, "upstream-unreachable", ["1"])
        assert await world.record() is None
        assert (await world.send(BOB)).code == "upstream-unreachable"


async def closes(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.close()


async def resets(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.transport.abort()


async def speaks_nonsense(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.write(b"220 smtp.example.com ESMTP\r\n\r\n")


async def breaks_off_in_head(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 201 Created\r\nContent-Le")
    writer.close()


async def breaks_off_in_body(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\nhalf")
    writer.close()


async def breaks_off_in_chunk(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nhalf")
    writer.close()


async def lies_about_chunks(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhalf\r\n0\r\n\r\n")


async def says_bad_gateway(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.write(replying("502 Bad Gateway"))


async def switches(_seen: Seen, _reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nPRI * HTTP/2.0")


def says(*data: bytes) -> Answer:
    """Answer with these bytes, and leave the connection open."""

    async def answer(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.writelines(data)

    return answer


CHUNKS = b"2\r\nok\r\n0\r\n\r\n"
LOST = [
    says(b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", CHUNKS),
    says(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", CHUNKS),
    says(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", CHUNKS),
    says(b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc"),
    says(b"HTTP/1.1 201 Created\r\nContent-Length: +2\r\n\r\nok"),
    says(b"HTTP/1.1 201 Created\r\nX-A: b\r\n c\r\nContent-Length: 2\r\n\r\nok"),
    says(b"HTTP/1.1 799 What\r\nContent-Length: 2\r\n\r\nok"),
    says(b"HTTP/2 201\r\n\r\n"),
    says(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 10_000),
    says(b"HTTP/1.1 201 Created\r\n", b"X-A: and more\r\n" * 30_000),
    says(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n", b"X-A: and more\r\n" * 30_000),
    says(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-A: ", b"a" * 1_000_000),
    switches,
    closes,
    resets,
    speaks_nonsense,
    breaks_off_in_head,
    breaks_off_in_body,
    breaks_off_in_chunk,
    lies_about_chunks,
    says_bad_gateway,
]


@pytest.mark.parametrize("answer", LOST)
async def test_outcome_unknown(tmp_path: Path, answer: object) -> None:
    """An upstream that is lost after it got the request leaves an unknown outcome: it is parked, and not sent again."""
    async with proxied(tmp_path, Origin(answer)) as world:  # type: ignore[arg-type]
        for _ in range(2):
            got = await world.pay()
            assert (got.status, got.code) == (409, "outcome-unknown")
        record = await world.record()
        assert record is not None
        assert record.state is State.UNKNOWN
    assert len(world.origin.seen) == 1


async def test_silence(tmp_path: Path) -> None:
    """An upstream that never answers leaves an unknown outcome, too; and so does one that stops in its answer."""

    async def never(seen: Seen, reader: Reader, writer: Writer) -> None:
        if b"begin" in seen.body:
            writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\nhalf")
        await reader.read()

    async with proxied(tmp_path, Origin(never), timeout=0.2) as world:
        got = await gathered([world.pay(), world.pay("key-2", b"begin")])
        assert [each.code for each in got] == ["outcome-unknown"] * 2
        assert {each.state for each in await world.records()} == {State.UNKNOWN}
        free = await world.send(BOB)
        assert (free.status, free.code) == (504, "upstream-timeout")


@pytest.mark.parametrize("preset", ["ietf", "stripe"])
async def test_rerun_by_choice(tmp_path: Path, preset: str) -> None:
    """With on_crash="rerun" an upstream that is lost frees the key: it may be sent again."""
    rules = {"on_crash": "rerun", "preset": preset, "dialect": "ietf"}
    async with proxied(tmp_path, Origin(closes), rules=rules) as world:
        assert (await world.pay()).code == "upstream-lost"
        world.origin.answer = created
        got = await world.pay()
    assert (got.status, got.is_replay) == (201, False)


async def test_answer_with_more_than_its_length(tmp_path: Path) -> None:
    """What an upstream sends beyond the length of an answer is not taken for the answer to another request."""

    async def longer(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(replying("201 Created") + replying("200 OK", b"of another"))

    async with proxied(tmp_path, Origin(longer)) as world:
        for key in ("a", "b", "c"):
            got = await world.pay(key)
            assert (got.status, got.body) == (201, b"ok")


async def test_what_comes_without_a_request(tmp_path: Path) -> None:
    """What an upstream says on a connection that is idle is not the answer to the next request: it is closed."""

    async def talks(_seen: Seen, reader: Reader, writer: Writer) -> None:
        writer.write(replying("201 Created"))
        await writer.drain()
        await go.wait()
        writer.write(replying("200 OK", b"of another"))
        with suppress(ConnectionError):
            await reader.read()
        closed.set()

    go, closed, origin = asyncio.Event(), asyncio.Event(), Origin(talks)
    async with proxied(tmp_path, origin, keepalive=10) as world:
        assert (await world.send(BOB)).body == b"ok"
        go.set()
        await closed.wait()
        assert (await world.send(BOB)).body == b"ok"
    assert origin.connections == 2


@pytest.mark.parametrize(
    "method, first",
    [
        ("GET", replying("200 OK")),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    ],
)
async def test_late_surplus(tmp_path: Path, method: str, first: bytes) -> None:
    """A guarded request has a connection of its own, so that what an upstream sends too much of, however late, is never
    stored as its answer.
    """
    before: list[Writer] = []

    async def twice(seen: Seen, _reader: Reader, writer: Writer) -> None:
        if seen.method == method:
            before.append(writer)
            writer.write(first)
        else:
            before[-1].write(replying("200 OK", b"of another"))
            writer.write(replying("201 Created"))

    async with proxied(tmp_path, Origin(twice), keepalive=10) as world:
        for key in ("a", "b", "c"):
            await world.send(BOB, method=method, body=b"")
            got, again = await world.pay(key), await world.pay(key)
            assert (got.status, got.body, again.body) == (201, b"ok", b"ok")


async def test_connections_of_guarded_requests(tmp_path: Path) -> None:
    """Each guarded request connects; what is not guarded may then use that connection, and no more are open than
    without guarded requests.
    """
    async with proxied(tmp_path, keepalive=10) as world:
        for number in range(5):
            await world.pay(f"key-{number}")
            await world.send(BOB)
    assert (len(world.origin.seen), world.origin.connections, world.origin.most) == (10, 5, 1)


async def test_early_answer(tmp_path: Path) -> None:
    """After an answer that came before the body was sent, the rest of the body is not in front of the next request."""
    writers: list[Writer] = []

    async def early(reader: Reader, writer: Writer) -> None:
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(replying("422 Unprocessable") if b"/early" in head else replying("200 OK"))

    # The buffers of a Unix socket are small, and hold less than this body.
    server = await asyncio.start_unix_server(early, tmp_path / "s")
    async with server, proxied(tmp_path, upstream=f"unix://{tmp_path}/s", keepalive=10, timeout=5) as world:
        assert (await world.send(KEY, BOB, target="/early", body=bytes(900_000))).status == 422
        assert (await world.send(BOB, body=b"")).status == 200
        for each in writers:
            each.close()
    assert len(writers) == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 201 Created\r\nContent-Type: text/plain\r\n\r\nok",
        b"HTTP/1.0 201 Created\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.1 201 Created\nContent-Length: 2\n\nok",
        b"HTTP/1.1 201\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nTransfer-Encoding: Chunked\r\n\r\n" + CHUNKS,
    ],
)
async def test_old_answers(tmp_path: Path, sent: bytes) -> None:
    """An answer may end with its connection, have lines as old servers end them, or follow an interim one."""

    async def old(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with proxied(tmp_path, Origin(old)) as world:
        for key in ("a", "b"):
            first, again = await world.pay(key), await world.pay(key)
            assert (first.status, first.body, again.body, again.is_replay) == (201, b"ok", b"ok", True)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "GET"])
async def test_sent_once(tmp_path: Path, method: str) -> None:
    """A request that meets the end of its connection is not sent again, by whatever method. That of a guarded one was
    made for it; others meet the end of a kept one.
    """

    async def twice(seen: Seen, reader: Reader, writer: Writer) -> None:
        if len(origin.seen) == 1:
            await created(seen, reader, writer)
        else:
            writer.close()

    origin = Origin(twice)
    async with proxied(tmp_path, origin, keepalive=10, rules={"methods": ["POST", "PUT", "DELETE"]}) as world:
        await world.send(BOB, method="GET", body=b"")
        got = await world.send(KEY, BOB, method=method, body=b"")
    assert got.code == ("upstream-lost" if method == "GET" else "outcome-unknown")
    assert (len(origin.seen), origin.connections) == (2, 1 if method == "GET" else 2)


async def test_stands_down(tmp_path: Path) -> None:
    """Where the upstream replays by itself, its record counts, and none is kept here."""

    async def replays(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(replying("201 Created", b"ok", "Idempotent-Replayed: true"))

    async with proxied(tmp_path, Origin(replays)) as world:
        for _ in range(2):
            assert (await world.pay()).is_replay
        assert await world.record() is None
    assert len(world.origin.seen) == 2


UNAVAILABLE = "503 Service Unavailable"


@pytest.mark.parametrize(
    "head, line, settings, is_freed",
    [
        (UNAVAILABLE, "Semel-No-Effect: true", {}, True),
        (UNAVAILABLE, "semel-no-effect: TRUE", {"rules": {"server_errors": "keep"}}, False),
        (UNAVAILABLE, "Semel-No-Effect: false", {}, False),
        ("502 Bad Gateway", "Semel-No-Effect: true", {}, True),
        ("422 Unprocessable Content", "Semel-No-Effect: true", {}, False),
        (UNAVAILABLE, "X-Other: 1", {"no_effect": [503]}, True),
        (UNAVAILABLE, "Retry-After: 3", {}, False),
        ("500 Oh", "X-Other: 1", {"no_effect": [503]}, False),
    ],
)
async def test_no_effect(tmp_path: Path, head: str, line: str, settings: dict[str, Any], is_freed: bool) -> None:
    """An upstream says by a header, or by a status that is set, that it has done nothing: a retry reaches it again."""
    answer = says(replying(head, b"x", line, "Retry-After: 3"))
    async with proxied(tmp_path, Origin(answer), **settings) as world:
        first = await world.pay()
        assert (first.status, first.values("semel-no-effect")) == (int(head[:3]), [])
        world.origin.answer = created
        again = await world.pay()
    assert (again.is_replay, len(world.origin.seen)) == ((False, 2) if is_freed else (True, 1))


@pytest.mark.parametrize(
    "head, lines",
    [("503 Later", ("Semel-No-Effect: true",)), ("201 Created", ("Idempotent-Replayed: true",))],
)
async def test_stream_that_is_not_kept(tmp_path: Path, head: str, lines: tuple[str, ...]) -> None:
    """A stream, too, leaves no record where nothing was done, or where the upstream keeps the key by itself."""
    async with proxied(
        tmp_path, Origin(says(replying(head, b"data: x", "Content-Type: text/event-stream", *lines)))
    ) as world:
        for _ in range(2):
            assert (await world.pay()).body == b"data: x"
        assert await world.record() is None
    assert len(world.origin.seen) == 2


async def test_kept_503_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says once that a 503 is kept, and what to set where it means that nothing was done."""
    _tell_of_kept_503.cache_clear()
    async with proxied(tmp_path, Origin(says(replying(UNAVAILABLE, b"x", "Retry-After: 3")))) as world:
        for key in ("one", "two"):
            await world.pay(key)
    assert [each.getMessage() for each in caplog.records if "no_effect = [503]" in each.getMessage()][1:] == []
    assert "no_effect = [503]" in caplog.text


async def test_answer_is_replayed_whole(tmp_path: Path) -> None:
    """Bytes of any kind, in chunks, with an encoding that is not undone."""

    async def binary(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Encoding: gzip\r\nLink: a\r\nLink: b\r\n"
            b"Content-Type: application/octet-stream\r\n\r\n3\r\n\x00\xff\x80\r\n2\r\n\r\n\r\n0\r\n\r\n"
        )

    async with proxied(tmp_path, Origin(binary)) as world:
        first, again = await world.pay(), await world.pay()
    assert first.body == again.body == b"\x00\xff\x80\r\n"
    for each in (first, again):
        assert each.values("link") == ["a", "b"]
        assert each.values("content-encoding") == ["gzip"]
    assert again.is_replay


async def test_report_mode(tmp_path: Path) -> None:
    """A proxy that only reports changes nothing."""
    async with proxied(tmp_path, rules={"enforcement": "report"}) as world:
        answers = [await world.pay() for _ in range(2)]
    assert [each.is_replay for each in answers] == [False, False]
    assert sum(world.proxy.guard.tally.snapshot().total.values()) == 2
    assert len(world.origin.seen) == 2


async def test_client_that_hangs_up(tmp_path: Path) -> None:
    """A guarded request is finished without its client, and the retry gets its answer."""
    arrived, go = asyncio.Event(), asyncio.Event()

    async def held(seen: Seen, reader: Reader, writer: Writer) -> None:
        arrived.set()
        await go.wait()
        await created(seen, reader, writer)

    async with proxied(tmp_path, Origin(held), rules={"in_progress": "wait"}) as world:
        first = asyncio.create_task(world.pay())
        await arrived.wait()
        first.cancel()
        again = asyncio.create_task(world.pay())
        go.set()
        assert (await again).is_replay
    assert len(world.origin.seen) == 1


@pytest.mark.slow  # A worker tries again after ten seconds.
async def test_accepted_while_the_upstream_is_down(tmp_path: Path) -> None:
    """What was accepted is run when the upstream is back, once."""
    async with proxied(tmp_path) as there:
        pass  # Its port is free now.
    async with proxied(tmp_path, rules={"in_progress": "accept"}, work=True, upstream=there.origin.url) as world:
        [where] = (await world.pay()).values("location")

        async def state() -> int:
            return (await world.send(BOB, method="GET", target=where, body=b"")).status

        assert await state() == 202
        back = await asyncio.start_server(there.origin.serve, "127.0.0.1", there.origin.port)
        async with asyncio.timeout(60):
            while await state() != 201:  # noqa: ASYNC110 - a client can only ask
                await asyncio.sleep(0.05)
        back.close()
    assert len(there.origin.seen) == 1


async def test_accepted(tmp_path: Path) -> None:
    """With in_progress="accept" a request is answered with 202, run by the proxy, and asked for at its status URL."""
    async with proxied(tmp_path, rules={"in_progress": "accept"}, work=True) as world:
        got = await world.pay()
        assert got.status == 202
        [where] = got.values("location")
        for _ in range(200):
            state = await world.send(BOB, method="GET", target=where, body=b"")
            if state.status == 201:
                break
            await asyncio.sleep(0.02)
        assert state.json() == {"body": 2}
    [seen] = world.origin.seen
    assert (seen.method, seen.body, seen.values("x-user")) == ("POST", b"{}", ["bob"])


FORGED = {"X-Forwarded-For": "192.0.2.66", "Forwarded": "for=192.0.2.66", "X-Real-IP": "192.0.2.66"}


@pytest.mark.parametrize("trusted", [["127.0.0.0/8"], ["10.0.0.0/8"]])
async def test_accepted_from_where_it_came(tmp_path: Path, trusted: list[str]) -> None:
    """A request that is run later tells the upstream of its way what it would have told when it came: of a peer that is
    not trusted, its address and nothing that it said of others.
    """
    rules = {"in_progress": "accept"}
    lines = [f"{name}: {each}" for name, each in FORGED.items()]
    async with proxied(tmp_path, rules=rules, work=True, scope="single", trusted=trusted) as world:
        now, later = await world.send(*lines), await world.send(KEY, *lines)
        assert (now.status, later.status) == (201, 202)
        async with asyncio.timeout(HANG):
            while len(world.origin.seen) < 2:  # noqa: ASYNC110 - a worker's run has no event here
                await asyncio.sleep(0.01)
    told = [{name: seen.values(name) for name in ("via", "x-forwarded-host", *FORGED)} for seen in world.origin.seen]
    assert told[0] == told[1]
    is_trusted = trusted == ["127.0.0.0/8"]
    assert told[1]["X-Forwarded-For"] == ["192.0.2.66, 127.0.0.1" if is_trusted else "127.0.0.1"]
    assert told[1]["X-Real-IP"] == (["192.0.2.66"] if is_trusted else [])
