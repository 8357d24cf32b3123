"""What can be wrong with an application around a store. Each judge takes what was found in it, and imports nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from semel.client.options import DEADLINE
from semel.core.policy import Policy
from semel.doctor.app.scopes import Named, named
from semel.doctor.model import MEBIBYTE, Group, Judgement, Kind, Limits, Severity, cannot_tell, ok, wrong
from semel.doctor.session import Handled, Session, Some, Unavailable
from semel.stores.leases import LOOP_SILENCE, LOOP_SILENCE_LEASES

if TYPE_CHECKING:
    from semel.doctor.app.application import Application

GROUP = Group(Kind.APP, "Application", "how-to/production.md", ("app-guard",))

#: How many guards are named: enough to see which they are.
MAX_NAMED = 3
#: What must be outside of the guard, by a part of its class's name, and why.
OUTSIDE = {
    "GZip": "compression for one client would be stored for all",
    "Brotli": "compression for one client would be stored for all",
    "Compress": "compression for one client would be stored for all",
    "CORS": "a replay would lack the headers that a browser needs",
}
#: The same, where a guard asks an outer layer for the user.
LOGINS = {
    "Authentication": "the user is not known yet when the key is claimed",
    "SessionMiddleware": "the user is not known yet when the key is claimed",
}
#: What one value may have: of PostgreSQL's bytea, of a string in Redis, of a blob in SQLite.
MAX_STORED = {Kind.POSTGRES: 1024 * MEBIBYTE, Kind.REDIS: 512 * MEBIBYTE, Kind.SQLITE: 1_000_000_000}


@dataclass(frozen=True, slots=True)
class Guards:
    """The guards that were found, and where the search ended."""

    names: tuple[str, ...]
    #: The name of a function, into which nothing can look.
    end: str | None = None


def _guards(app: Application) -> Guards:
    return Guards(tuple(guard.name for guard in app.guards), app.end)


@GROUP.check(
    "guard",
    Severity.ERROR,
    title="The application has a guard of Semel's",
    why="Without a guard keys are ignored, and every retry runs.",
    mend="app.add_middleware(IdempotencyMiddleware, store=…, scope=…)",
    look=_guards,
    after=(),
    page="how-to/fastapi.md",
)
def guard(seen: Guards, _limits: Limits) -> Judgement:
    """Judge whether there is one."""
    if seen.names:
        return ok(f"{len(seen.names)}: {', '.join(seen.names[:MAX_NAMED])}.")
    if seen.end is not None:
        return cannot_tell(
            f"No guard was found around the function {seen.end}, and what is inside of it can't be seen."
        )
    return wrong("No IdempotencyMiddleware, no route with Idempotent, no guarded view, no SEMEL in Django.")


@dataclass(frozen=True, slots=True)
class Order:
    """The layers inside of the guard, outermost first."""

    inside: tuple[str, ...]
    #: Whether the login is done by the routes themselves.
    is_per_route: bool = False
    is_there: bool = True
    #: The routes that log in by themselves, inside of the guard.
    own_logins: tuple[str, ...] = ()


def _order(app: Application) -> Order:
    if app.place is None:
        return Order((), is_there=False, own_logins=app.own_logins)
    inside = app.layers[app.place + 1 :]
    return Order(inside, is_per_route=app.guards[0].is_per_route, own_logins=app.own_logins)


@GROUP.check(
    "order",
    Severity.ERROR,
    title="Login, CORS and compression are outside of the guard",
    why="What is inside of the guard does not run for a replay, and what it adds to an answer is stored for every "
    "client.",
    mend="Add the guard first: app.add_middleware puts what is added later outside.",
    look=_order,
    page="how-to/fastapi.md#other-middleware",
)
def order(seen: Order, _limits: Limits) -> Judgement:
    """Judge the layers inside of the guard."""
    if seen.own_logins:
        named = ", ".join(seen.own_logins[:MAX_NAMED])
        return wrong(
            f"{named}: the login is inside of the guard, and is not asked before a stored answer is sent.",
            'semel.django.rest.IdempotentMixin as the first base of the view; or leave its path out of SEMEL["PATHS"].',
        )
    if not seen.is_there:
        return ok("The guards are around views; the order of Django's MIDDLEWARE is judged by app-django.")
    reasons = OUTSIDE if seen.is_per_route else OUTSIDE | LOGINS
    bad = [
        f"{layer.rpartition('.')[2]} is inside ({why})"
        for layer in seen.inside
        for part, why in reasons.items()
        if part in layer.rpartition(".")[2]
    ]
    return wrong("; ".join(dict.fromkeys(bad)) + ".") if bad else ok("Nothing is inside that should be outside.")


def _scopes(app: Application) -> list[Named]:
    return [named(each.name, each.scope) for each in app.guards if each.scope is not None]


@GROUP.check(
    "scope-constant",
    Severity.ERROR,
    title="The scope tells users apart",
    why="With one scope for all, a client that guesses or repeats another's key gets the other's answer.",
    mend="Return the account of the request from scope; or say scope=semel.SINGLE_TENANT, if there is one user.",
    look=_scopes,
    page="how-to/choose-a-scope.md",
)
def scope_constant(seen: list[Named], _limits: Limits) -> Judgement:
    """Judge whether a scope reads anything."""
    bad = [each for each in seen if each.is_constant and not each.is_said]
    if bad:
        return wrong("; ".join(f"{each.function} of {each.guard} reads nothing of the request" for each in bad) + ".")
    unknown = [each.function for each in seen if each.is_constant is None]
    if unknown:
        return cannot_tell(f"The code of {', '.join(unknown)} can't be read.")
    said = [each.function for each in seen if each.is_said]
    return ok(f"{said[0]}, said aloud." if said else f"{len(seen)} scope functions read something.")


@GROUP.check(
    "scope-address",
    Severity.WARNING,
    title="The scope is no IP address",
    why="Neighbours share an address, and phones change theirs: one client gets another's answer, or its own retry "
    "runs "
    "again.",
    mend="Return the account of the request from scope.",
    look=_scopes,
    page="how-to/choose-a-scope.md",
)
def scope_address(seen: list[Named], _limits: Limits) -> Judgement:
    """Judge whether a scope reads an address."""
    bad = [each for each in seen if each.addresses]
    if bad:
        return wrong("; ".join(f"{each.function} reads {', '.join(each.addresses)}" for each in bad) + ".")
    unknown = [each.function for each in seen if each.is_constant is None]
    if unknown:
        return cannot_tell(f"The code of {', '.join(unknown)} can't be read.")
    return ok("No scope function reads an address.")


def _sessions(app: Application) -> tuple[str, ...]:
    return tuple(app.sessions)


@GROUP.check(
    "session",
    Severity.WARNING,
    title="In atomic mode a route has one session, the operation's",
    why="Another session keeps a connection of the pool while its request waits for a second one, until all wait for "
    "each other; and what it commits is not in the transaction of the answer.",
    mend="In a login: async with sessions() as session: …, without yield. In a route: semel.current().connection.",
    look=_sessions,
    page="how-to/atomic.md#one-session",
)
def session(seen: tuple[str, ...], _limits: Limits) -> Judgement:
    """Judge the sessions that routes have beside the operation's."""
    if seen:
        return wrong("; ".join(seen[:MAX_NAMED]) + ".")
    return ok("No guarded route is seen to use another session of the store's engine.")


def _policies(app: Application) -> tuple[Policy, ...]:
    return app.policies


@GROUP.check(
    "enforcement",
    Severity.ERROR,
    title="Every policy is enforced",
    why="With report or off nothing is guarded: every retry runs.",
    mend='Set enforcement="enforce" in the policy, and unset SEMEL_ENFORCEMENT.',
    look=_policies,
    page="how-to/production.md#switch-it-off",
)
def enforcement(seen: tuple[Policy, ...], _limits: Limits) -> Judgement:
    """Judge whether a policy is switched off."""
    off = sorted({each.enforcement for each in seen} - {"enforce"})
    return wrong(f"enforcement = {', '.join(off)}.") if off else ok(f"{len(seen)} policies are enforced.")


@GROUP.check(
    "retention",
    Severity.ERROR,
    title="Keys are kept for longer than clients retry",
    why="A retry after the retention is a new operation, and runs again. Semel's own client goes on for two minutes.",
    mend="Policy(retention=timedelta(hours=24))",
    look=_policies,
    page="reference/policy.md",
)
def retention(seen: tuple[Policy, ...], _limits: Limits) -> Judgement:
    """Judge the shortest retention."""
    shortest = min((each.retention for each in seen), default=None)
    if shortest is None:
        return cannot_tell("No policy was found.")
    said = f"The shortest retention is {shortest}; Semel's client retries for {DEADLINE}."
    return wrong(said) if shortest <= DEADLINE else ok(said)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The shortest lease, and the slowest handler that the records tell of."""

    lease: timedelta | None
    handled: Handled


def _lengths(app: Application) -> Lengths:
    lease = min((each.lease for each in app.policies), default=None)
    return Lengths(lease, _stored(app).handled())


def _stored(app: Application) -> Session:
    if app.session is None:
        raise Unavailable("The app's store is not examined: give its URL.")
    return app.session


@GROUP.check(
    "lease",
    Severity.WARNING,
    title="Handlers are quicker than leases that can't be renewed",
    why="A live worker renews its lease, but not for longer than this if it blocks its event loop: then another "
    "takes the "
    "key over, and the first answer is lost.",
    mend="Policy(lease=…) of a tenth of the slowest handler, or Policy(in_progress='accept') and a worker.",
    look=_lengths,
    page="explanation/guarantees.md#guard",
)
def lease(seen: Lengths, _limits: Limits) -> Judgement:
    """Judge the slowest handler against how long a blocked loop keeps its leases."""
    if seen.lease is None:
        return cannot_tell("No policy was found.")
    if not seen.handled.count:
        return ok("There is no finished record to judge by.")
    if seen.handled.slowest is None:
        return ok(
            f"{seen.handled.count} finished records, and none tells how long its handler ran: those of atomic mode are "
            "made at its end."
        )
    bound = max(LOOP_SILENCE, LOOP_SILENCE_LEASES * seen.lease)
    line = f" ({seen.handled.line})" if seen.handled.line else ""
    said = f"The slowest of {seen.handled.count} handlers took {seen.handled.slowest}{line}; the lease is {seen.lease}."
    return wrong(said) if seen.handled.slowest > bound else ok(said)


@dataclass(frozen=True, slots=True)
class Bodies:
    """What a policy lets be stored, and what the store can hold in one value."""

    largest: int
    kind: Kind | None


def _bodies(app: Application) -> Bodies:
    largest = max((max(each.max_request_body, each.max_response_body) for each in app.policies), default=0)
    return Bodies(largest, app.session.kind if app.session else None)


@GROUP.check(
    "body-limits",
    Severity.WARNING,
    title="The store can hold what the policy lets in",
    why="A body that the store can't hold is found out after the handler ran: its answer is lost.",
    mend="Lower max_request_body and max_response_body in the policy.",
    look=_bodies,
    page="reference/policy.md",
)
def body_limits(seen: Bodies, _limits: Limits) -> Judgement:
    """Judge the largest limit."""
    said = f"The largest limit is {seen.largest / MEBIBYTE:,.0f} MiB."
    most = MAX_STORED.get(seen.kind) if seen.kind else None
    if most is not None and seen.largest >= most:
        return wrong(f"{said} {seen.kind} holds {most / MEBIBYTE:,.0f} MiB in one value.")
    return ok(said)


@dataclass(frozen=True, slots=True)
class Work:
    """Whether something needs a worker, and whether there is a sign of one."""

    is_needed: bool
    is_inside: bool
    pending: Some | None = None
    #: How long ago a service was last at work; None: none ever was.
    last: timedelta | None = None
    #: Whether the store shows that at all.
    is_shown: bool = True


def _work(app: Application) -> Work:
    needed = any(each.may_accept or each.store_request for each in app.policies)
    inside = any(each.works for each in app.guards)
    if not needed or inside:
        return Work(needed, inside)
    session = _stored(app)
    pending = session.pending()
    try:
        return Work(needed, inside, pending, session.last_upkeep())
    except Unavailable:
        return Work(needed, inside, pending, is_shown=False)


@GROUP.check(
    "worker",
    Severity.ERROR,
    title="A worker runs what the application accepts",
    why="A request that was accepted, or left by its client, is run by a worker and by nothing else.",
    mend="semel work --app module:app   # or work=True in the middleware",
    look=_work,
    page="how-to/run-the-services.md",
)
def worker(seen: Work, limits: Limits) -> Judgement:
    """Judge whether there is a sign of a worker."""
    if not seen.is_needed:
        return ok("No policy accepts or stores requests.")
    if seen.is_inside:
        return ok("The application runs the services itself.")
    if seen.pending is not None and seen.pending.age is not None and seen.pending.age > limits.accepted:
        return wrong(f"{seen.pending} accepted operations wait, the oldest for {seen.pending.age}.")
    if not seen.is_shown:
        return cannot_tell("Nothing waits, and this store does not show whether a worker runs.")
    if seen.last is None:
        return wrong("No service was ever at work on this store.")
    said = f"A service was at work {timedelta(seconds=round(seen.last.total_seconds()))} ago."
    return wrong(said) if seen.last > limits.watermark else ok(said)


@dataclass(frozen=True, slots=True)
class Kept:
    """Where an application keeps its records, and how many processes it is told to have."""

    kind: str
    workers: str | None = None


def _kept(app: Application) -> Kept:
    kind = type(app.store).__module__ if app.store is not None else ""
    return Kept("memory" if kind.startswith("semel.stores.memory") else kind, os.environ.get("WEB_CONCURRENCY"))


@GROUP.check(
    "memory",
    Severity.ERROR,
    title="The records outlive the process",
    why="memory:// is for tests: each worker process has its own keys, and a restart forgets them all.",
    mend="store='sqlite:///semel.db', or a PostgreSQL of your own",
    look=_kept,
    page="explanation/choosing-a-store.md",
)
def memory(seen: Kept, _limits: Limits) -> Judgement:
    """Judge where the records are."""
    if seen.kind != "memory":
        return ok("The store is not memory://.")
    many = f", and WEB_CONCURRENCY = {seen.workers}" if seen.workers else ""
    return wrong(f"The store is memory://{many}.")


@dataclass(frozen=True, slots=True)
class Alembic:
    """An env.py of Alembic's, and whether it names what leaves Semel's tables alone."""

    path: str | None
    is_told: bool = False
    #: Whether there are other tables beside Semel's; None: it is not known.
    has_neighbours: bool | None = None


def _alembic(app: Application) -> Alembic:
    found = alembic_in(Path.cwd())
    return found if app.session is None else replace(found, has_neighbours=app.session.has_neighbours())


def alembic_in(folder: Path) -> Alembic:
    """Find Alembic's ``env.py`` from *folder*: where alembic.ini says, or below."""
    places = []
    ini = folder / "alembic.ini"
    if ini.is_file():
        for line in ini.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "script_location":
                places.append(folder / value.strip().replace("%(here)s/", "").replace("%(here)s", "."))
    places += [folder / "alembic", folder / "migrations"]
    for place in places:
        env = place / "env.py"
        if env.is_file() and "context.configure" in (text := env.read_text("utf-8", "replace")):
            return Alembic(str(env), "semel.stores.alembic" in text or "semel_" in text)
    return Alembic(None)


@GROUP.check(
    "alembic",
    Severity.ERROR,
    title="Alembic leaves Semel's tables alone",
    why="alembic revision --autogenerate finds tables that no model has, and writes op.drop_table('semel_keys').",
    mend="context.configure(…, include_name=include_name)   # from semel.stores.alembic import include_name",
    look=_alembic,
    page="how-to/alembic.md",
)
def alembic(seen: Alembic, _limits: Limits) -> Judgement:
    """Judge what env.py says."""
    if seen.path is None:
        return ok("There is no env.py of Alembic's here.")
    if seen.is_told:
        return ok(f"{seen.path} names Semel's tables.")
    if seen.has_neighbours is None:
        return cannot_tell(f"{seen.path} does not name semel.stores.alembic, and the store is not examined.")
    if not seen.has_neighbours:
        return ok("Semel's tables have a database of their own.")
    return wrong(f"{seen.path} does not name semel.stores.alembic.")


def _django(app: Application) -> list[str] | None:
    if not app.is_django:
        return None
    from semel.django.checks import check  # noqa: PLC0415 - where a Django app is, Django is

    return [f"{each.id}: {each.msg} {each.hint or ''}".strip() for each in check()]


@GROUP.check(
    "django",
    Severity.ERROR,
    title="Django's own checks of Semel pass",
    why="They look at the setting SEMEL, at its database, and at the order of MIDDLEWARE.",
    mend="python manage.py check",
    look=_django,
    page="how-to/django.md",
)
def django(seen: list[str] | None, _limits: Limits) -> Judgement:
    """Judge what they say."""
    if seen is None:
        return ok("It is no Django application.")
    return wrong(" ".join(seen)) if seen else ok("manage.py check has nothing to say about Semel.")


@dataclass(frozen=True, slots=True)
class Places:
    """The store that is examined, and the one that the application uses."""

    examined: str
    used: str


def _places(app: Application) -> Places:
    from semel.doctor.sessions import session_of  # noqa: PLC0415 - it is needed here only

    examined = app.session.where if app.session else ""
    return Places(examined, session_of(app.store, 1.0).where if app.store is not None else "")


@GROUP.check(
    "same-store",
    Severity.WARNING,
    title="The store that is examined is the application's",
    why="What is found in another store says nothing about this application.",
    mend="Leave the address out: the application's own store is examined then.",
    look=_places,
)
def same_store(seen: Places, _limits: Limits) -> Judgement:
    """Judge whether they are the same."""
    if not seen.used or not seen.examined:
        return cannot_tell("The application does not tell which store it uses.")
    if seen.used == seen.examined:
        return ok(seen.used)
    if _but_host(seen.used) == _but_host(seen.examined):
        return cannot_tell(f"{seen.examined} and {seen.used} may be two names of one server.")
    return wrong(f"Examined is {seen.examined}; the application uses {seen.used}.")


def _but_host(where: str) -> tuple[str, str, str]:
    parts = urlsplit(where)
    return parts.scheme, parts.path, parts.query
