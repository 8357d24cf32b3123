"""`semel verify`, as it is typed: what it prints, what it asks, and how it ends."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from semel.verify.runner import CHECKS
from tests.verify.planted import Planted, served

Semel = Callable[..., subprocess.CompletedProcess[str]]

FIELDS = {"name", "verdict", "rule", "sent", "received", "why", "curl"}
REQUEST = """\
POST /payments
X-Account: alice
Authorization: Bearer open-sesame
Content-Type: application/json

{"amount": 500}
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(Planted(), dates=False) as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "pay.http").write_text(REQUEST)
    return "pay.http"


def reported(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode in {0, 1, 2}, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_json(url: str, file: str, semel: Semel) -> None:
    """The report has an object for each check, with everything that it rests on; a correct API ends with 0."""
    count = f"{url}/correct/count#$.n"
    options = ("--count", count, "--other-header", "X-Account: bob", "--settle", "1ms", "--format", "json")
    done = semel("verify", f"{url}/correct", "--request", file, *options)
    report = reported(done)
    assert done.returncode == 0, [each for each in report["checks"] if each["verdict"] != "pass"]
    assert len(report["checks"]) >= 30
    assert all(each.keys() >= FIELDS for each in report["checks"])
    assert all(isinstance(value, str) for each in report["checks"] for value in each.values())
    assert {each["verdict"] for each in report["checks"]} == {"pass"}
    assert {each["name"] for each in report["checks"] + report["not_run"]} == {each.name for each in CHECKS}
    assert "Creates at most" in done.stderr
    assert "open-sesame" not in done.stdout + done.stderr
    assert '-H "Authorization: $AUTHORIZATION"' in report["checks"][0]["curl"]


def test_failure(url: str, file: str, semel: Semel) -> None:
    """A failure ends with 1, and is told with its rule, its reason and a line for a shell."""
    count = f"{url}/no-fingerprint/count#$.n"
    options = ("--request", file, "--count", count, "--only", "other-body-refused", "--settle", "1ms")
    done = semel("verify", f"{url}/no-fingerprint", *options)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["verdict", "check", "what", "was", "seen"]
    assert lines[1].split()[:2] == ["fail", "other-body-refused"]
    assert "  rule     The same key with another body is refused" in done.stdout
    assert "curl -si -X POST" in done.stdout
    assert lines[-1].startswith("fail: 0 passed, 1 failed, 0 inconclusive")


def test_inconclusive(url: str, file: str, semel: Semel) -> None:
    """What could not be decided ends with 2."""
    options = ("--request", file, "--only", "race-2", "--format", "json")
    done = semel("verify", f"{url}/deterministic", *options)
    assert done.returncode == 2
    (check,) = reported(done)["checks"]
    assert check["verdict"] == "inconclusive"
    assert "Give --count" in check["why"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "Which API?"),
        (("http://127.0.0.1:1",), "Which request?"),
        (("ftp://127.0.0.1", "--json", "{}"), "begins with http://"),
        (("http://127.0.0.1:1", "--json", "{}"), "no connection to http://127.0.0.1:1: "),
        (("http://127.0.0.1:99999", "--json", "{}"), "port"),
        (("http://127.0.0.1:1", "--json", '{"a": }'), "--json, line 1, column 7"),
        (("http://127.0.0.1:1", "--request", "none.http"), "none.http can't be read"),
        (("http://127.0.0.1:1", "--request", "wrong.http"), "wrong.http, line 2, column 8: "),
        (("http://127.0.0.1:1", "--json", "{}", "--only", "rase-*"), "no check 'rase-*'"),
        (("http://127.0.0.1:1", "--json", "{}", "--count", "http://127.0.0.1:1/n"), "--count is URL#$.path"),
        (("http://127.0.0.1:1", "--json", "{}", "--other-header", "bob"), "'bob' is no header"),
        (("http://127.0.0.1:1", "--json", "{}", "--settle", "soon"), "not a duration"),
        (("http://127.0.0.1:1", "--json", "{}", "--timeout", "0"), "'0' is not a duration"),
        (("http://127.0.0.1:1", "--json", "{}", "--rate", "nan"), "--rate"),
        (("http://192.0.2.1", "--json", "{}"), "not local. Say --yes"),
        (("http://127.0.0.1:1", "--json", "{}", "--profile", "rfc"), "rfc"),
        (("http://127.0.0.1:1", "--jason", "{}"), "--jason"),
    ],
)
def test_usage(arguments: tuple[str, ...], message: str, semel: Semel, tmp_path: Path) -> None:
    """A wrong command line ends with 3 and says what is wrong; 2 has another meaning here."""
    (tmp_path / "wrong.http").write_text("POST /payments\nAccept \n\n{}")
    done = semel("verify", *arguments)
    assert done.returncode == 3
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_junit_and_markdown(url: str, file: str, semel: Semel) -> None:
    """JUnit's XML has a failure for each that failed; a page in Markdown has a table."""
    options = ("--request", file, "--count", f"{url}/key-cut/count#$.n", "--settle", "1ms")
    checks = ("--only", "long-key-not-cut", "--only", "key-case", "--only", "error-replayed")
    junit = semel("verify", f"{url}/key-cut", *options, *checks, "--format", "junit")
    suite = ET.fromstring(junit.stdout)[0]  # noqa: S314 - our own
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert [each[0].tag for each in suite if len(each)] == ["failure", "skipped"]
    page = semel("verify", f"{url}/key-cut", *options, *checks, "--format", "markdown").stdout
    assert "| ✅ | `key-case` |" in page
    assert "## ❌ long-key-not-cut" in page


def test_list(semel: Semel) -> None:
    """All checks can be named without an API."""
    done = semel("verify", "--list")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1 + len(CHECKS)


def test_escape_sequences_of_a_document(url: str, semel: Semel, tmp_path: Path) -> None:
    """What a document says in an error does not reach the terminal as it is."""
    (tmp_path / "api.json").write_text(json.dumps({"paths": {"/\x1b[2J": {"post": {}}, "/b": {"post": {}}}}))
    done = semel("verify", f"{url}/correct", "--openapi", "api.json")
    assert done.returncode == 3
    assert "Which operation?" in done.stderr
    assert "\x1b" not in done.stderr


def test_what_may_be_replaced_is_announced(url: str, file: str, semel: Semel) -> None:
    """Before PUT and PATCH are sent it is said that they are."""
    options = ("--request", file, "--only", "patch-guarded")
    assert "replace" in semel("verify", f"{url}/correct", *options, "--may-replace").stderr
    assert "replace" not in semel("verify", f"{url}/correct", *options).stderr


def test_openapi(url: str, semel: Semel, tmp_path: Path) -> None:
    """A document of OpenAPI gives the request: its path, an example, and the name of the header."""
    schema = {"type": "object", "required": ["amount"], "properties": {"amount": {"type": "integer", "minimum": 1}}}
    key = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Payment"}}}
    paths = {"/payments": {"post": {"parameters": [key], "requestBody": {"content": content}}, "get": {}}}
    document = {"openapi": "3.1.0", "paths": paths, "components": {"schemas": {"Payment": schema}}}
    (tmp_path / "api.json").write_text(json.dumps(document))
    options = ("--openapi", "api.json", "-H", "X-Account: alice", "--only", "replay-body", "--format", "json")
    report = reported(semel("verify", f"{url}/correct", *options))
    assert [each["verdict"] for each in report["checks"]] == ["pass"]
    assert '{"amount": 2}' in report["checks"][0]["sent"]
