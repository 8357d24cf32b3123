"""Goes on after a crash: what a journal has pending is sent, with its own key and bytes, through a client of the
application's. The client brings the credentials, which are in no journal; nothing is retried or judged here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from semel.client.options import checked_hosts, is_among
from semel.core.intent import Entry, Outgoing
from semel.core.retrying import origin_of, said_of
from semel.core.value import value
from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.client.journal import Journal

#: As in ``semel.client.httpx`` and ``.requests``: each needs its library.
_EXTENSION = "semel.intent"
_HEADER = "Semel-Intent"

_ELSEWHERE = (
    "This client does not send through a transport with the journal {}, so nothing was sent. Make it with "
    "IdempotentTransport(…, journal=…)."
)


_SEVERAL = (
    "This client's credentials may not be for all of {}. Nothing was sent. Name the hosts that it is for: "
    "journal.resume(client, hosts=[…]), or semel journal resume --host NAME."
)


@value
class Resumed:
    """What became of one entry."""

    intent: str
    key: str
    #: Of its answer; None: it has none, and *error* says why.
    status: int | None = None
    error: Exception | None = None


def resume(
    journal: Journal, client: Any, *, hosts: Collection[str] | None = None, header: str | None = None
) -> list[Resumed]:
    """Send what is pending, one after another; what fails is told, and stays pending. With *hosts*, only entries for
    them; with *header*, only those with their keys in that one.
    """
    ended = []
    for entry in _entries(journal, client, hosts):
        try:
            given = _given(journal, client, entry) if header in {None, entry.header} else None
            if given is not None:
                ended.append(Resumed(entry.intent, entry.key, client.request(**given).status_code))
        except Exception as error:  # noqa: BLE001 - whatever it is, the next entry is to be sent, too
            ended.append(Resumed(entry.intent, entry.key, error=error))
    return ended


async def aresume(journal: Journal, client: Any, *, hosts: Collection[str] | None = None) -> list[Resumed]:
    """Do the same on an event loop."""
    ended = []
    for entry in _entries(journal, client, hosts):
        try:
            given = _given(journal, client, entry)
            if given is not None:
                ended.append(Resumed(entry.intent, entry.key, (await client.request(**given)).status_code))
        except Exception as error:  # noqa: BLE001 - as above
            ended.append(Resumed(entry.intent, entry.key, error=error))
    return ended


def pending_for(journal: Journal, hosts: Collection[str] | None) -> list[Entry]:
    """Return what is pending for *hosts*; None: for all."""
    entries = journal.pending()
    if hosts is None:
        return entries
    names = checked_hosts(hosts)
    return [entry for entry in entries if is_among(names, *origin_of(entry.url)[1:])]


def _entries(journal: Journal, client: Any, hosts: Collection[str] | None) -> list[Entry]:
    """Return what is to be sent, if the client can send all of it."""
    entries = pending_for(journal, hosts)
    for entry in entries:
        _check(journal, client, entry.url)
    if hosts is None and entries:
        base = str(getattr(client, "base_url", ""))
        _check_origins([entry.url for entry in entries] + ([base] if base else []))
    return entries


def _given(journal: Journal, client: Any, entry: Entry) -> dict[str, Any] | None:
    """Return the arguments of the call that sends it; None: another process has ended it meanwhile."""
    outgoing = journal.request(entry.intent)
    if outgoing is None:
        return None
    return (_of_httpx if hasattr(client, "build_request") else _of_requests)(entry, outgoing)


def _check_origins(urls: list[str]) -> None:
    """Refuse several of them: what a client sends with every request, such as a token, may not be for all."""
    origins = {origin_of(url) for url in urls}
    if len(origins) > 1:
        raise ConfigurationError(_SEVERAL.format(" and ".join(sorted(map(said_of, origins)))))


def _check(journal: Journal, client: Any, url: str) -> None:
    """Refuse a client that would send it in another way: without its lease, and without a word to the journal."""
    if hasattr(client, "get_adapter"):
        through = client.get_adapter(url)
    elif hasattr(client, "_transport_for_url"):
        through = client._transport_for_url(client.build_request("POST", url).url)  # noqa: SLF001 - it has no other name
    else:
        return
    own = getattr(through, "journal", None)
    if own is None or own.path != journal.path:
        raise ConfigurationError(_ELSEWHERE.format(journal.path))


def _of_httpx(entry: Entry, outgoing: Outgoing) -> dict[str, Any]:
    return {
        "method": entry.method,
        "url": entry.url,
        "headers": list(outgoing.headers),
        "content": outgoing.body or None,
        "extensions": {_EXTENSION: entry.intent},
    }


def _of_requests(entry: Entry, outgoing: Outgoing) -> dict[str, Any]:
    headers: dict[str, str] = {}
    for name, said in outgoing.headers:
        text = name.decode("latin-1")
        headers[text] = f"{headers[text]}, {said.decode('latin-1')}" if text in headers else said.decode("latin-1")
    return {
        "method": entry.method,
        "url": entry.url,
        "headers": headers | {_HEADER: entry.intent},
        "data": outgoing.body or None,
    }
