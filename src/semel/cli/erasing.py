"""``semel keys erase``: deletes one customer's data, once it has shown what will happen and asked. What is deleted of a
record, and what stays, is in ``core/commands/erasing.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, TypeVar

import typer

from semel import stores
from semel.cli.address import StoreOption, given, made
from semel.cli.finding import spellings
from semel.cli.output import JsonOption, counting
from semel.cli.resolving import YesOption
from semel.core.commands import Command, Erased
from semel.core.operator import erasing_means, left_lines
from semel.errors import ConfigurationError, SemelError
from semel.flows.erase import EraseReport, erase
from semel.guard.running import run
from semel.stores import Store
from semel.stores.base import this_user
from semel.stores.tiered import Tiered
from semel.work.service import ServicePorts

T = TypeVar("T")


_NO_COPY = (
    "semel: No copy was in that cache. If the application has another, or another database or ?prefix= of it, give "
    "that URL, too: copies stay there until their retention ends."
)


class NotAllErased(SemelError):
    """Some operations of this scope have not ended, and are as they were. When they have, run this again."""


class _Counting(ServicePorts):
    """Tells a terminal how many records and lines its run has found so far."""

    count: Callable[[int], None]

    async def ask(self, command: Command[T]) -> T:
        """Ask the store, and count what came back."""
        outcome = await super().ask(command)
        if isinstance(outcome, Erased):
            self.count(outcome.count)
        return outcome


def erase_scope(
    scope: Annotated[str, typer.Argument(metavar="SCOPE", help="The customer, spelled as lists show it.")],
    *,
    store: StoreOption = None,
    cache: Annotated[str | None, typer.Option(metavar="URL", help="The Redis in front of it, if it is tiered.")] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Not needed: copies are found in every namespace.", hidden=True)
    ] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="For the audit trail. Do not name the customer in it.")
    ] = None,
    as_json: JsonOption = False,
    yes: YesOption = False,
) -> None:
    """Erase a customer's data. Tombstones of what has ended stay until their retention ends: a retry does not run."""
    if as_json and not yes:
        raise ConfigurationError("Say --yes with --json: a program can't answer the question.")
    with closing(_store(store, cache, namespace)) as keys:
        keys.actor = this_user()
        owner, seen = _looked_for(keys, scope)
        if not as_json:
            print("\n".join([*erasing_means(seen.erased, seen.audit_lines), *left_lines(seen.left)]))
        if not yes and (seen.erased or seen.audit_lines):
            typer.confirm("Erase this?", abort=True)
        done = _run(keys, "Erasing", owner, reason=reason)
    print(json.dumps(done.facts) if as_json else done)
    if done.copies == 0:
        typer.echo(_NO_COPY, err=True)
    if done.error is not None:
        raise done.error
    if done.left:
        raise NotAllErased


def _store(url: str | None, cache: str | None, namespace: str | None) -> Store:
    return made(url) if cache is None else stores.store(Tiered(given(url), cache, memory=0, namespace=namespace))


def _looked_for(keys: Store, scope: str) -> tuple[str, EraseReport]:
    """Return the spelling of *scope* under which there is something, and what there is."""
    for owner in spellings(scope):
        seen = _run(keys, "Looking", owner, is_preview=True)
        if seen.error is not None:
            raise seen.error
        if not seen.is_idle:
            break
    return owner, seen


def _run(keys: Store, said: str, owner: str, *, is_preview: bool = False, reason: str | None = None) -> EraseReport:
    ports = _Counting(keys)
    with counting(said) as ports.count:
        return run(erase, ports, owner, is_preview=is_preview, reason=reason)
