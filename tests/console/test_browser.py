"""The console in a real browser: logins, live pages, actions, hostile text, and what a page may load.

After each test the browser's own log has no violation of the content policy, and no request has left the host.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright
from playwright.sync_api import Request as Sent

from semel.console import Console, Token
from semel.console.rendering import operation_name
from semel.core.commands import Complete, Look, Save
from semel.core.message import Answer
from semel.core.recovery import Done, Progress
from semel.core.state import Event, State
from tests.console.world import EXPORT, FINISHED, NASTY, PARKED, SCOPE, STUCK, World, fill
from tests.kit.servers import NoServerBinary
from tests.kit.servers.programs import CHROMIUM

SECRET = "a token of sixteen or more"
#: Axe's words for what keeps people out.
BARRIERS = {"serious", "critical"}

#: What is pressed, and what is said then.
MESSAGE_ACTIONS = (("Send it again", "The message will be sent again."), ("Drop it", "The message is deleted."))
ENDPOINT_ACTIONS = (
    ("Turn it off… (hook-acme)", "The endpoint is off."),
    ("Turn it on… (hook-acme)", "The endpoint is on."),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which(CHROMIUM.names[0])
    if program is None:
        raise NoServerBinary(CHROMIUM)
    with sync_playwright() as playwright:
        # Without its sandbox, since tests run as root on some machines; the pages are our own.
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def served(console: Console) -> Iterator[str]:
    started = threading.Event()

    class Served(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    server = Served(uvicorn.Config(console, port=0, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        console.close()


class Window:
    """A tab of a browser, logged in or not; it notes what must not happen."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.origin = origin
        self.faults: list[str] = []
        context.set_default_timeout(60_000)
        self.page: Page = context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._sent)
        self.page.on("dialog", lambda dialog: self.faults.append(f"a dialog: {dialog.message}"))

    def open(self, path: str) -> Page:
        self.page.goto(self.origin + path)
        return self.page

    def log_in(self) -> Page:
        """Follow the link that the command line prints."""
        self.page.goto(f"{self.origin}/#{SECRET}")
        expect(self.page.locator(".figures")).to_be_visible()
        return self.page

    def _said(self, message: ConsoleMessage) -> None:
        # A status of 401 or 409 is logged, too, and is no fault.
        if "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def _sent(self, request: Sent) -> None:
        where = urlsplit(request.url)
        if where.scheme not in {"data", "blob"} and f"{where.scheme}://{where.netloc}" != self.origin:
            self.faults.append(f"a request to {request.url}")
        if SECRET in request.url or SECRET in request.headers.get("referer", ""):
            self.faults.append("the token is in a URL")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(f"sqlite:///{tmp_path}/semel.db")
    made.store.migrate()
    fill(made, many=60)
    yield made
    made.close()


@pytest.fixture
def origin(world: World) -> Iterator[str]:
    token = Token(SECRET, name="ada", roles=["read", "act", "bodies"])
    with served(Console(world.url, auth=token)) as place:
        yield place


@contextmanager
def window(
    browser: Browser, origin: str, *, width: int = 1280, scheme: str = "light", js: bool = True
) -> Iterator[Window]:
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
        java_script_enabled=js,
    )
    made = Window(context, origin)
    yield made
    context.close()
    assert made.faults == []


def place(key: str, scope: str = SCOPE) -> str:
    return f"/operation/{operation_name(scope, key)}"


def test_a_night_on_duty(browser: Browser, origin: str, world: World) -> None:
    """From the printed link to the newest trouble, what it means, a decision and its trace, by mouse and keyboard."""
    with window(browser, origin) as tab:
        page = tab.log_in()
        assert page.url == f"{origin}/"
        assert page.evaluate("document.cookie") == ""
        page.goto(f"{origin}/#{SECRET}")
        page.wait_for_url(f"{origin}/")
        tab.open(f"/operations#{SECRET}%")
        page.wait_for_url(f"{origin}/operations")
        tab.open("/")
        page.get_by_role("link", name="POST /payments").click()
        expect(page.get_by_text("outcome unknown").first).to_be_visible()
        page.get_by_role("link", name="It happened…").click()
        expect(page.get_by_text("A retry will go on after it.")).to_be_visible()
        page.get_by_label("Its result, as JSON").fill('{"charge": "ch_9"}')
        page.get_by_label("Reason, for the audit trail").fill("the provider has it")
        page.keyboard.press("Enter")
        expect(page.get_by_role("status")).to_have_text("Resolved: it happened.")
        expect(page.get_by_text("the provider has it")).to_be_visible()
    record = world.store.perform(Look(SCOPE, PARKED))
    assert record is not None
    assert record.state is State.PROCESSING


def test_hostile_text(browser: Browser, origin: str) -> None:
    """Stored markup, scripts, right-to-left marks and NUL are text on every page: nothing runs, nothing is loaded."""
    with window(browser, origin) as tab:
        tab.log_in()
        for path in (place(NASTY, "<b>bold</b>\ttenant"), "/operations", "/outbox", "/"):
            page = tab.open(path)
            assert page.evaluate("document.querySelectorAll('script:not([src]), img, iframe').length") == 0
        page = tab.open(place(NASTY, "<b>bold</b>\ttenant"))
        expect(page.locator("pre").first).to_contain_text("<script>alert(1)</script><svg onload")
        assert "\\u202e" in page.locator("pre").first.inner_text()


@pytest.mark.slow
def test_live(browser: Browser, origin: str, world: World) -> None:
    """A page that is open shows what happens, and keeps the focus and the place."""
    with window(browser, origin) as tab:
        page = tab.log_in()
        expect(page.locator("#pulse")).to_have_text("live")
        page.locator('#queue a[href*="operation"]').first.focus()
        focused = page.evaluate("document.activeElement.getAttribute('href')")
        world.parked("another", request_line="POST /late")
        expect(page.get_by_role("link", name="POST /late")).to_be_visible(timeout=60_000)
        assert page.evaluate("document.activeElement.getAttribute('href')") == focused


def test_parts_that_come_later(browser: Browser, origin: str, world: World) -> None:
    """A page that is open gets the parts that it did not have: steps, an answer; commands that no longer apply go."""
    hold = world.held("later", lease=timedelta(minutes=10))
    with window(browser, origin) as tab:
        tab.log_in()
        page = tab.open(place("later"))
        expect(page.locator("#commands")).to_contain_text("semel keys release")
        assert page.locator("#steps, #answer").count() == 0
        world.store.perform(Save(hold, Progress((Done("phase", "made", {"id": 7}),))))
        world.store.perform(Complete(hold, Event.COMPLETE, Answer(201, (), b"it is made")))
        expect(page.locator("#answer")).to_contain_text("it is made", timeout=60_000)
        expect(page.locator("#steps")).to_contain_text("made")
        expect(page.locator("#commands")).not_to_contain_text("semel keys release")
        order = page.evaluate("[...document.querySelectorAll('section.live')].map((each) => each.id)")
        assert order == ["summary", "steps", "history", "answer", "commands"]


@pytest.mark.slow
def test_without_scripts(browser: Browser, origin: str) -> None:
    """Without JavaScript the token is typed, pages are read, and forms work."""
    with window(browser, origin, js=False) as tab:
        page = tab.open("/")
        page.get_by_label("Token").fill(SECRET)
        page.get_by_role("button", name="Log in").click()
        expect(page.locator(".figures")).to_be_visible()
        tab.open(f"{place(STUCK)}/release")
        page.get_by_label("Reason, for the audit trail").fill("gone")
        page.get_by_role("button", name="Free the key").click()
        expect(page.get_by_role("status")).to_have_text("The key is free.")
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Token")).to_be_visible()


@pytest.mark.slow
def test_every_action(browser: Browser, origin: str, world: World) -> None:
    """Each action leads to its page, asks for a reason, and says what was done; a second window finds it changed."""
    world.accepted("again")
    world.parked("again-parked", request_line="POST /again")
    with window(browser, origin) as tab:
        page = tab.log_in()
        for path, button, said in (
            (f"{place('again-parked')}/not-applied", "It did not happen", "Resolved: it did not happen."),
            (f"{place(f'{EXPORT}-3')}/release", "Free the key", "The key is free."),
        ):
            tab.open(path)
            page.get_by_label("Reason, for the audit trail").fill("because")
            page.get_by_role("button", name=button).click()
            expect(page.get_by_role("status")).to_have_text(said)
        for button, said in MESSAGE_ACTIONS:
            tab.open("/outbox?state=dead")
            page.locator("tbody a").first.click()
            page.get_by_role("link", name=button).click()
            page.get_by_label("Reason, for the audit trail").fill("because")
            page.get_by_role("button", name=button).click()
            expect(page.get_by_role("status")).to_have_text(said)
        for link, said in ENDPOINT_ACTIONS:
            tab.open("/webhooks")
            page.get_by_role("link", name=link).click()
            page.get_by_label("Reason, for the audit trail").fill("because")
            page.get_by_role("button", name=link.partition("…")[0]).click()
            expect(page.get_by_role("status")).to_have_text(said)
        tab.open(f"{place(PARKED)}/release")
        record = world.store.perform(Look(SCOPE, PARKED))
        assert record is not None
        world.resolve(record)
        page.get_by_label("Reason, for the audit trail").fill("too late")
        page.get_by_role("button", name="Free the key").click()
        expect(page.get_by_text("It has changed since you looked, and nothing was done.")).to_be_visible()


@pytest.mark.parametrize("width", [1280, 390])
def test_long_names(browser: Browser, origin: str, world: World, width: int) -> None:
    """A key, a scope, a message and a consumer that are as long as they may be make no page wider than its window."""
    key, scope, name = "k" * 255, "s" * 255, "n" * 200
    world.parked(key, scope=scope, request_line=f"POST /{'p' * 200}")
    world.dead_letter(name, name, "e" * 900)
    world.unhandled(name, name, "e" * 900)
    paths = ["/", "/operations", "/outbox", "/inbox", place(key, scope), f"{place(key, scope)}/applied"]
    paths.append(f"/receipt/{operation_name(name, name)}/drop")
    with window(browser, origin, width=width) as tab:
        page = tab.log_in()
        wide = []
        for path in paths:
            tab.open(path)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append(path)
        assert wide == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_barriers(browser: Browser, origin: str, scheme: str, width: int) -> None:
    """Axe finds no serious barrier on any page, light and dark, wide and narrow; no page is wider than its window."""
    with window(browser, origin, width=width, scheme=scheme) as tab:
        found = []
        paths = ["/login", "/nothing", "/", "/operations", "/operations?age=zz", "/outbox", "/inbox", "/webhooks"]
        paths += [place(FINISHED), place(PARKED), f"{place(PARKED)}/applied", f"{place(PARKED)}/not-applied"]
        for path in paths:
            if path == "/":
                tab.log_in()
            page = tab.open(path)
            results = Axe().run(page)
            found += [
                f"{path}: {each['id']} {[node['target'] for node in each['nodes']][:3]}"
                for each in results.response["violations"]
                if each["impact"] in BARRIERS
            ]
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                found.append(f"{path} is wider than {width}")
        # Axe puts its own script into the page, past the policy; it loads nothing.
        tab.faults = [each for each in tab.faults if not re.search("axe", each)]
        assert found == []
