"""Webhooks by Standard Webhooks 1.0: endpoints to send to, and receivers. Signatures are in ``core/webhook.py``.

    from semel.webhooks import Endpoints                # where to send to; the relay sends
    from semel.webhooks.fastapi import webhook          # receive, in FastAPI and Starlette; also .django, .flask
    from semel.webhooks import verify                   # receive, anywhere else

``semel.webhooks.directory`` is for a relay. Sending needs ``pip install 'semel[webhooks]'``, receiving nothing but for
keys of ed25519.
"""

from semel.core.delivery import Endpoint
from semel.core.webhook import WebhookEvent
from semel.webhooks.endpoints import AsyncEndpoints, Endpoints
from semel.webhooks.receiving import verify

__all__ = ["AsyncEndpoints", "Endpoint", "Endpoints", "WebhookEvent", "verify"]
