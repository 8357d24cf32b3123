"""Sends one webhook by hand, to try an endpoint out: python webhooks_send.py https://acme.example/hooks."""

import asyncio
import sys
from uuid import uuid4

from semel.publishers import Message
from semel.publishers.webhook import Webhook


async def main(url: str, *, allow_private: bool = False) -> None:
    sender = Webhook("acme", url, secrets=["env:ACME_HOOK_SECRET"], allow_private=allow_private)
    await sender.open()
    try:
        payload = b'{"type": "order.paid", "data": {"order": 17}}'
        for verdict in await sender.publish([Message(str(uuid4()), "order.paid", "acme", payload)]):
            print(verdict)
    finally:
        await sender.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
