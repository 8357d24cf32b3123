"""The demo's payment provider: it charges once per key, and logs every call. It knows nothing of Semel.

``run.py`` runs it as a program and never kills it: it stands for a service of another company.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from semel.cli.demo.serving import Receive, Scope, Send, lifespan, read_json, send_json, serve

#: How long the card network takes, before the charge and after it. A caller that dies in the second half has paid.
DELAY_SECONDS = (0.02, 0.15)


class Provider:
    """``POST /charges`` charges a card: once per ``Idempotency-Key``, and on every request without one."""

    def __init__(self, log: Path, seed: str) -> None:
        """Write to *log*; *seed* decides how slow each call is."""
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._chance = random.Random(seed)  # noqa: S311 - delays have no enemy
        self._charges: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        keys = [value.decode("latin-1") for name, value in scope["headers"] if name == b"idempotency-key"]
        bill = await read_json(receive)
        await self._dawdle()
        charge = self._charge(keys[0] if keys else str(uuid4()), bill)
        await self._dawdle()
        await send_json(send, 201, {"charge": charge})

    def _charge(self, key: str, bill: dict[str, Any]) -> str:
        is_new = key not in self._charges
        charge = self._charges.setdefault(key, f"ch_{len(self._charges) + 1:06}")
        # In the file before it is answered: no client can know of a charge that is not in it.
        os.write(self._log, json.dumps({"order": bill["order"], "charge": charge, "is_new": is_new}).encode() + b"\n")
        return charge

    async def _dawdle(self) -> None:
        await asyncio.sleep(self._chance.uniform(*DELAY_SECONDS))


if __name__ == "__main__":
    descriptor, log, seed = sys.argv[1:]
    serve(Provider(Path(log), seed), int(descriptor))
