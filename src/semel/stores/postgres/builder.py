"""The queries of ``queries.sql`` with their parameters put in order. Which command asks which, others say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from semel.core.hint import hint_of
from semel.core.message import Answer
from semel.core.record import NO_TOKEN, Hold
from semel.core.trail import FULL, Audit
from semel.stores.base import this_process
from semel.stores.headers import written
from semel.stores.postgres.bounds import WALKS, Bounds
from semel.stores.postgres.signals import channel_of
from semel.stores.statement import Joined, Names, Query, Statement, load_queries

PACKAGE = "semel.stores.postgres"


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries of ``queries.sql``: a name that is in one and not in the other fails at start-up."""

    claim: Query
    claim_one: Query
    take_over: Query
    complete: Query
    complete_one: Query
    completed: Query
    release: Query
    renew: Query
    save: Query
    mark: Query
    lock: Query
    peek: Query
    begin: Query
    probe: Query
    finish: Query
    note_finish: Query
    replace: Query
    wait: Query
    settle: Query
    park: Query
    look: Query
    browse: Query
    search: Query
    find_stuck: Query
    bound: Query
    advance: Query
    read_request: Query
    sweep: Query
    add_counts: Query
    read_counts: Query
    reap: Query
    rotate: Query
    reap_trail: Query
    reap_inbox: Query
    survey: Query
    erase: Query
    erase_trail: Query
    discard: Query
    unpark: Query
    resolve: Query
    note: Query
    read_trail: Query
    now: Query
    check: Query
    privileges: Query


#: The queries that have parts: each variant's name, and which parts it has.
_VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "claim": {"claim": ("plain",), "claim_kept": ("kept",)},
    "complete": {"complete": (), "complete_told": ("hints",)},
    "finish": {
        "finish": ("plain",),
        "finish_told": ("plain", "told"),
        "finish_dated": ("dated",),
        "finish_dated_told": ("dated", "told"),
    },
    "browse": {"browse": ("plain",), "browse_unfinished": ("unfinished",)},
    "search": {
        "search": ("age",),
        "search_unfinished": ("unfinished",),
        "search_scope": ("scope", "age"),
        "search_one": ("one",),
    },
    "survey": {"survey": (), "survey_all": ("messages",)},
    "advance": {"advance": (), "advance_back": ("back",)},
    "bound": {f"bound_{walk}": (walk,) for walk in WALKS},
}


def queries_of(names: Names, audit: Audit) -> dict[str, Query]:
    """Load the queries, each variant of those that have parts under a name of its own."""
    loaded = Queries(**load_queries(PACKAGE, names))
    queries: dict[str, Query] = {each.name: getattr(loaded, each.name) for each in fields(Queries)}
    trail = ("trail",) if audit in FULL else ()
    for name, variants in _VARIANTS.items():
        query = queries.pop(name)
        queries |= {variant: query.with_parts(*parts, *trail) for variant, parts in variants.items()}
    return queries


def no_owner() -> int | None:
    """Have no lock that shows that this process lives: only leases tell."""
    return None


class Builder:
    """Builds statements for one table."""

    def __init__(
        self,
        names: Names,
        *,
        audit: Audit = "on",
        actor: Callable[[], str] = this_process,
        owner: Callable[[], int | None] = no_owner,
    ) -> None:
        """Load the queries with *names* put in. *actor* says who the audit trail shall name, if there is one: *audit*.

        *owner* is asked with every statement for the lock (``signals.owner_lock``) that this process holds now. What
        is claimed bears it; and only while there is one is it tested whether the owners of others still live.
        """
        self.names = names
        #: Whether there is an audit trail, and who it is to name; and which lock this process holds now.
        self.has_trail = audit != "off"
        self.actor = actor
        self._tells_all = audit in FULL
        self.owner = self._owner = owner
        self._channel = channel_of(names)
        #: From where statements walk along the indexes.
        self.bounds = Bounds()
        self._queries = queries_of(names, audit)
        self._sql = {name: query.numbered for name, query in self._queries.items()}
        self._order = {name: query.parameters for name, query in self._queries.items()}

    def statement(self, name: str, read: Any, **parameters: Any) -> Statement[Any]:
        """Build a statement of the store's own."""
        values = self._with_usual(parameters)
        return Statement(self._sql[name], [values[each] for each in self._order[name]], read)

    def batch(self, name: str, read: Any, values: dict[str, Any]) -> Statement[Any]:
        """Build a statement of the store's own of which many are sent: *values* has all that it takes."""
        if self._tells_all:
            values["actor"] = self.actor()
        return Statement(self._sql[name], list(map(values.__getitem__, self._order[name])), read)

    @property
    def tells_all(self) -> bool:
        """Whether the audit trail has what is ordinary, too."""
        return self._tells_all

    def query(self, name: str) -> Query:
        """Return a query by its name."""
        return self._queries[name]

    def joined(self, query: Query, read: Any, **parameters: Any) -> Joined[Any]:
        """Build a statement that joins a transaction of the application's."""
        values = self._with_usual(parameters)
        return Joined(query, {each: values[each] for each in query.parameters}, read)

    def _with_usual(self, parameters: dict[str, Any]) -> dict[str, Any]:
        owner = self.owner()
        return parameters | {
            "audit": self.has_trail,
            "everything": self._tells_all,
            "actor": self.actor(),
            "no_token": NO_TOKEN,
            "channel": self._channel,
            "owner": owner,
            "tests_owner": owner is not None,
            **self.bounds.parameters(),
        }


def of_hold(hold: Hold) -> dict[str, Any]:
    """Return the parameters that name a hold."""
    return {"scope": hold.scope, "key": hold.key, "attempt": hold.attempt, "token": hold.token}


def hint(hold: Hold, *, wakes: bool) -> str | None:
    """Return what is told to those who listen; None: nothing is told."""
    return hint_of(hold.scope, hold.key) if wakes else None


def of_answer(answer: Answer) -> dict[str, Any]:
    """Return the parameters that hold an answer."""
    return {"status": answer.status, "headers": written(answer.headers), "body": answer.body}
