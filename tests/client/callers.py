"""Every library in every colour, called in one way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import httpx2
import requests

from semel.client import Journal, Resumed
from semel.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from semel.client.options import Quotas
from semel.client.requests import IdempotentAdapter

KINDS = ("httpx", "httpx2", "async httpx", "async httpx2", "requests")


class Got(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Caller:
    """One client. ``Lost`` is what its library raises for a lost connection."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind = kind
        options.setdefault("quotas", Quotas())
        self.library: Any = {"httpx": httpx, "httpx2": httpx2, "requests": requests}[kind.removeprefix("async ")]
        self.Lost: type[Exception] = (
            requests.ConnectionError if self.library is requests else self.library.TransportError
        )
        self._runner = asyncio.Runner() if kind.startswith("async") else None
        self.client, self.transport = self._made(options)
        self.journal: Journal | None = self.transport.journal

    def _made(self, options: dict[str, Any]) -> tuple[Any, Any]:
        if self.library is requests:
            session, adapter = requests.Session(), IdempotentAdapter(**options)
            session.trust_env = False
            session.mount("http://", adapter)
            return session, adapter
        if self._runner is not None:
            transport: Any = AsyncIdempotentTransport(self.library.AsyncHTTPTransport(verify=False), **options)
            return self.library.AsyncClient(transport=transport), transport
        transport = IdempotentTransport(self.library.HTTPTransport(verify=False), **options)
        return self.library.Client(transport=transport), transport

    def post(self, url: str, intent: str | None = None, **given: Any) -> Got:
        return self.request("POST", url, intent, **given)

    def request(self, method: str, url: str, intent: str | None = None, **given: Any) -> Got:
        if self.library is requests:
            given["headers"] = {**given.get("headers", {}), **({"Semel-Intent": intent} if intent else {})}
            given["data"] = given.pop("content", None)
            given["allow_redirects"] = given.pop("follow_redirects", False)
        elif intent is not None:
            given["extensions"] = {"semel.intent": intent}
        response = self.wait(self.client.request, method, url, **given)
        return Got(response.status_code, dict(response.headers), response.content)

    def resume(self, client: Any = None, **given: Any) -> list[Resumed]:
        assert self.journal is not None
        resume = self.journal.resume if self._runner is None else self.journal.aresume
        return self.wait(resume, client or self.client, **given)  # type: ignore[no-any-return]

    def wait(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the library, in its colour."""
        if self._runner is None:
            return function(*args, **kwargs)

        async def called() -> Any:
            return await function(*args, **kwargs)

        return self._runner.run(called())

    def close(self) -> None:
        if self._runner is None:
            self.client.close()
            return
        self.wait(self.client.aclose)
        self._runner.close()
