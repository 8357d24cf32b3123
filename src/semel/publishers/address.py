"""The URL of a destination: the hosts, the user, and the settings after the question mark. Nothing is connected here,
and no text that is made here has a password in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from semel.core.message import one_line
from semel.core.outbox import Failed, Message, Rejected, Unreachable, Verdict
from semel.core.value import value
from semel.errors import ConfigurationError

#: How long to wait for a connection, and then for the confirmations of one call. A broker confirms in milliseconds; one
#: that takes longer is in trouble, and a message is worth less than a relay that hangs.
TIMEOUT_SECONDS = 10.0

#: A reason is a line in a log and a cell of a table.
MAX_REASON = 500

#: What the errors of a client mean for a message: the first line with their kind says it.
Table = Sequence[
    tuple[type[BaseException] | tuple[type[BaseException], ...], Callable[[str], Rejected | Failed | Unreachable], str]
]

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_HIDDEN = "***"


@value
class Address:
    """Where a destination is, and as which user it is reached."""

    #: The destination's name.
    name: str
    scheme: str
    #: ``host:port``, as it was given; the port may be missing. Kafka and NATS are named by several.
    hosts: tuple[str, ...]
    user: str | None
    password: str | None
    #: Without its first slash.
    path: str
    settings: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        """Show no password."""
        return f"Address({self.name!r}, {self.scheme}://{self.place})"

    @property
    def place(self) -> str:
        """Where it is, for people to read."""
        return ",".join(self.hosts)

    def text(self, setting: str, default: str) -> str:
        """Return a setting as it was given."""
        return dict(self.settings).get(setting, default)

    def number(self, setting: str, default: float) -> float:
        """Return a setting that is a number above zero."""
        given = self.text(setting, "")
        try:
            number = float(given) if given else default
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            raise ConfigurationError(f"Destination {self.name!r}: ?{setting}= is a number above 0, not {given!r}.")
        return number

    def seconds(self, default: float) -> tuple[float, timedelta]:
        """Return how long to wait for the confirmations of one call: in seconds, and as a publisher's ``limit``."""
        timeout = self.number("timeout", default)
        return timeout, timedelta(seconds=timeout)

    def reason(self, text: str, error: BaseException | None = None) -> str:
        """Return *text* as a reason: on one line, with what *error* says and nothing that is secret."""
        if error is not None:
            said = str(error) or type(error).__name__
            for secret in {self.password, self.password and unquote(self.password)} - {None, ""}:
                said = said.replace(str(secret), _HIDDEN)
            text = f"{text} ({said})"
        line = one_line(" ".join(text.split()))
        return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 1]}…"

    def verdict(self, table: Table, error: BaseException, **words: str) -> Verdict:
        """Return what *table* says of *error*, with *words* and the place put into its text."""
        for kinds, kind, text in table:
            if isinstance(error, kinds):
                return kind(self.reason(text.format(place=self.place, name=self.name, **words), error))
        raise error


def dropped(reason: str) -> Unreachable:
    """Say that the destination ended the connection while it had the message."""
    return Unreachable(reason, is_dropped=True)


def late(reason: str) -> Unreachable:
    """Say that the destination was reached, and did not confirm within the time limit."""
    return Unreachable(reason, is_late=True)


def address(name: str, url: str, known: Collection[str], *, several: bool = False) -> Address:
    """Read *url*. *known* are the settings that it may have; *several* says that it may name more than one host."""
    try:
        parts = urlsplit(url)
        userinfo, hosts = _hosts(parts)
    except ValueError:  # What it says has the URL in it, and the URL a password.
        raise ConfigurationError(f"The URL of destination {name!r} can't be read: check its host and port.") from None
    if not hosts or (len(hosts) > 1 and not several):
        wanted = "at least one host" if several else "one host"
        raise ConfigurationError(f"The URL of destination {name!r} names {wanted}: {parts.scheme}://host:port.")
    user, colon, password = userinfo.partition(":")
    return Address(
        name=name,
        scheme=parts.scheme,
        hosts=hosts,
        user=unquote(user) if user else None,
        password=unquote(password) if colon else None,
        path=unquote(parts.path.removeprefix("/")),
        settings=_settings(name, parts, known),
    )


def _hosts(parts: SplitResult) -> tuple[str, tuple[str, ...]]:
    userinfo, _, listed = parts.netloc.rpartition("@")
    hosts = tuple(host for host in listed.split(",") if host)
    for host in hosts:
        each = urlsplit(f"//{host}")
        if not each.hostname or each.port == 0:  # `port` raises ValueError for what is none.
            raise ValueError(host)
    return userinfo, hosts


def _settings(name: str, parts: SplitResult, known: Collection[str]) -> tuple[tuple[str, str], ...]:
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    given = [setting for setting, _ in pairs]
    if strange := sorted(set(given) - set(known)):
        raise ConfigurationError(
            f"Destination {name!r}: ?{strange[0]}= is not known in a URL of {parts.scheme}://. "
            f"There are: {', '.join(sorted(known))}."
        )
    if twice := [setting for setting in given if given.count(setting) > 1]:
        raise ConfigurationError(f"Destination {name!r}: ?{twice[0]}= is there twice.")
    return tuple(pairs)


def host_and_port(host: str, port: int) -> tuple[str, int]:
    """Split one of the hosts; *port* is the one to use where none was given."""
    parts = urlsplit(f"//{host}")
    return parts.hostname or "", parts.port or port


def template(name: str, text: str) -> str:
    """Return *text*, if it has no other placeholders than ``{type}`` and ``{key}``."""
    if strange := [each for each in _PLACEHOLDER.findall(text) if each not in {"type", "key"}]:
        raise ConfigurationError(
            f"Destination {name!r}: {{{strange[0]}}} is no placeholder. There are: {{type}} and {{key}}."
        )
    return text


def filled(text: str, message: Message) -> str:
    """Put the message's type and ordering key into a template. A message without a key has an empty one."""
    return _PLACEHOLDER.sub(lambda found: message.type if found[1] == "type" else message.key or "", text)
