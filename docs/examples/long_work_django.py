"""Django: a report that is accepted at once and made by a worker. Django's own login names the user of both."""

import json
from typing import Any

import django
from django.conf import settings

MIDDLEWARE = ["sessions.middleware.SessionMiddleware", "auth.middleware.AuthenticationMiddleware"]
settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}},
    INSTALLED_APPS=[*(f"django.contrib.{app}" for app in ("contenttypes", "auth", "sessions")), "semel.django"],
    MIDDLEWARE=[*(f"django.contrib.{each}" for each in MIDDLEWARE), f"{__name__}.worker_login"],  # below Django's own
    ROOT_URLCONF=__name__,
    SECRET_KEY="for the example only",  # noqa: S106 - it is no secret
)
django.setup()

from django.contrib.auth import decorators, get_user, get_user_model  # noqa: E402 - a project has its settings elsewhere
from django.contrib.sessions.middleware import SessionMiddleware  # noqa: E402
from django.core.handlers.wsgi import WSGIRequest  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import close_old_connections  # noqa: E402
from django.http import HttpRequest, HttpResponse, JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402

from semel import Policy  # noqa: E402
from semel.stores.django import DjangoStore  # noqa: E402
from semel.wsgi import PRINCIPAL, IdempotencyMiddleware, RequestView  # noqa: E402


def worker_login(get_response: Any) -> Any:
    def login(request: Any) -> HttpResponse:
        if PRINCIPAL in request.META:  # What a worker runs has no session, and names its user. No client can.
            request.user = get_user_model().objects.get(pk=request.META[PRINCIPAL].removeprefix("user:"))
            # It has no CSRF token either. It was accepted with a key, in a header that no form of another site sends.
            request._dont_enforce_csrf_checks = True  # noqa: SLF001 - Django has no other word for it
        return get_response(request)

    return login


@decorators.login_required  # type: ignore[untyped-decorator]  # Django has no types
def report(request: HttpRequest) -> JsonResponse:  # What takes long is here, best in steps.
    return JsonResponse({"month": json.loads(request.body)["month"], "for": request.user.get_username()}, status=201)


def user_of(outside: RequestView) -> str | None:  # Django's login, asked around Django and at the status URL.
    close_old_connections()
    request = WSGIRequest(outside.raw)
    SessionMiddleware(lambda _: HttpResponse()).process_request(request)
    user = get_user(request)
    return f"user:{user.pk}" if user.is_authenticated else None  # As in Django's other guards: one owner for both.


urlpatterns = [path("reports", report)]
paths = {"/reports": Policy.ietf(required=True, in_progress="accept")}
application = IdempotencyMiddleware(get_wsgi_application(), store=DjangoStore(), scope=user_of, paths=paths)
