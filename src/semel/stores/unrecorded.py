"""A store for operations while their guard is switched off: phases have a transaction, and nothing is recorded.

A handler still finds its operation, and providers get the same derived keys; a retry does everything again.
"""

from __future__ import annotations

from typing import Any

from semel.core.commands import Command, Commit, CommitAlone, Mark, Park, Save, Verdict

#: What is recorded of a step.
_RECORDS = (Save, Mark, Park)


class Unrecorded:
    """A store, sync or async, that records no step."""

    def __init__(self, store: Any) -> None:
        """Use the transactions of *store*, and its threads if it has any."""
        self._store = store

    def perform(self, command: Command[Any]) -> Verdict:
        """Do nothing, and return ``DONE``."""
        assert isinstance(command, _RECORDS)  # noqa: S101 - all that a step asks for beside its transaction
        return Verdict.DONE

    def transaction(self) -> UnrecordedTransaction:
        """Return a transaction for one phase."""
        return UnrecordedTransaction(self._store.transaction())

    def start_in_thread(self, call: Any) -> Any:
        """Call a plain function in a thread of the store."""
        return self._store.start_in_thread(call)


class UnrecordedTransaction:
    """A transaction of a phase that is not recorded; its results are awaited if the store's are."""

    def __init__(self, transaction: Any) -> None:
        """Write in *transaction*."""
        self._transaction = transaction

    @property
    def connection(self) -> Any:
        """The open connection."""
        return self._transaction.connection

    @property
    def waits(self) -> bool:
        """Whether what it returns is to be awaited."""
        waits: bool = self._transaction.waits
        return waits

    @property
    def dialect(self) -> Any:
        """Which database it is on."""
        return self._transaction.dialect

    def run(self, joined: Any) -> Any:
        """Run one more statement in it."""
        return self._transaction.run(joined)

    def perform(self, command: Command[Any]) -> Any:
        """Carry out one command."""
        if not isinstance(command, Commit):
            return self._transaction.perform(command)
        done = self._transaction.perform(CommitAlone())
        return Verdict.DONE if done is None else _awaited(done)


async def _awaited(done: Any) -> Verdict:
    await done
    return Verdict.DONE
