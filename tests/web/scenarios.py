"""What a client sees, as one list of scenarios for every entry point and every store.

The rows of the rule book (``reference/standards.md``, section d) that concern the guard level; a row's text is its
scenario's name. ``test_scenarios.py`` runs them.
"""

import gzip
import logging
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, cast
from unittest.mock import patch

import httpx

import semel
from semel import Fingerprinter, NoEffect, Policy
from semel.core.commands import Claim, Complete, Now, Park, Reap, Save, Verdict
from semel.core.fingerprint import Subject
from semel.core.message import Answer
from semel.core.policy import MAX_RESPONSE_BODY, Mode
from semel.core.recovery import Begun, Done, Progress
from semel.core.state import State
from semel.errors import StoreUnavailable
from semel.flows import handle
from semel.flows.upkeep import hold_of, release, resolve_applied, resolve_not_applied
from semel.guard.ports import AsyncPorts, ThreadPorts
from semel.guard.running import run
from semel.guard.waiting.queue import Queues
from semel.stores import Store
from semel.work.service import ServicePorts
from tests.web.harness import HANG_SECONDS, Api, AsgiWorld, Call, Gate, Reply, Response, chunks, eventually, wait_until

BRIEF = timedelta(milliseconds=60)
A_MOMENT = timedelta(milliseconds=50)
TICK_SECONDS = 0.005
UUID = "8e03978e-40d5-43e8-bc93-6894a57f9324"
JSON = (("content-type", "application/json"),)
TEXT = (("content-type", "text/plain"),)


@dataclass(frozen=True)
class Scenario:
    name: str
    check: Callable[[Api], None]
    policy: Policy = field(default_factory=Policy.ietf)
    #: It is about what a request says, and no store has a part in that.
    is_syntax: bool = False


#: Every scenario that is a story of its own; the tables below are turned into more of them.
STORIES: list[Scenario] = []


def story(name: str, **policy: Any) -> Callable[[Callable[[Api], None]], Callable[[Api], None]]:
    def tell(check: Callable[[Api], None]) -> Callable[[Api], None]:
        STORIES.append(Scenario(name, check, Policy.ietf(**policy)))
        return check

    return tell


# What scenarios say again and again


def assert_problem(response: Response, status: int, code: str) -> None:
    assert (response.status, response.code) == (status, code)
    problem = response.json()
    assert problem["status"] == status
    assert problem["type"].endswith(code)
    assert problem["title"]
    assert problem["detail"]
    assert response.header("cache-control") == "no-store"
    assert problem["type"] == f"urn:semel:problem:{problem['code']}"
    assert response.header("link") is None  # There is no page to link to, unless the application has said where.
    assert response.error is None
    assert not response.is_replay


def assert_replayed(first: Response, again: Response) -> None:
    """The answer is the first one's, byte for byte, and says that it is a replay."""
    assert not first.is_replay
    assert again.is_replay
    assert (again.status, again.body) == (first.status, first.body)
    for name in ("content-type", "location", "link", "etag"):
        assert again.values(name) == first.values(name)


def assert_kept(api: Api, runs: int = 1) -> Response:
    """A request runs once, and its retry is a replay."""
    before = api.runs
    first = api.send()
    assert_replayed(first, api.send())
    assert api.runs == before + runs
    return first


def assert_freed(api: Api) -> Response:
    """A request leaves nothing behind, and its retry runs."""
    before = api.runs
    first = api.send()
    assert api.records() == []
    assert not api.send().is_replay
    assert api.runs == before + 2
    return first


# d1. The header's value


@dataclass(frozen=True)
class Accepted:
    """The key the handler sees."""

    key: str


@dataclass(frozen=True)
class Malformed:
    """400, and words that say what is wrong."""

    said: str


@dataclass(frozen=True)
class Row:
    name: str
    #: The values of the header, a line each.
    values: tuple[bytes, ...]
    strict: Accepted | Malformed
    lenient: Accepted | Malformed | None = None
    more: tuple[tuple[str, bytes], ...] = ()
    header: tuple[str, ...] = ("Idempotency-Key",)


QUOTE_IT = Malformed("Quote it")
EMPTY = Malformed("empty")
ONE = Malformed("Send one")
LIST = Malformed("list")
ASCII = Malformed("ASCII")

HEADER_ROWS = (
    Row("empty", (b"",), EMPTY),
    Row("only spaces", (b"   ",), EMPTY),
    Row('""', (b'""',), EMPTY),
    Row('"   " is blank', (b'"   "',), EMPTY),
    Row("quoted", (f'"{UUID}"'.encode(),), Accepted(UUID)),
    Row("abc unquoted", (b"abc",), QUOTE_IT, Accepted("abc")),
    Row("an unquoted UUID", (UUID.encode(),), QUOTE_IT, Accepted(UUID)),
    Row("2024 unquoted is no number", (b"2024",), QUOTE_IT, Accepted("2024")),
    Row("abc-def unquoted is no token", (b"abc-def",), QUOTE_IT, Accepted("abc-def")),
    Row("an escaped quote", (rb'"a\"b"',), Accepted('a"b')),
    Row("an escaped backslash", (rb'"a\\b"',), Accepted("a\\b")),
    Row("an escape that is none", (rb'"a\x"',), Malformed("backslash")),
    Row('"abc is never closed', (b'"abc',), Malformed("never closed")),
    Row('abc" is half quoted', (b'abc"',), Malformed("double quote")),
    Row("'abc' in single quotes", (b"'abc'",), QUOTE_IT, Accepted("'abc'")),
    Row("UTF-8, quoted", ('"é"'.encode(),), ASCII),
    Row("UTF-8, bare", ("é".encode(),), ASCII),
    Row("Latin-1", (b"\xe9",), ASCII),
    Row("a control character", (b'"a\x01b"',), ASCII),
    Row("a tab inside", (b'"a\tb"',), ASCII),
    Row("a tab in a bare key", (b"a\tb",), ASCII),
    Row("a line feed", (b"a\nb",), ASCII),
    Row("a carriage return", (b'"a\rb"',), ASCII),
    Row("NUL", (b'"a\x00b"',), ASCII),
    Row("as long as allowed", (b'"' + b"k" * 255 + b'"',), Accepted("k" * 255)),
    Row("over the allowed length", (b'"' + b"k" * 256 + b'"',), Malformed("255")),
    Row("64 KB", (b'"' + b"k" * 65_536 + b'"',), Malformed("255")),
    Row("two identical lines", (b'"a"', b'"a"'), ONE),
    Row("two different lines", (b'"a"', b'"b"'), ONE),
    Row("two different bare lines", (b"a", b"b"), ONE),
    Row("a comma list, bare", (b"a, b",), LIST),
    Row("a comma list, quoted", (b'"a", "b"',), LIST),
    Row("a comma inside quotes", (b'"a,b"',), Accepted("a,b")),
    Row("a parameter is not part of the key", (b'"k";v=1',), Accepted("k")),
    Row("a malformed parameter", (b'"k";V=1',), Malformed("parameter")),
    Row("a bare key with a parameter", (b"k;v=1",), QUOTE_IT),
    Row("spaces around it", (b'  "k"  ',), Accepted("k")),
    Row("tabs around it", (b'\t "k" \t',), Accepted("k")),
    Row("only tabs", (b"\t\t",), EMPTY),
    Row(
        "alias and standard differ",
        (b'"a"',),
        Malformed("different"),
        more=(("X-Request-Key", b'"b"'),),
        header=("Idempotency-Key", "X-Request-Key"),
    ),
    Row(
        "alias and standard agree",
        (b'"a"',),
        Accepted("a"),
        more=(("X-Request-Key", b'"a"'),),
        header=("Idempotency-Key", "X-Request-Key"),
    ),
)


def header_scenario(row: Row, *, strict: bool) -> Scenario:
    expected = row.strict if strict else row.lenient or row.strict
    lines = (*(("Idempotency-Key", value) for value in row.values), *row.more)

    def check(api: Api) -> None:
        first = api.send(key=None, lines=lines)
        if isinstance(expected, Malformed):
            assert_problem(first, 400, "idempotency-key-invalid")
            assert expected.said in first.json()["detail"]
            assert api.runs == 0
            assert api.records() == []
        else:
            assert_replayed(first, api.send(key=None, lines=lines))
            assert [call.key for call in api.shop.runs] == [expected.key]
            assert [record.key for record in api.records()] == [expected.key]

    mode = "strict" if strict else "lenient"
    return Scenario(f"d1 {row.name} ({mode})", check, Policy.ietf(strict=strict, header=row.header), is_syntax=True)


@story("d1 header absent passes unprotected where a key is optional")
def _(api: Api) -> None:
    assert [api.send(key=None).status for _ in range(2)] == [201, 201]
    assert [call.key for call in api.shop.runs] == [None, None]
    assert api.records() == []


@story("d1 header absent is 400 where a key is required", required=True)
def _(api: Api) -> None:
    assert_problem(api.send(key=None), 400, "idempotency-key-missing")
    assert api.runs == 0


@story("d1 a malformed key is never taken for no key, even where a key is optional")
def _(api: Api) -> None:
    assert_problem(api.send(key="a,b"), 400, "idempotency-key-invalid")
    assert api.runs == 0


@story("d1 an underscore in the name is another header, or one key too many where a server merges the two")
def _(api: Api) -> None:
    response = api.send(key="good", lines=[("Idempotency_Key", "evil")])
    if isinstance(api.world, AsgiWorld):
        assert [call.key for call in api.shop.runs] == ["good"]
    else:
        assert_problem(response, 400, "idempotency-key-invalid")


@story("d1 case variants are different keys")
def _(api: Api) -> None:
    assert not api.send(key="ABC").is_replay
    assert not api.send(key="abc").is_replay
    assert api.runs == 2


@story("d1 quoted and bare are one key")
def _(api: Api) -> None:
    assert_replayed(api.send(key="abc"), api.send(key='"abc"'))
    assert api.runs == 1


@story("d1 a refusal does not repeat the key")
def _(api: Api) -> None:
    assert b"hunter2" not in api.send(key="hunter2,b").body


# d2. What makes two requests the same


@dataclass(frozen=True)
class Pair:
    name: str
    first: dict[str, Any]
    second: dict[str, Any]
    same: bool


def json_pair(name: str, first: str, second: str, *, same: bool, content_type: str = "application/json") -> Pair:
    one, other = ({"body": each.encode(), "content_type": content_type} for each in (first, second))
    return Pair(name, one, other, same)


def typed_pair(name: str, first: str | None, second: str | None, *, same: bool) -> Pair:
    return Pair(name, {"content_type": first}, {"content_type": second}, same)


def multipart(content: bytes, filename: str = "a.txt") -> dict[str, Any]:
    """Encode a form as httpx does: with a new boundary each time."""
    files = {"file": (filename, content, "text/plain")}
    request = httpx.Request("POST", "http://x/", data={"note": "n"}, files=files)
    return {"body": request.read(), "content_type": request.headers["content-type"]}


FORM = "application/x-www-form-urlencoded"
LONG = "x" * 70_000

PAIRS = (
    json_pair("JSON key order differs", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}', same=True),
    json_pair("JSON whitespace differs", '{"a": 1}', '{ "a" :1 }', same=True),
    json_pair(
        "+json key order differs", '{"a":1,"b":2}', '{"b":2,"a":1}', same=True, content_type="application/x+json"
    ),
    json_pair("1 and 1.0", '{"a": 1}', '{"a": 1.0}', same=True),
    json_pair("integers beyond 2^53", '{"a": 9007199254740993}', '{"a": 9007199254740992}', same=False),
    json_pair("1e400 is compared as it came", '{"a": 1e400, "b": 1}', '{"b": 1, "a": 1e400}', same=False),
    json_pair("duplicate member names", '{"a": 1, "a": 2}', '{"a": 2}', same=False),
    json_pair("null and absent", '{"a": 1, "b": null}', '{"a": 1}', same=False),
    json_pair("array order", '{"a": [1, 2]}', '{"a": [2, 1]}', same=False),
    json_pair("invalid JSON, the same", '{"a":', '{"a":', same=True),
    json_pair("invalid JSON, another", '{"a":', '{"b":', same=False),
    json_pair("empty body and {}", "", "{}", same=False),
    json_pair("one line of a batch changed", '[{"to": "a"}, {"to": "b"}]', '[{"to": "a"}, {"to": "c"}]', same=False),
    json_pair("a long body, the same", f'{{"a": "{LONG}", "b": 1}}', f'{{"a": "{LONG}", "b": 1}}', same=True),
    json_pair(
        "a long body in another order is not canonicalised",
        f'{{"a": "{LONG}", "b": 1}}',
        f'{{"b": 1, "a": "{LONG}"}}',
        same=False,
    ),
    Pair("query order", {"target": "/pay?a=1&b=2"}, {"target": "/pay?b=2&a=1"}, same=True),
    Pair("order of one name's values", {"target": "/pay?a=1&a=2"}, {"target": "/pay?a=2&a=1"}, same=False),
    Pair("query changed", {"target": "/pay?to=alice"}, {"target": "/pay?to=mallory"}, same=False),
    Pair("query missing", {"target": "/pay?dry=1"}, {"target": "/pay"}, same=False),
    Pair("percent-encoding case in the query", {"target": "/pay?a=%2f"}, {"target": "/pay?a=%2F"}, same=True),
    Pair("the path is compared raw", {"target": "/pay/a%2fb"}, {"target": "/pay/a/b"}, same=False),
    Pair("another path", {"target": "/pay/1"}, {"target": "/pay/2"}, same=False),
    Pair("another method", {"method": "POST"}, {"method": "PATCH"}, same=False),
    Pair("another host", {"lines": [("Host", "a.test")]}, {"lines": [("Host", "b.test:8080")]}, same=True),
    typed_pair(
        "media type case and spacing", "application/json; charset=utf-8", "Application/JSON;charset=utf-8", same=True
    ),
    typed_pair("another media type", "application/json", "text/plain", same=False),
    typed_pair("no media type", "application/json", None, same=False),
    typed_pair("charset of a text type", "text/plain; charset=utf-8", "text/plain; charset=latin-1", same=False),
    typed_pair("another parameter", "text/plain; format=flowed", "text/plain", same=True),
    Pair("multipart boundary changes on retry", multipart(b"hello"), multipart(b"hello"), same=True),
    Pair("multipart content changes", multipart(b"hello"), multipart(b"bye"), same=False),
    Pair("multipart file name changes", multipart(b"hello"), multipart(b"hello", "b.txt"), same=False),
    Pair("a large multipart upload", multipart(b"h" * 700_000), multipart(b"h" * 700_000), same=True),
    json_pair("form pairs, spelled otherwise", "a=1&b=%2f", "a=1&b=%2F", same=True, content_type=FORM),
    json_pair("form pairs in another order", "a=1&b=2", "b=2&a=1", same=False, content_type=FORM),
    Pair(
        "gzip of one text at two levels",
        {"body": gzip.compress(b"a" * 999, 1, mtime=0), "lines": [("Content-Encoding", "gzip")]},
        {"body": gzip.compress(b"a" * 999, 9, mtime=0), "lines": [("Content-Encoding", "gzip")]},
        same=False,
    ),
    Pair("Content-Encoding changes", {"lines": [("Content-Encoding", "gzip")]}, {}, same=False),
    Pair("Accept changes", {"lines": [("Accept", "text/html")]}, {"lines": [("Accept", "*/*")]}, same=True),
    Pair("a trace id changes", {"lines": [("traceparent", "1")]}, {"lines": [("traceparent", "2")]}, same=True),
)


def pair_scenario(pair: Pair) -> Scenario:
    def check(api: Api) -> None:
        first, second = api.send(**pair.first), api.send(**pair.second)
        assert first.status == 201
        if pair.same:
            assert_replayed(first, second)
        else:
            assert_problem(second, 422, "idempotency-key-reused")
            # The first one's answer is as good as before.
            assert_replayed(first, api.send(**pair.first))
        assert api.runs == 1

    return Scenario(f"d2 {pair.name}: {'the same' if pair.same else 'refused'}", check, is_syntax=True)


@story("d2 an API version counts where it is named", fingerprint=Fingerprinter(headers=("api-version",)))
def _(api: Api) -> None:
    assert api.send(lines=[("API-Version", "1")]).status == 201
    assert_problem(api.send(lines=[("API-Version", "2")]), 422, "idempotency-key-reused")


@story("d2 a left-out member may change", fingerprint=Fingerprinter(omit=("sent_at",)))
def _(api: Api) -> None:
    assert_replayed(api.send(body=b'{"a": 1, "sent_at": 1}'), api.send(body=b'{"a": 1, "sent_at": 2}'))


@story("d2 a recipe that changes between deployments refuses no retry of what went before")
def _(api: Api) -> None:
    later = api.under(Policy.ietf(fingerprint=Fingerprinter(secret=b"s" * 32)))
    assert_replayed(api.send(), later.send())
    assert_problem(later.send(body=b"{}"), 422, "idempotency-key-reused")


@story("d2 a retry after a change of recipe is compared by its method, path and query, and its body is passed over")
def _(api: Api) -> None:
    later = api.under(Policy.ietf(fingerprint=Fingerprinter(omit=("sent_at",))))
    first = api.send("/pay?to=alice", body=b'{"a": 1, "sent_at": 1}')
    assert_replayed(first, later.send("/pay?to=alice", body=b'{"a": 1, "sent_at": 2}'))
    for target, method in (("/pay/refund?to=alice", "POST"), ("/pay?to=mallory", "POST"), ("/pay?to=alice", "PATCH")):
        another = later.send(target, method=method, body=b'{"a": 1, "sent_at": 1}')
        assert_problem(another, 422, "idempotency-key-reused")
    assert api.runs == 1


@story("d2 an endpoint never replays what one with another recipe has answered")
def _(api: Api) -> None:
    recipes = (
        None,
        Fingerprinter(),
        Fingerprinter(omit=("sent_at",)),
        Fingerprinter(headers=("api-version",)),
        Fingerprinter(canonical_limit=0),
        Fingerprinter(secret=b"s" * 32),
    )
    entries = [api.under(Policy.ietf(fingerprint=recipe)) for recipe in recipes]
    for row, payments in enumerate(entries):
        for column, refunds in enumerate(entries):
            if row != column:
                key = f"{row}-{column}"
                assert payments.send("/pay", key=key).status == 201
                assert_problem(refunds.send("/pay/refund", key=key), 422, "idempotency-key-reused")
    assert {call.path for call in api.shop.runs} == {"/pay"}


@story("d2 without a fingerprint the key alone decides", fingerprint=None)
def _(api: Api) -> None:
    assert_replayed(api.send(body=b"{}"), api.send(body=b"[]"))
    assert_replayed(api.send(key="key-2"), api.send("/pay/refund", key="key-2"))


@story("d2 a fingerprint can be turned on, and off again, without refusing the retries of what went before")
def _(api: Api) -> None:
    off = api.under(Policy.ietf(fingerprint=None))
    assert_replayed(off.send(key="key-1"), api.send(key="key-1"))
    assert_replayed(api.send(key="key-2"), off.send(key="key-2"))


# d3. Methods, statuses, bodies


@story("d3 safe methods with a key pass through, without a look-up")
def _(api: Api) -> None:
    for method in ("GET", "HEAD", "OPTIONS", "TRACE", "QUERY"):
        before = api.runs
        assert not any(api.send(method=method).is_replay for _ in range(2))
        assert api.runs == before + 2
    assert api.records() == []
    assert {call.key for call in api.shop.runs} == {None}


@story("d3 PUT and DELETE pass through until they are added")
def _(api: Api) -> None:
    for method in ("PUT", "DELETE"):
        assert not any(api.send(method=method).is_replay for _ in range(2))
    assert api.runs == 4
    api = api.under(Policy.ietf(methods={"PUT", "DELETE"}))
    assert [api.send(method=method, key=method).is_replay for method in ("PUT", "PUT", "DELETE", "DELETE")] == [
        False,
        True,
        False,
        True,
    ]


@story("d3 a CORS preflight is never touched", required=True)
def _(api: Api) -> None:
    lines = [("Origin", "https://a.test"), ("Access-Control-Request-Headers", "idempotency-key")]
    assert api.send(method="OPTIONS", key=None, lines=lines).status == 201


def bodiless(api: Api, status: int) -> None:
    api.answer(Reply(status, b"", ()))
    again = assert_kept_once(api)
    assert again.body == b""
    assert again.header("content-type") is None
    if status == 204:
        assert again.header("content-length") is None


def assert_kept_once(api: Api) -> Response:
    first, again = api.send(), api.send()
    assert_replayed(first, again)
    assert api.runs == 1
    return again


@story("d3 204 is kept, with no body and no framing")
def _(api: Api) -> None:
    bodiless(api, 204)


@story("d3 205 is kept, with no Content-Type invented")
def _(api: Api) -> None:
    bodiless(api, 205)


def freed_scenario(status: int) -> Scenario:
    def check(api: Api) -> None:
        api.answer(Reply(status, b"" if status == 304 else b"no", TEXT))
        assert assert_freed(api).status == status

    return Scenario(f"d3 {status} frees the key", check)


def kept_scenario(status: int) -> Scenario:
    def check(api: Api) -> None:
        api.answer(Reply(status, b'{"said": "once"}', (*JSON, ("location", "/p/1"))))
        again = assert_kept_once(api)
        assert (again.status, again.header("location")) == (status, "/p/1")

    return Scenario(f"d3 {status} of the handler is kept, with its Location", check)


@story("d3 401 on a retry comes from the authentication, not from the store")
def _(api: Api) -> None:
    assert api.send().status == 201
    api.shop.is_locked = True
    refused = api.send()
    assert (refused.status, refused.body) == (401, b"Who are you?")


@story("d3 a retry with If-Match replays the success rather than a 412")
def _(api: Api) -> None:
    api.answer(Reply(200, b"done", (*TEXT, ("etag", '"2"'))), Reply(412, b"changed"))
    lines = [("If-Match", '"1"')]
    first, again = api.send(lines=lines), api.send(lines=lines)
    assert_replayed(first, again)
    assert again.header("etag") == '"2"'


@story("d3 500 is kept: it may have taken effect")
def _(api: Api) -> None:
    api.answer(Reply(500, b"oops"), Reply(201))
    assert assert_kept_once(api).status == 500


@story("d3 500 with no_effect() frees the key")
def _(api: Api) -> None:
    def handler(_call: Call) -> Reply:
        semel.current().no_effect()
        return Reply(500, b"oops")

    api.shop.handler = handler
    assert assert_freed(api).status == 500


@story("d3 500 frees the key where the policy says so", server_errors="release")
def _(api: Api) -> None:
    api.answer(Reply(503, b"later"))
    assert assert_freed(api).status == 503


def raising(error: Exception) -> Callable[[Call], Reply]:
    def handler(_call: Call) -> Reply:
        raise error

    return handler


@story("d3 an exception is kept as a 500, and still reaches whoever reports errors")
def _(api: Api) -> None:
    error = RuntimeError("after the commit")
    api.shop.handler = raising(error)
    first, again = api.send(), api.send()
    assert first.error is error
    assert first.status == 500
    assert again.error is None
    assert_replayed(first, again)
    assert api.runs == 1


@story("d3 an exception frees the key where the policy says so", server_errors="release")
def _(api: Api) -> None:
    api.shop.handler = raising(RuntimeError("oops"))
    assert isinstance(assert_freed(api).error, RuntimeError)


@story("d3 NoEffect is a 503 that frees the key")
def _(api: Api) -> None:
    api.shop.handler = raising(NoEffect("The provider is closed on Sundays."))
    first = assert_freed(api)
    assert_problem(first, 503, "no-effect")
    assert first.json()["detail"] == "The provider is closed on Sundays."
    assert first.json()["retryable"] is True
    assert first.header("retry-after") == "1"


@story("d3 a streamed answer within the limit is kept whole")
def _(api: Api) -> None:
    api.shop.handler = lambda _: Reply(200, chunks(10_000, 50))
    again = assert_kept_once(api)
    assert again.body == b"".join(chunks(10_000, 50))


@story("d3 a streamed answer beyond the limit arrives complete, and leaves a tombstone", max_response_body=100_000)
def _(api: Api) -> None:
    api.shop.handler = lambda _: Reply(200, chunks(10_000, 300), (*TEXT, ("location", "/p/1")))
    first, again = api.send(), api.send()
    assert first.body == b"".join(chunks(10_000, 300))
    assert_problem(again, 409, "response-not-replayable")
    assert again.header("location") == "/p/1"
    assert api.runs == 1


@story("d3 a download beyond the limit arrives complete, and leaves a tombstone")
def _(api: Api) -> None:
    body = bytes(range(256)) * (MAX_RESPONSE_BODY // 128)
    api.shop.handler = lambda _: Reply(200, body, (("content-type", "application/octet-stream"),))
    assert api.send().body == body
    assert_problem(api.send(), 409, "response-not-replayable")
    assert api.runs == 1


def says_later(name: str, **said: Any) -> Scenario:
    """A handler that passes on what another service said: "not now"."""

    def check(api: Api) -> None:
        api.answer(Reply(409, **said), Reply(201))
        assert api.send().status == 409
        assert api.records() == []
        assert api.send().status == 201
        assert api.send().is_replay
        assert api.runs == 2

    return Scenario(f"d3 a 409 that says later is not kept: {name}", check)


LATER = (
    says_later("Retry-After", headers=(*TEXT, ("retry-after", "1"))),
    says_later("Stripe-Should-Retry", headers=(*JSON, ("stripe-should-retry", "true"))),
    says_later(
        "a problem that is retryable",
        headers=(("content-type", "application/problem+json"),),
        body=b'{"code": "idempotency-key-in-progress", "retryable": true}',
    ),
)


@story("d3 a handler with steps that raises says that a retry goes on, and the error is still reported")
def _(api: Api) -> None:
    charges: list[str] = []

    def charge(*, idempotency_key: str) -> int:
        charges.append(idempotency_key)
        return len(charges)

    def handler(_: Call) -> Reply:
        semel.current().effect("charged", charge)
        if api.runs == 1:
            raise RuntimeError("The second service did not answer.")
        return Reply()

    api.shop.handler = handler
    first = api.send()
    assert (first.status, first.code) == (503, "operation-unfinished")
    assert first.json()["retryable"] is True
    assert int(first.header("retry-after") or 0) >= 1
    assert isinstance(first.error, RuntimeError)
    assert api.send().status == 201
    assert api.send().is_replay
    assert (api.runs, len(charges)) == (2, 1)


@story("d3 text/event-stream flows, and leaves a tombstone")
def _(api: Api) -> None:
    events = (("content-type", "text/event-stream"),)
    api.shop.handler = lambda _: Reply(200, iter([b"data: 1\n\n", b"data: 2\n\n"]), events)
    assert api.send().body == b"data: 1\n\ndata: 2\n\n"
    assert_problem(api.send(), 409, "response-not-replayable")
    assert api.runs == 1


def assert_flows(api: Api, gate: Gate, first: "Future[Response]") -> Response:
    """A tombstone is stored while the handler still answers, and the client gets all of it."""
    gate.wait()
    again = eventually(api.send, lambda each: each.code != "idempotency-key-in-progress")
    assert_problem(again, 409, "response-not-replayable")
    gate.open()
    assert api.runs == 1
    return first.result(HANG_SECONDS)


def stream_scenario(media_type: str) -> Scenario:
    def check(api: Api) -> None:
        with Gate() as gate:

            def lines() -> Iterator[bytes]:
                yield b'{"tick": 1}\n'
                gate(Call("", "", b"", None, None))
                yield b'{"tick": 2}\n'

            api.shop.handler = lambda _: Reply(200, lines(), (("content-type", media_type),))
            assert assert_flows(api, gate, api.start()).body == b'{"tick": 1}\n{"tick": 2}\n'

    return Scenario(f"d3 a stream of {media_type} flows at once, and leaves a tombstone", check)


STREAMS = [
    stream_scenario(each)
    for each in ("application/x-ndjson", "application/jsonl; charset=utf-8", "application/json-seq")
]


@story("d3 a stream that does not end in time flows on, and leaves a tombstone", max_response_time=A_MOMENT)
def _(api: Api) -> None:
    with Gate() as gate:

        def ticks() -> Iterator[bytes]:
            while not gate.wait_opened(TICK_SECONDS):
                gate.entered.set()
                yield b"tick "
            yield b"the end"

        api.shop.handler = lambda _: Reply(200, ticks(), TEXT)
        body = assert_flows(api, gate, api.start()).body
        assert body.startswith(b"tick tick")
        assert body.endswith(b"the end")


@story("d3 a stream that takes steps is held back until they are taken", max_response_time=A_MOMENT)
def _(api: Api) -> None:
    taken: list[int] = []

    def step(number: int, *, idempotency_key: str) -> int:
        assert idempotency_key
        taken.append(number)
        return number

    with Gate() as gate:

        def steps(operation: semel.Operation) -> Iterator[bytes]:
            for number in range(20):
                gate.wait_opened(TICK_SECONDS)
                operation.effect(f"step-{number}", step, number)
                yield b"%d " % number

        api.shop.handler = lambda _: Reply(200, steps(semel.current()), TEXT)
        first, again = api.send(), api.send()
    assert first.body == b"".join(b"%d " % number for number in range(20))
    assert_replayed(first, again)
    assert taken == list(range(20))


@story("d3 lines that are all there are kept, whatever their type")
def _(api: Api) -> None:
    body = b'{"row": 1}\n{"row": 2}\n'
    length = ("content-length", str(len(body)))
    api.answer(Reply(200, body, (("content-type", "application/x-ndjson"), length)))
    assert assert_kept(api).body == body


@story("d3 Set-Cookie and Date are the first answer's own")
def _(api: Api) -> None:
    own = (("set-cookie", "session=a"), ("set-cookie", "b=c"), ("date", "Mon, 01 Jan 2001 00:00:00 GMT"))
    api.answer(Reply(201, b"ok", (*TEXT, *own, ("x-request-id", "1"), ("access-control-allow-origin", "*"))))
    first, again = api.send(), api.send()
    assert first.values("set-cookie") == ["session=a", "b=c"]
    assert_replayed(first, again)
    for name in ("set-cookie", "date", "x-request-id", "access-control-allow-origin"):
        assert again.values(name) == []


@story("d3 a header that the policy names is replayed", replay_headers={"X-Request-Cost"})
def _(api: Api) -> None:
    api.answer(Reply(201, b"ok", (*TEXT, ("x-request-cost", "7"))))
    assert assert_kept_once(api).header("x-request-cost") == "7"


@story("d3 repeated headers come back as often, and in order")
def _(api: Api) -> None:
    api.answer(Reply(201, b"ok", (*TEXT, ("link", "<a>; rel=a"), ("link", "<b>; rel=b"))))
    assert assert_kept_once(api).values("link") == ["<a>; rel=a", "<b>; rel=b"]


@story("d3 a coded body is replayed with its coding")
def _(api: Api) -> None:
    body = gzip.compress(b'{"a": 1}')
    api.answer(Reply(200, body, (*JSON, ("content-encoding", "gzip"))))
    again = assert_kept_once(api)
    assert (again.body, again.header("content-encoding")) == (body, "gzip")


@story("d3 any bytes come back as they were")
def _(api: Api) -> None:
    api.answer(Reply(200, bytes(range(256)), (("content-type", "application/octet-stream"),)))
    again = assert_kept_once(api)
    assert again.body == bytes(range(256))
    assert again.header("content-length") == "256"


@story("d3 an empty body stays empty")
def _(api: Api) -> None:
    api.answer(Reply(200, b"", TEXT))
    assert assert_kept_once(api).header("content-length") == "0"


@story("d3 Accept differs on a retry: the one representation there is comes back")
def _(api: Api) -> None:
    assert_replayed(api.send(lines=[("Accept", "text/html")]), api.send(lines=[("Accept", "text/plain")]))


@story("d3 the handler gets the body that was sent, however large")
def _(api: Api) -> None:
    bodies = [b"", b"x", bytes(range(256)) * 4096]
    for index, body in enumerate(bodies):
        assert api.send(key=f"key-{index}", body=body, content_type="application/octet-stream").status == 201
    assert [call.body for call in api.shop.runs] == bodies


@story("d3 a body over the limit is 413, and nothing runs", max_request_body=1000)
def _(api: Api) -> None:
    refused = api.send(body=b"x" * 1001)
    assert_problem(refused, 413, "request-body-too-large")
    assert b"1000 bytes, the max_request_body" in refused.body
    assert api.runs == 0
    assert api.records() == []
    assert api.send(body=b"x" * 1000).status == 201


# d4. Identity, transport, lifecycle


@story("d4 a token that is renewed between retries changes nothing")
def _(api: Api) -> None:
    assert_replayed(api.send(lines=[("Authorization", "Bearer 1")]), api.send(lines=[("Authorization", "Bearer 2")]))


@story("d4 two tenants with one key never meet")
def _(api: Api) -> None:
    alice, bob = (api.send(lines=[("X-Account", name)]) for name in ("alice", "bob"))
    assert (alice.json(), bob.json()) == ({"payment": 1}, {"payment": 2})
    assert_replayed(bob, api.send(lines=[("X-Account", "bob")]))
    # Not even to be told that their bodies differ.
    assert api.send(lines=[("X-Account", "eve")], body=b"{}").status == 201


@story("d4 an owner of several names is no other, whatever is in the names")
def _(api: Api) -> None:
    answers = [api.send(lines=[("X-Names", names)]) for names in ("a/b,c", "a,b/c", "a,b,c", "a%2Fb,c")]
    assert [each.json() for each in answers] == [{"payment": number} for number in (1, 2, 3, 4)]
    assert_replayed(answers[1], api.send(lines=[("X-Names", "a,b/c")]))
    assert_problem(api.send(lines=[("X-Names", "a,")]), 400, "idempotency-scope-missing")
    assert f"{api.tenant}/a%2Fb/c" in {record.scope for record in api.records()}


@story("d4 on behalf of another account, or in test mode, is another operation")
def _(api: Api) -> None:
    assert api.send().status == 201
    assert not api.send(lines=[("X-Mode", "test")]).is_replay
    assert api.runs == 2


@story("d4 nobody's request is refused, and nothing runs")
def _(api: Api) -> None:
    assert_problem(api.send(lines=[("X-Account", "")]), 400, "idempotency-scope-missing")
    assert api.runs == 0


@story("d4 a user who is locked out before a retry gets no replay")
def _(api: Api) -> None:
    assert api.send().status == 201
    api.shop.is_locked = True
    assert not api.send().is_replay
    api.shop.is_locked = False
    assert api.send().is_replay


@story("d4 the API version changed between retries: the old bytes come back")
def _(api: Api) -> None:
    assert_replayed(api.send(lines=[("API-Version", "1")]), api.send(lines=[("API-Version", "2")]))


@story("d4 after retention a key is new, whatever it is used for", lease=BRIEF, retention=BRIEF)
def _(api: Api) -> None:
    first = api.send()
    again = eventually(api.send, lambda response: not response.is_replay)
    assert (first.json(), again.json()) == ({"payment": 1}, {"payment": 2})
    other = eventually(lambda: api.send(body=b"{}"), lambda response: response.status == 201)
    assert other.json() == {"payment": 3}


@story("d4 after retention a late retry is 410 where the policy says so", lease=BRIEF, retention=BRIEF, late="refuse")
def _(api: Api) -> None:
    assert api.send().status == 201
    late = eventually(api.send, lambda response: not response.is_replay)
    assert_problem(late, 410, "idempotency-key-expired")
    assert api.runs == 1


def uuid7(at: datetime) -> str:
    """Make a key that says it was made *at* that time."""
    milliseconds = int(at.timestamp() * 1000)
    return f"{milliseconds >> 16:08x}-{milliseconds & 0xFFFF:04x}-7000-8000-{secrets.token_hex(6)}"


def reap(api: Api) -> None:
    """Clear away everything of this API that can be, once all of it is past its retention."""
    wait_until(lambda: all(record.retention_left <= timedelta(0) for record in api.records()))
    while api.world.perform(Reap(1000, Answer(408))).total:
        pass


def late_scenario(mode: Mode) -> Scenario:
    def check(api: Api) -> None:
        numbers = ["01234567890123456789012345", "00000000000000000000000017", "76543210987654321098765432"]
        keys = ["plain", uuid7(api.world.perform(Now()) + timedelta(hours=1)), *numbers]
        for key in keys:
            assert api.send(key=key).status == 201
        # On a busy machine a key may be too old before it is sent.
        recent = iter(lambda: uuid7(api.world.perform(Now())), None)
        dated = next(key for key in recent if api.send(key=key).status == 201)
        reap(api)
        # Of that one its own age tells, so nothing is left of it.
        assert {record.key for record in api.records()} == {*keys}
        for key in (*keys, dated):
            assert_problem(api.send(key=key), 410, "idempotency-key-expired")
        assert api.runs == len(keys) + 1

    name = f"d4 a late retry is 410 after its record was reaped, whatever time its key tells ({mode})"
    return Scenario(name, check, Policy.ietf(lease=BRIEF, retention=5 * BRIEF, late="refuse", mode=mode))


@story("d4 what is unknown waits for a person: no time frees it, and nothing reaps it", lease=BRIEF, retention=BRIEF)
def _(api: Api) -> None:
    scope, fingerprint = f"{api.tenant}/alice/live", pay_fingerprint()
    for key in ("applied", "not_applied", "released"):
        hold = api.world.perform(Claim(scope, key, key.encode().ljust(16), fingerprint, BRIEF, BRIEF))
        assert api.world.perform(Park(hold)) is Verdict.DONE
    reap(api)
    reap(api)
    for policy in (Policy.ietf(), Policy.ietf(late="refuse"), Policy.ietf(retention=BRIEF, lease=BRIEF)):
        for record in api.records():
            assert_problem(api.under(policy).send(key=record.key), 409, "outcome-unknown")
    assert_problem(api.send(key="applied", body=b"{}"), 422, "idempotency-key-reused")
    assert api.runs == 0
    assert {(record.key, record.state, record.is_expired) for record in api.records()} == {
        (key, State.UNKNOWN, False) for key in ("applied", "not_applied", "released")
    }
    by_key = {record.key: record for record in api.records()}
    assert run(resolve_applied, ServicePorts(cast("Store", api.world)), by_key["applied"], {"id": 7}) is Verdict.DONE
    assert run(resolve_not_applied, ServicePorts(cast("Store", api.world)), by_key["not_applied"]) is Verdict.DONE
    assert run(release, ServicePorts(cast("Store", api.world)), hold_of(by_key["released"])) is Verdict.DONE
    assert [api.send(key=key).status for key in ("not_applied", "released")] == [201, 201]
    assert api.runs == 2


@story("d4 an operation that was resolved is kept for its retention from then on")
def _(api: Api) -> None:
    scope, retention = f"{api.tenant}/alice/live", timedelta(seconds=1)
    steps = Progress((Done("phase", "ordered", 1), Begun("charged")))
    for key in ("resolved", "resumed"):
        hold = api.world.perform(Claim(scope, key, key.encode().ljust(16), pay_fingerprint(), BRIEF, retention))
        if key == "resumed":
            assert api.world.perform(Save(hold, steps)) is Verdict.DONE
        assert api.world.perform(Park(hold)) is Verdict.DONE
    reap(api)
    for record in api.records():
        assert run(resolve_applied, ServicePorts(cast("Store", api.world)), record, {"id": 7}) is Verdict.DONE
    by_key = {record.key: record for record in api.records()}
    assert not any(record.is_expired for record in by_key.values())
    assert all(timedelta(0) < record.retention_left <= retention for record in by_key.values())
    assert (by_key["resolved"].state, by_key["resumed"].state) == (State.COMPLETE, State.PROCESSING)
    # What it has done stays done: a late retry goes on from there, and is no new operation.
    assert by_key["resumed"].recovery_point == "charged"
    again = api.send(key="resolved")
    assert (again.status, again.body, again.is_replay) == (200, b'{"id": 7}', True)
    assert api.runs == 0


def pay_fingerprint() -> bytes:
    """The fingerprint of what ``Api.send`` sends, unless it is told otherwise."""
    return Fingerprinter().of(Subject("POST", "/pay", b"", ((b"content-type", b"application/json"),), b'{"amount": 5}'))


@story("d4 of many retries at the edge of retention one runs", lease=BRIEF, retention=BRIEF)
def _(api: Api) -> None:
    assert api.send().status == 201
    wait_until(lambda: api.records()[0].is_expired)
    later = api.under(Policy.ietf())
    responses = [each.result(HANG_SECONDS) for each in [later.start() for _ in range(8)]]
    assert api.runs == 2
    assert {response.status for response in responses} <= {201, 409}
    assert {response.body for response in responses if response.status == 201} == {b'{"payment": 2}'}


@story("d4 a retry that goes to another node is a replay")
def _(api: Api) -> None:
    assert_replayed(api.send(), api.under(Policy.ietf()).send())


@story("d4 the header's name is found in any case")
def _(api: Api) -> None:
    names = ("idempotency-key", "IDEMPOTENCY-KEY", "Idempotency-Key")
    responses = [api.send(key=None, lines=[(name, "k")]) for name in names]
    assert [response.is_replay for response in responses] == [False, True, True]


@story("d4 a double click gets 409 with Retry-After while the first one runs")
def _(api: Api) -> None:
    with Gate() as gate:
        api.shop.handler = gate
        first = api.start()
        gate.wait()
        busy = api.send()
        assert_problem(busy, 409, "idempotency-key-in-progress")
        assert int(busy.header("retry-after") or 0) >= 1
        assert busy.json()["retryable"] is True
        # To a client 409 is "wait" and 422 is "never".
        assert_problem(api.send(body=b"{}"), 422, "idempotency-key-reused")
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), api.send())
    assert api.runs == 1


@story("d4 after a crash Retry-After tells the rest of the lease", lease=timedelta(minutes=5), fingerprint=None)
def _(api: Api) -> None:
    scope = f"{api.tenant}/alice/live"
    for key, left in (("alive", timedelta(minutes=4)), ("dead", timedelta(seconds=100))):
        # As it is a minute, or more than three, after the worker was last heard of.
        api.world.perform(Claim(scope, key, b"d" * 16, b"", left, timedelta(hours=1)))
    alive, dead = api.send(key="alive"), api.send(key="dead")
    for busy in (alive, dead):
        assert_problem(busy, 409, "idempotency-key-in-progress")
    assert alive.header("retry-after") == "1"
    assert 60 < int(dead.header("retry-after") or 0) <= 100
    assert api.runs == 0


@story("d4 a live worker renews its lease, so a slow handler keeps its key", lease=timedelta(seconds=1))
def _(api: Api) -> None:
    with Gate() as gate:
        api.shop.handler = gate
        first = api.start()
        gate.wait()
        (begun,) = api.records()
        assert begun.lease_expires_at is not None
        end = begun.lease_expires_at + timedelta(seconds=1)
        wait_until(lambda: (api.records()[0].lease_expires_at or end) > end)
        assert_problem(api.send(), 409, "idempotency-key-in-progress")
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), api.send())
    assert [call.attempt for call in api.shop.runs] == [1]


@story("d4 a provider's key is derived: the same on a retry, another for each tenant, never the client's own")
def _(api: Api) -> None:
    def handler(_call: Call) -> Reply:
        semel.current().no_effect()
        return Reply(503, semel.current().derive("charge").encode())

    api.shop.handler = handler
    once, again = api.send(), api.send()
    other = api.send(lines=[("X-Account", "bob")])
    assert once.body == again.body != other.body
    assert b"key-1" not in once.body


@contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []

    def note(record: logging.LogRecord) -> bool:
        records.append(record)
        return True

    logger = logging.getLogger("semel")
    logger.addFilter(note)
    try:
        yield records
    finally:
        logger.removeFilter(note)


@story("d4 a key with personal data works, and is warned about without being repeated")
def _(api: Api) -> None:
    with logged() as records:
        assert api.send(key="jane@example.com").status == 201
    assert [record.levelname for record in records] == ["WARNING"]
    assert "jane" not in records[0].getMessage() + repr(vars(records[0]))


@story("d4 a mounted app is known by its whole path")
def _(api: Api) -> None:
    assert_replayed(api.send(mount="/v1"), api.send(mount="/v1"))
    assert_problem(api.send(mount="/v2"), 422, "idempotency-key-reused")


@story("d4 one key on two endpoints is a mistake")
def _(api: Api) -> None:
    assert api.send("/pay/1").status == 201
    assert_problem(api.send("/pay/2"), 422, "idempotency-key-reused")


@story("d4 one key on two endpoints is two operations where the policy says so", scope_by="operation")
def _(api: Api) -> None:
    assert [api.send(target).is_replay for target in ("/pay/1", "/pay/2", "/pay/1")] == [False, False, True]
    assert_problem(api.send("/pay/1", body=b"{}"), 422, "idempotency-key-reused")


# Waiting for the first to end


@contextmanager
def seats() -> Iterator[Callable[[], int]]:
    """Count who sits down to wait, in whichever entry point."""
    taken: list[str] = []
    take = Queues.take

    def note(self: Queues, name: str, *rest: Any) -> None:
        take(self, name, *rest)
        taken.append(name)

    with patch.object(Queues, "take", note):
        yield lambda: len(taken)


@story("an answer that the store does not take is kept by its worker, and stored later")
def answer_that_waits(api: Api) -> None:
    with store_without_answers():
        assert_problem(api.send(), 503, "answer-not-stored")
    again = eventually(api.send, lambda response: response.status != 409)
    assert (again.status, again.is_replay, api.runs) == (201, True, 1)


@contextmanager
def store_without_answers() -> Iterator[None]:
    """Have the store take no answers from the requests themselves, in whichever entry point."""

    def away(ask: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def refuse(self: Any, command: Any) -> Any:
            if isinstance(command, Complete):
                raise StoreUnavailable("It is away.")
            return ask(self, command)

        return refuse

    with (
        patch.object(handle, "COMPLETE_PAUSES", ()),
        patch.object(ThreadPorts, "ask", away(ThreadPorts.ask)),
        patch.object(AsyncPorts, "ask", away(AsyncPorts.ask)),
    ):
        yield


@contextmanager
def held(api: Api) -> Iterator[tuple[Gate, "Future[Response]"]]:
    """Have a first request in its handler, until the gate is opened."""
    with Gate() as gate:
        api.shop.handler = gate
        first = api.start()
        gate.wait()
        yield gate, first
    first.result(HANG_SECONDS)


IN_PROGRESS = "idempotency-key-in-progress"


def assert_told_to_come_back(response: Response) -> None:
    assert_problem(response, 409, IN_PROGRESS)
    assert int(response.header("retry-after") or 0) >= 1
    assert response.header("preference-applied") is None


@story("waiting: a duplicate waits for the first to end, and gets its answer", in_progress="wait")
def _(api: Api) -> None:
    with seats() as taken, held(api) as (gate, first):
        again = api.start()
        wait_until(lambda: taken() == 1)
        assert not again.done()
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), again.result(HANG_SECONDS))
    assert again.result().header("preference-applied") is None
    assert api.runs == 1


@story("waiting: one answer is given to all who wait", in_progress="wait")
def _(api: Api) -> None:
    with seats() as taken, held(api) as (gate, first):
        others = [api.start() for _ in range(4)]
        wait_until(lambda: taken() >= 4)
        gate.open()
        for other in others:
            assert_replayed(first.result(HANG_SECONDS), other.result(HANG_SECONDS))
    assert api.runs == 1


@story("waiting: another request under the same key is refused at once", in_progress="wait")
def _(api: Api) -> None:
    with seats() as taken, held(api):
        assert_problem(api.send(body=b"{}"), 422, "idempotency-key-reused")
        assert taken() == 0


@story("waiting: a key of one's own waits for nobody", in_progress="wait")
def _(api: Api) -> None:
    with seats() as taken, held(api):
        api.shop.handler = None
        assert api.send(key="key-2").status == 201
        assert api.send(lines=[("X-Account", "bob")]).status == 201
        assert taken() == 0


@story("waiting: when the time is over, a duplicate is told to come back", in_progress="wait", wait=A_MOMENT)
def _(api: Api) -> None:
    with seats() as taken, held(api) as (gate, first):
        assert_told_to_come_back(api.send())
        assert taken() >= 1
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), api.send())


@story("waiting: one too many for a key is told to come back at once", in_progress="wait", max_waiters_per_key=1)
def _(api: Api) -> None:
    with seats() as taken, held(api) as (gate, first):
        waits = api.start()
        wait_until(lambda: taken() == 1)
        assert_told_to_come_back(api.send())
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), waits.result(HANG_SECONDS))


@story("waiting: one too many for the process is told to come back at once", in_progress="wait", max_waiters=0)
def _(api: Api) -> None:
    with held(api):
        assert_told_to_come_back(api.send())


@story(
    "waiting: when the first frees its key, one who waits runs, and others get that answer",
    in_progress="wait",
)
def _(api: Api) -> None:
    with seats() as taken, Gate() as gate:

        def handler(call: Call) -> Reply:
            if api.runs > 1:
                return Reply()
            gate(call)
            raise NoEffect

        api.shop.handler = handler
        first = api.start()
        gate.wait()
        others = [api.start() for _ in range(2)]
        wait_until(lambda: taken() >= 2)
        gate.open()
        assert_problem(first.result(HANG_SECONDS), 503, "no-effect")
        one, other = sorted((each.result(HANG_SECONDS) for each in others), key=lambda each: each.is_replay)
        assert_replayed(one, other)
    assert api.runs == 2


@story(
    "waiting: who waits for a dead worker takes over after its lease",
    in_progress="wait",
    fingerprint=None,
)
def _(api: Api) -> None:
    dead = Claim(f"{api.tenant}/alice/live", "key-1", b"d" * 16, b"", timedelta(seconds=0.5), timedelta(hours=1))
    api.world.perform(dead)
    with seats() as taken:
        response = api.send()
        assert taken() >= 1
    assert (response.status, response.is_replay) == (201, False)
    assert [call.attempt for call in api.shop.runs] == [2]


@story("waiting: an answer that can't be kept is a tombstone to who waits, too", in_progress="wait")
def _(api: Api) -> None:
    with seats() as taken, Gate() as gate:

        def handler(call: Call) -> Reply:
            gate(call)
            return Reply(200, iter([b"data: 1\n\n"]), (("content-type", "text/event-stream"),))

        api.shop.handler = handler
        first = api.start()
        gate.wait()
        again = api.start()
        wait_until(lambda: taken() == 1)
        gate.open()
        assert first.result(HANG_SECONDS).status == 200
        assert_problem(again.result(HANG_SECONDS), 409, "response-not-replayable")


@story("waiting: atomic mode waits, too", in_progress="wait", mode="atomic")
def _(api: Api) -> None:
    with seats() as taken, held(api) as (gate, first):
        again = api.start()
        wait_until(lambda: taken() == 1)
        assert_problem(api.send(body=b"{}"), 422, "idempotency-key-reused")
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), again.result(HANG_SECONDS))
    assert api.runs == 1


@story("waiting: report mode never waits", in_progress="wait", enforcement="report")
def _(api: Api) -> None:
    with seats() as taken, held(api) as (gate, first):
        api.shop.handler = None
        assert api.send().status == 201
        gate.open()
        assert first.result(HANG_SECONDS).status == 201
        assert (api.runs, taken()) == (2, 0)


@story("waiting: a client that says Prefer: wait is kept waiting, and told so")
def _(api: Api) -> None:
    with seats() as taken, held(api) as (gate, first):
        again = api.start(lines=[("Prefer", "respond-async, wait=7")])
        wait_until(lambda: taken() == 1)
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), again.result(HANG_SECONDS))
    assert again.result().header("preference-applied") == "wait=7"
    assert api.send(lines=[("Prefer", "wait=7")]).header("preference-applied") is None


@story("waiting: a client is kept waiting no longer than the policy says", wait=timedelta(seconds=5))
def _(api: Api) -> None:
    with seats() as taken, held(api) as (gate, first):
        again = api.start(lines=[("Prefer", "wait=100000000000")])
        wait_until(lambda: taken() == 1)
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), again.result(HANG_SECONDS))
    assert again.result().header("preference-applied") == "wait=5"


@story("waiting: a wish that says nothing is no wish, and no mistake")
def _(api: Api) -> None:
    with seats() as taken, held(api):
        for said in ("wait=0", "wait", "wait=soon", "wait=-1", "wait=1.5", "=", "wait=\xb2", ""):
            assert_told_to_come_back(api.send(lines=[("Prefer", said.encode("latin-1"))]))
        assert taken() == 0


@story("waiting: a client that will not wait is not kept waiting", in_progress="wait")
def _(api: Api) -> None:
    with seats() as taken, held(api):
        assert_told_to_come_back(api.send(lines=[("Prefer", "wait=0")]))
        assert taken() == 0


@story("waiting: wishes are not met where the policy does not", preferences=())
def _(api: Api) -> None:
    with seats() as taken, held(api):
        assert_told_to_come_back(api.send(lines=[("Prefer", "wait=5")]))
        assert taken() == 0


# Stripe's manners


@story("Stripe: another body is 400 and an idempotency_error")
def _(api: Api) -> None:
    api = api.under(Policy.stripe())
    assert api.send().status == 201
    mismatch = api.send(body=b"{}")
    assert (mismatch.status, mismatch.header("content-type")) == (400, "application/json")
    assert mismatch.json()["error"]["type"] == "idempotency_error"
    assert api.send(method="PATCH").status == 201, "PATCH is not guarded"


@story("Stripe: in progress is 409 and idempotency_key_in_use; a 500 is kept")
def _(api: Api) -> None:
    api = api.under(Policy.stripe())
    with Gate() as gate:
        api.shop.handler = gate
        first = api.start()
        gate.wait()
        busy = api.send()
        assert (busy.status, busy.json()["error"]["code"]) == (409, "idempotency_key_in_use")
        gate.open()
        first.result(HANG_SECONDS)
    api.answer(Reply(500, b"oops"))
    assert_replayed(api.send(key="b"), api.send(key="b"))


SCENARIOS: tuple[Scenario, ...] = (
    *(header_scenario(row, strict=strict) for row in HEADER_ROWS for strict in (True, False)),
    *(pair_scenario(pair) for pair in PAIRS),
    *(freed_scenario(status) for status in (206, 304, 401, 405, 407, 408, 413, 415, 416, 421, 425, 429)),
    *(kept_scenario(status) for status in (200, 201, 202, 303, 307, 400, 402, 403, 404, 409, 410, 412, 422)),
    *(late_scenario(mode) for mode in ("guard", "atomic")),
    *LATER,
    *STREAMS,
    *STORIES,
)
