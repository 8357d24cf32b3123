"""The endpoints of webhooks, kept in the store's database. Nothing is sent here: the relay does that.

    endpoints = Endpoints("postgresql://…")
    endpoints.add("acme", "https://acme.example/hooks", secrets=["env:ACME_HOOK_SECRET"])

Each endpoint is a destination of the outbox, by its name. The table says where its secrets are, and has none itself.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from semel.core.commands import CommitAlone, Open, Undo
from semel.core.delivery import Endpoint, read_url
from semel.core.outbox import check_name
from semel.errors import ConfigurationError, EndpointUnknown
from semel.stores import AsyncStore, Store, async_store, store
from semel.stores.dialect import durable_of
from semel.stores.secrets import check_reference
from semel.stores.statement import Joined
from semel.stores.transaction import at_once
from semel.stores.webhooks import EndpointStatements

T = TypeVar("T")

#: An endpoint that has taken nothing for so long is turned off.
PATIENCE = timedelta(days=5)


class _Endpoints:
    """What both colours share: where a transaction *waits*, what its methods return is awaited."""

    _waits: bool
    _store: Any

    def __init__(self, store: Store | AsyncStore, *, is_given: bool) -> None:
        self._is_given = is_given
        self._statements = EndpointStatements(store)
        # A cache in front holds finished answers, and nothing else.
        self._store = durable_of(store)

    async def _add(self, name: str, url: str, secrets: Sequence[str], *, replace: bool) -> Endpoint:
        name, references = _checked(name, url, secrets)
        added = await self._run(self._statements.add(name, url, references, replace=replace))
        if added is None:
            raise ConfigurationError(
                f"There is an endpoint {name!r} already. To give it another URL or secrets: replace=True (--replace)."
            )
        return added

    async def _required(self, name: str, joined: Joined[Endpoint | None]) -> Endpoint:
        endpoint = await self._run(joined)
        if endpoint is None:
            raise EndpointUnknown(f"There is no endpoint {name!r}. To see all: semel webhooks list.")
        return endpoint

    async def _run(self, joined: Joined[T]) -> T:
        transaction = self._store.transaction()
        await self._done(transaction.perform(Open()))
        try:
            answer: T = await self._done(transaction.run(joined))
        except BaseException:
            await self._done(transaction.perform(Undo()))
            raise
        await self._done(transaction.perform(CommitAlone()))
        return answer

    async def _done(self, given: Any) -> Any:
        return (await given) if self._waits else given


class Endpoints(_Endpoints):
    """The endpoints in a store, for code in threads."""

    _waits = False

    def __init__(self, given: Any) -> None:
        """Use a store, or what ``semel.stores.store`` takes: a URL, an engine, a pool."""
        is_given = isinstance(given, Store)
        super().__init__(given if is_given else store(given), is_given=is_given)

    def add(self, name: str, url: str, *, secrets: Sequence[str], replace: bool = False) -> Endpoint:
        """Add an endpoint. *secrets* say where its signing secrets are, the newest first: ``env:NAME``,
        ``file:PATH``. With *replace*, it takes the place of the one that there is.
        """
        return at_once(self._add(name, url, secrets, replace=replace))

    def list(self) -> builtins.list[Endpoint]:
        """Return all endpoints, by name."""
        return [*at_once(self._run(self._statements.list()))]

    def enable(self, name: str) -> Endpoint:
        """Send to it again: what waits for it, and what comes."""
        return at_once(self._required(name, self._statements.enable(name)))

    def disable(self, name: str, reason: str) -> Endpoint:
        """Send nothing more to it. Messages for it wait in the outbox."""
        return at_once(self._required(name, self._statements.disable(name, reason)))

    def remove(self, name: str) -> Endpoint:
        """Forget it, and return what it was. Messages for it wait in the outbox, for an endpoint of this name."""
        return at_once(self._required(name, self._statements.remove(name)))

    def close(self) -> None:
        """Close the connections, unless the store was given. To use this again opens them again."""
        if not self._is_given:
            self._store.close()


class AsyncEndpoints(_Endpoints):
    """The endpoints in a store, for code on an event loop."""

    _waits = True

    def __init__(self, given: Any) -> None:
        """Use a store, or what ``semel.stores.async_store`` takes: a URL, an engine, a pool."""
        is_given = isinstance(given, AsyncStore)
        super().__init__(given if is_given else async_store(given), is_given=is_given)

    async def add(self, name: str, url: str, *, secrets: Sequence[str], replace: bool = False) -> Endpoint:
        """As ``Endpoints.add``."""
        return await self._add(name, url, secrets, replace=replace)

    async def list(self) -> builtins.list[Endpoint]:
        """As ``Endpoints.list``."""
        return [*await self._run(self._statements.list())]

    async def enable(self, name: str) -> Endpoint:
        """As ``Endpoints.enable``."""
        return await self._required(name, self._statements.enable(name))

    async def disable(self, name: str, reason: str) -> Endpoint:
        """As ``Endpoints.disable``."""
        return await self._required(name, self._statements.disable(name, reason))

    async def remove(self, name: str) -> Endpoint:
        """As ``Endpoints.remove``."""
        return await self._required(name, self._statements.remove(name))

    async def close(self) -> None:
        """As ``Endpoints.close``."""
        if not self._is_given:
            await self._store.close()

    async def turn_off(self, endpoint: Endpoint, reason: str) -> Endpoint | None:
        """Send nothing more to it, if it still has the URL that has asked for that."""
        return await self._run(self._statements.disable(endpoint.name, reason, endpoint.url))

    async def note_failure(self, endpoint: Endpoint, reason: str, patience: timedelta = PATIENCE) -> Endpoint | None:
        """Note that a try has failed; when it has done nothing else for *patience*, turn the endpoint off."""
        return await self._run(self._statements.note_failure(endpoint.name, endpoint.url, patience, reason))

    async def note_success(self, endpoint: Endpoint) -> Endpoint | None:
        """Note that it has taken a webhook."""
        return await self._run(self._statements.note_success(endpoint.name, endpoint.url))


def _checked(name: str, url: str, secrets: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    check_name("An endpoint's name", name)
    if isinstance(secrets, str) or not secrets:
        raise ConfigurationError("secrets= is a list of at least one reference, such as env:HOOK_SECRET.")
    if "#" in url:
        raise ConfigurationError(
            f"Webhooks to {name!r}: the URL has a # in it, and what follows is not sent. Secrets are given beside it."
        )
    read_url(name, url)
    return name, tuple(check_reference(each) for each in secrets)
