"""A visitor of the console without a browser or a server: requests and responses are values. It tests nothing."""

from __future__ import annotations

import html
import re
from urllib.parse import urlencode

from semel.console.access import User
from semel.console.http import Request, Response
from semel.console.rendering import operation_name
from semel.console.site import FORM, Site
from tests.console.world import SCOPE

ALL = ("read", "act", "bodies")


class Visitor:
    """A browser without a window: it keeps cookies, and sends what browsers send."""

    def __init__(self, site: Site, user: User | None = None) -> None:
        self.site = site
        self.user = user
        self.cookies: dict[str, str] = {}

    def get(self, place: str, **headers: str) -> Response:
        return self._ask("GET", place, b"", headers)

    def post(self, place: str, form: dict[str, str] | None = None, **headers: str) -> Response:
        sent = {"sec_fetch_site": "same-origin"} | headers
        body = urlencode({"form": self.cookies.get(named(FORM), "")} | (form or {})).encode()
        return self._ask("POST", place, body, sent)

    def page(self, place: str) -> str:
        response = self.get(place)
        assert response.status == 200, response.body.decode()
        return response.body.decode()

    def act(self, place: str, **form: str) -> Response:
        """Send the form of an action, as its own page has it."""
        shown = self.page(place)
        seen = re.search(r'name="seen" value="([0-9a-f]+)"', shown)
        assert seen
        return self.post(place, {"seen": seen[1], "reason": "asked the provider"} | form)

    def _ask(self, method: str, place: str, body: bytes, headers: dict[str, str]) -> Response:
        path, _, query = place.partition("?")
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent.setdefault("cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))
        response = self.site.respond(Request(method, path, "", query, sent, body, user=self.user))
        for name, value in response.headers:
            if name == "set-cookie":
                cookie, _, text = value.partition(";")[0].partition("=")
                self.cookies[cookie] = text
        return response


def named(kind: str) -> str:
    """Return what a cookie is called, for a visitor that says no host."""
    return Request("GET", "/").cookie_name(kind)


def header(response: Response, name: str) -> str | None:
    return dict(response.headers).get(name)


def text_of(response: Response) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", response.body.decode()))


def operation(key: str, scope: str = SCOPE) -> str:
    return f"/operation/{operation_name(scope, key)}"
