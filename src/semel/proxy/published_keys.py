"""A set of keys (JWKS) that an identity provider publishes: fetched at the start, and again when it may have changed.
How a token is verified with a key is in ``tokens.py``.
"""

from __future__ import annotations

import asyncio
import io
import logging
import queue
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

from semel.errors import ConfigurationError
from semel.proxy.tokens import KeyNotKnown, Verifier

if TYPE_CHECKING:
    import socket

logger = logging.getLogger("semel.proxy")

#: Seconds after which the set is fetched again, so that a key that was withdrawn is no longer accepted.
MAX_AGE = 600
#: Seconds between two fetches, whatever ids are in the tokens that come: anyone can make up ids.
MIN_AGE = 30
#: Seconds that keys count after the last good fetch. Longer, and a provider in trouble keeps withdrawn keys valid.
MAX_STALE = 86400
#: Seconds for one fetch as a whole, and so for a request that waits for it.
TIMEOUT = 5
#: Bytes. The sets of well-known providers have some thousand.
MAX_SIZE = 256 * 1024
#: The name of the threads that fetch.
THREAD = "semel-published-keys"

_LOOPBACK = re.compile(r"http://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?/", re.IGNORECASE)


class KeysTooOld(KeyNotKnown):
    """Our keys were fetched too long ago to accept any token."""


class PublishedKeys:
    """Verifies tokens with the keys that are published at a URL."""

    def __init__(
        self,
        url: str,
        *,
        max_age: float = MAX_AGE,
        min_age: float = MIN_AGE,
        max_stale: float = MAX_STALE,
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Fetch the keys from *url* at once, so that a mistake in it is seen at the start."""
        self._url = url
        self._max_age, self._min_age, self._max_stale, self._timeout = max_age, min_age, max_stale, timeout
        self._clock = clock
        self._asked_at = self._good_at = clock()
        self._fetching: asyncio.Future[None] | None = None
        if "@" in url.partition("//")[2].partition("/")[0]:
            # It would not be sent, and be quoted in logs.
            raise ConfigurationError("--jwt-key: the URL has a user's name or a password in it. Leave them out.")
        if url.lower().startswith("http://") and not _LOOPBACK.match(url):
            raise ConfigurationError(f"--jwt-key: {url}: keys are fetched by https://, where others can't forge them.")
        outcomes: queue.SimpleQueue[Verifier | Exception] = queue.SimpleQueue()
        _fetch_aside(url, timeout, outcomes.put)
        try:
            outcome = outcomes.get(timeout=timeout)
        except queue.Empty:
            outcome = _late(timeout)
        if isinstance(outcome, ConfigurationError):
            raise outcome
        if isinstance(outcome, Exception):
            raise ConfigurationError(f"--jwt-key: {url} can't be fetched: {outcome}") from None
        self._verifier = outcome

    def verified(self, token: str) -> dict[str, Any]:
        """Return the claims of *token*, if a key of the set has signed it and it is valid now."""
        if self._age > self._max_age:
            self._fetch()  # Requests don't wait for it: what is known was good until now.
        if self._is_stale:
            raise KeysTooOld("the keys that are known here are too old, and the provider gives no others.")
        return self._verifier.verified(token)

    async def renewed(self) -> None:
        """Fetch the keys again, unless that was done a moment ago. Where it fails, the known ones stay for a while."""
        if self._age > self._min_age:
            self._fetch()
        if self._fetching is not None:
            await asyncio.shield(self._fetching)  # It ends by the deadline, whatever the provider does.

    @property
    def _age(self) -> float:
        return self._clock() - self._asked_at

    @property
    def _is_stale(self) -> bool:
        return self._clock() - self._good_at > self._max_stale

    def _fetch(self) -> None:
        """Begin a fetch, unless one is under way."""
        if self._fetching is not None and not self._fetching.done():
            return
        asked_at = self._asked_at = self._clock()
        loop = asyncio.get_running_loop()
        fetching = self._fetching = loop.create_future()

        def end(outcome: Verifier | Exception) -> None:
            if not fetching.done():  # What comes after the deadline could be older than what came since.
                deadline.cancel()
                self._take(outcome, asked_at)
                fetching.set_result(None)

        def tell(outcome: Verifier | Exception) -> None:
            with suppress(RuntimeError):  # The loop was closed meanwhile.
                loop.call_soon_threadsafe(end, outcome)

        deadline = loop.call_later(self._timeout, end, _late(self._timeout))
        _fetch_aside(self._url, self._timeout, tell)

    def _take(self, outcome: Verifier | Exception, asked_at: float) -> None:
        if isinstance(outcome, Verifier):
            self._verifier, self._good_at = outcome, asked_at
        elif self._is_stale:
            logger.error(
                "The keys at %s can't be fetched (%s). Those that are known are too old: no token is accepted.",
                self._url,
                outcome,
            )
        else:
            logger.warning("The keys at %s can't be fetched (%s). Those that are known stay.", self._url, outcome)


def _late(timeout: float) -> TimeoutError:
    return TimeoutError(f"there was no whole answer within {timeout:g} s")


def _fetch_aside(url: str, timeout: float, tell: Callable[[Verifier | Exception], None]) -> None:
    """Fetch in a thread of its own, which no exit of the process waits for, and tell what came of it."""

    def run() -> None:
        try:
            outcome: Verifier | Exception = _fetched(url, timeout)
        except TimeoutError:
            outcome = _late(timeout)
        except HTTPError as error:
            error.close()  # It is an answer, too, and has a connection.
            outcome = error
        except (OSError, HTTPException, ValueError, ConfigurationError) as error:
            outcome = error
        tell(outcome)

    threading.Thread(target=run, name=THREAD, daemon=True).start()


class _Limited(io.RawIOBase):
    """Reads until a deadline. The limit of a socket is for each read alone, and one byte at a time is never late."""

    def __init__(self, sock: socket.socket, file: io.BufferedReader) -> None:
        self._sock, self._file = sock, file
        self._timeout = sock.gettimeout() or TIMEOUT
        self._until = time.monotonic() + self._timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise _late(self._timeout)
        self._sock.settimeout(left)
        return self._file.readinto1(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Answer(HTTPResponse):
    """An answer that is read until a deadline, its head too."""

    def __init__(self, sock: socket.socket, *rest: Any, **named: Any) -> None:
        super().__init__(sock, *rest, **named)
        self.fp = io.BufferedReader(_Limited(sock, self.fp))


class _Plain(HTTPConnection):
    response_class = _Answer


class _Secure(HTTPSConnection):
    response_class = _Answer


class _PlainHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Plain, req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Secure, req)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it could lead to where anyone can answer."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow it nowhere."""
        return


def _fetched(url: str, timeout: float) -> Verifier:
    handlers: list[Any] = [_NoRedirect, _PlainHandler, _SecureHandler]
    if url.lower().startswith("http://"):
        # A proxy on the way could answer for loopback, and its own loopback is another.
        handlers.append(urllib.request.ProxyHandler({}))
    with urllib.request.build_opener(*handlers).open(url, timeout=timeout) as answer:
        data: bytes = answer.read(MAX_SIZE + 1)
    if len(data) > MAX_SIZE:
        raise ValueError(f"it has more than {MAX_SIZE} bytes")
    return Verifier.of_set(data, url)
