"""A receiver of Standard Webhooks in FastAPI: what is not signed with our secret never gets to the handler."""

from fastapi import FastAPI

from semel.webhooks import WebhookEvent
from semel.webhooks.fastapi import webhook

paid: list[int] = []

app = FastAPI()


@app.post("/webhooks")
@webhook(secrets=["env:SHOP_HOOK_SECRET"])
async def receive(event: WebhookEvent) -> None:
    if event.type == "order.paid":
        paid.append(event.json()["data"]["order"])
