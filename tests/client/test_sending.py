"""What clients send, over a network that loses requests and answers: one effect, one key, the same bytes."""

import asyncio
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from semel import client, errors
from semel.client import Journal
from semel.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from semel.client.options import Quotas
from semel.client.requests import IdempotentAdapter, intent
from semel.core.retrying import Origin
from semel.errors import ClientError, ConfigurationError, RedirectRefused, RequestNotRepeatable, RequestOutcomeUnknown
from tests.client.callers import Caller
from tests.client.served import Fault, Say, Serve, Served
from tests.web.harness import wait_until
from tests.web.serving import Backstage

Call = Callable[..., Caller]

SHORT = timedelta(seconds=1)


@pytest.mark.parametrize(
    "faults",
    [
        ["lose before"],
        ["lose after"],
        ["cut"],
        ["garbage"],
        ["lose after", "lose before", "cut"],
        [Say(503), "lose after", Say(429, {"Retry-After": "0"}), Say(425)],
    ],
    ids=str,
)
def test_one_effect(server: Served, call: Call, faults: list[Fault]) -> None:
    """Whatever is lost on the way, the request is sent again with the same key and bytes, and takes effect once."""
    server.faults.extend(faults)
    got = call().post(f"{server.url}/pay?a=1", json={"amount": 5})
    assert got.status == 201
    assert json.loads(got.body)["paid"] == 1
    assert list(server.effects.values()) == [1]
    assert len(server.seen) == len(faults) + 1
    assert len({(each.key, each.body, each.path) for each in server.seen}) == 1
    assert server.seen[0].key


def test_keys_differ(server: Served, call: Call) -> None:
    """Each operation has a key of its own; a caller's own key is used as it is."""
    caller = call()
    for _ in range(2):
        caller.post(server.url, json={})
    caller.post(server.url, json={}, headers={"idempotency-key": '"mine"'})
    first, second, own = server.keys
    assert (len({first, second}), own) == (2, '"mine"')


def test_other_requests_are_not_touched(server: Served, call: Call) -> None:
    """A GET, and a PUT without a key, are sent once and without a key; a PUT with a key is retried."""
    caller = call()
    for method in ("GET", "PUT"):
        server.faults.append("lose before")
        with pytest.raises(caller.Lost):
            caller.request(method, server.url)
    assert server.keys == [None, None]
    server.faults.append("lose before")
    assert caller.request("PUT", server.url, headers={"Idempotency-Key": "mine"}).status == 201
    assert server.keys[2:] == ["mine", "mine"]


def test_hosts(server: Served, call: Call) -> None:
    """A request to a host that is not known to honour keys is sent once, without a key, and its error is the
    library's.
    """
    plain, known = call(hosts=["api.example.com"]), call(hosts=["api.example.com", f"127.0.0.1:{server.port}"])
    server.faults.extend(["lose before"] * 2)
    with pytest.raises(plain.Lost):
        plain.post(server.url, json={}, headers={"Idempotency-Key": "mine"})
    assert server.keys == ["mine"]
    assert known.post(server.url, json={}).status == 201
    assert len(server.seen) == 3
    plain.post(server.url, json={})
    assert server.keys[-1] is None


def test_bodies_that_are_read_once(server: Served, call: Call, kind: str) -> None:
    """A body that can be read only once is kept for the next try."""

    def chunks() -> Iterator[bytes]:
        yield from (b"a", b"b")

    async def achunks() -> Any:
        for chunk in chunks():
            yield chunk

    server.faults.append("lose after")
    call().post(server.url, content=achunks() if kind.startswith("async") else chunks())
    assert [each.body for each in server.seen] == [b"ab", b"ab"]


def test_multipart(server: Served, call: Call, tmp_path: Path) -> None:
    """A form with a file is sent with the same boundary and bytes each time."""
    file = tmp_path / "a.txt"
    file.write_bytes(b"receipt")
    server.faults.append("lose before")
    with file.open("rb") as opened:
        call().post(server.url, files={"receipt": opened})
    first, second = server.seen
    assert b"receipt" in first.body
    assert (first.body, first.header("content-type")) == (second.body, second.header("content-type"))


def test_bodies_that_are_too_large(server: Served, call: Call, kind: str) -> None:
    """A body that is too large to be kept is refused, and nothing is sent; one that the library keeps is not."""
    caller = call(max_body=3)

    async def achunks() -> Any:
        yield b"four"

    with pytest.raises(RequestNotRepeatable, match="max_body"):
        caller.post(server.url, content=achunks() if kind.startswith("async") else iter([b"fo", b"ur"]))
    assert not server.seen
    assert caller.post(server.url, content=b"four").status == 201


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_a_server_that_hangs(server: Served, call: Call, fault: str) -> None:
    """The deadline ends a try that hangs, or drips, whatever its time limit; the exception has the key."""
    server.outage = fault
    with pytest.raises(RequestOutcomeUnknown) as caught:
        call(deadline=SHORT).post(server.url, json={}, timeout=None)
    assert {caught.value.key} == set(server.keys)
    assert caught.value.response is None


@pytest.mark.parametrize("is_kept", [False, True], ids=["", "journal"])
@pytest.mark.parametrize("clock", ["time", "clock_gettime"])
def test_asleep_between_two_tries(
    server: Served, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, clock: str, is_kept: bool
) -> None:
    """A client that slept between two tries, by either clock, does not send past its deadline: the server may have
    forgotten the key.
    """

    class Slept(Quotas):
        def spend(self, host: Origin) -> bool:
            before = getattr(time, clock)
            monkeypatch.setattr(time, clock, lambda *of: before(*of) + 90_000)
            return super().spend(host)

    server.faults.append("lose after")
    caller = call(quotas=Slept(), **({"journal": tmp_path / "a.journal"} if is_kept else {}))
    with pytest.raises(RequestOutcomeUnknown) as caught:
        caller.post(server.url, "invoice 17" if is_kept else None, json={})
    assert server.keys == [caught.value.key]


def test_asleep_while_the_journal_is_written(
    server: Served, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A client that slept when the journal had noted its next try, and had not sent it, does not send it."""
    renew = Journal.renew

    def slept(*given: Any) -> bool:
        is_held, before = renew(*given), time.time
        monkeypatch.setattr(time, "time", lambda: before() + 90_000)
        return is_held

    monkeypatch.setattr(Journal, "renew", slept)
    server.faults.append("lose after")
    with pytest.raises(RequestOutcomeUnknown) as caught:
        call(journal=tmp_path / "a.journal").post(server.url, "invoice 17", json={})
    assert server.keys == [caught.value.key]


def test_asleep_before_a_redirect(server: Served, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that may have taken effect before it was redirected is not sent on past the server's retention."""

    def sleep(*_: object, **__: object) -> None:
        before = time.time
        monkeypatch.setattr(time, "time", lambda: before() + 90_000)

    async def asleep(_: object) -> None:
        sleep()

    server.faults += ["lose after", Say(307, {"Location": "/moved"})]
    caller = call()
    if caller.kind == "requests":
        caller.client.hooks["response"].append(sleep)
    else:
        caller.client.event_hooks = {"response": [asleep if caller.kind.startswith("async") else sleep]}
    with pytest.raises(RequestOutcomeUnknown) as caught:
        caller.post(server.url, json={}, follow_redirects=True)
    assert server.keys == [caught.value.key] * 2


def test_a_server_that_hangs_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With requests, which has no time limit of its own, a try without an answer is ended all the same, and sent again
    with the same key.
    """
    monkeypatch.setattr("semel.client.requests.TRY_SECONDS", 0.1)
    caller = Caller("requests")
    server.faults.append("hang")
    assert caller.post(server.url, json={}).status == 201
    assert len(set(server.keys)) == 1
    assert len(server.seen) > 1
    caller.close()


def test_events_after_the_deadline(server: Served, call: Call) -> None:
    """An event stream that was handed over is not cut when the operation's deadline has passed."""
    server.faults += [Say(503, {"Retry-After": "0"}), "events"]
    assert call(deadline=timedelta(seconds=0.3)).post(server.url, json={}).body == b"data: 1\n\ndata: 2\n\n"


class Stopped(BaseException):
    """What a signal handler raises, or a task that is cancelled."""


def test_stopped_and_sent_again(server: Served, call: Call, kind: str) -> None:
    """A program that was interrupted while it sent finds the key in its request: sent again, the same request has the
    same key and takes effect once, and its doubt is not forgotten.
    """

    class Stopping(Quotas):
        def spend(self, host: Origin) -> bool:
            raise Stopped

    caller = call(quotas=Stopping())
    server.faults.append("lose after")
    if kind == "requests":
        request: Any = caller.client.prepare_request(requests.Request("POST", server.url, json={}))
    else:
        request = caller.client.build_request("POST", server.url, json={})
    with pytest.raises(Stopped) as caught:
        caller.wait(caller.client.send, request)
    key = request.headers["Idempotency-Key"]
    assert str(key) in caught.value.__notes__[0]
    server.faults.append(Say(404))
    with pytest.raises(RequestOutcomeUnknown):
        caller.wait(caller.client.send, request)
    assert caller.wait(caller.client.send, request).status_code == 201
    assert server.keys == [key] * 3
    assert list(server.effects.values()) == [1]


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_a_time_limit_around_it(server: Served, library: Any) -> None:
    """A time limit of asyncio's, around a request, leaves the key in the request, and in a note of its cause."""

    async def called() -> None:
        transport = AsyncIdempotentTransport(library.AsyncHTTPTransport(), quotas=Quotas())
        async with library.AsyncClient(transport=transport) as client:
            request = client.build_request("POST", server.url, json={})

            async def sending() -> None:
                async with asyncio.timeout(None) as limit:
                    sent = asyncio.create_task(client.send(request))
                    await asyncio.to_thread(wait_until, lambda: len(server.seen) == 1)
                    limit.reschedule(0)
                    await sent

            with pytest.raises(TimeoutError) as caught:
                await sending()
            assert request.headers["Idempotency-Key"] in str(caught.value.__cause__.__notes__)  # type: ignore[union-attr]
            assert (await client.send(request)).status_code == 201

    server.faults.append("hang")
    asyncio.run(called())
    assert len(set(server.keys)) == 1


def test_an_unknown_key_is_sent_again(server: Served, call: Call) -> None:
    """A key of an unknown outcome is in doubt in a new request of the same process, too; another key is not."""
    caller = call(deadline=SHORT)
    server.outage = "lose before"
    with pytest.raises(RequestOutcomeUnknown) as first:
        caller.post(server.url, json={})
    server.outage = Say(404)
    with pytest.raises(RequestOutcomeUnknown) as second:
        caller.post(server.url, json={}, headers={"Idempotency-Key": first.value.key})
    assert second.value.response.status_code == 404
    assert caller.post(server.url, json={}, headers={"Idempotency-Key": "another"}).status == 404


def test_nothing_listens(call: Call) -> None:
    """Where nothing was sent, the error is the library's own."""
    caller = call(deadline=SHORT)
    with pytest.raises(caller.Lost):
        caller.post("http://127.0.0.1:1/", json={})


def test_final_answers(server: Served, call: Call) -> None:
    """A replayed server error, and a 422, are returned after one try."""
    for said in (Say(503, {"Idempotent-Replayed": "true", "Retry-After": "1"}), Say(422), Say(400)):
        server.faults.append(said)
        assert call().post(server.url, json={}).status == said.status
    assert len(server.seen) == 3


def test_compressed_problems(server: Served, call: Call) -> None:
    """A problem is read, however it was encoded; and the caller gets the answer as it came."""
    problem = json.dumps({"code": "outcome-unknown"}).encode()
    headers = {"Content-Type": "application/problem+json", "Content-Encoding": "gzip"}
    server.faults.append(Say(409, headers, gzip.compress(problem)))
    with pytest.raises(RequestOutcomeUnknown) as caught:
        call().post(server.url, json={})
    assert caught.value.response.status_code == 409
    server.faults.append(Say(409, {**headers, "Idempotent-Replayed": "true"}, gzip.compress(problem)))
    assert call().post(server.url, json={}).body == problem
    server.faults.append(Say(409, {**headers, "Retry-After": "0"}, b"no gzip"))
    assert call().post(server.url, json={}).status == 201


def test_accepted(serve: Serve, call: Call) -> None:
    """A 202 is followed to its result, with the credentials of the request and without its key."""
    server = serve(in_progress="accept")
    got = call().post(f"{server.url}/pay", json={"a": 1}, headers={"Authorization": "Bearer x"})
    assert (got.status, json.loads(got.body)["paid"]) == (201, 1)
    look = server.seen[-1]
    assert (look.method, look.key, look.header("authorization")) == ("GET", None, "Bearer x")
    assert look.body == b""


def test_accepted_elsewhere(server: Served, call: Call) -> None:
    """A status URL of another host is not asked: credentials would go there."""
    server.faults.append(Say(202, {"Location": "http://localhost:1/status", "Retry-After": "0"}))
    assert call().post(server.url, json={}).status == 202
    assert len(server.seen) == 1


def test_redirects(server: Served, call: Call) -> None:
    """A redirect on the same host keeps the key; one to another host is refused, and leaves an earlier try in doubt; a
    GET that follows has none.
    """
    caller = call()
    server.faults.extend(["lose before", Say(307, {"Location": "/moved"}), "lose after"])
    assert caller.post(f"{server.url}/pay", json={}, follow_redirects=True).status == 201
    assert [each.path for each in server.seen] == ["/pay", "/pay", "/moved", "/moved"]
    assert len(set(server.keys)) == 1

    server.faults.append(Say(307, {"Location": f"http://localhost:{server.port}/"}))
    with pytest.raises(RedirectRefused):
        caller.post(server.url, json={}, follow_redirects=True)
    server.faults.extend(["lose after", Say(307, {"Location": f"http://localhost:{server.port}/"})])
    with pytest.raises(RequestOutcomeUnknown) as caught:
        caller.post(server.url, json={}, follow_redirects=True)
    assert isinstance(caught.value.__cause__, RedirectRefused)
    server.faults.append(Say(303, {"Location": "/result"}))
    assert caller.post(server.url, json={}, follow_redirects=True).status == 201
    assert (server.seen[-1].method, server.keys[-1]) == ("GET", None)


def test_redirects_take_the_doubt_along(server: Served, call: Call) -> None:
    """A request that may have taken effect before it was redirected is in doubt at the next URL, too."""
    server.faults.extend(["lose after", Say(307, {"Location": "/moved"}), Say(404)])
    with pytest.raises(RequestOutcomeUnknown) as caught:
        call().post(f"{server.url}/pay", json={}, follow_redirects=True)
    assert set(server.keys) == {caught.value.key}
    server.faults.extend([Say(307, {"Location": "/moved"}), Say(404)])
    assert call().post(f"{server.url}/pay", json={}, follow_redirects=True).status == 404


@pytest.mark.parametrize("hops", [["elsewhere"], ["/result", "elsewhere"]], ids=["at once", "by way of this host"])
def test_redirects_to_a_result_elsewhere(server: Served, call: Call, hops: list[str]) -> None:
    """A redirect to a result on another host gets no key, and nothing that looks like a credential by its name; on the
    same host it gets all of them.
    """
    elsewhere = f"http://localhost:{server.port}/result"
    server.faults += [Say(303, {"Location": elsewhere if hop == "elsewhere" else hop}) for hop in hops]
    secrets = {"X-Api-Key": "x", "x_auth_token": "x", "Authorization": "Bearer x", "Cookie": "session=x"}
    secrets["Proxy-Authorization"] = "x"
    given = {**secrets, "X-Tenant": "a"}
    assert call().post(server.url, json={}, headers=given, follow_redirects=True).status == 201
    for seen in server.seen[:-1]:
        assert {seen.header(name) for name in ("x-api-key", "x_auth_token", "authorization")} == {"x", "Bearer x"}
    last = server.seen[-1]
    assert (last.method, last.header("host"), last.header("x-tenant")) == ("GET", f"localhost:{server.port}", "a")
    assert [last.header(name) for name in (*secrets, "Idempotency-Key")] == [None] * 6


def test_redirects_from_http_to_https(server: Served, call: Call) -> None:
    """A redirect to the same host by https is refused with words of its own."""
    caller = call()
    if caller.kind == "requests":
        caller.client.mount("https://", caller.transport)
    server.faults.append(Say(308, {"Location": server.url.replace("http:", "https:")}))
    with pytest.raises(RedirectRefused, match="Write https:// in its URL"):
        caller.post(server.url, json={}, follow_redirects=True)


def test_outage(server: Served, call: Call) -> None:
    """An outage costs the server at most a tenth more requests."""
    server.outage = Say(503, {"Retry-After": "0"})
    caller = call(deadline=timedelta(minutes=10))
    for _ in range(100):
        with pytest.raises(RequestOutcomeUnknown):
            caller.post(server.url, json={})
    assert len(server.seen) <= 110


def test_answers_that_are_too_large(server: Served, call: Call) -> None:
    """An answer over the limit is handed over as it comes, whole."""
    large = bytes(range(256)) * 40
    server.faults.append(Say(201, {}, large))
    assert call(max_answer=10).post(server.url, json={}).body == large


class Chunks(httpx.SyncByteStream, httpx2.SyncByteStream, httpx.AsyncByteStream, httpx2.AsyncByteStream):
    """An answer without a length, which ends, or breaks."""

    def __init__(self, chunks: list[bytes | Exception]) -> None:
        self._chunks = chunks
        self.is_closed: object = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def __aiter__(self) -> Any:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.is_closed = True

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("library", [httpx, httpx2])
@pytest.mark.parametrize("headers", [{"content-type": "text/event-stream"}, {}], ids=["events", "large"])
def test_streams(library: Any, headers: dict[str, str]) -> None:
    """A stream of events, and what is larger than the limit, flow through, and are closed by the caller."""
    streams: list[Chunks] = []

    def answer(_: Any) -> Any:
        streams.append(Chunks([b"one", b"two", b"three"]))
        return library.Response(200, headers=headers, stream=streams[-1])

    transport = IdempotentTransport(library.MockTransport(answer), max_answer=4)
    with library.Client(transport=transport) as client, client.stream("POST", "http://here/") as response:
        assert not streams[0].is_closed
        assert b"".join(response.iter_raw()) == b"onetwothree"
    assert streams[0].is_closed

    async def called() -> bytes:
        inner = AsyncIdempotentTransport(library.MockTransport(answer), max_answer=4)
        async with library.AsyncClient(transport=inner) as client, client.stream("POST", "http://here/") as response:
            assert not streams[1].is_closed
            return b"".join([chunk async for chunk in response.aiter_raw()])

    assert asyncio.run(called()) == b"onetwothree"
    assert streams[1].is_closed


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_a_status_url_is_asked_in_the_same_way(library: Any) -> None:
    """What the caller says about how a request is sent, such as the name for TLS, holds for a status URL."""
    said: list[dict[str, Any]] = []

    def answer(request: Any) -> Any:
        said.append(request.extensions)
        headers = {"Location": "/status", "Retry-After": "0"} if request.method == "POST" else {}
        return library.Response(202 if headers else 200, headers=headers)

    transport = IdempotentTransport(library.MockTransport(answer))
    with library.Client(transport=transport) as client:
        extensions = {"sni_hostname": "api.example.com", "target": b"/pay"}
        assert client.post("https://127.0.0.1/pay", extensions=extensions).status_code == 200
    assert [(each["sni_hostname"], each.get("target")) for each in said] == [
        ("api.example.com", b"/pay"),
        ("api.example.com", None),
    ]
    assert all(each["timeout"]["read"] for each in said)


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_streams_of_tries_are_closed(library: Any) -> None:
    """An answer that is not read to its end, and not returned either, is closed: its connection is free again."""
    streams: list[Chunks] = []

    def answer(_: Any) -> Any:
        streams.append(Chunks([b"one", b"two"]))
        return library.Response(503 if len(streams) < 3 else 201, stream=streams[-1])

    with library.Client(transport=IdempotentTransport(library.MockTransport(answer), max_answer=4)) as client:
        assert client.post("http://here/").content == b"onetwo"

    async def called() -> None:
        streams.clear()
        inner = AsyncIdempotentTransport(library.MockTransport(answer), max_answer=4)
        async with library.AsyncClient(transport=inner) as client:
            assert (await client.post("http://here/")).content == b"onetwo"

    assert [stream.is_closed for stream in streams] == [True] * 3
    asyncio.run(called())
    assert [stream.is_closed for stream in streams] == [True] * 3


def test_threads_share_a_transport(server: Served, call: Call, kind: str) -> None:
    """Requests of several threads at once have each its own key and its own answer."""
    if kind.startswith("async"):
        pytest.skip("a loop has one thread")
    caller = call()
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda number: caller.post(server.url, json={"number": number}), range(40)))
    assert {each.status for each in got} == {201}
    assert len(set(server.keys)) == 40
    assert set(server.effects.values()) == {1}


def test_http2(sqlite_url: str, tmp_path: Path) -> None:
    """The wrapped transport's HTTP/2 stays."""
    backstage = Backstage(tmp_path, sqlite_url)
    try:
        server = backstage.serve("hypercorn")
        for library in (httpx, httpx2):
            inner: Any = library.HTTPTransport(http1=False, http2=True, verify=False)
            with library.Client(transport=IdempotentTransport(inner)) as client:
                response = client.post(f"{server.url}/pay", json={})
            assert (response.status_code, response.http_version) == (201, "HTTP/2")
    finally:
        backstage.close()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"deadline": timedelta(hours=24)}, "shorter than the server's retention"),
        ({"deadline": timedelta(hours=1), "retention": timedelta(hours=1)}, "shorter than the server's retention"),
        ({"deadline": 5}, "timedelta"),
        ({"hosts": "api.example.com"}, r"\['api.example.com'\]"),
        ({"hosts": ["https://api.example.com"]}, "localhost:8000"),
        ({"max_body": -1}, "bytes"),
        ({"header": "Idempotency Key"}, "name of a header"),
    ],
)
def test_configuration(options: dict[str, Any], words: str) -> None:
    """What can't work is refused at construction."""
    with pytest.raises(ConfigurationError, match=words):
        IdempotentTransport(httpx.HTTPTransport(verify=False), **options)


@pytest.mark.parametrize(
    "kind, given, words",
    [
        (IdempotentTransport, httpx.Client, "HTTPTransport"),
        (IdempotentTransport, httpx2.AsyncHTTPTransport, "HTTPTransport"),
        (IdempotentTransport, lambda: None, "HTTPTransport"),
        (AsyncIdempotentTransport, httpx.AsyncClient, "AsyncHTTPTransport"),
        (AsyncIdempotentTransport, httpx2.HTTPTransport, "AsyncHTTPTransport"),
        (IdempotentAdapter, requests.Session, "HTTPAdapter"),
        (IdempotentAdapter, lambda: "https://", "HTTPAdapter"),
    ],
)
def test_what_is_no_transport(kind: Any, given: Callable[[], Any], words: str) -> None:
    """A client, or a transport of the other colour, in the place of a transport is refused with what to give."""
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\({words}\(\)\)"):
        kind(given())


@pytest.mark.parametrize("key", [b"order-17", "order-17"])
def test_keys_as_bytes(server: Served, call: Call, key: str | bytes) -> None:
    """A key that the caller gives as bytes, or as text, is sent as it is, with every try."""
    server.faults.append("lose after")
    caller = call()
    if caller.kind == "requests":
        headers: Any = {"Idempotency-Key": key}
    else:
        headers = [(b"Idempotency-Key", key)] if isinstance(key, bytes) else {"Idempotency-Key": key}
    if isinstance(headers, list):
        response = caller.wait(caller.client.post, server.url, headers=headers)
        assert response.status_code == 201
    else:
        assert caller.post(server.url, json={}, headers=headers).status == 201
    assert server.keys == ["order-17"] * 2


def test_an_empty_key_is_none(server: Served, call: Call) -> None:
    """A request whose key is empty gets one: many servers take an empty key for none, and run each try."""
    server.faults.append("lose after")
    assert call().post(server.url, json={}, headers={"Idempotency-Key": ""}).status == 201
    (key,) = set(server.keys)
    assert key
    assert server.effects.total() == 1


@pytest.mark.parametrize("retries", [3, Retry(total=None, read=3, allowed_methods=None)], ids=["3", "no total"])
def test_adapters_that_retry_by_themselves(retries: int | Retry) -> None:
    """An adapter of requests that retries below ours is refused."""
    with pytest.raises(ConfigurationError, match="max_retries=0"):
        IdempotentAdapter(HTTPAdapter(max_retries=retries))


@pytest.fixture
def mounted(server: Served) -> Iterator[requests.Session]:
    """A session with our adapter for one host only: the server has another name, too."""
    with requests.Session() as session:
        session.trust_env = False
        session.mount(server.url, IdempotentAdapter(quotas=Quotas()))
        yield session


def test_redirects_to_another_adapter(server: Served, mounted: requests.Session) -> None:
    """A redirect to a host with another adapter is refused before the key, or anything else, is sent there."""
    elsewhere = f"http://localhost:{server.port}/"
    server.faults.append(Say(307, {"Location": elsewhere}))
    with pytest.raises(RedirectRefused) as caught:
        mounted.post(server.url, json={})
    assert server.keys == [caught.value.key]
    server.seen.clear()
    server.faults.extend(["lose after", Say(307, {"Location": elsewhere})])
    with pytest.raises(RequestOutcomeUnknown):
        mounted.post(server.url, json={})
    server.faults.append(Say(307, {"Location": elsewhere}))
    response = mounted.post(server.url, json={}, allow_redirects=False)
    assert response.next is not None
    assert str(response.request.headers["Idempotency-Key"]).encode() == (server.keys[-1] or "").encode()
    server.faults.append(Say(303, {"Location": elsewhere}))
    assert mounted.post(server.url, json={}).status_code == 201
    assert [each.method for each in server.seen] == ["POST", "POST", "POST", "POST", "GET"]


@pytest.mark.parametrize("library", [httpx, httpx2])
@pytest.mark.parametrize("status", [301, 308])
def test_redirects_to_another_transport(server: Served, library: Any, status: int) -> None:
    """The same for a transport that is mounted for one host: no other can send what was redirected."""
    server.faults.extend([Say(status, {"Location": f"http://localhost:{server.port}/"})] * 2)
    inner = IdempotentTransport(library.HTTPTransport(), quotas=Quotas())
    keyed = {"Idempotency-Key": "mine"}
    client = library.Client(mounts={server.url: inner}, follow_redirects=True, trust_env=False)
    with client, pytest.raises(RedirectRefused):
        client.put(server.url, json={}, headers=keyed)

    async def called() -> None:
        inner = AsyncIdempotentTransport(library.AsyncHTTPTransport(), quotas=Quotas())
        async with library.AsyncClient(mounts={server.url: inner}, follow_redirects=True, trust_env=False) as client:
            with pytest.raises(RedirectRefused):
                await client.put(server.url, json={}, headers=keyed)

    asyncio.run(called())
    assert [each.header("host") for each in server.seen] == [server.host] * 2


def test_intents_through_another_adapter(server: Served, mounted: requests.Session, tmp_path: Path) -> None:
    """An intent by ``intent()`` is never sent: with another adapter, nothing is."""
    named = intent("invoice 17")
    with pytest.raises(ConfigurationError, match="Mount an IdempotentAdapter"):
        mounted.post(f"http://localhost:{server.port}/", json={}, headers=named)
    with pytest.raises(ConfigurationError, match="one line"):
        intent("invoice\n17")
    assert not server.seen
    mounted.mount(server.url, IdempotentAdapter(journal=tmp_path / "a.journal"))
    assert mounted.post(server.url, json={}, headers=named).status_code == 201
    assert server.seen[0].header("semel-intent") is None


def test_challenges_in_requests(server: Served, mounted: requests.Session) -> None:
    """A challenge to log in is answered through the same adapter, with the same key."""
    mounted.auth = requests.auth.HTTPDigestAuth("bob", "secret")
    server.faults.extend([Say(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth"'}), "lose after"])
    assert mounted.post(server.url, json={}).status_code == 201
    assert (len(server.seen), len(set(server.keys))) == (3, 1)
    assert (server.seen[2].header("authorization") or "").startswith("Digest")


def test_requests_of_another_library() -> None:
    """A request of a library that is not known is refused with words."""
    transport = IdempotentTransport(httpx.HTTPTransport())
    request = httpx.Request("POST", "http://here/")
    request.__class__ = type("Strange", (), {})
    with pytest.raises(ConfigurationError, match="httpx or httpx2"):
        transport.handle_request(request)


def test_exceptions() -> None:
    """Every exception of a client is imported from where its journal is."""
    kinds = {
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ClientError)
    }
    assert kinds <= set(client.__all__)


def test_neither_library_is_imported() -> None:
    """The transports import neither library of HTTP."""
    program = "import sys, semel.client.httpx; print({'httpx', 'httpx2', 'requests', 'anyio'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_quotas_are_bounded() -> None:
    """The quotas of many hosts take no more memory than those of a thousand."""
    quotas = Quotas()
    assert all(quotas.spend(("https", f"host-{number}", 443)) for number in range(3000))
    assert len(quotas._of) == 1000
