"""What passes a proxy: the rules by themselves, and a corpus of requests that two servers could read differently."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from semel.errors import IdentityRefused, RequestAmbiguous
from semel.proxy.headers import Framing, HeaderRules, Pairs, Peer, framing, incoming
from tests.proxy.kit import BOB, HANG, KEY, Origin, Seen, proxied, replying, request

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter

RULES = HeaderRules(b"x-user", (b"idempotency-key",))
TRUSTED = Peer("10.0.0.1", is_trusted=True)
STRANGER = Peer("2001:db8::1", is_trusted=False)
HOST = (b"host", b"shop")


def named(pairs: Pairs) -> list[bytes]:
    return [name for name, _ in pairs]


def passed(headers: Pairs, peer: Peer = TRUSTED, rules: HeaderRules = RULES) -> Pairs:
    """Return the headers that reach the server behind the proxy."""
    return rules.outgoing(rules.received(headers, peer)[1])


@pytest.mark.parametrize(
    "lengths, codings, version",
    [
        ([b"5"], [b"chunked"], "1.1"),
        ([b"5", b"5"], [], "1.1"),
        ([b"5", b"6"], [], "1.1"),
        ([b"+5"], [], "1.1"),
        ([b"5, 5"], [], "1.1"),
        ([b""], [], "1.1"),
        ([], [b"gzip, chunked"], "1.1"),
        ([], [b"identity"], "1.1"),
        ([], [b"chunked", b"chunked"], "1.1"),
        ([], [b"chunked"], "1.0"),
    ],
)
def test_ambiguous_framing(lengths: list[bytes], codings: list[bytes], version: str) -> None:
    """The length of a body is said in one way, or the request is refused."""
    with pytest.raises(RequestAmbiguous):
        framing(lengths, codings, version)


def test_framing() -> None:
    """A body has a length, or comes in chunks, or there is none."""
    assert framing([b"5"], []) == Framing(5)
    assert framing([], [b"Chunked"]) == Framing(None)
    assert framing([], []).is_empty


def test_hop_by_hop() -> None:
    """What belongs to the connection is dropped, and what it lists; all else is passed on in order, repeated or not."""
    sent = [
        HOST,
        (b"connection", b"close, X-Gone"),
        (b"x-gone", b"1"),
        (b"te", b"trailers"),
        (b"keep-alive", b"5"),
        (b"upgrade", b"h2c"),
        (b"proxy-authorization", b"x"),
        (b"accept", b"a"),
        (b"x-b", b"1"),
        (b"accept", b"c"),
    ]
    kept = passed(sent)
    assert kept[:4] == [HOST, (b"accept", b"a"), (b"x-b", b"1"), (b"accept", b"c")]
    assert named(kept[4:]) == [b"via", b"forwarded", b"x-forwarded-proto", b"x-forwarded-for", b"x-forwarded-host"]


@pytest.mark.parametrize(
    "name", [b"x_user", b"x.user", b"idempotency_key", b"semel_attempt", b"x_forwarded_for", b"content_length"]
)
def test_twins_are_dropped(name: bytes) -> None:
    """A name that CGI, WSGI or Rack take for one that counts is dropped."""
    assert name not in named(passed([HOST, (name, b"eve")]))


def test_other_underscores_pass() -> None:
    """Other names with an underscore are the application's own."""
    assert (b"x_trace_id", b"1") in passed([HOST, (b"x_trace_id", b"1")])


@pytest.mark.parametrize("name", [b"x-user", b"x.user", b"x_user_", b"_x-user"])
def test_twins_of_a_name_with_an_underscore(name: bytes) -> None:
    """A header that names the user may have an underscore in its own name. Then the usual spelling is its twin."""
    rules = HeaderRules(b"x_user", (b"idempotency-key",))
    kept = passed([HOST, (b"x_user", b"bob"), (name, b"eve")], rules=rules)
    is_twin = name.strip(b"_") == name
    assert [each for each in kept if each[0] in {name, b"x_user"}] == [
        (b"x_user", b"bob"),
        *([] if is_twin else [(name, b"eve")]),
    ]


@pytest.mark.parametrize("word", [b"x-user", b"X-User", b"idempotency-key", b"host", b"cookie", b"close, x-user"])
def test_listed_in_connection(word: bytes) -> None:
    """Connection can't have the server behind the proxy lose what names the user, or the key."""
    with pytest.raises(RequestAmbiguous):
        RULES.received([HOST, (b"connection", word)], TRUSTED)


def test_identity() -> None:
    """A user is named once, by a peer that is trusted."""
    user = (b"x-user", b"bob")
    assert RULES.received([HOST, user], TRUSTED)[0].is_empty
    for headers, peer in [([HOST, user, user], TRUSTED), ([HOST, user], STRANGER)]:
        with pytest.raises(IdentityRefused):
            RULES.received(headers, peer)


@pytest.mark.parametrize("headers", [[], [HOST, HOST]])
def test_host(headers: Pairs) -> None:
    """A request has one Host."""
    with pytest.raises(RequestAmbiguous):
        RULES.received(headers, TRUSTED)


def test_forwarded() -> None:
    """What a trusted peer says of the way is added to; what another says is replaced."""
    said = [HOST, (b"via", b"1.1 lb"), (b"forwarded", b"for=192.0.2.7"), (b"x-forwarded-for", b"192.0.2.7")]
    trusted, strange = (dict(passed(said, each)) for each in (TRUSTED, STRANGER))
    assert trusted[b"via"] == strange[b"via"] == b"1.1 lb, 1.1 semel"
    assert trusted[b"forwarded"] == b"for=192.0.2.7, for=10.0.0.1;proto=http;host=shop"
    assert trusted[b"x-forwarded-for"] == b"192.0.2.7, 10.0.0.1"
    assert strange[b"forwarded"] == b'for="[2001:db8::1]";proto=http;host=shop'
    assert strange[b"x-forwarded-for"] == b"2001:db8::1"


async def test_circle(tmp_path: Path) -> None:
    """A request that has passed too many of these proxies goes round in a circle, and is refused."""
    async with proxied(tmp_path) as world:
        assert (await world.send(BOB, "Via: " + ", ".join(["1.1 semel"] * 8))).code == "request-ambiguous"
        assert (await world.send(BOB, "Via: " + ", ".join(["1.1 semel"] * 2))).status == 201


def test_forwarded_quotes_its_host() -> None:
    """A host can't add an element of its own."""
    made = dict(passed([(b"host", b'a";for=evil')], Peer(None, is_trusted=True)))
    assert made[b"forwarded"] == b'for=_unix;proto=http;host="a\\";for=evil"'


def test_answers() -> None:
    """An answer loses what belongs to the connection, and a length beside chunks or without a body."""
    sent = [
        (b"Set-Cookie", b"a"),
        (b"Connection", b"X-A"),
        (b"X-A", b"1"),
        (b"Content-Length", b"3"),
        (b"Set-Cookie", b"b"),
    ]
    assert incoming(200, sent) == ((b"set-cookie", b"a"), (b"content-length", b"3"), (b"set-cookie", b"b"))
    assert named(incoming(304, sent)) == [b"set-cookie", b"set-cookie"]
    assert named(incoming(200, [*sent, (b"Transfer-Encoding", b"chunked")])) == [b"set-cookie", b"set-cookie"]


def spelled(*lines: str, target: str = "/pay", body: bytes = b"") -> bytes:
    return "\r\n".join([f"POST {target} HTTP/1.1", "Host: shop", *lines, "", ""]).encode("latin-1") + body


#: Each is refused, and the upstream sees none of it.
REFUSED = {
    "TE and CL": spelled("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "two lengths": spelled("Content-Length: 5", "Content-Length: 6", body=b"hello!"),
    "equal lengths": spelled("Content-Length: 5", "Content-Length: 5", body=b"hello"),
    "a length list": spelled("Content-Length: 5, 5", body=b"hello"),
    "a signed length": spelled("Content-Length: +5", body=b"hello"),
    "TE twice": spelled("Transfer-Encoding: chunked", "Transfer-Encoding: identity", body=b"0\r\n\r\n"),
    "TE unknown": spelled("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "TE with a tab": spelled("Transfer-Encoding:\tgzip", body=b"0\r\n\r\n"),
    "TE before a colon": spelled("Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
    "TE in HTTP/1.0": b"POST /pay HTTP/1.0\r\nHost: shop\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded line": spelled("X-A: b\r\n c", "Content-Length: 0"),
    "a folded TE": spelled("X-A: b\r\n Transfer-Encoding: chunked", "Content-Length: 0"),
    "a bare CR": spelled("X-A: b\rX-User: eve", "Content-Length: 0"),
    "a bare LF": spelled("X-A: b\nX-User: eve", "Content-Length: 0"),
    "a NUL": spelled("X-A: b\x00", "Content-Length: 0"),
    "a blank in a name": spelled("X User: eve", "Content-Length: 0"),
    "a blank before the first line": spelled(" X-User: eve", "Content-Length: 0"),
    "a header without a name": spelled(": eve", "Content-Length: 0"),
    "no host": b"POST /pay HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "two hosts": spelled("Host: other", "Content-Length: 0"),
    "the user twice": spelled("X-User: bob", "X-User: eve", "Content-Length: 0"),
    "the user, not to be passed on": spelled("X-User: bob", "Connection: x-user", "Content-Length: 0"),
    "the key, not to be passed on": spelled(KEY, BOB, "Connection: Idempotency-Key", "Content-Length: 0"),
    "latin-1 in a header": spelled("X-A: \xe9", "Content-Length: 0"),
    "a chunk size with a sign": spelled("Transfer-Encoding: chunked", body=b"+5\r\nhello\r\n0\r\n\r\n"),
    "a chunk line with a bare LF": spelled("Transfer-Encoding: chunked", body=b"2;a\nxx\r\n2a\r\n0\r\n\r\n"),
    "a chunk longer than its size": spelled("Transfer-Encoding: chunked", body=b"2\r\nxxyy0\r\n\r\n"),
    "a chunk size in hexadecimal": spelled("Transfer-Encoding: chunked", body=b"0x2\r\nxx\r\n0\r\n\r\n"),
    "TE with a vertical tab": spelled("Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "TE in quotes": spelled('Transfer-Encoding: "chunked"', body=b"0\r\n\r\n"),
    "a length in hexadecimal": spelled("Content-Length: 0x5", body=b"hello"),
    "a length that is too large": spelled("Content-Length: " + "9" * 23),
    "another version": b"POST /pay HTTP/2.0\r\nHost: shop\r\nContent-Length: 0\r\n\r\n",
    "a tunnel": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
    "a method in small letters": b"post /pay HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n",
    "a chunk size that is too large": spelled("Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\n"),
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nHost: shop\r\n\r\n",
    "an absolute target, and no host": b"POST http://shop/pay HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "an absolute target, and two hosts": spelled("Host: b", "Content-Length: 0", target="http://shop/pay"),
    "an absolute target with a user": spelled("Content-Length: 0", target="http://shop@evil.example/pay"),
    "an absolute target without a host": spelled("Content-Length: 0", target="http:///pay"),
    "an absolute target of another protocol": spelled("Content-Length: 0", target="ftp://shop/pay"),
    "a fragment": spelled("Content-Length: 0", target="/pay#part"),
    "a fragment of an absolute target": spelled("Content-Length: 0", target="http://shop/pay#part"),
    "raw bytes in a path": b"POST /\xc3\xa9 HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n",
    "too long a head": spelled("X-A: " + "a" * 100_000, "Content-Length: 0"),
    "too many headers": spelled(*["X-A: a"] * 1001, "Content-Length: 0"),
    "too long a target": spelled("Content-Length: 0", target="/" + "a" * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_refused(tmp_path: Path, name: str) -> None:
    """What two servers could read differently is refused with 400, and the connection is closed."""
    async with proxied(tmp_path) as world, world.connected() as client:
        client.writer.write(REFUSED[name])
        got = await client.got()
        assert got.status == 400
        client.writer.write(request(BOB))
        assert await client.reader.read() == b""
        assert [each.values("x-user") for each in world.origin.seen if each.values("x-user") != []] == []


@pytest.mark.parametrize(
    "target",
    [
        "/%7Ex/./c?q=[1]&q=%5B1%5D",
        "//evil.example/x",
        "/a/..%2f..%2Fb",
        "/a/../b;c=d?//x?y#".rstrip("#"),
        "/a%00b",
        "/@evil.example/",
        "/a?b=c+d%20e",
        "/:8080/",
        "/a?",
        "/a??",
        "/?",
    ],
)
async def test_targets_are_unchanged(tmp_path: Path, target: str) -> None:
    """Path and query reach the upstream byte for byte, and nothing in them is a host."""
    async with proxied(tmp_path) as world:
        assert (await world.send(BOB, target=target)).status == 201
    assert world.origin.seen[0].target == target


async def test_absolute_target(tmp_path: Path) -> None:
    """A target with a host in it goes to the upstream, and nowhere else. Its host counts, and not the header (RFC 9112,
    3.2.2): two servers could believe two of them.
    """
    async with proxied(tmp_path) as world:
        for target in ("http://127.0.0.1:1/x?y", "http://SHOP.example", "HTTPS://[::1]:7/?y", "http://shop?"):
            await world.send(BOB, target=target)
    assert [each.target for each in world.origin.seen] == ["/x?y", "/", "/?y", "/?"]
    hosts = [each.values("host") for each in world.origin.seen]
    assert hosts == [["127.0.0.1:1"], ["SHOP.example"], ["[::1]:7"], ["shop"]]
    assert world.origin.seen[0].values("x-forwarded-host") == ["127.0.0.1:1"]


async def test_request_arrives_as_it_was_sent(tmp_path: Path) -> None:
    """Headers in order, repeated ones and those in UTF-8 too; none is added that tells of another client."""
    async with proxied(tmp_path) as world:
        sent = request("Accept: a", "X-B: 1", "Accept: c", "X-Name: caf\xc3\xa9", "Cookie: a=1")
        await world.raw(sent)
    [seen] = world.origin.seen
    names = [name for name, _ in seen.lines]
    assert names[:6] == ["host", "accept", "x-b", "accept", "x-name", "cookie"]
    assert seen.values("host") == ["shop"]
    assert seen.values("x-name") == ["caf\xc3\xa9"]
    assert not {"user-agent", "accept-encoding", "content-type"} & set(map(str.lower, names))


@pytest.mark.parametrize(
    "method, head, lines",
    [
        ("HEAD", "200 OK", ["Content-Length: 5"]),
        ("GET", "204 No Content", []),
        ("GET", "304 Not Modified", ["Content-Length: 5", "ETag: a"]),
        ("POST", "204 No Content", ["Content-Length: 0"]),
    ],
)
async def test_answers_without_a_body(tmp_path: Path, method: str, head: str, lines: list[str]) -> None:
    """They end where they end, and the connection is used again."""

    async def bare(seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write("\r\n".join([f"HTTP/1.1 {head}", *lines, "", ""]).encode())

    async with proxied(tmp_path, Origin(bare)) as world, world.connected() as client:
        for _ in range(2):
            client.writer.write(request(BOB, method=method, body=b""))
            got = await client.got(method)
            assert got.status == int(head[:3])
    assert world.origin.connections == 1


async def test_interim_answers(tmp_path: Path) -> None:
    """What an upstream says before its answer is not taken for the answer."""

    async def hints(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        writer.write(replying("200 OK"))

    async with proxied(tmp_path, Origin(hints)) as world:
        assert (await world.pay()).body == b"ok"
        assert (await world.pay()).is_replay


async def test_redirects_and_cookies(tmp_path: Path) -> None:
    """A redirect is the client's to follow, and its cookies are nobody else's."""

    async def moved(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(replying("302 Found", b"", "Location: http://127.0.0.1:1/", "Set-Cookie: a=1", "Set-Cookie: b=2"))

    async with proxied(tmp_path, Origin(moved)) as world:
        got = await world.send(BOB, method="GET", body=b"")
        await world.send(BOB, method="GET", body=b"")
    assert (got.status, got.values("set-cookie")) == (302, ["a=1", "b=2"])
    assert [each.values("cookie") for each in world.origin.seen] == [[], []]


async def test_answer_with_a_large_header(tmp_path: Path) -> None:
    """An answer may have headers of many kilobytes."""

    async def large(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(replying("200 OK", b"ok", "X-A: " + "a" * 40_000))

    async with proxied(tmp_path, Origin(large)) as world:
        assert (await world.send(BOB, method="GET", body=b"")).values("x-a") == ["a" * 40_000]


@pytest.mark.parametrize("line", ["200 " + "a" * 300_000, "200 OK\r\nX-A: " + "a" * 300_000])
async def test_answer_with_too_large_a_head(tmp_path: Path, line: str) -> None:
    """An answer with a head of more than 256 kB does not pass, however it is cut on its way."""

    async def large(_seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(replying(line))

    async with proxied(tmp_path, Origin(large)) as world:
        assert (await world.send(BOB, method="GET", body=b"")).code == "upstream-lost"


async def test_trailers(tmp_path: Path) -> None:
    """What comes behind a body is no header: it can't name a user, nor a key."""
    chunked = "Transfer-Encoding: chunked"
    trailers = b"2\r\n{}\r\n0\r\nX-User: eve\r\nX-Trailer: 1\r\nIdempotency-Key: other\r\nSemel-Attempt: 7\r\n\r\n"
    async with proxied(tmp_path) as world:
        for lines in ((KEY, BOB), (BOB,)):
            async with world.connected() as client:
                head = spelled(*lines, chunked)
                client.writer.write(head + trailers[:7])
                await client.writer.drain()
                client.writer.write(trailers[7:])
                assert (await client.got()).status == 201
        assert [(each.scope, each.key) for each in await world.records()] == [("bob", "key-1")]
    for seen in world.origin.seen:
        assert (seen.values("x-user"), seen.values("x-trailer"), seen.body) == (["bob"], [], b"{}")
    assert [each.values("semel-attempt") for each in world.origin.seen] == [["1"], []]


@pytest.mark.parametrize("trailers", [b"X-A: and more\r\n" * 100_000 + b"\r\n", b"X-A: " + b"a" * 1_500_000])
@pytest.mark.parametrize("lines", [(KEY, BOB), (BOB,)])
async def test_too_many_trailers(tmp_path: Path, trailers: bytes, lines: tuple[str, ...]) -> None:
    """What comes behind a body is no longer than a head: the request is refused, and the connection is closed."""
    got = b""
    async with proxied(tmp_path) as world, world.connected() as client, asyncio.timeout(HANG):
        client.writer.write(spelled(*lines, "Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\n" + trailers))
        with suppress(ConnectionError):  # What it has not read makes it a reset, before or behind the answer.
            got = await client.reader.read()
        assert await world.records() == ()
    assert got == b"" or got.startswith(b"HTTP/1.1 400 ")
    assert world.origin.seen == []


WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: " + "A" * 22 + "==",
)
#: As curl --http2 and Java's HttpClient send it.
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("lines", [WEBSOCKET, H2C])
async def test_upgrade_with_a_body(tmp_path: Path, method: str, lines: tuple[str, ...]) -> None:
    """A request with a body is no WebSocket, and gets to no other protocol: it is read as if it did not ask for one.
    Its body is its body, and not the next request.
    """
    body = b"POST /pay HTTP/1.1\r\nHost: shop\r\nX-User: eve\r\nContent-Length: 0\r\n\r\n"
    async with proxied(tmp_path) as world, world.connected() as client:
        client.writer.write(request(KEY, BOB, *lines, method=method, body=body) + request(BOB, target="/next"))
        assert [(await client.got()).status, (await client.got()).status] == [201, 201]
        keys = [each.key for each in await world.records()]
    first, second = world.origin.seen
    assert (first.method, first.target, first.body, first.values("x-user")) == (method, "/pay", body, ["bob"])
    assert (first.values("upgrade"), first.values("http2-settings"), first.values("connection")) == ([], [], [])
    assert second.target == "/next"
    assert keys == (["key-1"] if method == "POST" else [])


async def test_upgrade_in_pieces(tmp_path: Path) -> None:
    """However it is cut on its way, and in chunks, too."""
    sent = spelled(KEY, BOB, *H2C, "Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\nX-User: eve\r\n\r\n")
    async with proxied(tmp_path) as world, world.connected() as client:
        for at in range(len(sent)):
            client.writer.write(sent[at : at + 1])
            await asyncio.sleep(0)
        assert (await client.got()).status == 201
        client.writer.write(sent)
        assert (await client.got()).is_replay
    [seen] = world.origin.seen
    assert (seen.body, seen.values("x-user")) == (b"{}", ["bob"])


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: +5",),
        ("Transfer-Encoding: gzip",),
    ],
)
async def test_upgrade_hides_no_framing(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """What is refused without Upgrade is refused with it."""
    for upgrade in (WEBSOCKET, H2C):
        async with proxied(tmp_path) as world, world.connected() as client:
            client.writer.write(spelled(*upgrade, *lines, body=b"0\r\n\r\n" + request(BOB)))
            assert (await client.got()).status == 400
            assert await client.reader.read() == b""
        assert world.origin.seen == []


async def test_upgrade_without_a_body(tmp_path: Path) -> None:
    """A GET that asks for HTTP/2 is answered in HTTP/1.1, and so is what follows on its connection."""
    async with proxied(tmp_path) as world, world.connected() as client:
        for _ in range(2):
            client.writer.write(request(BOB, *H2C, method="GET", body=b""))
            assert (await client.got("GET")).status == 201
        client.writer.write(request(BOB, *H2C, "Connection: close", method="GET", body=b""))
        assert (await client.got("GET")).values("connection") == ["close"]
    assert [each.method for each in world.origin.seen] == ["GET"] * 3


async def test_upgrade_behind_a_request(tmp_path: Path) -> None:
    """A WebSocket can't begin before the request in front of it is answered: that one gets the first answer, and what
    asked for a WebSocket is read as if it did not.
    """

    async def answer(seen: Seen, _reader: Reader, writer: Writer) -> None:
        writer.write(replying("201 Created" if seen.target == "/pay" else "426 Upgrade Required"))

    async with proxied(tmp_path, Origin(answer)) as world, world.connected() as client:
        client.writer.write(request(KEY, BOB) + request(BOB, *WEBSOCKET, method="GET", target="/ws", body=b""))
        assert [(await client.got()).status, (await client.got()).status] == [201, 426]
        assert (await world.pay()).is_replay
    assert [each.values("upgrade") for each in world.origin.seen] == [[], []]


async def test_refused_behind_a_request(tmp_path: Path) -> None:
    """What can't be read is not answered before the request in front of it: that one gets its own answer, and then the
    connection is closed.
    """
    async with proxied(tmp_path) as world, world.connected() as client:
        client.writer.write(request(KEY, BOB) + b"what is this?\r\n\r\n" + request(BOB))
        assert (await client.got()).status == 201
        assert await client.reader.read() == b""
    assert len(world.origin.seen) == 1


async def test_pipelined_behind_a_large_body(tmp_path: Path) -> None:
    """A body counts for its own request, and not for the head of the next, of which a part has come with it."""
    sent = request(BOB, body=bytes(200_000)) + request(BOB, target="/next")
    async with proxied(tmp_path) as world, world.connected() as client:
        client.writer.write(sent[:-20])
        assert (await client.got()).status == 201
        client.writer.write(sent[-20:])
        assert (await client.got()).status == 201
    assert [each.target for each in world.origin.seen] == ["/pay", "/next"]
