"""The console in ASGI, WSGI and Django, by itself and mounted below a path: links, cookies and users are the host's."""

from __future__ import annotations

import asyncio
import io
import os
import re
import threading
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from semel.console import Console, Token, User
from semel.console.threads import Threads
from semel.console.wsgi import Console as WSGIConsole
from semel.errors import ConfigurationError
from semel.stores import async_store
from semel.stores.memory import MemoryStore
from tests.console.world import PARKED, World

SECRET = "a token of sixteen or more"
HERE = {"sec-fetch-site": "same-origin"}


def ada(scope: Any) -> User | None:
    return User("ada", ["read", "act"])


async def bob(scope: Any) -> User | None:
    await asyncio.sleep(0)
    return User("bob") if dict(scope["headers"]).get(b"x-user") == b"bob" else None


@pytest.fixture
def url(tmp_path: Path) -> str:
    world = World(f"sqlite:///{tmp_path}/semel.db")
    world.store.migrate()
    world.parked(PARKED)
    world.close()
    return world.url


def browser(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://host")


def mounted(kind: str, console: Console) -> Any:
    if kind == "bare":
        return console
    if kind == "starlette":
        return Starlette(routes=[Mount("/ops/semel", app=console)])
    app = FastAPI()
    app.mount("/ops/semel/", console)
    return app


@pytest.mark.parametrize("kind, base", [("bare", ""), ("starlette", "/ops/semel"), ("fastapi", "/ops/semel")])
async def test_asgi(url: str, kind: str, base: str) -> None:
    """Mounted below a path, every link, form and cookie stays below it, from the login to an action."""
    console = Console(url, auth=Token(SECRET))
    async with browser(mounted(kind, console)) as client:
        page = await client.get(f"{base}/")
        assert page.status_code == 401
        assert f'action="{base}/login"' in page.text
        token = re.search(r'name="form" value="([^"]+)"', page.text)
        assert token
        form = {"form": token[1], "token": SECRET}
        answer = await client.post(f"{base}/login", data=form, headers=HERE)
        assert (answer.status_code, answer.headers["location"]) == (303, f"{base}/")
        assert f"Path={base}/;" in answer.headers["set-cookie"]
        page = await client.get(f"{base}/operations")
        links = re.findall(r'(?:href|src|action)="([^"]+)"', page.text)
        assert all(link.startswith((f"{base}/", "#")) for link in links)
        place = re.search(rf'href="({base}/operation/[^"]+)"', page.text)
        assert place
        form_page = await client.get(f"{place[1]}/release")
        seen = re.search(r'name="seen" value="([^"]+)"', form_page.text)
        assert seen
        sent = {"form": token[1], "seen": seen[1], "reason": "why"}
        answer = await client.post(f"{place[1]}/release", data=sent, headers=HERE)
        assert answer.headers["location"] == f"{place[1]}?done=release"
        assert (await client.get(f"{base}/static/console.css")).headers["content-type"].startswith("text/css")
    console.close()


async def test_mounts_without_a_slash(url: str) -> None:
    """The mount without a slash at its end leads to the one with it, where the cookies are sent."""
    console = Console(url, auth=ada, path="/ops")
    async with browser(console) as client:
        answer = await client.get("/ops?state=x")
        assert (answer.status_code, answer.headers["location"]) == (308, "/ops/?state=x")
        assert (await client.get("/ops/")).status_code == 200
    console.close()
    app = WSGIConsole(url, auth=ada)
    status, headers, _ = asked(app, "", "/ops")
    assert (status, headers["location"]) == ("308 Permanent Redirect", "/ops/")
    app.close()


class Silent(MemoryStore):
    """A store that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def perform(self, command: Any) -> Any:
        assert self.may_answer.wait(60)
        return super().perform(command)


async def test_stores_that_do_not_answer() -> None:
    """A page that takes too long, or has no thread, is a 503 in words; files are served all the same."""
    store = Silent()
    console = Console(store, auth=ada)
    console._threads = Threads(most=2, seconds=0.05)
    async with browser(console) as client:
        for _ in range(2):
            late = await client.get("/operations")
            assert late.status_code == 503
            assert "may still be carried out" in late.text
        busy = await client.get("/operations")
        assert busy.status_code == 503
        assert "Nothing was done" in busy.text
        assert (await client.get("/static/console.js")).status_code == 200
        store.may_answer.set()
        while (await client.get("/operations")).status_code == 503:
            pass
    console.close()


def test_stores_that_do_not_answer_under_wsgi() -> None:
    """The same under WSGI: a server's own thread is not kept."""
    store = Silent()
    app = WSGIConsole(store, auth=ada)
    app._threads = Threads(most=1, seconds=0.05)
    assert "may still be carried out" in asked(app, "/operations")[2]
    assert "Nothing was done" in asked(app, "/operations")[2]
    assert asked(app, "/static/console.js")[0] == "200 OK"
    store.may_answer.set()
    while asked(app, "/operations")[0] != "200 OK":
        pass
    app.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child(url: str) -> None:
    """A console that has served before its process is forked goes on in the child, with threads of its own."""
    app = WSGIConsole(url, auth=ada)
    assert asked(app, "/")[0] == "200 OK"
    # The doctor's thread is not to be inside of SQLite at that moment: no child gets the locks in there back.
    while app.site.reader.findings is not None and app.site.reader.findings() is None:
        pass
    app._threads._seconds = 5.0
    site = app.site
    locks = [site._mutex, site._failures._mutex, site.samples._mutex, site._actor._mutex, app._threads._mutex]
    for each in locks:
        each.acquire()  # Other threads have them at that moment.
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if asked(app, "/operations")[0] == "200 OK" and asked(app, "/")[0] == "200 OK" else 1
        finally:
            os._exit(status)
    for each in locks:
        each.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asked(app, "/operations")[0] == "200 OK"
    app.close()


async def test_users_of_the_host(url: str) -> None:
    """A function of the ASGI scope, or a coroutine function, says who looks."""
    console = Console(url, auth=bob)
    async with browser(console) as client:
        assert (await client.get("/")).status_code == 401
        assert "bob" in (await client.get("/", headers={"x-user": "bob"})).text
    console.close()


async def test_slashes_too_many(url: str) -> None:
    """A mount path with slashes too many is the same path."""
    console = Console(url, auth=ada, path="//semel//")
    async with browser(console) as client:
        page = await client.get("/semel//operations")
        assert page.status_code == 200
        assert 'href="/semel/operations"' in page.text
    console.close()


async def test_long_forms(url: str) -> None:
    """A form that is too long is refused before it is read to its end."""
    console = Console(url, auth=ada)
    async with browser(console) as client:
        assert (await client.post("/login", content=b"x" * 300_000)).status_code == 413
    console.close()


async def test_forms_that_are_cut_off(url: str) -> None:
    """A form that ends before its end is not carried out, and a client that is gone is not answered."""
    console = Console(url, auth=ada)
    messages = iter([{"type": "http.request", "body": b"reason=do", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    await console({"type": "http", "method": "POST", "path": "/login", "headers": []}, receive, send)
    assert sent == []
    console.close()


@pytest.mark.parametrize("length", ["4", "-1", "x", "²", "1.0", "+3"])
def test_lengths_of_forms(url: str, length: str) -> None:
    """Under WSGI a form has to be as long as its Content-Length says, which has to be a number."""
    app = WSGIConsole(url, auth=ada)
    sent: dict[str, Any] = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": length, "wsgi.input": io.BytesIO(b"a=b")}
    status, _, said = asked(app, "/login", **sent)
    assert status == "400 Bad Request"
    assert "Nothing was done" in said
    app.close()


async def test_lifespan_and_websockets() -> None:
    """It starts and ends with its server, and closes a WebSocket."""
    console = Console("memory://", auth=ada)
    sent: list[Any] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await console({"type": "lifespan"}, receive, send)
    await console({"type": "websocket"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


@pytest.mark.parametrize("answer", ["ada", 1, RuntimeError("secret")])
async def test_logins_that_fail(url: str, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where the application's own function fails, or returns no User, nothing is shown, and the log says why."""

    def auth(_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    for status in ((await _status(Console(url, auth=auth))), asked(WSGIConsole(url, auth=auth), "/")[0]):
        assert str(status).startswith("500")
    assert "auth= has failed" in caplog.text


async def _status(console: Console) -> int:
    async with browser(console) as client:
        page = await client.get("/")
        assert "secret" not in page.text
        return page.status_code


def test_stores_of_a_loop() -> None:
    """A store for an event loop is refused in words."""
    with pytest.raises(ConfigurationError, match="give it the store's URL"):
        Console(async_store("memory://"))


def asked(app: WSGIConsole, path: str, mount: str = "", **more: Any) -> tuple[str, dict[str, str], str]:
    environ: dict[str, Any] = {"SCRIPT_NAME": mount, "PATH_INFO": path} | more
    setup_testing_defaults(environ)
    started: list[Any] = []
    body = b"".join(app(environ, lambda status, headers: started.append((status, headers))))
    return started[0][0], dict(started[0][1]), body.decode()


def test_wsgi(url: str) -> None:
    """The same pages under WSGI, with the environ's own user, below SCRIPT_NAME."""
    app = WSGIConsole(url, auth=lambda environ: User("ada") if environ.get("REMOTE_USER") == "ada" else None)
    status, headers, page = asked(app, "/", "/ops", REMOTE_USER="ada")
    assert status == "200 OK"
    assert headers["cache-control"] == "no-store"
    assert 'href="/ops/operations"' in page
    assert asked(app, "/ops", "/ops", REMOTE_USER="ada")[0] == "404 Not Found"
    assert asked(app, "/operations")[0] == "401 Unauthorized"
    for length in ("9999999", "9" * 5000):
        assert asked(app, "/", CONTENT_LENGTH=length)[0].startswith("413")
    sent: dict[str, Any] = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "3", "wsgi.input": io.BytesIO(b"a=b")}
    assert asked(app, "/login", **sent)[0] == "403 Forbidden"
    app.close()
