"""A receiver of Stripe's webhooks in Flask."""

from flask import Flask

from semel.webhooks import WebhookEvent
from semel.webhooks.flask import webhook

charges: dict[str, str] = {}

app = Flask(__name__)


@app.post("/stripe")
@webhook(secrets=["env:STRIPE_HOOK_SECRET"], preset="stripe")
def receive(event: WebhookEvent) -> None:
    if event.type == "charge.succeeded":
        charges[event.id] = event.json()["data"]["object"]["id"]
