"""Endpoints of webhooks: what is sent to one, and what its answer means. Nothing is sent here.

The rules are those of Standard Webhooks 1.0; ``webhook-delivery`` is a header that receivers of Svix's may answer with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from semel.core.message import one_line
from semel.core.outbox import Delivered, Failed, Message, Rejected, Verdict
from semel.core.value import value
from semel.errors import ConfigurationError

#: What the specification advises to stay below.
ADVISED_PAYLOAD = 20_000
#: The longest pause that an endpoint can ask for: that of the schedule's last try.
MAX_RETRY_AFTER = timedelta(hours=24)
#: How much of an answer is shown in a reason.
SHOWN_BYTES = 200

_GONE = 410
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD = re.compile(rb"[\x20-\x7e\x80-\xff\t]*")

#: Set here, or by the client of HTTP: an application's header of such a name is not sent.
_OURS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "keep-alive",
        "te",
        "traceparent",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OUR_BEGINNINGS = ("webhook-", "proxy-", ":")


@value
class Endpoint:
    """One endpoint. Times are in seconds since 1970, by the store's clock."""

    #: The destination's name.
    name: str
    url: str
    #: Where the signing secrets are, the newest first.
    secrets: tuple[str, ...]
    is_on: bool = True
    #: Why it is off.
    reason: str | None = None
    #: The first failure after the last success.
    failing_since: float | None = None
    created_at: float = 0.0
    #: When this was read.
    now: float = 0.0


@value
class Target:
    """Where to send to, and what the URL of a command line says of it."""

    #: Without a fragment.
    url: str
    #: Where the signing secrets are.
    secrets: tuple[str, ...] = ()
    allows_private: bool = False


@value
class Answered:
    """What one try came to."""

    verdict: Verdict
    #: Why the endpoint wants no more webhooks at all, if it said so.
    turns_off: str | None = None


def read_url(name: str, url: str) -> Target:
    """Read the URL of endpoint *name*. Its fragment, which is never sent, has the settings."""
    said = f"Webhooks to {name!r}: "
    try:
        parts = urlsplit(url)
        settings = parse_qsl(parts.fragment, keep_blank_values=True, strict_parsing=bool(parts.fragment))
        host, _ = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        raise ConfigurationError(f"{said}the URL can't be read.") from None
    if parts.scheme not in {"http", "https"} or not host or not url.isprintable() or " " in url:
        raise ConfigurationError(f"{said}the URL is to be https://host/path.")
    if "@" in parts.netloc:
        raise ConfigurationError(
            f"{said}the URL has a user's name or a password in it. Remove it: a webhook is told by its signature."
        )
    if any(key not in {"secret", "private"} or (key == "private" and given != "allow") for key, given in settings):
        raise ConfigurationError(f"{said}after # there can be secret=env:NAME, secret=file:PATH and private=allow.")
    secrets = tuple(given for key, given in settings if key == "secret")
    return Target(urlunsplit(parts._replace(fragment="")), secrets, any(key == "private" for key, _ in settings))


def request_headers(message: Message, timestamp: int, signature: str, agent: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of one try. Raises ``ConfigurationError`` for a header that can't be sent."""
    pairs = [(name, said) for name, said in message.headers if not is_ours(name)]
    if not any(name.lower() == "user-agent" for name, _ in pairs):
        pairs.append(("user-agent", agent))
    pairs += [
        ("content-type", message.content_type),
        # What is compressed could be huge; and only the beginning of an answer is read.
        ("accept-encoding", "identity"),
        ("webhook-id", message.id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", signature),
    ]
    if message.traceparent is not None:
        pairs.append(("traceparent", message.traceparent))
    return [_checked(name, said) for name, said in pairs]


def is_ours(name: str) -> bool:
    """Whether an application can't set this header."""
    return name.lower() in _OURS or name.lower().startswith(_OUR_BEGINNINGS)


def _checked(name: str, said: str) -> tuple[bytes, bytes]:
    encoded = said.encode("utf-8", "replace")
    if not _TOKEN.fullmatch(name) or not _FIELD.fullmatch(encoded) or encoded != encoded.strip():
        raise ConfigurationError(f"Header {ascii(name)[:80]} of this message can't be sent over HTTP.")
    return name.encode(), encoded


def answered(status: int, headers: Mapping[str, str], beginning: bytes, *, now: float) -> Answered:
    """Say what an endpoint's answer means. *headers* are in lower case; *beginning* is the first part of its body."""
    wish = headers.get("webhook-delivery", "").strip().lower()
    turns_off = "The endpoint answered webhook-delivery: disable." if wish == "disable" else None
    if 200 <= status < 300:  # noqa: PLR2004 - the statuses of success
        return Answered(Delivered(), turns_off)
    reason = f"The endpoint answered {status}"
    if said := one_line(beginning[:SHOWN_BYTES].decode("utf-8", "replace").strip()):
        reason += f": {said}"
    if status == _GONE:
        return Answered(Rejected(reason), "The endpoint answered 410 (Gone).")
    if wish == "abort-message":
        return Answered(Rejected(f"{reason} (webhook-delivery: abort-message)"))
    if 300 <= status < 400:  # noqa: PLR2004 - the statuses of redirection
        where = one_line(headers.get("location", "elsewhere"))[:SHOWN_BYTES]
        return Answered(
            Failed(f"The endpoint answered {status}, to {where}. Redirects are not followed: change its URL.")
        )
    return Answered(Failed(reason, retry_after(headers.get("retry-after"), now=now)), turns_off)


def retry_after(said: str | None, *, now: float) -> timedelta | None:
    """Read ``Retry-After``: seconds, or a date. None: there is none, or it can't be read."""
    if said is None:
        return None
    said = said.strip()
    if said.isascii() and said.isdigit():
        # Longer numbers can't be converted; all of them are too long.
        seconds = float(said[:20])
    else:
        try:
            moment = parsedate_to_datetime(said)
        except (ValueError, OverflowError):  # a year, or an hour, of twenty digits
            return None
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
    return timedelta(seconds=max(0.0, min(seconds, MAX_RETRY_AFTER.total_seconds())))
