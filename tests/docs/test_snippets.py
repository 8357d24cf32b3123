"""What the pages show is run: Python as it stands, curl against the app it is about, and what is typed."""

import argparse
import doctest
import http
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main

from semel import Policy
from semel.cli.app import app as cli
from semel.core.problem import refused
from tests.docs.served import ROOT, asgi, load
from tools.docs import SITUATIONS, pages

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r"^<!-- include: .*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
PAGES = [page.relative_to(ROOT).as_posix() for page in pages(ROOT)]


def blocks(page: str, language: str) -> list[str]:
    """The blocks that were typed into the page; an included program has a test of its own."""
    text = INCLUDED.sub("", (ROOT / page).read_text())
    return [code for kind, code in BLOCK.findall(text) if kind == language]


def run_python(page: str) -> dict[str, Any]:
    """Run the Python of a page from top to bottom, as its reader would."""
    names: dict[str, Any] = {"__name__": "snippet"}
    for code in blocks(page, "python"):
        if code.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, names, page, page, 0)
            assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
        else:
            exec(compile(code, page, "exec"), names)  # noqa: S102 - it is what the page tells people to do
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python on a page runs."""
    monkeypatch.chdir(tmp_path)
    run_python(page)


def test_the_clients_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of the page keeps its key, waits as it is told, and stops at a final answer."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    busy = {"code": "idempotency-key-in-progress", "retryable": True}
    answers: list[httpx.Response | Exception] = [
        httpx.ReadError(""),
        httpx.Response(409, json=busy, headers={"Retry-After": "1", "Content-Type": "application/problem+json"}),
        httpx.Response(201),
    ]
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    post_once = run_python("docs/how-to/clients.md")["post_once"]
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert post_once(client, "http://here/", {}).status_code == 201
    assert 0.05 <= waits[0] <= 0.1
    assert waits[1:] == [1.0]
    assert len(keys) == 3
    assert len(set(keys)) == 1


async def test_readme_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What curl prints in the README is what the program above it answers (`date` and `server` are the server's)."""
    monkeypatch.chdir(tmp_path)
    (transcript,) = blocks("README.md", "console")
    async with asgi(load("quickstart").app) as client:
        said = await replayed(transcript, client)
    assert said == transcript


async def replayed(transcript: str, client: httpx.AsyncClient) -> str:
    lines = []
    for line in transcript.splitlines():
        if line.startswith("$ "):
            lines += [line, *await curl(line.removeprefix("$ "), client)]
    return "\n".join(lines) + "\n"


async def curl(command: str, client: httpx.AsyncClient) -> list[str]:
    """Do as curl would, and return what it would print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-i", action="store_true")
    parser.add_argument("-o")
    parser.add_argument("-w", default="")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("--json")
    given = parser.parse_args(shlex.split(command)[1:])
    headers = dict(each.split(": ", 1) for each in given.H) | {"content-type": "application/json"}
    answer = await client.post(f"http://{given.url}", content=given.json, headers=headers)
    if given.o == "/dev/null":
        return [str(given.w).replace("%{http_code}", str(answer.status_code)).removesuffix("\\n")]
    status = http.HTTPStatus(answer.status_code)
    head = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{n}: {v}" for n, v in answer.headers.items()), ""]
    return [*(head if given.i else []), answer.text]


def test_problems_are_spelled_as_they_are_sent() -> None:
    """Every problem that a page shows is one that is sent, to the letter."""
    sent = {(refused(error(), Policy.ietf()).body or b"").decode() for error in SITUATIONS}
    shown = [line for page in PAGES for line in (ROOT / page).read_text().splitlines() if line.startswith('{"type"')]
    assert shown
    assert set(shown) <= sent


TYPED = re.compile(r"^(?:\$ |ExecStart=\S*/)?(semel (?!migrate$).*?)(?: +#.*)?$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_shown_exist(page: str) -> None:
    """Every command of the command line that a page tells people to type is there, with its options."""
    text = "\n".join(code for kind in ("", "ini") for code in blocks(page, kind))
    for typed in TYPED.findall(text):
        command: Any = typer.main.get_command(cli)
        for word in shlex.split(typed)[1:]:
            if (usual := getattr(command, "usual", None)) and word not in command.commands:
                command = command.commands[usual]
            if word.startswith("--"):
                assert word in {name for each in command.params for name in each.opts}, typed
            elif hasattr(command, "commands"):
                command = command.commands[word]
        assert not hasattr(command, "commands"), typed


def test_reap_says_what_the_page_says(tmp_path: Path) -> None:
    """`semel reap` prints the line that is shown for it."""
    command = [sys.executable, "-m", "semel", "reap", "--store", f"sqlite:///{tmp_path}/semel.db"]
    semel = [sys.executable, "-m", "semel", "migrate", command[-1]]
    subprocess.run(semel, check=True, capture_output=True)
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"$ semel reap\n{said}" in blocks("docs/how-to/run-the-services.md", "")


async def test_the_cors_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page allows and exposes lets a page of another origin send its key, and read what came of it."""
    monkeypatch.chdir(tmp_path)
    app = run_python("docs/how-to/cors.md")["app"]
    origin = {"Origin": "https://shop.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,idempotency-key"}
    async with asgi(app) as client:
        assert (await client.options("/payments", headers=origin | asked)).status_code == 200
        for is_replay in (None, "true"):
            key = {"Idempotency-Key": "k"}
            answer = await client.post("/payments", json={"amount": 5}, headers=origin | key)
            assert (answer.status_code, answer.headers.get("idempotent-replayed")) == (201, is_replay)
            assert answer.headers["access-control-allow-origin"] == "https://shop.example"
            assert "Idempotent-Replayed" in answer.headers["access-control-expose-headers"]
