"""The console as a WSGI app, to be run by itself or mounted below a path. What it shows is in ``site.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from semel.console.access import Auth, Token, User, check_user
from semel.console.http import MAX_BODY, Request, Response, cut_off, login_failed, placed, too_long, with_slash
from semel.console.site import Site
from semel.console.threads import Threads

#: Of a ``Content-Length``.
MAX_DIGITS = 20

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


class Console:
    """The console of one store. Nothing is shown until *auth* says who may see it."""

    def __init__(self, store: Any, *, auth: Auth = None) -> None:
        """Show *store*: a URL, or a store for threads. *auth* is a ``Token``, or a function of the WSGI environ that
        returns a ``User`` or None.
        """
        self.site = Site(store, auth)
        self._threads = Threads()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        response = self._respond(environ)
        start_response(f"{response.status} {HTTPStatus(response.status).phrase}", list(response.headers))
        return [response.body]

    def close(self) -> None:
        """Close the store, unless it was given."""
        self._threads.close()
        self.site.close()

    def _respond(self, environ: Environ) -> Response:
        said = environ.get("CONTENT_LENGTH") or "0"
        # A negative length would be a read without an end.
        if not said.isascii() or not said.isdigit():
            return cut_off()
        # Python refuses to read a number of too many digits.
        if len(said) > MAX_DIGITS or int(said) > MAX_BODY:
            return too_long()
        length = int(said)
        body = environ["wsgi.input"].read(length) if length else b""
        if len(body) != length:
            return cut_off()
        try:
            user = self._user(environ)
        except Exception as error:  # noqa: BLE001 - it is the application's function
            return login_failed(error)
        mount = _text(environ.get("SCRIPT_NAME", ""))
        # The path is what is below the mount: it is put in front, so that a path like the mount's is no matter.
        path, base = placed(mount + "/" + _text(environ.get("PATH_INFO", "")), mount)
        if base and not environ.get("PATH_INFO"):
            return with_slash(base, environ.get("QUERY_STRING", ""))
        headers = {
            name[5:].replace("_", "-").lower(): str(value)
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        request = Request(
            environ["REQUEST_METHOD"],
            path,
            base,
            environ.get("QUERY_STRING", ""),
            headers,
            body,
            is_secure=environ.get("wsgi.url_scheme") == "https",
            user=user,
        )
        return self.site.respond_in_time(request, self._threads)

    def _user(self, environ: Environ) -> User | None:
        auth = self.site.auth
        return None if auth is None or isinstance(auth, Token) else check_user(auth(environ))


def _text(given: str) -> str:
    """Return a path of the environ as text: WSGI has bytes as Latin-1."""
    return given.encode("latin-1").decode("utf-8", "replace")
