"""Webhooks, by Standard Webhooks 1.0: one endpoint, ``https://…``. Endpoints in a table are in ``semel.webhooks``.

On an operator's command line the settings are in the URL's fragment, which is never sent:

    https://shop.example/hooks#secret=env:HOOK_SECRET&secret=file:/run/secrets/old_hook&private=allow

A URL that a program gives may be a customer's, who is to decide nothing of that: there a fragment is refused.

The endpoint's name is resolved once for each try, or for those that begin at the same time. Every address is checked
(``core/addresses.py``), and the connection is made to one that was: a name server that changes its answer in between
gains nothing. Redirects are not followed, and no proxy of the environment is used. Any port may be named. What was not
connected is ``Unreachable``; what was sent and not answered is ``Failed``, since a webhook that an endpoint can't
digest must not be sent for ever.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from typing import Any

from semel.core.addresses import forbidden
from semel.core.delivery import ADVISED_PAYLOAD, Answered, answered, read_url, request_headers
from semel.core.events import LargeWebhook
from semel.core.message import one_line
from semel.core.outbox import WEBHOOK_SCHEDULE, Failed, Message, Rejected, Schedule, Unreachable, Verdict
from semel.core.webhook import Secret, check_signing, read_secret, signatures
from semel.errors import ConfigurationError
from semel.stores.secrets import check_reference, resolved
from semel.telemetry.stream import tell

try:
    import httpx2
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("Webhooks need a client of HTTP. Run: pip install 'semel[webhooks]'") from error

#: The specification advises 15 to 30 s for the whole of a try.
TIMEOUT = timedelta(seconds=15)
#: To connect takes milliseconds, or fails.
MAX_CONNECT = timedelta(seconds=5)
#: Tries at one endpoint at the same time: what an endpoint of a small shop can serve.
MAX_CONNECTIONS = 8
#: No try of a call is begun after this. With the last one's time-out, a call ends before a relay's patience does, which
#: would take what was delivered for undelivered.
BEGIN_WITHIN = timedelta(seconds=10)
#: Names that are resolved at the same time, of all endpoints.
MAX_RESOLVING = 32
#: What is read of an answer; more than is shown, and less than can hurt.
READ_BYTES = 4096

AGENT = "semel-webhooks/1"

#: Returns the addresses of a host.
Resolve = Callable[[str, int], Awaitable[Iterable[str]]]


class Webhook:
    """Sends to one endpoint."""

    schedule: Schedule = WEBHOOK_SCHEDULE
    #: How many messages are best given to one call.
    batch: int = MAX_CONNECTIONS

    def __init__(
        self,
        name: str,
        url: str,
        *,
        secrets: Sequence[str] = (),
        allow_private: bool = False,
        timeout: timedelta = TIMEOUT,
        tls: ssl.SSLContext | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        """Send to *url*, as destination *name*, signed with each of *secrets*: references (``env:NAME``,
        ``file:PATH``), or secrets. *allow_private* lets it send into the own network. *tls* is in place of the
        system's certificates.
        """
        self._name = name
        if "#" in url:
            raise ConfigurationError(
                f"Webhooks to {name!r}: the URL has a #. Give secrets and allow_private as arguments: the URL may be a "
                "customer's."
            )
        try:
            self._url = httpx2.URL(read_url(name, url).url)
        except httpx2.InvalidURL:
            raise ConfigurationError(f"Webhooks to {name!r}: the URL can't be read.") from None
        self._secrets = tuple(secrets)
        self._allow_private = allow_private
        self._timeout = timeout.total_seconds()
        self.limit = BEGIN_WITHIN + timeout
        self._tls = tls
        self._resolve = resolve or _resolve
        self._client: httpx2.AsyncClient | None = None
        self._turns: asyncio.Semaphore | None = None
        self._resolving: asyncio.Future[Iterable[str]] | None = None
        self._has_told = False

    @classmethod
    def at(cls, name: str, url: str) -> Webhook:
        """Return the one that an operator's URL says, with the settings in its fragment."""
        target = read_url(name, url)
        secrets = tuple(map(check_reference, target.secrets))
        return cls(name, target.url, secrets=secrets, allow_private=target.allows_private)

    async def open(self) -> None:
        """Check the secrets. Nothing is connected before there is something to send."""
        self._read_secrets()
        self._opened()

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send all of *messages*, several at a time."""
        return [each.verdict for each in await self.deliver(messages)]

    async def deliver(self, messages: Sequence[Message]) -> Sequence[Answered]:
        """Send all of *messages*, and say also whether the endpoint wants no more of them."""
        try:
            secrets = self._read_secrets()
        except ConfigurationError as error:
            # It is the sender's fault, and costs the messages nothing.
            return [Answered(Unreachable(str(error)))] * len(messages)
        call = _Call(asyncio.get_running_loop().time() + BEGIN_WITHIN.total_seconds())
        return await asyncio.gather(*(self._in_turn(message, secrets, call) for message in messages))

    async def close(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        self._resolving = None  # A thread can't be stopped, and a try may wait for it.
        if client is not None:
            await client.aclose()

    async def _in_turn(self, message: Message, secrets: Sequence[Secret], call: _Call) -> Answered:
        client = self._opened()
        assert self._turns is not None  # noqa: S101 - for the type checker
        async with self._turns:
            if call.is_late or asyncio.get_running_loop().time() > call.until:
                return Answered(Unreachable("The endpoint is slow, and this webhook's turn has not come yet."))
            tried = await self._try(client, message, secrets)
            call.is_late |= isinstance(tried.verdict, Failed) and tried.verdict.is_late
            return tried

    async def _try(self, client: httpx2.AsyncClient, message: Message, secrets: Sequence[Secret]) -> Answered:
        if len(message.payload) > ADVISED_PAYLOAD and not self._has_told:
            self._has_told = True
            tell(LargeWebhook(self._name, len(message.payload)))
        progress = _Progress()
        try:
            async with asyncio.timeout(self._timeout):
                addresses = await self._checked_addresses()
                if isinstance(addresses, Answered):
                    return addresses
                return await self._send(client, message, secrets, addresses, progress)
        except TimeoutError:
            return progress.answered or _ended(progress, f"no answer within {self._timeout:g} s", is_late=True)
        except (OSError, UnicodeError, httpx2.HTTPError) as error:
            return progress.answered or _ended(progress, _said(error))

    async def _send(
        self,
        client: httpx2.AsyncClient,
        message: Message,
        secrets: Sequence[Secret],
        addresses: Sequence[str],
        progress: _Progress,
    ) -> Answered:
        now = time.time()
        signature = signatures(secrets, message.id, int(now), message.payload)
        try:
            headers = request_headers(message, int(now), signature, AGENT)
        except ConfigurationError as error:
            return Answered(Rejected(str(error)))
        # Of an endpoint with several addresses, one may be away.
        for address in addresses[:-1]:
            try:
                return await self._ask(client, address, headers, message.payload, progress)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
        return await self._ask(client, addresses[-1], headers, message.payload, progress)

    async def _ask(
        self,
        client: httpx2.AsyncClient,
        address: str,
        headers: Sequence[tuple[bytes, bytes]],
        payload: bytes,
        progress: _Progress,
    ) -> Answered:
        """Send to this address and no other. The name is what the endpoint's certificate is checked for."""
        request = client.build_request(
            "POST",
            self._url.copy_with(host=address),
            headers=[(b"host", self._url.netloc), *headers],
            content=payload,
            extensions={"sni_hostname": self._url.raw_host.decode("ascii").rstrip("."), "trace": progress.note},
        )
        response = await client.send(request, stream=True, follow_redirects=False)
        status, now = response.status_code, time.time()
        said = {name.lower(): value for name, value in response.headers.items()}
        # The status decides, whether or not the rest arrives.
        progress.answered = answered(status, said, b"", now=now)
        try:
            # An answer that is read to its end leaves the connection for the next try.
            beginning = b""
            async for part in response.aiter_raw():
                beginning += part[: READ_BYTES - len(beginning)]
                if len(beginning) >= READ_BYTES:
                    break
            return answered(status, said, beginning, now=now)
        finally:
            await response.aclose()

    async def _checked_addresses(self) -> Sequence[str] | Answered:
        """Return the endpoint's addresses, if every one of them may be sent to."""
        host = self._url.raw_host.decode("ascii")
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        if self._resolving is None or self._resolving.done():
            # One at a time: a name server that takes its time on purpose would have all the threads there are.
            self._resolving = asyncio.ensure_future(self._resolve(host, port))
            self._resolving.add_done_callback(_seen)
        addresses = tuple(dict.fromkeys(await asyncio.shield(self._resolving)))
        if not addresses:
            raise OSError(f"{host} has no address")
        if not self._allow_private:
            for address in addresses:
                if (why := forbidden(address)) is not None:
                    # What may be sent to is the sender's own setting: it costs the messages nothing.
                    return Answered(
                        Unreachable(
                            f"{host} is at {address}, which is {why}, so nothing was sent. If this endpoint is of your "
                            "own network, allow it: semel relay --webhooks --allow-private (#private=allow in a URL of "
                            "--to; allow_private=True in Python). Else correct its URL."
                        )
                    )
        return addresses

    def _read_secrets(self) -> Sequence[Secret]:
        try:
            secrets = [read_secret(resolved(each)) for each in self._secrets]
            check_signing(secrets)
        except ConfigurationError as error:
            raise ConfigurationError(f"Webhooks to {self._name!r}: {error}") from None
        return secrets

    def _opened(self) -> httpx2.AsyncClient:
        if self._client is None:
            limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
            connect = min(self._timeout, MAX_CONNECT.total_seconds())
            self._client = httpx2.AsyncClient(
                verify=self._tls or _system_tls(),
                # A proxy of the environment would connect to an address of its own choice.
                trust_env=False,
                follow_redirects=False,
                limits=limits,
                timeout=httpx2.Timeout(self._timeout, connect=connect),
            )
            self._turns = asyncio.Semaphore(MAX_CONNECTIONS)
        return self._client


class _Call:
    """Until when tries of a call are begun: none after the first one that got no answer in time."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.is_late = False


class _Progress:
    """How far a try has come: whether the request has begun to go out, and what the answer's status means."""

    is_sent = False
    answered: Answered | None = None

    async def note(self, step: str, _details: Any) -> None:
        """Hear of each step of the client's."""
        if step == "http11.send_request_headers.started":
            self.is_sent = True


@cache
def _system_tls() -> ssl.SSLContext:
    # One for all endpoints: each takes milliseconds to read, and a megabyte to keep.
    return ssl.create_default_context()


@cache
def _resolvers() -> ThreadPoolExecutor:
    # Threads of their own: an endpoint's name server may take its time on purpose, and the loop's few threads are
    # needed elsewhere.
    return ThreadPoolExecutor(MAX_RESOLVING, "semel-resolve")


async def _resolve(host: str, port: int) -> Iterable[str]:
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolvers(), ask)
    return [str(address[0]) for *_, address in found]


def _seen(resolving: asyncio.Future[Iterable[str]]) -> None:
    """Look at its error: the tries that have waited for it may have given up."""
    if not resolving.cancelled():
        resolving.exception()


def _ended(progress: _Progress, why: str, *, is_late: bool = False) -> Answered:
    """Say how a try ended that brought no answer."""
    if progress.is_sent:
        return Answered(Failed(f"The endpoint got the webhook and did not answer: {why}.", is_late=is_late))
    return Answered(Unreachable(f"The endpoint can't be reached: {why}."))


def _said(error: Exception) -> str:
    return one_line(str(error)).rstrip(".") or type(error).__name__
