"""The setting ``SEMEL``, read into one frozen value, and the stores that it names. Nothing here is checked twice:
``manage.py check`` and the first request read it the same way.

    SEMEL = {
        "DATABASE": "default",              # the alias of the database that keeps the records
        "POLICY": {"required": True},       # a Policy, fields of Policy.ietf(), "ietf" or "stripe"
        "SCOPE": "shop.api.account_of",     # callable(request) -> str; default: the user who is logged in
        "ALLOW_ANONYMOUS": False,           # True: requests without credentials share the scope "anonymous"
        "PATHS": ["/api/*"],                # what the middleware guards; default: everything
        "AUDIT": "on",                      # the audit trail: "on", "all", "replays" (all, and replays too) or "off"
        "STORE": "postgresql://…",          # a store of its own (or a Tiered), instead of Django's database
        "ENCRYPT": "env:SEMEL_SECRETS",     # where the secrets are that answers and requests are encrypted with
    }
"""

from __future__ import annotations

import difflib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.db.models import Model
from django.http import HttpRequest
from django.utils.module_loading import import_string

from semel.core.credentials import looks_secret
from semel.core.policy import Policy
from semel.core.trail import Audit
from semel.errors import ConfigurationError, ScopeMissing
from semel.guard.request import Paths, Routes, switch
from semel.stores import AsyncStore, Store
from semel.stores import async_store as open_async_store
from semel.stores import store as open_store
from semel.stores.django import AsyncDjangoStore, DjangoStore
from semel.stores.encrypted import Encrypted
from semel.stores.secrets import check_reference
from semel.stores.tiered import Tiered

NAME = "SEMEL"

#: The scope of requests without a user, if they are allowed.
ANONYMOUS = "anonymous"

#: What to do about a view that logs in by itself.
LOGS_IN_INSIDE = (
    "This is a REST framework view, which logs in inside the view: a guard around it would not know the user. "
    "Derive it from semel.django.rest.IdempotentMixin, or put @idempotent below @api_view."
)
#: The same, where the middleware guards it.
OR_SCOPE = (
    f'Or give a function that finds the user by the request\'s own credential in {NAME}["SCOPE"]. '
    f'A view that needs no guard, such as one that hands out tokens, is left out by {NAME}["PATHS"].'
)
#: Names of headers and of cookies, in part, that a browser sends for a user who is not logged in, too.
_SENT_BY_ALL = ("cookie", "csrf", "xsrf")
_SET_FOR_ALL = (*_SENT_BY_ALL, "session")

#: Returns the user of a request; None: it has none. It may be a coroutine function, for async views.
Scope = Callable[[Any], str | Awaitable[str | None] | None]


def user_scope(request: Any) -> str | None:
    """Return the user of a request by Django's own login: ``user:<primary key>``; None if no user is logged in."""
    view = getattr(getattr(request, "resolver_match", None), "func", None)
    if isinstance(request, HttpRequest) and logs_in_inside(view):
        raise ConfigurationError(f"{LOGS_IN_INSIDE} {OR_SCOPE}")
    return _scope_of(getattr(request, "user", None))


async def async_user_scope(request: Any) -> str | None:
    """Return the same for an async view, in which looking up the user must not block the loop."""
    # Not auser first: a login by token, or one that acts for another user, sets ``user`` alone.
    named: str | None = await sync_to_async(user_scope)(request)
    return _scope_of(await request.auser()) if named is None and hasattr(request, "auser") else named


def logs_in_inside(view: Any) -> bool:
    """Whether *view* is one of REST framework's with a login of its own, which Django's middleware knows nothing of."""
    made: Any = getattr(view, "cls", None)
    if not hasattr(made, "initialize_request"):
        return False
    from rest_framework.authentication import SessionAuthentication  # noqa: PLC0415 - where such a view is, it is
    from rest_framework.views import APIView  # noqa: PLC0415 - as above

    said = {**vars(view)}.get("initkwargs", {}).get("authentication_classes", made.authentication_classes)
    is_chosen = made.get_authenticators is not APIView.get_authenticators
    # It takes the user from Django's own login.
    own = SessionAuthentication.authenticate
    return is_chosen or any(getattr(each, "authenticate", None) is not own for each in said)


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``SEMEL`` says."""

    #: The alias of Django's database that keeps the records.
    database: str = "default"
    policy: Policy = field(default_factory=Policy.ietf)
    #: As it was given; ``principal`` and ``aprincipal`` call it.
    scope: Scope = user_scope
    allow_anonymous: bool = False
    #: What the middleware guards, and by which policy.
    paths: Paths = None
    audit: Audit = "on"
    #: A store of its own; None is Django's database.
    store: str | Tiered | Encrypted | None = None
    #: Where the secrets are; None: nothing is encrypted, unless the store says so itself.
    encrypt: str | None = None

    def opened(self) -> Store:
        """Return a store of its own for code in threads."""
        made = open_store(self.store) if self.store else DjangoStore(self.database, audit=self.audit)
        return open_store(Encrypted(made, self.encrypt)) if self.encrypt else made

    def async_opened(self) -> AsyncStore:
        """Return a store of its own for code on an event loop."""
        made = open_async_store(self.store) if self.store else AsyncDjangoStore(self.database, audit=self.audit)
        return open_async_store(Encrypted(made, self.encrypt)) if self.encrypt else made

    @property
    def routes(self) -> Routes:
        """What the middleware guards."""
        return Routes(self.policy, self.paths)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every policy that is in it."""
        more = self.paths.values() if isinstance(self.paths, Mapping) else ()
        return (self.policy, *more)

    def principal(self, request: Any) -> str | None:
        """Return the user of *request*, for a view that runs in a thread; None is refused."""
        if inspect.iscoroutinefunction(self.scope):
            raise ConfigurationError(f'{NAME}["SCOPE"] is `async def`, and this view is not: it can\'t be awaited.')
        return self._or_anonymous(self.scope(request), request)

    async def aprincipal(self, request: Any) -> str | None:
        """Return the user of *request*, for a view that runs on an event loop; None is refused."""
        if self.scope is user_scope:
            return self._or_anonymous(await async_user_scope(request), request)
        if inspect.iscoroutinefunction(self.scope):
            return self._or_anonymous(await self.scope(request), request)
        # It may ask the database.
        return self._or_anonymous(await sync_to_async(self.scope)(request), request)

    def _or_anonymous(self, named: Any, request: Any) -> str | None:
        if not named and isinstance(request, HttpRequest):
            _refuse_credentials(request)
        said: str | None = ANONYMOUS if not named and self.allow_anonymous else named
        return said


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with one setting, as ``manage.py check`` shows it."""

    id: str
    message: str
    hint: str


class Wrong(Exception):
    """A setting is wrong: its message and the remedy."""

    def __init__(self, message: str, hint: str) -> None:
        """*message* says what is wrong; *hint* is the remedy."""
        super().__init__(message)
        self.hint = hint


def read(given: object) -> tuple[Settings, list[Problem]]:
    """Read the setting ``SEMEL``. A wrong part keeps its default, and becomes a ``Problem``."""
    if not isinstance(given, Mapping):
        return Settings(), [
            Problem(
                "semel.E001", f"{NAME} is {type(given).__name__}, not a dict.", f'{NAME} = {{"DATABASE": "default"}}'
            )
        ]
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        if name not in _READERS:
            problems.append(Problem("semel.E002", f"{NAME}[{name!r}] is not known.", _nearest(name)))
            continue
        number, reader = _READERS[name]
        try:
            found[name.lower()] = reader(value)
        except Wrong as wrong:
            problems.append(Problem(number, f"{NAME}[{name!r}] {wrong}", wrong.hint))
    return Settings(**found), problems


_logger = logging.getLogger("semel")
#: The routes of which the log has a line about credentials.
_told: set[str] = set()

_lock = threading.RLock()
_settings: Settings | None = None
_store: Store | None = None
_async_store: AsyncStore | None = None


def settings() -> Settings:
    """Return the current value of ``SEMEL``; raise ``ConfigurationError`` if it is wrong."""
    global _settings  # noqa: PLW0603 - read once, since every request asks; forgotten when it changes
    if _settings is None:
        switch()  # A wrong value is an error at the start.
        said, problems = read(getattr(django_settings, NAME, {}))
        if problems:
            raise ConfigurationError(" ".join(f"{each.message} {each.hint}" for each in problems))
        _settings = said
    return _settings


def store() -> Store:
    """Return the store for code in threads."""
    global _store  # noqa: PLW0603 - as above
    found = _store
    if found is not None:
        return found
    with _lock:
        if _store is None:
            _store = settings().opened()
        return _store


def async_store() -> AsyncStore:
    """Return the store for code on an event loop. A STORE of its own needs a loop that outlives the request."""
    global _async_store  # noqa: PLW0603 - as above
    with _lock:
        if _async_store is None:
            _async_store = settings().async_opened()
        return _async_store


def _forget(*, setting: str, **_: Any) -> None:
    global _settings, _store, _async_store  # noqa: PLW0603 - as above
    if setting == NAME:
        with _lock:
            if _store is not None:
                _store.close()
            # Its loop closes the async store. Django closes Django's own connections.
            _settings = _store = _async_store = None
            _told.clear()


setting_changed.connect(_forget, dispatch_uid="semel")


def _database(value: object) -> str:
    if not isinstance(value, str):
        raise Wrong(f"is {value!r}.", 'Give the name of an entry of DATABASES, such as "default".')
    return value


def _policy(value: object) -> Policy:
    if isinstance(value, Policy):
        return value
    try:
        if isinstance(value, Mapping):
            return Policy.ietf(**value)
        if isinstance(value, str) and value in _PRESETS:
            return _PRESETS[value]()
    except (ConfigurationError, TypeError) as error:
        raise Wrong("can't be right.", str(error)) from error
    raise Wrong(f"is {value!r}.", 'Give a Policy, a dict of its fields, "ietf" or "stripe".')


def _scope(value: object) -> Scope:
    if isinstance(value, str):
        try:
            value = import_string(value)
        except ImportError as error:
            raise Wrong("can't be imported.", f"{error}.") from error
    if not callable(value):
        raise Wrong(
            f"is {value!r}.",
            "Give a function that returns the user of a request, or its dotted path, or leave it out.",
        )
    return value


def _allow_anonymous(value: object) -> bool:
    if not isinstance(value, bool):
        raise Wrong(f"is {value!r}.", "Give True or False.")
    return value


def _paths(value: Any) -> Paths:
    if isinstance(value, Iterator):
        raise Wrong("is an iterator, and can be read only once.", "Give a list.")
    paths: Paths = {each: _policy(policy) for each, policy in value.items()} if isinstance(value, Mapping) else value
    try:
        Routes(None, paths)
    except ConfigurationError as error:
        raise Wrong("can't be right.", str(error)) from error
    return paths


def _audit(value: object) -> Audit:
    for each in get_args(Audit):
        if value == each:
            known: Audit = each
            return known
    raise Wrong(f"is {value!r}.", f"Give one of {', '.join(map(repr, get_args(Audit)))}.")


def _encrypt(value: object) -> str | None:
    try:
        return None if value is None else check_reference(value)
    except ConfigurationError as error:
        raise Wrong("can't be right.", str(error)) from error


def _store_given(value: object) -> str | Tiered | Encrypted | None:
    if (
        value is not None
        and not isinstance(value, Tiered | Encrypted)
        and (not isinstance(value, str) or "://" not in value)
    ):
        # It is not shown: it may hold a password.
        raise Wrong("is not the URL of a store.", "Give one such as postgresql://user@host/database, or leave it out.")
    return value


_PRESETS: dict[str, Callable[[], Policy]] = {"ietf": Policy.ietf, "stripe": Policy.stripe}

#: The parts, how each is read, and its number in ``manage.py check``.
_READERS: dict[object, tuple[str, Callable[[Any], Any]]] = {
    "DATABASE": ("semel.E003", _database),
    "POLICY": ("semel.E004", _policy),
    "SCOPE": ("semel.E005", _scope),
    "ALLOW_ANONYMOUS": ("semel.E006", _allow_anonymous),
    "PATHS": ("semel.E007", _paths),
    "AUDIT": ("semel.E008", _audit),
    "STORE": ("semel.E009", _store_given),
    "ENCRYPT": ("semel.E016", _encrypt),
}


def _nearest(name: object) -> str:
    known = [str(each) for each in _READERS]
    near = difflib.get_close_matches(str(name).upper(), known, 1)
    return f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}."


def _refuse_credentials(request: HttpRequest) -> None:
    """Raise if *request* has a credential that no login has read yet: its user is not anonymous."""
    sent = [*_secret(request.headers, _SENT_BY_ALL), *_secret(request.COOKIES, _SET_FOR_ALL)]
    if not sent:
        return
    match = getattr(request, "resolver_match", None)
    route = "/" if match is None else f"/{match.route}"
    if route not in _told:
        _told.add(route)
        _logger.warning(
            "%s: the request has a credential (%s), and no user was found, so its key is refused. If the view logs in "
            "by itself, the guard must come after that: @idempotent below the login's decorator, @idempotent below "
            "@api_view, or semel.django.rest.IdempotentMixin. Or give a function that finds the user by the credential "
            'in SEMEL["SCOPE"]. ALLOW_ANONYMOUS changes nothing here: one user would get the answers of another.',
            route,
            ", ".join(sent),
        )
    raise ScopeMissing("An idempotency key belongs to a user, and this request's credentials name none that is known.")


def _secret(names: Iterable[str], harmless: tuple[str, ...]) -> Iterator[str]:
    """Yield those of *names* that look like credentials, and are not sent for everybody."""
    lower = (each.lower() for each in names)
    return (each for each in lower if looks_secret(each) and not any(part in each for part in harmless))


def _scope_of(user: Any) -> str | None:
    if user is None or not user.is_authenticated:
        return None
    if user.pk is None:
        raise ConfigurationError(
            "The user who is logged in was never saved, and has no primary key. Give a function that returns the user "
            f'of a request in {NAME}["SCOPE"].'
        )
    return f"{_kind_of(user)}:{user.pk}"


def _kind_of(user: Any) -> str:
    """Return a prefix for the user's model: users of two tables may have the same primary key."""
    if not isinstance(user, Model):
        return "user"
    tables = [each._meta.label for each in user.__class__.__mro__ if hasattr(each, "_meta")]  # noqa: SLF001 - as it is called
    return "user" if django_settings.AUTH_USER_MODEL in tables else str(tables[0].lower())
