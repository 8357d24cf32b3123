"""The page on long work: its program does what the page says, and its client gets its report."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.cli.application import middleware_of
from semel.errors import Unauthenticated
from semel.flows.finish import FinishReport
from semel.work import AsyncCompleter, Completer
from tests.docs.served import ROOT, asgi, load, wsgi
from tests.docs.test_django_examples import said_by
from tests.docs.test_snippets import run_python

PAGE = "docs/how-to/long-work.md"
ALICE = {"Authorization": "Bearer token-of-alice"}
KEY = {"Idempotency-Key": "report-november"}


async def test_the_exchange_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page shows of 202, progress and answer is what the program sends, but for the time in the address."""
    monkeypatch.chdir(tmp_path)
    example: Any = load("long_work_app")
    shown = [each for each in (ROOT / PAGE).read_text().split("```http\n")[1:] if "HTTP/1.1 2" in each]
    pages_answers = re.findall(r"^HTTP/1\.1 (\d+) .*?\n(.*?)\n\n(.*?)\n", "".join(shown), re.MULTILINE | re.DOTALL)
    midway: list[httpx.Response] = []
    async with asgi(example.app) as client:
        first = await client.post("/reports", json={"month": "November"}, headers=ALICE | KEY)
        where = first.headers["location"]

        async def write_part(month: str, number: int, *, idempotency_key: str) -> str:
            if number == 2:
                midway.append(await client.get(where, headers=ALICE))
            return f"part {number} of {month}, {idempotency_key}"

        example.write_part = write_part
        middleware: Any = middleware_of(example.app)
        completer = AsyncCompleter(middleware.store, middleware.finish)
        assert await completer.run_once() == FinishReport(finished=1)
        last = await client.get(where, headers=ALICE)
        again = await client.post("/reports", json={"month": "November"}, headers=ALICE | KEY)
        others = await client.get(where, headers={"Authorization": "Bearer token-of-bob"})
    name = re.compile(r"/semel/operations/[\w-]+")
    sent = [
        (str(each.status_code), "\n".join(f"{key}: {value}" for key, value in each.headers.items()), each.text)
        for each in (first, midway[0], last)
    ]
    assert [tuple(name.sub("…", part) for part in each) for each in sent] == [
        tuple(name.sub("…", part) for part in each) for each in pages_answers
    ]
    assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
    assert others.json()["code"] == "operation-not-found"


def test_the_client_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of the page follows the address until there is an answer, as often as it is told to come back."""
    monkeypatch.chdir(tmp_path)
    waits: list[float] = []
    told = {"Location": "/there", "Retry-After": "3"}
    answers = [httpx.Response(202, headers=told), httpx.Response(202, headers=told), httpx.Response(201)]
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        return answers.pop(0)

    order = run_python(PAGE)["order"]
    monkeypatch.setattr("time.sleep", waits.append)
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://here") as client:
        assert order(client, "key", "November").status_code == 201
    assert asked == ["POST /reports", "GET /there", "GET /there"]
    assert waits == [3.0, 3.0]


def refuse() -> None:
    raise Unauthenticated


def test_flask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In Flask the login of the app names the user of the client and of the worker; a login that does not know of
    workers is told of in the log; one that raises Unauthenticated answers 401.
    """
    monkeypatch.chdir(tmp_path)
    example: Any = load("long_work_flask")
    middleware: Any = middleware_of(example.app)
    completer = Completer(middleware.store, middleware.finish)
    with wsgi(example.app, middleware) as client:
        nobody = client.post("/reports", json={"month": "November"}, headers=KEY)
        first = client.post("/reports", json={"month": "November"}, headers=ALICE | KEY)
        assert completer.run_once() == FinishReport(finished=1)
        asked = [
            client.get(first.headers["location"], headers={"Authorization": f"Bearer token-of-{who}"})
            for who in ("alice", "bob")
        ]
        assert [each.status_code for each in (nobody, first, *asked)] == [400, 202, 201, 404]
        assert asked[0].json() == {"month": "November", "for": "alice"}
        knows_no_worker = lambda: example.ACCOUNTS.get(example.request.headers.get("Authorization", "")[7:])  # noqa: E731 - one line
        monkeypatch.setattr(example, "current_account", knows_no_worker)
        client.post("/reports", json={"month": "May"}, headers=ALICE | {"Idempotency-Key": "may"})
        assert Completer(middleware.store, middleware.finish).run_once() == FinishReport(failed=1)
        monkeypatch.setattr(example, "current_account", refuse)
        refused = client.post("/reports", json={"month": "June"}, headers=ALICE | {"Idempotency-Key": "june"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert "NotLoggedIn: A worker ran a request, and the app refused it" in caplog.text


DJANGO = """
from django.core.management import call_command
import httpx
from tests.docs.served import BASE_URL, load
example = load("long_work_django")
from django.contrib.auth.models import User
from django.test import Client
from semel.work import Completer
call_command("check", fail_level="WARNING")
call_command("migrate", verbosity=0)
headers = [{"Idempotency-Key": "k"}]
for name in ("jane", "joe"):
    browser = Client()
    browser.force_login(User.objects.create_user(name))
    headers.append(headers[0] | {"Cookie": f"sessionid={browser.cookies['sessionid'].value}"})
nobody, jane, joe = headers
app = example.application
with httpx.Client(transport=httpx.WSGITransport(app=app), base_url=BASE_URL) as client:
    answers = [client.post("/reports", json={"month": "May"}, headers=each) for each in (nobody, jane)]
    done = Completer(app.store, app.finish).run_once()
    answers += [client.get(answers[1].headers["location"], headers=each) for each in (jane, joe, nobody)]
    answers.append(client.post("/reports", json={"month": "May"}, headers=jane))
print([each.status_code for each in answers], answers[2].json(), answers[-1].headers["idempotent-replayed"], done)
call_command("semel_erase", "user:1", yes=True)
"""


def test_django(tmp_path: Path) -> None:
    """In Django a session names the user of the client, and a middleware that of the worker; the records belong to
    the same owner as those of Django's other guards, and are erased with them.
    """
    assert said_by(DJANGO, tmp_path) == [
        "[400, 202, 201, 404, 404, 201] {'month': 'May', 'for': 'jane'} true completed: 1 finished, 0 failed, 0 parked",
        "erased: 1 operations, 0 audit lines deleted, 0 left",
    ]
