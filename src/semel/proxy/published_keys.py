"""A set of keys (JWKS) that an identity provider publishes: fetched at the start, and again when it may have changed.
How a token is verified with a key is in ``tokens.py``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import urllib.request
from http.client import HTTPException
from typing import Any

from semel.errors import ConfigurationError
from semel.proxy.tokens import Verifier

logger = logging.getLogger("semel.proxy")

#: Seconds after which the set is fetched again, so that a key that was withdrawn is no longer accepted.
MAX_AGE = 600
#: Seconds between two fetches, whatever ids are in the tokens that come: anyone can make up ids.
MIN_AGE = 30
#: Seconds for one fetch.
TIMEOUT = 5
#: Bytes. The sets of well-known providers have some thousand.
MAX_SIZE = 256 * 1024

_LOOPBACK = re.compile(r"http://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?/", re.IGNORECASE)


class PublishedKeys:
    """Verifies tokens with the keys that are published at a URL."""

    def __init__(self, url: str, *, max_age: float = MAX_AGE, min_age: float = MIN_AGE) -> None:
        """Fetch the keys from *url* at once, so that a mistake in it is seen at the start."""
        self._url = url
        self._max_age, self._min_age = max_age, min_age
        self._asked_at = time.monotonic()
        self._fetching: asyncio.Future[None] | None = None
        if url.lower().startswith("http://") and not _LOOPBACK.match(url):
            raise ConfigurationError(f"--jwt-key: {url}: keys are fetched by https://, where others can't forge them.")
        try:
            self._verifier = _fetched(url)
        except ConfigurationError:
            raise
        except (OSError, HTTPException, ValueError) as error:
            raise ConfigurationError(f"--jwt-key: {url} can't be fetched: {error}") from None

    def verified(self, token: str) -> dict[str, Any]:
        """Return the claims of *token*, if a key of the set has signed it and it is valid now."""
        verifier = self._verifier
        if self._age > self._max_age:
            self._fetch()  # Requests don't wait for it: what is known was good until now.
        return verifier.verified(token)

    async def renewed(self) -> None:
        """Fetch the keys again, unless that was done a moment ago. Where it fails, the known ones stay."""
        if self._age > self._min_age:
            self._fetch()
        if self._fetching is not None:
            await asyncio.shield(self._fetching)

    @property
    def _age(self) -> float:
        return time.monotonic() - self._asked_at

    def _fetch(self) -> None:
        self._asked_at = time.monotonic()
        self._fetching = asyncio.get_running_loop().run_in_executor(None, self._replace)

    def _replace(self) -> None:
        try:
            self._verifier = _fetched(self._url)
        except (OSError, HTTPException, ValueError, ConfigurationError) as error:
            logger.warning("The keys at %s can't be fetched (%s). Those that are known stay.", self._url, error)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it could lead to where anyone can answer."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow it nowhere."""
        return


_opener = urllib.request.build_opener(_NoRedirect)


def _fetched(url: str) -> Verifier:
    with _opener.open(url, timeout=TIMEOUT) as answer:
        data: bytes = answer.read(MAX_SIZE + 1)
    if len(data) > MAX_SIZE:
        raise ValueError(f"it has more than {MAX_SIZE} bytes")
    return Verifier.of_set(data, url)
