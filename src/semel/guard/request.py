"""Which requests are guarded, by which policy, and what the application is shown of one. It speaks no protocol."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, Self

from semel.core.message import Head, Headers
from semel.core.policy import Policy
from semel.core.status import STATUS_PATH, checked_path
from semel.core.value import value
from semel.errors import ConfigurationError
from semel.stores import AsyncStore, Store
from semel.telemetry.logs import logger

#: Where an app that is run for a stored request finds its user (in the ASGI scope, or the WSGI environ): credentials
#: are not stored, and no server ever sets this.
PRINCIPAL = "semel.principal"

NOWHERE_TO_ASK = (
    'A policy here accepts requests to be run later (in_progress="accept", or "respond-async" among its preferences), '
    f"and their clients have nowhere to ask for the outcome. {{}}{STATUS_PATH!r}; or take that from the policy."
)

#: In the environment: switches every guard of this process off, or to report mode.
SWITCH = "SEMEL_ENFORCEMENT"

_ATOMIC_STAYS = 'What has mode="atomic" stays guarded: its handlers write through the guard\'s own transaction.'
SWITCHED: dict[str, tuple[int, str]] = {
    "off": (
        logging.CRITICAL,
        f"{SWITCH}=off: NOTHING IS GUARDED in this process. Keys are ignored, and every retry runs. " + _ATOMIC_STAYS,
    ),
    "report": (
        logging.WARNING,
        f"{SWITCH}=report: requests are not guarded in this process, and what would have been is reported. "
        + _ATOMIC_STAYS,
    ),
}

Paths = str | Iterable[str] | Mapping[str, Policy] | Callable[[str], bool] | None


@cache
def switch() -> Literal["off", "report"] | None:
    """Return to what the environment switches the guards of this process; None: to nothing. Said once, loudly."""
    said = os.environ.get(SWITCH, "")
    if said in {"", "enforce"}:
        return None
    if said not in SWITCHED:
        raise ConfigurationError(f'{SWITCH} can\'t be {said!r}: it must be "off", "report" or "enforce".')
    logger.log(*SWITCHED[said])
    return "off" if said == "off" else "report"


def switched(policy: Policy) -> Policy:
    """Return *policy* as the environment has it."""
    said = switch()
    if said is None or policy.mode == "atomic" or policy.enforcement == "off":
        return policy
    return replace(policy, enforcement=said)


class HeaderView(Mapping[str, str]):
    """Request headers by name, in any case; several of one name are joined with a comma."""

    def __init__(self, headers: Headers) -> None:
        """View *headers*, which have lower-case names."""
        self._headers = headers

    def __getitem__(self, name: str) -> str:
        """Return the value of *name*."""
        wanted = name.lower().encode("latin-1")
        values = [value.decode("latin-1") for each, value in self._headers if each == wanted]
        if not values:
            raise KeyError(name)
        return ", ".join(values)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(dict.fromkeys(name.decode("latin-1") for name, _ in self._headers))

    def __len__(self) -> int:
        """Count the names."""
        return len({name for name, _ in self._headers})


@value
class RequestView:
    """What the application's ``scope`` callable is given to name the user of a request."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    #: The ASGI scope, or the WSGI environ: where an outer layer left the user it knows.
    raw: Any

    @classmethod
    def of(cls, head: Head, path: str, raw: object) -> Self:
        """Show *head*, with the decoded *path*."""
        return cls(head.method, path, head.query.decode("latin-1"), HeaderView(head.headers), raw)


def check_modes(store: Store | AsyncStore, policies: Iterable[Policy]) -> None:
    """Raise if a policy needs what *store* does not have."""
    if any(each.mode == "atomic" for each in policies):
        store.check_transactions()


class Routes:
    """Which requests are guarded, and by which policy."""

    #: Whether a path, decoded, is one of a pattern.
    fits: Callable[[str, str], bool] = staticmethod(fnmatchcase)

    def __init__(self, policy: Policy | None, paths: Paths) -> None:
        """Guard the given *paths*: patterns such as ``/orders/*``, each perhaps with its own policy; None is all."""
        policy = Policy.ietf() if policy is None else policy
        if not isinstance(policy, Policy):
            raise ConfigurationError(f"policy must be a Policy, such as Policy.ietf(), not {policy!r}.")
        policy = switched(policy)
        #: That of requests to a path without a policy of its own.
        self.policy = policy
        self._accepts = paths if callable(paths) else None
        self._patterns: Mapping[str, Policy] | None = None
        if paths is not None and self._accepts is None:
            self._patterns = _patterns(paths, policy)

    @property
    def accepting(self) -> Policy | None:
        """A policy by which requests may be accepted, to be run later; None: there is none."""
        return next((each for each in self.policies if each.may_accept), None)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every policy that a request may be guarded by."""
        return (self.policy,) if self._patterns is None else tuple(self._patterns.values())

    def policy_for(self, method: str, path: str) -> Policy | None:
        """Return the policy of this request, or None when it is not guarded."""
        # Most apps have one policy for all of their paths.
        is_plain = self._patterns is None and self._accepts is None
        policy = self.policy if is_plain else self.policy_at(path)
        return policy if policy is not None and method in policy.methods else None

    def pattern_at(self, path: str) -> str | None:
        """Return the pattern by which *path* is guarded, where the application gave any."""
        return next((pattern for pattern in self._patterns or () if self.fits(path, pattern)), None)

    def policy_at(self, path: str) -> Policy | None:
        """Return the policy of requests to *path*, by whatever method, or None when none of them is guarded."""
        if self._patterns is not None:
            return next((each for pattern, each in self._patterns.items() if self.fits(path, pattern)), None)
        return self.policy if self._accepts is None or self._accepts(path) else None


def declared_length(head: Head) -> int:
    """Return how long the client says its body is; 0 when it does not say."""
    values = head.values(b"content-length")
    return int(values[0]) if values and values[0].isdigit() else 0


def checked_scope(scope: object) -> Callable[[RequestView], Any]:
    """Return *scope* if it can be asked, and explain it where it was left out."""
    if callable(scope):
        return scope
    raise ConfigurationError(
        "scope must be a callable that names a request's user: scope=lambda request: request.headers['x-account']. "
        "For an API with one user, say so: scope=semel.SINGLE_TENANT."
    )


def status_path_for(routes: Routes, path: str | None) -> str | None:
    """Return where the state of operations is asked for; None: nowhere, for none is ever accepted."""
    path = checked_path(path)
    if routes.accepting is None:
        return None
    if path is None:
        raise ConfigurationError(NOWHERE_TO_ASK.format("Give the middleware a status_path, such as status_path="))
    return path


def _patterns(paths: object, policy: Policy) -> Mapping[str, Policy]:
    if isinstance(paths, Mapping):
        patterns = {pattern: switched(each) if isinstance(each, Policy) else each for pattern, each in paths.items()}
    elif isinstance(paths, str):
        patterns = {paths: policy}
    elif isinstance(paths, Iterable):
        patterns = dict.fromkeys(paths, policy)
    else:
        raise ConfigurationError(f"paths must be patterns such as '/orders/*' or a callable, not {paths!r}.")
    for pattern, each in patterns.items():
        if not isinstance(pattern, str) or not pattern.startswith(("/", "*")):
            raise ConfigurationError(f"paths: {pattern!r} is no pattern of a path, such as '/orders/*'.")
        if not isinstance(each, Policy):
            raise ConfigurationError(f"paths: {pattern!r} needs a Policy, not {each!r}.")
    return patterns
