"""What pages of another origin can read of the proxy's answers, and in which coding an answer is stored."""

import asyncio
from pathlib import Path

import pytest

from tests.proxy.kit import BOB, KEY, Got, Origin, Seen, proxied, replying

PAGE = "https://shop.example"
ORIGIN = f"Origin: {PAGE}"


async def with_cors(_seen: Seen, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(replying("201 Created", b"{}", f"Access-Control-Allow-Origin: {PAGE}", "Location: /pay/1"))


def allowed(got: Got) -> list[str]:
    return got.values("access-control-allow-origin")


async def test_cors(tmp_path: Path) -> None:
    """A page can read a replay and every refusal, once allowed: what the upstream allows is not said twice."""
    rules = {"max_request_body": 10}
    async with proxied(tmp_path, Origin(with_cors), cors_origins=[PAGE, "http://localhost:3000"], rules=rules) as world:
        first, replay = await world.send(KEY, BOB, ORIGIN), await world.send(KEY, BOB, ORIGIN)
        assert (allowed(first), allowed(replay), replay.is_replay) == ([PAGE], [PAGE], True)
        assert first.values("vary") == []
        assert replay.values("access-control-allow-credentials") == ["true"]
        exposed = set(replay.values("access-control-expose-headers")[0].split(", "))
        assert {"idempotent-replayed", "retry-after", "location", "link", "etag", "preference-applied"} <= exposed
        refused = [
            await world.send(KEY, BOB, ORIGIN, body=b"[]"),
            await world.send("Idempotency-Key:", BOB, ORIGIN),
            await world.send("Idempotency-Key: other", BOB, ORIGIN, body=b"x" * 11),
            await world.send(KEY, ORIGIN),
            await world.send(KEY, BOB, BOB, ORIGIN),
        ]
        world.proxy.drain()
        refused.append(await world.send("Idempotency-Key: third", BOB, ORIGIN))
    assert [each.status for each in refused] == [422, 400, 413, 400, 400, 503]
    assert [allowed(each) for each in refused] == [[PAGE]] * 6
    assert all("Origin" in each.values("vary") for each in [replay, *refused])


@pytest.mark.parametrize("lines", [(), ("Origin: https://evil.example",), ("Origin: null",), (ORIGIN, ORIGIN)])
async def test_other_origins(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """Pages of other origins are shown nothing, and no cache may give them what was for another."""
    async with proxied(tmp_path, cors_origins=PAGE) as world:
        got = [await world.send(KEY, BOB, *lines) for _ in range(2)][1]
    assert (got.is_replay, allowed(got), got.values("vary")) == (True, [], ["Origin"])


async def test_any_origin(tmp_path: Path) -> None:
    """With ``*`` every page can read them, without its user's cookies."""
    async with proxied(tmp_path, cors_origins="*") as world:
        got = [await world.send(KEY, BOB, ORIGIN) for _ in range(2)][1]
    assert (allowed(got), got.values("access-control-allow-credentials"), got.values("vary")) == (["*"], [], [])


async def test_answers_of_the_upstream(tmp_path: Path) -> None:
    """Of its own answers the upstream decides by itself which page may read them, of preflights too."""
    async with proxied(tmp_path, cors_origins=PAGE) as world:
        for method, lines in (("GET", ()), ("POST", ()), ("POST", (KEY,)), ("OPTIONS", ())):
            got = await world.send(*lines, BOB, ORIGIN, method=method, body=b"")
            assert (allowed(got), got.values("vary"), got.values("semel-upstream")) == ([], [], [])
    assert [each.method for each in world.origin.seen] == ["GET", "POST", "POST", "OPTIONS"]


async def test_coding(tmp_path: Path) -> None:
    """A guarded request asks for an answer without a coding: the retry of another client may not accept the first's."""
    async with proxied(tmp_path) as world:
        for lines in ((KEY, "Accept-Encoding: gzip, br"), ("Accept-Encoding: gzip, br",), (KEY, "X-User: eve")):
            await world.send(BOB if "eve" not in lines[-1] else "X-Other: 1", *lines)
    assert [each.values("accept-encoding") for each in world.origin.seen] == [["identity"], ["gzip, br"], ["identity"]]
