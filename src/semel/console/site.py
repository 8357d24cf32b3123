"""The console as one function, from a request to a response. It is called in threads, and knows no framework.

What is asked is checked in this order: a known file, the login, the role, the origin and the form's own token, and only
then the store is asked.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hmac import compare_digest
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from semel.console.access import Auth, Failures, Token, User, check_auth
from semel.console.examination import Examination
from semel.console.http import Request, Response, finished, quoted, see_other
from semel.console.http import html as as_html
from semel.console.reading import Reader
from semel.console.rendering import render
from semel.console.threads import MAX_THREADS, PAGE_SECONDS, AllBusy, Threads
from semel.console.views import Refused, Views
from semel.errors import ConfigurationError, StoreError, StoreUnavailable
from semel.stores import AsyncStore, Store, store
from semel.stores.forks import start_afresh_in_children

logger = logging.getLogger("semel.console")

#: Kinds of cookies.
SESSION, FORM = "semel_console", "semel_console_form"
#: Sessions that were ended, and are remembered, at most.
MAX_ENDED = 10_000

#: The files that a page loads, and their types.
STATIC = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_BUSY = (
    "The console is busy",
    f"{MAX_THREADS} pages are being made, and none of them is ready: the store may not answer. Nothing was done.",
)
_LATE = (
    "The store does not answer",
    f"It has taken more than {PAGE_SECONDS:.0f} seconds. A form that was sent may still be carried out: look again.",
)
_OFF = (
    "This console is off, since it was not told who may see it. Give it auth=: a Token(…), or a function of your "
    "application's request that returns a User(…)."
)


#: Makes a call, with something before and after it.
Around = Callable[[Callable[[], Response]], Response]


class Site(Views):
    """One console."""

    def __init__(self, given: Any, auth: Auth = None, *, clock: Callable[[], float] = time.time) -> None:
        """Show the store that *given* is, or names; it is opened by the first request."""
        if isinstance(given, AsyncStore):
            raise ConfigurationError("The console works in threads: give it the store's URL, or a Store.")
        self.auth = check_auth(auth)
        super().__init__(Reader(given if isinstance(given, Store) else store(given)))
        self._is_given = isinstance(given, Store)
        if isinstance(given, str) and not given.startswith("memory:"):
            self.reader.findings = Examination(given)
        self._failures = Failures()
        #: Sessions that were ended by a log-out here. Other processes know nothing of them.
        self._ended: dict[str, None] = {}
        self._clock = clock
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have a lock that no thread of a parent has."""
        self._mutex = threading.Lock()

    def respond(self, request: Request) -> Response:
        """Answer *request*, whatever it is."""
        try:
            response = self._answer(request)
        except Refused as refused:
            response = self.refusal(request, refused.status, refused.title, str(refused))
            if refused.status == HTTPStatus.METHOD_NOT_ALLOWED:
                # A page that takes a form says no to what is neither.
                response = response.plus(("allow", "GET, HEAD" if request.method == "POST" else "GET, HEAD, POST"))
        except StoreError as error:
            newer = None if isinstance(error, StoreUnavailable) else self.reader.newer()
            said = " ".join(filter(None, (newer, str(error))))
            response = self.refusal(request, 503, "The store can't be read", said)
        except ConfigurationError as error:
            response = self.refusal(request, 400, "That can't be done", str(error))
        except Exception as error:
            logger.exception("A page of the console failed.")
            said = f"{type(error).__name__}. The log has the rest."
            response = self.refusal(request, 500, "This page has failed", said)
        whole = finished(response)
        return replace(whole, body=b"") if request.method == "HEAD" else whole

    def respond_in_time(self, request: Request, threads: Threads, around: Around = lambda call: call()) -> Response:
        """Answer in another thread, for a server that calls in its own: it is not kept by a store that is silent.
        *around* is what has to be done there.
        """
        if request.path.startswith("/static/"):
            return self.respond(request)
        try:
            return threads.wait(lambda: around(lambda: self.respond(request)))
        except (AllBusy, TimeoutError) as error:
            return self.unanswered(request, error)

    def unanswered(self, request: Request, error: AllBusy | TimeoutError) -> Response:
        """Answer a request for which there is no thread, or one that has not ended in time."""
        title, said = _BUSY if isinstance(error, AllBusy) else _LATE
        return finished(self.refusal(request, 503, title, said)).plus(("retry-after", "5"))

    def close(self) -> None:
        """Close the store, unless it was given."""
        if not self._is_given:
            self.reader.store.close()

    def _answer(self, request: Request) -> Response:
        parts = request.path.strip("/").split("/")
        if parts[0] == "static":
            return _static(parts[1:])
        if self.auth is None:
            raise Refused(401, "The console is off", _OFF)
        if request.method not in {"GET", "HEAD", "POST"}:
            raise Refused(405, "Method not allowed", "This page can be read (GET), and some take a form (POST).")
        if request.method == "POST":
            self._check_form(request)
        if parts == ["login"] and isinstance(self.auth, Token) and request.method == "POST":
            return self._log_in(request, self.auth)
        user = self._user(request)
        if user is None:
            return self._log_in_page(request)
        if not user.may("read"):
            raise Refused(403, "Not for you", f"{user.name} may not see this console: the role read is missing.")
        if parts == ["logout"] and request.method == "POST":
            self._end(request)
            return see_other(f"{quoted(request.base)}/").plus(_cookie(request, SESSION, "", 0))
        return self.page(request, user, parts)

    def _user(self, request: Request) -> User | None:
        if isinstance(self.auth, Token):
            return self.auth.user if self._sessions(request) else None
        return request.user

    def _sessions(self, request: Request) -> list[str]:
        """Return the sessions of a browser that are not over."""
        token, now = self.auth, self._clock()
        if not isinstance(token, Token):
            return []
        return [each for each in request.cookies(SESSION) if token.is_session(each, now) and each not in self._ended]

    def _end(self, request: Request) -> None:
        """End the sessions of a browser, and forget those that are over by themselves."""
        token, now = self.auth, self._clock()
        if isinstance(token, Token):
            with self._mutex:
                ended = [*self._ended, *self._sessions(request)]
                self._ended = dict.fromkeys([each for each in ended if token.is_session(each, now)][-MAX_ENDED:])

    def _log_in(self, request: Request, token: Token) -> Response:
        if not token.is_it(request.form.get("token", "")):
            # The right token is always let in: a stranger who guesses must not lock the operator out.
            if wait := self._failures.wait():
                page = self._log_in_page(request, f"That is not the token. Wait {wait} seconds.", 429)
                return page.plus(("retry-after", str(wait)))
            self._failures.note()
            return self._log_in_page(request, "That is not the token.")
        session = token.session(self._clock())
        return see_other(f"{quoted(request.base)}/").plus(_cookie(request, SESSION, session))

    def _log_in_page(self, request: Request, said: str = "", status: int = 401) -> Response:
        if not isinstance(self.auth, Token):
            raise Refused(401, "Log in first", "The application that has this console does not know you. Log in there.")
        return self.html(request, None, "login.html", status, title="Log in", said=said)

    def _check_form(self, request: Request) -> None:
        """Refuse a form that no page of the console has sent."""
        if not request.is_from_here:
            raise Refused(403, "Not from here", "This form was not sent by a page of the console. Nothing was done.")
        field = request.form.get("form", "").encode("utf-8", "replace")
        cookies = [each.encode("utf-8", "replace") for each in request.cookies(FORM) if each]
        if not any(compare_digest(each, field) for each in cookies):
            said = "This form is too old, or cookies are off. Nothing was done: load the page again."
            raise Refused(403, "The form is too old", said)

    def html(self, request: Request, user: User | None, template: str, status: int = 200, **values: Any) -> Response:
        """Make a page of a template, with a token for its forms."""
        kept = next(filter(_is_form_token, request.cookies(FORM)), None)
        form = kept or secrets.token_urlsafe(18)
        base = quoted(request.base)
        text = render(
            template,
            base=base,
            user=user,
            form_token=form,
            has_messages=self.reader.has_messages,
            can_log_out=isinstance(self.auth, Token),
            here_path=request.path,
            **{"form": {}, "done": None, "here": f"{base}/"} | values,
        )
        response = as_html(text, status)
        return response.plus(_cookie(request, FORM, form)) if kept is None else response

    def refusal(
        self, request: Request, status: int, title: str, said: str, *, user: User | None = None, here: str | None = None
    ) -> Response:
        """Answer with a page that says why; with plain text, if even that fails."""
        base = quoted(request.base)
        try:
            text = render(
                "refused.html",
                base=base,
                user=user,
                title=title,
                said=said,
                here=here or f"{base}/",
                form_token="",
                has_messages=False,
                can_log_out=False,
                here_path="",
                done=None,
                status=status,
            )
        except Exception:
            logger.exception("The console could not say what is wrong.")
            return Response(status, (("content-type", "text/plain; charset=utf-8"),), f"{title}: {said}\n".encode())
        return as_html(text, status)


def _static(parts: list[str]) -> Response:
    if len(parts) != 1 or parts[0] not in STATIC:
        return Response(404, (("content-type", "text/plain; charset=utf-8"),), b"There is no such file.\n")
    data = (files("semel.console") / "static" / parts[0]).read_bytes()
    return Response(200, (("content-type", STATIC[parts[0]]),), data)


def _cookie(request: Request, kind: str, text: str, age: int | None = None) -> tuple[str, str]:
    path = f"{quoted(request.base)}/"
    said = f"{request.cookie_name(kind)}={text}; Path={path}; HttpOnly; SameSite=Strict"
    if age is not None:
        said += f"; Max-Age={age}"
    return "set-cookie", said + ("; Secure" if request.is_secure else "")


def _is_form_token(text: str) -> bool:
    return len(text) == 24 and text.isascii() and text.replace("-", "").replace("_", "").isalnum()  # noqa: PLR2004 - as made
