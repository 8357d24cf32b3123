"""What the console answers, from a request value to a response value: no server, no framework, no browser."""

from __future__ import annotations

import html
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from semel.console import sampling
from semel.console.access import Token, User
from semel.console.examination import Examination, Found
from semel.console.http import POLICY, Request, placed
from semel.console.rates import rates
from semel.console.reading import Reader
from semel.console.rendering import operation_name, without_secrets
from semel.console.sampling import Samples
from semel.console.site import FORM, SESSION, Site
from semel.core.commands import AddCounts, Look, Minutes, Note, Park, ReadTrail, Survey
from semel.core.record import Hold
from semel.core.state import State
from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores import store
from semel.stores.dialect import messages_of
from semel.stores.inbox import InboxStatements
from semel.stores.memory import MemoryStore
from semel.stores.outbox import OutboxStatements
from semel.stores.webhooks import EndpointStatements
from semel.webhooks import Endpoints
from semel.work import Sweeper
from tests.console.visitor import ALL, Visitor, header, named, operation, text_of
from tests.console.world import EXPORT, FINISHED, NASTY, NASTY_BODY, PARKED, SCOPE, STUCK, World, claim, fill
from tests.stores.colours import wait_until

SECRET = "a token of sixteen or more"


@pytest.fixture(scope="module")
def full_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("console") / "full.db"
    world = World(f"sqlite:///{path}")
    world.store.migrate()
    fill(world, many=60)
    world.close()
    return path


@pytest.fixture
def world(full_file: Path, tmp_path: Path) -> Iterator[World]:
    """A store of one's own on a bad day."""
    copy = tmp_path / "full.db"
    copy.write_bytes(full_file.read_bytes())
    made = World(f"sqlite:///{copy}")
    yield made
    made.close()


@pytest.fixture
def visitor(world: World) -> Iterator[Visitor]:
    """Ada, who may do everything."""
    site = Site(world.url, lambda _: None)
    yield Visitor(site, User("ada", ALL))
    site.close()


def empty(auth: Any = None, store: Any = "memory://") -> Site:
    return Site(store, auth)


class TestAccess:
    """Who gets in."""

    @pytest.mark.parametrize("place", ["/", "/operations", "/nothing", "/login", operation("x")])
    def test_off_until_told(self, place: str) -> None:
        """Without auth= every page is a 401 that says how to turn the console on."""
        response = Visitor(empty()).get(place)
        assert response.status == 401
        assert "Give it auth=" in text_of(response)

    def test_host_does_not_know_them(self) -> None:
        """A visitor that the host application does not know is told to log in there."""
        assert Visitor(empty(lambda _: None)).get("/").status == 401

    def test_role_read(self) -> None:
        """A user without the role read sees nothing."""
        assert Visitor(empty(lambda _: None), User("eve", ())).get("/").status == 403

    def test_login(self) -> None:
        """The token is sent in a form, and a cookie that scripts can't read takes its place."""
        visitor = Visitor(empty(Token(SECRET)))
        assert 'name="token"' in visitor.get("/").body.decode()
        response = visitor.post("/login", {"token": SECRET})
        assert (response.status, header(response, "location")) == (303, "/")
        cookie = next(value for name, value in response.headers if name == "set-cookie")
        assert cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
        assert SECRET not in cookie
        assert visitor.get("/").status == 200
        session = visitor.cookies[named(SESSION)]
        assert visitor.post("/logout").status == 303
        assert visitor.get("/").status == 401
        assert visitor.get("/", cookie=f"{named(SESSION)}={session}").status == 401

    def test_cookies_of_a_mounted_console(self) -> None:
        """Below a path, over https, a cookie goes to that path alone, and never in the clear."""
        response = empty(Token(SECRET)).respond(Request("GET", "/", "/ops/semel", is_secure=True))
        assert "; Path=/ops/semel/; HttpOnly; SameSite=Strict; Secure" in str(header(response, "set-cookie"))

    @pytest.mark.parametrize("cookie", ["", "x", "1.2", "9999999999.nonce.0000", "é.b.c"])
    def test_forged_sessions(self, cookie: str) -> None:
        """A session that the token did not sign is none."""
        assert Visitor(empty(Token(SECRET))).get("/", cookie=f"{named(SESSION)}={cookie}").status == 401

    def test_cookies_of_the_host(self) -> None:
        """Cookies of other shapes, which the host application may set, hide none of the console's."""
        token = Token(SECRET)
        cookie = f'odd={{"a": "b c", []}}; =; x; {named(SESSION)}={token.session(2**31)}; é=1'
        assert Visitor(empty(token)).get("/", cookie=cookie).status == 200

    def test_several_sessions(self) -> None:
        """Of several cookies with one name, as a browser has for several paths, one that is valid will do."""
        token = Token(SECRET)
        old, valid = token.session(0), token.session(2**31)
        site = empty(token)
        for cookies in ((old, valid), (valid, old)):
            cookie = "; ".join(f"{named(SESSION)}={each}" for each in cookies)
            assert Visitor(site).get("/", cookie=cookie).status == 200

    def test_consoles_beside_each_other(self) -> None:
        """Cookies of two consoles on one machine have names of their own, by port and by path."""
        places = [("127.0.0.1:8900", ""), ("127.0.0.1:8901", ""), ("127.0.0.1:8900", "/ops")]
        names = {Request("GET", "/", base, headers={"host": host}).cookie_name(SESSION) for host, base in places}
        assert len(names) == 3

    def test_sessions_end(self) -> None:
        """A login lasts a working day."""
        token = Token(SECRET)
        assert token.is_session(token.session(1000), 1000 + 11 * 3600)
        assert not token.is_session(token.session(1000), 1000 + 12 * 3600)

    def test_white_space(self) -> None:
        """White space at the ends of a token is of no effect, wherever it comes from."""
        for made, typed in ((SECRET, f" {SECRET}\n"), (f"{SECRET}\n", SECRET), (f"{SECRET} ", f"{SECRET} ")):
            assert Token(made).is_it(typed)

    def test_login_is_limited(self) -> None:
        """After ten wrong tokens in a minute a client is told to wait; the right one is let in all the same."""
        visitor = Visitor(empty(Token(SECRET)))
        visitor.get("/")
        for _ in range(10):
            assert visitor.post("/login", {"token": "wrong"}).status == 401
        response = visitor.post("/login", {"token": "wrong"})
        assert response.status == 429
        assert 0 < int(str(header(response, "retry-after"))) <= 61
        assert visitor.post("/login", {"token": SECRET}).status == 303

    @pytest.mark.parametrize(
        "headers",
        [
            {"sec_fetch_site": "cross-site"},
            {"sec_fetch_site": "same-site"},
            {"sec_fetch_site": "none"},
            {"sec_fetch_site": "cross-site", "origin": "http://here", "host": "here"},
        ],
    )
    def test_forms_from_elsewhere(self, headers: dict[str, str]) -> None:
        """A form that another site has sent is refused, with the right token and without."""
        visitor = Visitor(empty(Token(SECRET)))
        visitor.get("/")
        assert visitor.post("/login", {"token": SECRET}, **headers).status == 403

    @pytest.mark.parametrize(
        "origin, status",
        [
            ("http://here:8900", 303),
            ("https://here:8900", 303),
            ("http://there", 403),
            ("null", 403),
            ("http://[", 403),
        ],
    )
    def test_old_browsers(self, origin: str, status: int) -> None:
        """Where a browser does not say from which site a form comes, its origin has to be this host."""
        site = empty(Token(SECRET))
        visitor = Visitor(site)
        visitor.get("/")
        form = visitor.cookies[named(FORM)]
        body = urlencode({"form": form, "token": SECRET}).encode()
        name = Request("GET", "/", headers={"host": "here:8900"}).cookie_name(FORM)
        headers = {"origin": origin, "host": "here:8900", "cookie": f"{name}={form}"}
        assert site.respond(Request("POST", "/login", headers=headers, body=body)).status == status
        headers |= {"origin": "null", "host": ""}
        assert site.respond(Request("POST", "/login", headers=headers, body=body)).status == 403
        del headers["origin"]
        assert site.respond(Request("POST", "/login", headers=headers, body=body)).status == 403

    def test_forms_have_a_token(self) -> None:
        """A form without the token of its page is refused."""
        visitor = Visitor(empty(Token(SECRET)))
        visitor.get("/")
        assert visitor.post("/login", {"token": SECRET, "form": "other"}).status == 403
        visitor.cookies.clear()
        assert visitor.post("/login", {"token": SECRET, "form": ""}).status == 403

    def test_wrong_settings(self) -> None:
        """What can be no login is refused when the console is made."""
        for wrong in (
            lambda: Token("short"),
            lambda: Token(f"short{' ' * 20}"),
            lambda: User("a", ["write"]),
            lambda: empty("token"),
            lambda: Site("x://"),
        ):
            with pytest.raises(ConfigurationError):
                wrong()

    def test_every_answer_is_locked(self, visitor: Visitor) -> None:
        """Pages, files, refusals and redirects all forbid scripts, frames, caches and referrers from elsewhere."""
        for response in (
            visitor.get("/"),
            visitor.get("/static/console.js"),
            visitor.get("/static/../site.py"),
            visitor.get("/nothing"),
            visitor.post("/logout"),
            Visitor(empty()).get("/"),
        ):
            assert header(response, "content-security-policy") == POLICY
            assert header(response, "x-content-type-options") == "nosniff"
            assert header(response, "cache-control") == "no-store"
            assert header(response, "referrer-policy") == "no-referrer"

    def test_methods(self, visitor: Visitor) -> None:
        """A page is read, or takes a form; HEAD has no body; anything else is refused."""
        refused = visitor._ask("PUT", "/", b"", {})
        assert (refused.status, dict(refused.headers)["allow"]) == (405, "GET, HEAD, POST")
        visitor.get("/")
        refused = visitor.post("/operations")
        assert (refused.status, dict(refused.headers)["allow"]) == (405, "GET, HEAD")
        head = visitor._ask("HEAD", "/", b"", {})
        assert (head.status, head.body) == (200, b"")


class TestPages:
    """What is shown."""

    def test_overview(self, visitor: Visitor) -> None:
        """The first page counts, and names the newest trouble first, with the link to it."""
        page = visitor.page("/")
        kinds = re.findall(r'class="kind">([^<]+)<', page)
        assert set(kinds) == {"endpoint off", "inbox", "dead letter", "stuck", "to be resolved"}
        assert kinds[-1] == "to be resolved"
        assert f'href="{operation(PARKED)}"' in page
        assert "31,000 of 50,000 rows" in page
        assert '<progress max="1" value="0.62"' in page

    def test_empty_stores(self) -> None:
        """An empty store is said to be empty."""
        visitor = Visitor(empty(lambda _: None), User("ada"))
        said = text_of(visitor.get("/"))
        assert "The store is empty" in said
        assert "No operation is stuck" in said
        assert "No operations." in text_of(visitor.get("/operations"))
        assert visitor.get("/outbox").status == 404

    def test_findings(self, visitor: Visitor) -> None:
        """What is wrong with the set-up is shown, with what to type; if nothing is, there is no word of it."""
        assert "set-up" not in visitor.page("/")
        visitor.site.reader.findings = lambda: (Found("error", "fsync", "fsync = off.", "ALTER SYSTEM <b>"),)
        said = visitor.page("/")
        assert "fsync = off." in said
        assert "ALTER SYSTEM &lt;b&gt;" in said
        visitor.site.reader.findings = lambda: ()
        assert "set-up" not in visitor.page("/")

    def test_the_doctor_is_asked_beside_the_pages(self, tmp_path: Path) -> None:
        """A store that a URL names is examined in the background; what waits for a person is shown elsewhere."""
        url = f"sqlite:///{tmp_path}/keys.db"
        store(url).migrate()
        (tmp_path / "keys.db").chmod(0o644)
        site = Site(url, lambda _: None)
        assert isinstance(site.reader.findings, Examination)
        wait_until(lambda: bool(site.reader.findings and site.reader.findings()))
        visitor = Visitor(site, User("ada"))
        assert "keys.db has mode 0644" in visitor.page("/")
        site.close()

    def test_charts_have_gaps(self, visitor: Visitor) -> None:
        """What was not counted is drawn as a gap, and never as zero."""
        assert visitor.page("/").count('class="gap"') == 5

    @pytest.mark.parametrize(
        "query, keys",
        [
            ("state=unknown", [PARKED]),
            ("state=stuck", [STUCK]),
            ("state=stuck&endpoint=transfers&age=%3E1m&scope=" + SCOPE, [STUCK]),
            ("state=stuck&endpoint=payments", []),
            ("key=" + FINISHED, [FINISHED]),
            ("reason=provider+did+not", [PARKED]),
            ("status=5xx&age=1s", []),
            ("endpoint=/exports&state=processing", [f"{EXPORT}-2", EXPORT]),
        ],
    )
    def test_filters(self, visitor: Visitor, query: str, keys: list[str]) -> None:
        """Filters in the URL are combined, and the form shows them again."""
        found = re.findall(r'<td class="key"><a href="([^"]+)"', visitor.page(f"/operations?{query}"))
        assert found == [operation(key) for key in keys]

    def test_digests(self, visitor: Visitor) -> None:
        """A key is found by the digest that logs have."""
        digest = re.search(r"Digest in logs</dt><dd><code>([0-9a-f]{12})", visitor.page(operation(PARKED)))
        assert digest
        assert operation(PARKED) in visitor.page(f"/operations?key={digest[1]}")

    def test_pages_of_a_list(self, visitor: Visitor) -> None:
        """A list goes on where the page before it ended."""
        first = visitor.page("/operations")
        link = re.search(r'rel="next" href="([^"]+)"', first)
        assert link
        second = visitor.page(html.unescape(link[1]))
        names = [re.findall(r'href="(/operation/[^"]+)"', each) for each in (first, second)]
        assert len(names[0]) == 50
        assert names[1]
        assert not set(names[0]) & set(names[1])

    @pytest.mark.parametrize("query", ["age=soon", "status=abc", "state=odd"])
    def test_unreadable_filters(self, visitor: Visitor, query: str) -> None:
        """A filter that can't be read is a 400 that says how to write it, with what was typed still there."""
        response = visitor.get(f"/operations?{query}")
        assert response.status == 400
        assert "notice bad" in response.body.decode()

    @pytest.mark.parametrize("query", ["after=x", "after=%00", "after=%FF", "scan=-1&after=WzEsMiwzXQ"])
    def test_broken_cursors(self, visitor: Visitor, query: str) -> None:
        """A broken place in a list is a 400 in words."""
        response = visitor.get(f"/operations?{query}")
        assert response.status == 400
        assert "can't be read" in text_of(response)

    @pytest.mark.parametrize("query", ["scan=1", "scan=99999999999", "scan=é", "&".join(f"x{n}=1" for n in range(99))])
    def test_odd_queries(self, visitor: Visitor, query: str) -> None:
        """Whatever else is in a query is of no effect."""
        assert visitor.get(f"/operations?{query}").status == 200

    def test_one_operation(self, visitor: Visitor) -> None:
        """An operation shows its steps, told apart, the keys of its effects, its timeline and what can be typed."""
        page = visitor.page(operation(PARKED))
        said = html.unescape(page)
        assert '<li class="done">' in page
        assert "outcome unknown" in page
        assert len(re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-", page)) >= 2
        assert "parked</b> the provider did not answer in 30 s" in said
        assert f"semel keys resolve {PARKED} --scope {SCOPE} --not-applied" in said

    @pytest.mark.parametrize("stored", [f"00-{'a1' * 16}-{'b2' * 8}-01", "<script>alert(1)</script>"])
    def test_the_trace_of_an_operation(self, visitor: Visitor, world: World, stored: str) -> None:
        """The id of the trace that ran an operation is shown, to be copied; what is none is not shown."""
        world.ended("traced", traceparent=stored)
        page = visitor.page(operation("traced"))
        assert ("<dt>Trace</dt>" in page, f"<code>{'a1' * 16}</code>" in page) == (stored[0] == "0", stored[0] == "0")
        assert "alert(1)" not in page

    def test_messages_of_an_operation(self, visitor: Visitor) -> None:
        """Messages that an operation published are listed with it, while they are in the outbox."""
        page = visitor.page(operation(FINISHED))
        assert "Messages it published" in page
        assert page.count('href="/message/') == 1

    def test_bodies_need_their_role(self, visitor: Visitor) -> None:
        """Bodies and results are shown to those with the role bodies, and to no others."""
        page = operation(FINISHED)
        assert "ch_1" in visitor.page(page)
        assert "4711" in visitor.page(page)
        visitor.user = User("bob", ["read", "act"])
        assert "ch_1" not in visitor.page(page)
        assert "4711" not in visitor.page(page)
        assert "The role bodies is needed" in text_of(visitor.get(page))

    def test_secrets_need_the_role_bodies(self, visitor: Visitor, world: World) -> None:
        """Without the role bodies, headers of a message are names only, and a URL has neither user nor query."""
        name = world.message("order.paid", "orders")
        Endpoints(world.store).add("hook", "https://example.com/in?token=q1w2", secrets=["env:SECRET"])
        assert "/orders" in text_of(visitor.get(f"/message/{name}"))
        assert "q1w2" in visitor.page("/webhooks")
        visitor.user = User("bob", ["read", "act"])
        said = text_of(visitor.get(f"/message/{name}"))
        assert "ce-source" in said
        assert "/orders" not in said
        for place in ("/webhooks", f"/webhook/{operation_name('', 'hook')}/disable"):
            said = text_of(visitor.get(place))
            assert "https://example.com/in?…" in said
            assert "q1w2" not in said

    @pytest.mark.parametrize(
        "url, shown",
        [
            ("https://u:p@h:1/in", "https://h:1/in"),
            ("https://h/a@b?x=1#y", "https://h/a@b?…"),
            ("https://h#x", "https://h?…"),
            ("no url", "no url"),
        ],
    )
    def test_urls_without_secrets(self, url: str, shown: str) -> None:
        """The host and the path of an endpoint are shown to all."""
        assert without_secrets(url) == shown

    def test_hostile_text(self, visitor: Visitor) -> None:
        """Markup, terminal escapes, right-to-left marks and NUL are shown as text."""
        page = visitor.page(operation(NASTY, "<b>bold</b>\ttenant"))
        assert NASTY_BODY.decode().startswith("<script>")
        for each in ("<script>alert", "<svg onload", "<img src", "<b>bold", "\x1b", "\u202e", "\x00"):
            assert each not in page
        said = html.unescape(page)
        assert "<script>alert(1)</script><svg onload" in said
        assert "\\u202e" in said
        assert "<script>alert" not in visitor.page("/operations")

    def test_halves_of_surrogate_pairs(self) -> None:
        """A key and a scope with half of a surrogate pair, which some stores can hold, are listed and found."""
        store = MemoryStore()
        store.perform(claim("k\ud800", 1, scope="s\udfff"))
        visitor = Visitor(empty(lambda _: None, store), User("ada", ALL))
        assert "k\\ud800" in visitor.page("/operations")
        assert "k\\ud800" in visitor.page("/operations?" + urlencode({"key": "k\\ud800", "scope": "s\\udfff"}))
        assert visitor.get(operation("k\ud800", "s\udfff")).status == 200

    def test_what_the_store_can_not_hold(self, visitor: Visitor) -> None:
        """A filter or an address with a character that the store can't hold is a 400 or a 404."""
        for query in ("key=%5Cud800", "scope=%5Cud800", "reason=%5Cud800"):
            assert visitor.get(f"/operations?{query}").status == 400
        after = operation_name("\ud800", "x")
        assert visitor.get(f"/operations?after={after}").status == 400
        assert visitor.get(operation("\ud800")).status == 404

    def test_gone(self, visitor: Visitor, world: World) -> None:
        """Of an operation that is deleted, the audit trail is left; of one that never was, nothing."""
        visitor.act(f"{operation(PARKED)}/release")
        assert "Its audit trail is left" in text_of(visitor.get(operation(PARKED)))
        for place in (
            operation("never"),
            "/operation/x",
            "/operation/%00",
            "/message/x",
            "/message/" + "0" * 36,
            "/x/y/z",
        ):
            assert visitor.get(place).status == 404

    def test_outbox(self, visitor: Visitor) -> None:
        """The outbox lists dead letters first, and can be filtered."""
        page = visitor.page("/outbox")
        assert page.index("ledger") < page.index("order-0")
        assert "invoice-1" not in visitor.page("/outbox?to=orders")
        assert "order-0" not in visitor.page("/outbox?state=dead")
        assert visitor.get("/outbox?state=x").status == 400
        assert "evt_77120" in visitor.page("/inbox")
        assert "hooks.acme.example" in visitor.page("/webhooks")

    def test_a_destination_that_no_relay_serves(self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where a message waits for long, and nothing was tried, its row and its page say what to type."""
        typed = "semel relay --to orders=URL"
        page = visitor.page("/outbox?to=orders")
        assert typed not in text_of(visitor.get("/outbox?to=orders"))
        monkeypatch.setattr("semel.stores.outbox.UNSENT_AFTER", timedelta(seconds=-1))
        assert typed in text_of(visitor.get("/outbox?to=orders"))
        (first, *_) = re.findall(r'href="/message/([^"]+)"', page)
        assert typed in text_of(visitor.get(f"/message/{first}"))


class TestRates:
    """How requests have ended, by minute, from the store's own counts."""

    def test_an_hour(self) -> None:
        """Outcomes are grouped; a minute that no process has counted is a gap, and one without requests is zero."""
        now = datetime(2026, 11, 18, 12, 30, 20, tzinfo=UTC)
        begun, idle, last = (now.replace(second=0) - timedelta(minutes=each) for each in (40, 39, 1))
        read = Minutes(
            now,
            (
                (begun, "ran", 3),
                (begun, "freed", 1),
                (begun, "added", 2),
                (idle, "added", 1),
                (last, "missing", 2),
                (last, "of a newer version", 1),
                (now - timedelta(hours=3), "ran", 9),
            ),
        )
        found = rates(read)
        ran = found.series[0]
        assert (ran.name, ran.highest, len(ran.values)) == ("Ran", 4, 60)
        assert ran.values[18:22] == (None, 4, 0, None)
        assert (found.since, found.missing, found.has_gap_before) == (begun, 37, True)
        assert next(each for each in found.series if each.name == "Refused").values[-2:] == (3, None)
        assert {each[0]: each[2] for each in found.totals} == {
            "ran": 3,
            "freed": 1,
            "missing": 2,
            "of a newer version": 1,
        }
        assert rates(Minutes(now, ())).since is None

    def test_the_page(self, visitor: Visitor, world: World) -> None:
        """The overview has a chart for each group with its numbers as a table, and says since when it is counted."""
        assert "No counts in the last hour" in text_of(visitor.get("/"))
        world.store.perform(AddCounts({"ran": 7, "replayed": 2, "mismatch": 1, "added": 1}))
        page = visitor.page("/")
        assert 'aria-label="Replayed, by minute, last hour; highest 2"' in page
        assert "Mismatch" in page
        said = text_of(visitor.get("/"))
        assert "No counts before" in said
        assert re.search(r"ran\s*the handler ran, and its answer is stored\s*7", said)

    def test_an_older_schema(self, visitor: Visitor, world: World) -> None:
        """Without the table, the page says what is missing, and shows the rest."""
        world.sql("DROP TABLE semel_counts")
        assert "This store has no counts" in text_of(visitor.get("/"))


class TestCounting:
    """The store is counted by one thread at a time, and no page waits for another's count."""

    def test_the_last_counts_meanwhile(self) -> None:
        """While one thread counts, others show what was counted last."""
        counts = MemoryStore().perform(Survey(10, 10))
        clock = [0.0]
        begun, may_go_on = threading.Event(), threading.Event()

        def count(since: Any) -> Any:
            if since is not None:
                begun.set()
                assert may_go_on.wait(60)
            return counts, None

        samples = Samples(count, lambda: clock[0])
        assert samples.now() is counts
        clock[0] = 100
        slow = threading.Thread(target=samples.now)
        slow.start()
        assert begun.wait(60)
        assert samples.now() is counts
        assert len(samples.series()) == 5
        may_go_on.set()
        slow.join()

    def test_the_first_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first count is waited for, but not for ever; one that fails is made again."""
        counts = MemoryStore().perform(Survey(10, 10))
        begun, may_go_on = threading.Event(), threading.Event()
        answers: list[Any] = [StoreUnavailable("gone"), (counts, None)]

        def count(since: Any) -> Any:
            begun.set()
            assert may_go_on.wait(60)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def first() -> None:
            with suppress(StoreUnavailable):
                samples.now()

        samples = Samples(count)
        slow = threading.Thread(target=first)
        slow.start()
        assert begun.wait(60)
        monkeypatch.setattr(sampling, "FIRST_SECONDS", 0.01)
        with pytest.raises(StoreUnavailable, match="does not answer"):
            samples.now()
        may_go_on.set()
        slow.join()
        assert samples.now() is counts


class TestActions:
    """What can be done."""

    def test_only_what_applies(self, visitor: Visitor) -> None:
        """Only actions that apply are shown, and none to those who may only look."""
        for key, names in (
            (PARKED, ["applied", "not-applied", "release"]),
            (STUCK, ["release"]),
            (f"{EXPORT}-3", ["release"]),
            (FINISHED, []),
        ):
            place = operation(key)
            assert re.findall(rf'href="{place}/([a-z-]+)"', visitor.page(place)) == names
        visitor.user = User("bob", ["read"])
        assert "/release" not in visitor.page(operation(PARKED))
        assert visitor.get(f"{operation(PARKED)}/release").status == 403
        assert visitor.post(f"{operation(PARKED)}/release").status == 403

    def test_what_does_not_apply(self, visitor: Visitor) -> None:
        """An action that does not apply is refused."""
        assert visitor.get(f"{operation(FINISHED)}/release").status == 400
        assert visitor.get(f"{operation(PARKED)}/explode").status == 400

    def test_preview(self, visitor: Visitor) -> None:
        """A page says first what will happen, and asks for a reason."""
        said = text_of(visitor.get(f"{operation(PARKED)}/not-applied"))
        assert "A retry will go on after order_created, and do charge_created." in said
        assert "the card may be charged again" in said
        response = visitor.act(f"{operation(PARKED)}/not-applied", reason="  ")
        assert response.status == 422
        assert "Say why" in text_of(response)

    def test_free(self, visitor: Visitor, world: World) -> None:
        """An operation that was swept half-way is free: it is no trouble, and no page calls it stuck."""
        assert "its worker is gone" in text_of(visitor.get("/"))
        assert Sweeper(world.store).run_once().freed == 1
        said = text_of(visitor.get(operation(STUCK)))
        assert "It was given back half-way, and is free" in said
        assert "Free since" in said
        assert "its worker is gone" not in text_of(visitor.get("/"))

    def test_release(self, visitor: Visitor, world: World) -> None:
        """A freed key is gone, and the trail has the user and the reason."""
        response = visitor.act(f"{operation(STUCK)}/release", reason="customer asked\x1b for it")
        assert (response.status, header(response, "location")) == (303, f"{operation(STUCK)}?done=release")
        assert world.store.perform(Look(SCOPE, STUCK)) is None
        lines = world.store.perform(ReadTrail(SCOPE, STUCK))[-2:]
        assert [line.event for line in lines] == ["discarded", "explained"]
        assert {line.actor for line in lines} == {"ada (console)"}
        assert lines[-1].detail == "customer asked\\x1b for it"

    def test_it_happened(self, visitor: Visitor, world: World) -> None:
        """An effect that happened is done, with the result that was typed."""
        place = f"{operation(PARKED)}/applied"
        for wrong in ("{", '{"a": 1, "a": 2}', '[{"a": {"b": 1, "b": 1}}]'):
            assert visitor.act(place, result=wrong).status == 422
        assert visitor.act(place, result='{"charge": "ch_9"}').status == 303
        record = world.store.perform(Look(SCOPE, PARKED))
        assert record is not None
        assert (record.state, record.recovery_point) == (State.PROCESSING, "charge_created")
        events = [line.event for line in world.store.perform(ReadTrail(SCOPE, PARKED))]
        assert events[-3:] == ["resolved", "applied", "explained"]

    def test_an_operation_that_ends_by_it(self, visitor: Visitor, world: World) -> None:
        """Where the operation itself is in doubt, the page has its status, and where another one can be given."""
        world.store.perform(Park(world.accepted("again")))
        said = text_of(visitor.get(f"{operation('again')}/applied"))
        assert "ends with status 200" in said
        assert "another status, or with headers such as Location, is given on the command line" in said
        assert f"semel keys resolve again --scope {SCOPE} --applied RESULT --status 200" in said

    def test_it_did_not_happen(self, visitor: Visitor, world: World) -> None:
        """An effect that did not happen is to be done again, after the steps that are done."""
        assert visitor.act(f"{operation(PARKED)}/not-applied").status == 303
        record = world.store.perform(Look(SCOPE, PARKED))
        assert record is not None
        assert (record.state, record.recovery_point) == (State.PROCESSING, "order_created")

    def test_reasons_that_are_lost(self, caplog: pytest.LogCaptureFixture) -> None:
        """Where an action is done and its reason can't be kept, the page says both."""

        class Forgetful(MemoryStore):
            def perform(self, command: Any) -> Any:
                if isinstance(command, Note):
                    raise StoreUnavailable("The trail is full.")
                return super().perform(command)

        store = Forgetful()
        hold = store.perform(claim("key", 1))
        store.perform(Park(hold))
        visitor = Visitor(empty(lambda _: None, store), User("ada", ALL))
        said = text_of(visitor.act(f"{operation('key')}/release"))
        assert "Done, but the reason could not be kept" in said
        assert "The key is free. The trail is full." in said
        assert store.perform(Look(SCOPE, "key")) is None

    def test_run_again(self, visitor: Visitor, world: World) -> None:
        """A parked operation with a stored request, and no effect in doubt, can be handed to a worker."""
        hold = world.accepted("again")
        world.store.perform(Park(hold))
        assert visitor.act(f"{operation('again')}/again").status == 303
        record = world.store.perform(Look(SCOPE, "again"))
        assert record is not None
        assert (record.state, record.is_stuck) == (State.PROCESSING, True)

    def test_changed_meanwhile(self, visitor: Visitor, world: World) -> None:
        """What has changed since its page was made is left alone."""
        place = f"{operation(STUCK)}/release"
        shown = visitor.page(place)
        seen = re.search(r'name="seen" value="([0-9a-f]+)"', shown)
        assert seen
        record = world.store.perform(Look(SCOPE, STUCK))
        assert record is not None
        again = world.held_again(STUCK, Hold(SCOPE, STUCK, record.attempt, record.token))
        response = visitor.post(place, {"seen": seen[1], "reason": "why"})
        assert response.status == 409
        assert "nothing was done" in text_of(response)
        after = world.store.perform(Look(SCOPE, STUCK))
        assert after is not None
        assert after.token == again.token

    def test_dead_letters(self, visitor: Visitor, world: World) -> None:
        """A dead letter is sent again, or dropped, once."""
        first, second = re.findall(r'href="/message/([^"]+)"', visitor.page("/outbox?state=dead"))
        assert visitor.act(f"/message/{first}/requeue").status == 303
        assert visitor.get(f"/message/{first}/requeue").status == 400
        assert visitor.act(f"/message/{second}/drop").status == 303
        assert visitor.get(f"/message/{second}").status == 404
        trail = text_of(visitor.get(f"/message/{first}"))
        assert "requeued" in trail
        assert "asked the provider" in trail
        assert trail.count("ada (console)") == 2

    def test_endpoints(self, visitor: Visitor, world: World) -> None:
        """An endpoint of webhooks is turned off and on again, with a reason."""
        (place,) = re.findall(r'href="(/webhook/[^"]+/disable)"', visitor.page("/webhooks"))
        assert visitor.act(place).status == 303
        assert "asked the provider (ada)" in text_of(visitor.get("/webhooks"))
        assert visitor.act(place.replace("disable", "enable")).status == 303
        assert visitor.get("/webhook/x/enable").status == 404

    def test_parked_messages(self, visitor: Visitor, world: World) -> None:
        """A parked message of the inbox is tried again, or given up, with a preview and a reason, once."""
        requeue, drop = re.findall(r'href="(/receipt/[^"]+)"', visitor.page("/inbox"))
        assert "whatever is delivered again" in visitor.page(drop)
        assert visitor.post(requeue, {"seen": "0" * 32, "reason": "why"}).status == 409
        assert visitor.act(requeue).headers[0][1].endswith("/inbox?done=requeue")
        assert "next delivery" in text_of(visitor.get("/inbox?done=requeue"))
        lines = world.store.perform(ReadTrail("inbox:billing", "evt_77120"))
        assert [(each.event, each.actor) for each in lines][-2:] == [
            ("requeued", "ada (console)"),
            ("explained", "ada (console)"),
        ]
        assert visitor.get(drop).status == 400
        assert visitor.get("/receipt/x/drop").status == 404
        assert Visitor(visitor.site, User("bob", ["read"])).get(drop).status == 403

    def test_guards(self, world: World) -> None:
        """What has changed between the look and the statement is left alone by the statement itself."""
        check_guards(world)


def check_guards(world: World) -> None:
    reader = Reader(world.store)
    outbox, inbox = OutboxStatements(messages_of(world.store)), InboxStatements(messages_of(world.store))
    endpoints = EndpointStatements(world.store)
    (dead,), listed = reader.outbox(("dead",), None), reader.receipt("billing", "evt_77120")
    on, off = reader.endpoints()
    assert listed is not None
    for changed in (replace(dead[0], attempts=99), replace(dead[0], ended_at=1.0)):
        for change in (outbox.requeue, outbox.drop):
            assert reader.carry_out(change(id=dead[0].id, seen=changed)) == 0
    for receipt in (replace(listed, changed_at=1.0), replace(listed, receipt=replace(listed.receipt, attempts=99))):
        for answer in (inbox.requeue, inbox.drop):
            assert reader.run(answer(listed.consumer, listed.message_id, receipt)) is False
    for other in (replace(off, url="https://other.example"), replace(off, is_on=True), replace(off, reason="other")):
        assert reader.run(endpoints.enable(off.name, other)) is None
        assert reader.run(endpoints.disable(off.name, "why", seen=other)) is None
    assert reader.carry_out(outbox.requeue(id=dead[0].id, seen=dead[0])) == 1
    assert reader.carry_out(outbox.drop(id=dead[1].id, seen=dead[1])) == 1
    assert reader.run(inbox.drop(listed.consumer, listed.message_id, listed)) is True
    assert reader.run(endpoints.enable(off.name, off)) is not None
    assert reader.run(endpoints.disable(on.name, "why", seen=on)) is not None


class TestBadInput:
    """What goes wrong is said in words."""

    def test_stores_that_are_not_there(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A server that can't be reached, and a file without tables, are a page that says so."""
        (tmp_path / "other.db").touch()
        for url in ("postgresql://127.0.0.1:1/nothing?connect_timeout=1", "redis://127.0.0.1:1/0"):
            response = Visitor(empty(lambda _: None, url), User("ada")).get("/")
            assert response.status == 503
            assert "Traceback" not in response.body.decode()
        assert not [each for each in caplog.records if each.levelno >= logging.ERROR]

    def test_newer_schemas(self, world: World) -> None:
        """A store that a newer version has changed is shown, with one line that says so; and so where it fails."""
        world.sql("INSERT INTO semel_keys_migrations (name, applied_at) VALUES ('9999_pre_future', 0)")
        visitor = Visitor(Site(world.url, lambda _: None), User("ada", ALL))
        line = "A newer version of Semel has changed this store's tables (9999_pre_future)"
        assert text_of(visitor.get("/")).count(line) == 1
        world.sql("ALTER TABLE semel_keys RENAME COLUMN request_line TO line")
        refused = visitor.get("/operations")
        assert refused.status == 503
        assert line in text_of(refused)

    def test_older_schemas(self, world: World) -> None:
        """A store with an older schema is shown as far as it goes, and what is missing is said."""
        world.sql("DROP TABLE semel_inbox")
        visitor = Visitor(Site(world.url, lambda _: None), User("ada", ALL))
        said = text_of(visitor.get("/"))
        assert "The inbox can't be read" in said
        assert visitor.get("/inbox").status == 503
        world.sql("DROP TABLE semel_keys")
        for place in ("/", "/operations", operation(PARKED)):
            response = visitor.get(place)
            assert response.status == 503, response.body
        visitor.site.close()

    def test_faults_of_our_own(self, caplog: pytest.LogCaptureFixture) -> None:
        """A page that fails is a 500 without a traceback in it; the log has that."""

        class Broken(MemoryStore):
            def perform(self, command: Any) -> Any:
                raise RuntimeError("<script>secret")

        response = Visitor(empty(lambda _: None, Broken()), User("ada")).get("/")
        assert response.status == 500
        assert "secret" not in response.body.decode()
        assert "secret" in caplog.text

    @pytest.mark.parametrize(
        "path, root, below",
        [
            ("/", "", ("/", "")),
            ("/semel", "/semel", ("/", "/semel")),
            ("/semel/", "/semel/", ("/", "/semel")),
            ("//semel//operations/", "//semel/", ("/operations", "/semel")),
            ("/operations", "/semel", ("/operations", "/semel")),
            ("/semelina", "/semel", ("/semelina", "/semel")),
            ("//evil.example/x", "", ("/evil.example/x", "")),
        ],
    )
    def test_mounts(self, path: str, root: str, below: tuple[str, str]) -> None:
        """Slashes too many, in a path or in the mount, are of no effect."""
        assert placed(path, root) == below

    def test_million_scopes(self) -> None:
        """Many scopes are no matter: none is listed that was not asked for."""
        store = MemoryStore()
        for number in range(300):
            store.perform(claim("key", number, scope=f"scope-{number}", lease=timedelta(hours=1)))
        page = Visitor(empty(lambda _: None, store), User("ada")).page("/operations?key=key")
        assert page.count('<td class="scope"') == 50
