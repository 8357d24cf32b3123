"""Django in one file: the middleware goes around the WSGI application, which wsgi.py calls `application`."""

import json

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path

from semel.door import RequestView
from semel.wsgi import IdempotencyMiddleware

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"])

payments: list[int] = []


def pay(request: HttpRequest) -> JsonResponse:
    payments.append(json.loads(request.body)["amount"])
    return JsonResponse({"payment": len(payments), "amount": payments[-1]}, status=201)


urlpatterns = [path("payments", pay)]


def whose_request(request: RequestView) -> str | None:
    """Django's own login has not run yet at this point, so the scope is read from the request's headers."""
    return request.headers.get("x-account")


application = IdempotencyMiddleware(get_wsgi_application(), store="sqlite:///semel.db", scope=whose_request)
