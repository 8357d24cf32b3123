"""The parts of a verification that send nothing: other requests, paths into JSON, what is told, what OpenAPI gives."""

import base64
import html
import json
import os
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from semel.errors import ConfigurationError
from semel.verify import variants
from semel.verify.checks.refusals import fault_of
from semel.verify.counting import CountFailed, at, counter
from semel.verify.message import Answer, Request
from semel.verify.model import IETF, STRIPE, Check, Finding, NotRun, Report, Verdict
from semel.verify.openapi import found_in
from semel.verify.report import as_json, as_junit, as_markdown
from semel.verify.target import Target, key_header, request_of
from semel.verify.telling import MAX_SHOWN, Step, Teller

JSON = (("Content-Type", "application/json"),)
FORM = (("Content-Type", "application/x-www-form-urlencoded"),)
PROBLEM = (("Content-Type", "application/problem+json"),)


def asked(body: bytes, headers: tuple[tuple[str, str], ...] = JSON) -> Request:
    return Request("POST", "/payments", headers, body)


@pytest.mark.parametrize(
    "request_, first",
    [
        (asked(b'{"to": "ann", "amount": 5}'), b'{"to": "ann", "amount": 6}'),
        (asked(b'{"to": {"name": "ann 9"}}'), b'{"to": {"name": "ann 10"}}'),
        (asked(b'{"ok": true}'), b'{"ok": true, "semel-verify": 1}'),
        (asked(b"[[1]]"), b"[[2]]"),
        (asked(b"a=x&b=9", FORM), b"a=xx&b=9"),
        (asked(b"hello 7", ()), b"hello 8"),
    ],
)
def test_other_requests(request_: Request, first: bytes) -> None:
    """Another operation of the same kind differs in one value: a number, before a text, before a new member."""
    assert next(variants.others(request_)).body == first
    third = variants.numbered(request_, 3)
    assert third is not None
    assert len({request_.body, first, third.body}) == 3


def test_the_same_in_another_spelling() -> None:
    """White space and order change the bytes, and not what they mean."""
    request = asked(b'{"a": 1, "b": [2]}')
    for each in (variants.reordered(request), variants.padded(request)):
        assert each is not None
        assert json.loads(each.body) == json.loads(request.body)
        assert each.body != request.body
    assert variants.padded(asked(b"{}")) is None
    assert variants.reordered(asked(b"a=1", FORM)) is None
    assert variants.broken(asked(b'{"a": 1}\n')) == asked(b'{"a": 1')


@pytest.mark.parametrize(
    "path, found",
    [
        ("$", {"n": [1, {"a b": 5}]}),
        ("$.n", [1, {"a b": 5}]),
        ("$.n[1]['a b']", 5),
        ("$.n.length()", 2),
        ("$.n[-2]", 1),
    ],
)
def test_paths(path: str, found: object) -> None:
    """A path leads to a value, an element, or the length of a list."""
    assert at({"n": [1, {"a b": 5}]}, path) == found


@pytest.mark.parametrize("path", ["$.m", "$.n[9]", "$.n.x", "$.n[0].y"])
def test_paths_that_lead_nowhere(path: str) -> None:
    """A path that leads nowhere is told."""
    with pytest.raises(CountFailed, match="there is no"):
        at({"n": [1]}, path)


async def test_counting_by_sql(tmp_path: Path) -> None:
    """A query gives the count, only reads, and needs one number."""
    file = tmp_path / "shop.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE payments AS SELECT 1 AS id UNION SELECT 2")
        connection.commit()
    target = Target("http://127.0.0.1", timeout=1)

    def by(query: str) -> Any:
        return counter(f"sqlite:///{file}#{query}", "", (), target.client_for)

    assert await by("SELECT count(*) FROM payments").read() == 2
    for query in ("SELECT 'a'", "SELECT 1, 2", "SELECT 1 WHERE 0", "SELECT * FROM none", "WITH a AS (SELECT 1) DELETE"):
        with pytest.raises(CountFailed):
            await by(query).read()
    with pytest.raises(ConfigurationError, match="begins with SELECT"):
        by("DELETE FROM payments")


@pytest.mark.parametrize("address, sent", [("/n", "sesame"), ("http://here:1/n", "sesame"), ("http://there:1/n", None)])
def test_credentials_stay_with_their_server(address: str, sent: str | None) -> None:
    """A counter on another server is asked without the credentials of the first."""
    target = Target("http://here:1", timeout=1)
    counts: Any = counter(f"{address}#n", target.base, (("Authorization", "sesame"),), target.client_for)
    assert counts._request.header("authorization") == sent


async def test_counting_on_postgres(postgres_url: str) -> None:
    """PostgreSQL is asked in a transaction that can't write, and its password is not in the report."""
    target = Target("http://127.0.0.1", timeout=1)
    counts = counter(f"{postgres_url}#SELECT 40 + 2", "", (), target.client_for)
    assert await counts.read() == 42
    assert counts.name == "postgresql SELECT 40 + 2"
    writes = counter(
        f"{postgres_url}#WITH a AS (DELETE FROM pg_description RETURNING 1) SELECT 1", "", (), target.client_for
    )
    with pytest.raises(CountFailed, match="read-only"):
        await writes.read()


def teller(**more: Any) -> Teller:
    told = Teller("http://here", key_header="Idempotency-Key", **more)
    told.learn(SECRET)
    return told


SECRET = Request(
    "POST",
    "/payments?api_key=k123456&a=1",
    (
        ("Authorization", "Bearer sesame-open"),
        ("Cookie", "session=abcdefg"),
        ("Idempotency-Key", '"a0d026ab-eee2-4a8f-a269-55ab471714d8"'),
    ),
    b'{"a": "it\'s"}',
)
ECHO = Answer(401, (("Set-Cookie", "session=hijklmn; Path=/"),), b'{"token": "sesame-open", "you": "abcdefg"}')


def test_credentials_are_not_told() -> None:
    """Credentials are in no text of a report, not even where an answer repeats them; in a curl line, variables are."""
    steps = [Step((SECRET,), (ECHO,))]
    texts = [teller().sent(steps), teller().received(steps), teller().curl(steps)]
    for secret in ("sesame-open", "abcdefg", "hijklmn", "k123456"):
        assert not any(secret in each for each in texts)
    assert '-H "Authorization: $AUTHORIZATION"' in texts[2]
    shown = teller(shows_credentials=True)
    assert "Bearer sesame-open" in shown.curl(steps)


PASSWORD = 'open/sesame "7" & é'
PAIR = f"ann:{PASSWORD}"


@pytest.mark.parametrize(
    "text",
    [
        PASSWORD,
        json.dumps(PASSWORD),
        json.dumps(PASSWORD).replace("/", "\\/"),
        f"to=/pay?p={quote(PASSWORD)}",
        quote(PASSWORD, safe="").lower(),
        quote_plus(PASSWORD),
        html.escape(PASSWORD),
        html.escape(PASSWORD).replace("&quot;", "&#34;").replace("é", "&#xE9;"),
        r"open/sesame \u00227\u0022 \u0026 \u00E9",
        r"open/sesame \"7\" \u0026 é",
        "".join(f"%{each:02X}" for each in PASSWORD.encode()),
        "x" * (MAX_SHOWN - 8) + PASSWORD,
        "x" * (MAX_SHOWN - 8) + base64.b64encode(PAIR.encode()).decode(),
    ],
)
def test_credentials_are_not_told_in_another_spelling(text: str) -> None:
    """A password is in no report, however an answer spells it, and where it is cut: in JSON, in a URL, in a page."""
    basic = f"Basic {base64.b64encode(PAIR.encode()).decode()}"
    request = Request("POST", "/payments", (("Authorization", basic),), text.encode())
    told = Teller("http://here", key_header="Idempotency-Key")
    told.learn(request)
    steps = [Step((request,), (Answer(401, (("Location", text),) if text.isascii() else (), text.encode()),))]
    for said in (told.sent(steps), told.received(steps), told.curl(steps), told.clean(text)):
        for part in ("sesame", base64.b64encode(PAIR.encode()).decode()[:6]):
            assert part not in said


def test_escape_sequences_of_an_answer() -> None:
    """What an answer says reaches no report as it is, its media type neither."""
    answer = Answer(200, (("Content-Type", "text/\x1b[2J"), ("Location", "/\x1b[2J"), ("ETag", "\x9b2J")), b"\x1b[2J")
    said = Teller("http://here", key_header="Idempotency-Key").received([Step((), (answer,))])
    assert not set("\x1b\x9b") & set(said)


def test_two_principals_are_two_variables() -> None:
    """A curl line has a variable for each credential of one header: with one for two principals, it would send both
    requests as one of them.
    """
    other = SECRET.having(("Authorization", "Bearer of-another"), ("Cookie", "session=of-another"))
    told = teller()
    told.learn(other)
    line = told.curl([Step((SECRET,), (ECHO,)), Step((other,), (ECHO,)), Step((SECRET,), (ECHO,))])
    script = f"curl() {{ printf '<%s>' \"$@\"; }}; {line}"
    given = {"AUTHORIZATION": "A", "COOKIE": "a", "OTHER_AUTHORIZATION": "B", "OTHER_COOKIE": "b"}
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True, text=True, env=os.environ | given)
    assert re.findall("<(?:Authorization|Cookie): (.)>", done.stdout) == ["A", "a", "B", "b", "A", "a"]


def test_curl_lines_can_be_run() -> None:
    """A line is one that a shell can read, with any body, and each run of it has a fresh key."""
    binary = Request("POST", "/", SECRET.headers, b"\x00\xff'\"")
    steps = [Step((SECRET,), (ECHO,)), Step((SECRET,), (ECHO,)), Step((binary, SECRET, SECRET), (), is_race=True)]
    line = teller().curl(steps)
    assert "\n" not in line
    assert line.startswith("K=$(uuidgen")
    script = f"curl() {{ printf '<%s>' \"$@\"; cat; }}; {line}"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert done.stdout.count(b"<-si>") == 5
    assert done.stdout.count(b'<{"a": "it\'s"}>') == 4
    assert b"\x00\xff'\"" in done.stdout


@pytest.mark.parametrize(
    "answer, is_fine",
    [
        (Answer(422, PROBLEM, b'{"type": "https://a/b", "status": 422}'), True),
        (Answer(422, PROBLEM, b'{"type": "urn:a:b"}'), True),
        (Answer(422, (("Link", '<https://a>; rel="describedby"'),), b"no"), True),
        (Answer(422, PROBLEM, b'{"type": "https://a/b", "status": 400}'), False),
        (Answer(422, PROBLEM, b'{"title": "no"}'), False),
        (Answer(422, PROBLEM, b"no"), False),
        (Answer(422, JSON, b'{"code": "key-reused"}'), True),
        (Answer(422, JSON, b'{"detail": "no"}'), False),
    ],
)
def test_problems(answer: Answer, is_fine: bool) -> None:
    """A problem has a type of its own, and the status that it is sent with."""
    assert (fault_of(IETF, answer, is_strict=True) is None) == is_fine


def test_errors_of_stripe() -> None:
    """Stripe's errors have a type."""
    assert fault_of(STRIPE, Answer(400, JSON, b'{"error": {"type": "idempotency_error"}}'), is_strict=False) is None
    assert fault_of(STRIPE, Answer(400, JSON, b'{"error": {}}'), is_strict=False) is not None
    assert fault_of(STRIPE, Answer(400, JSON, b'{"error": "no"}'), is_strict=False) is not None


def test_reports() -> None:
    """A report can hold anything that a server says: control characters, markup, pipes."""
    check = Check("a-check", "A rule", "It matters.")
    finding = Finding(check, Verdict.FAIL, "It said <b>|\x00\x1b[31m]]>", "sent", "received \ud800", "curl")
    report = Report("http://here/", "ietf", "counted", (finding,), (NotRun(check, "no"),))
    assert json.loads(as_json(report).encode("utf-8", "surrogatepass"))["checks"][0]["why"].endswith("It matters.")
    assert "a-check" in as_junit(report).encode().decode()
    assert "&lt;b>\\|" in as_markdown(report)


@pytest.mark.parametrize(
    "counted, verdict",
    [
        ([], Verdict.INCONCLUSIVE),
        ([Verdict.PASS], Verdict.PASS),
        ([Verdict.PASS, Verdict.INCONCLUSIVE], Verdict.INCONCLUSIVE),
        ([Verdict.INCONCLUSIVE, Verdict.FAIL, Verdict.PASS], Verdict.FAIL),
    ],
)
def test_the_verdict_of_the_whole(counted: list[Verdict], verdict: Verdict) -> None:
    """One failure is a failure, one that is open leaves it open, and nothing is not a pass."""
    check = Check("a-check", "", "")
    assert Report("", "", "", tuple(Finding(check, each, "") for each in counted)).verdict is verdict


def document(**operations: Any) -> dict[str, Any]:
    return {"paths": {f"/{name}": {"post": each} for name, each in operations.items()}}


def test_openapi() -> None:
    """The operation with a key is found among others; an example is taken, or made from the schema."""
    key = {"name": "X-Idempotency-Key", "in": "header"}
    plain = {"requestBody": {"content": {"application/json": {"example": {"a": 1}}}}}
    found = found_in(document(users=plain, payments=plain | {"parameters": [key]}), None)
    assert (found.request.target, found.request.body, found.key_header) == (
        "/payments",
        b'{"a": 1}',
        "X-Idempotency-Key",
    )
    assert found_in(document(users=plain, orders=plain), "post /orders").request.target == "/orders"
    schema = {
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
            "n": {"anyOf": [{"type": "integer", "exclusiveMinimum": 5}, {"type": "null"}]},
            "note": {"type": "string", "minLength": 8},
        }
    }
    made = found_in(document(a={"requestBody": {"content": {"application/json": {"schema": schema}}}}), None)
    content = json.loads(made.request.body)
    assert (content["tags"], content["n"], content["note"]) == (["a"], 6, "semelxxx")


@pytest.mark.parametrize(
    "given, operation, message",
    [
        ([], None, "has no paths"),
        (document(), None, "no such operation"),
        (document(a={}, b={}), None, "Give --operation: POST /a, POST /b"),
        (document(a={}), "POST /c", "There are: POST /a"),
        (document(a={"requestBody": {"$ref": "other.yaml#/a"}}), None, "another document"),
        (document(a={"requestBody": {"content": {"text/xml": {}}}}), None, "no example of text/xml"),
    ],
)
def test_openapi_that_does_not_tell(given: Any, operation: str | None, message: str) -> None:
    """What can't be found in a document is told."""
    with pytest.raises(ConfigurationError) as error:
        found_in(given, operation)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "path, described, message",
    [
        ("/pay\r\nX: y", {}, "path '/pay\\r\\nX: y' can't be sent"),
        ("/pay\x1b[31m", {}, "can't be sent"),
        ("http://there/pay", {}, "can't be sent"),
        ("/a", {"requestBody": {"content": {"a/json\r\nX: y": {"example": 1}}}}, "'a/json\\r\\nX: y' can't be sent"),
        ("/a", {"parameters": [{"in": "header", "name": "X-User", "example": "b\r\nX: y"}]}, "X-User"),
        ("/a", {"parameters": [{"in": "header", "name": "X-User: a\r\nX", "example": "b"}]}, "can't be sent"),
        ("/a", {"parameters": [{"in": "header", "name": "Idempotency-Key: 1\r\nX"}]}, "--key-header"),
    ],
)
def test_openapi_that_would_send_something_else(path: str, described: Any, message: str) -> None:
    """A document can't smuggle a header or a second request into what is sent, nor an escape sequence to a terminal."""
    with pytest.raises(ConfigurationError) as error:
        found_in({"paths": {path: {"post": described}}}, None)
    assert message in str(error.value)
    assert not set("\x1b\r\n") & set(str(error.value))


def test_values_in_an_openapi_path() -> None:
    """A value in a path is one segment of it, whatever is in it."""
    described = {"parameters": [{"in": "path", "name": "id", "example": "a/b c?\r\n"}]}
    found = found_in({"paths": {"/pay/{id}": {"post": described}}}, None)
    assert found.request.target == "/pay/a%2Fb%20c%3F%0D%0A"


def test_parameters_of_an_openapi_operation() -> None:
    """Parameters that are required are sent, and headers that have an example; what is typed comes before them."""
    one = {"$ref": "#/components/parameters/User"}
    others = [
        {"in": "header", "name": "Idempotency-Key", "required": True, "example": "k"},
        {"in": "header", "name": "Authorization", "required": True, "example": "Bearer x"},
        {"in": "header", "name": "X-Trace", "schema": {"type": "string"}},
        {"in": "header", "name": "X-Version", "required": True, "schema": {"type": "integer", "default": 3}},
        {"in": "header", "name": "X-Shop", "schema": {"example": "a"}},
        {"in": "query", "name": "dry run", "required": True, "schema": {"type": "boolean", "default": False}},
        {"in": "query", "name": "page", "example": 7},
    ]
    user = {"in": "header", "name": "X-User", "required": True, "examples": {"one": {"value": "verify-a"}}}
    document = {
        "paths": {"/pay": {"post": {"parameters": [one, *others]}}},
        "components": {"parameters": {"User": user}},
    }
    found = found_in(document, None).request
    assert found.target == "/pay?dry+run=false"
    assert found.headers == (("X-User", "verify-a"), ("X-Version", "3"), ("X-Shop", "a"))
    target = Target("http://here", timeout=1)
    typed = request_of(target, file=None, content=None, headers=[("X-User", "me")], found=found)
    assert typed.header("x-user") == "me"


def test_presets_of_headers() -> None:
    """A vendor's name stands for its header and the length of its keys."""
    assert (key_header("paypal").name, key_header("paypal").max_length) == ("PayPal-Request-Id", 108)
    assert key_header("X-My-Key").name == "X-My-Key"
    with pytest.raises(ConfigurationError, match="nor a vendor"):
        key_header("my key")


@pytest.mark.parametrize(
    "url, is_local",
    [
        ("http://localhost:8000", True),
        ("http://api.localhost", True),
        ("http://127.8.9.1", True),
        ("http://[::1]:80/a", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example.com", False),
        ("https://api.example.com", False),
    ],
)
def test_local(url: str, is_local: bool) -> None:
    """Only loopback is local."""
    assert Target(url, timeout=1).is_local == is_local


def test_credentials_of_a_url() -> None:
    """A password in the URL is sent as a header, and is in no text."""
    target = Target("http://ann:open%20sesame@localhost:8000/v1/", timeout=1)
    assert target.base == "http://localhost:8000/v1"
    assert target.credentials == "Basic YW5uOm9wZW4gc2VzYW1l"
