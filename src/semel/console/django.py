"""The console below a path of a Django project. What it shows is in ``site.py``.

from semel.console.django import console_urls, staff

urlpatterns = [path("semel/", include(console_urls(auth=staff)))]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import close_old_connections
from django.http import HttpRequest, HttpResponse
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt

from semel.console.access import Auth, Token, User, check_user
from semel.console.http import MAX_BODY, Request, Response, cut_off, login_failed, placed, too_long, with_slash
from semel.console.site import Site
from semel.console.threads import Threads
from semel.django import conf


def console_urls(store: Any = None, *, auth: Auth = None) -> list[Any]:
    """Return the console's URLs, for ``include``. It shows the store that ``SEMEL`` names, or another *store*.

    *auth* is a function of Django's request that returns a ``User`` or None, such as ``staff``; or a ``Token``.
    """
    return [re_path(r"^(?P<rest>.*)$", _View(store, auth).respond, name="semel-console")]


def staff(request: HttpRequest) -> User | None:
    """Let Django's own permissions decide: staff with ``semel.view_record`` may read; those with
    ``semel.view_record_contents`` see bodies, too; superusers may act.
    """
    user: Any = getattr(request, "user", None)
    if user is None or not user.is_active or not user.is_staff or not user.has_perm("semel.view_record"):
        return None
    roles = ["read"]
    if user.has_perm("semel.view_record_contents"):
        roles.append("bodies")
    if user.is_superuser:
        roles.append("act")
    return User(user.get_username(), roles)


class _View:
    """Makes the site when it is first asked: the settings are not read while URLs are."""

    def __init__(self, store: Any, auth: Auth) -> None:
        self._store = store
        self._auth = auth
        self._site: Site | None = None
        self._threads = Threads()
        # Its forms have a token of their own, and the origin is checked.
        self.respond = csrf_exempt(self._respond)

    def _respond(self, request: HttpRequest, rest: str, **_: Any) -> HttpResponse:
        # The path of the mount may have parameters of its own, which are the application's.
        body = request.body
        if len(body) > MAX_BODY:
            return _as_django(too_long())
        if (said := request.META.get("CONTENT_LENGTH")) and said != str(len(body)):
            return _as_django(cut_off())
        auth = self._auth
        try:
            user = None if auth is None or isinstance(auth, Token) else check_user(auth(request))
        except Exception as error:  # noqa: BLE001 - it is the application's function
            return _as_django(login_failed(error))
        whole = request.path
        path, base = placed(whole, whole[: len(whole) - len(rest)] if rest else whole)
        if base and path == "/" and not whole.endswith("/"):
            return _as_django(with_slash(base, request.META.get("QUERY_STRING", "")))
        asked = Request(
            request.method or "GET",
            path,
            base,
            request.META.get("QUERY_STRING", ""),
            {name.lower(): value for name, value in request.headers.items()},
            body,
            is_secure=request.is_secure(),
            user=user,
        )
        return _as_django(self._made().respond_in_time(asked, self._threads, _around))

    def _made(self) -> Site:
        if self._site is None:
            self._site = Site(self._opened(), self._auth)
        return self._site

    def _opened(self) -> Any:
        """Return a store of the console's own: its actor is the user, and not the application."""
        if self._store is not None:
            return self._store
        return conf.settings().opened()


def _around(call: Callable[[], Response]) -> Response:
    """Do as Django does with each request: a thread has connections of its own, and here no request begins or ends."""
    close_old_connections()
    try:
        return call()
    finally:
        close_old_connections()


def _as_django(response: Response) -> HttpResponse:
    made = HttpResponse(response.body, status=response.status)
    del made.headers["Content-Type"]
    for name, value in response.headers:
        if name == "set-cookie":
            made.cookies.load(value)
        else:
            made.headers[name] = value
    return made
