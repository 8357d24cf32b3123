"""A receiver of GitHub's webhooks in Django, as one file: the view is what its decorator makes of the handler."""

import os

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.urls import path

from semel.webhooks import WebhookEvent
from semel.webhooks.django import webhook

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.environ.get("DJANGO_SECRET_KEY", "for this example"),
    ALLOWED_HOSTS=["localhost"],
    MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"],
)

pushes: list[str] = []


@webhook(secrets=["env:GITHUB_HOOK_SECRET"], preset="github")
def receive(event: WebhookEvent) -> None:
    if event.type == "push":
        pushes.append(event.json()["ref"])


urlpatterns = [path("github", receive)]
application = get_wsgi_application()
