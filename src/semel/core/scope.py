"""The owner of a key. Two principals may use the same key; the application's own login says which one it is."""

from __future__ import annotations

import hashlib
import re
from uuid import UUID

from semel.core.message import Head
from semel.core.policy import Policy
from semel.errors import ConfigurationError, ScopeMissing

#: Characters. It is half of a primary key, and an index row has room for about 2,700 bytes.
MAX_PRINCIPAL_LENGTH = 255
MAX_SCOPE_LENGTH = 1024

#: Separates the parts of a scope, since no principal may contain it.
SEPARATOR = "\t"
_AFTER_SEPARATOR = chr(ord(SEPARATOR) + 1)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


#: In front of the scopes of report mode. No principal is empty, so no other scope starts like this.
REPORTED = f"{SEPARATOR}report{SEPARATOR}"


class SingleTenant:
    """The scope of an API with one user only, stated explicitly: every key belongs to the same principal."""

    #: The one principal there is.
    principal = "single-tenant"

    def __call__(self, _request: object) -> str:
        """Return it."""
        return self.principal

    def __repr__(self) -> str:
        """Show it as the code writes it."""
        return "semel.SINGLE_TENANT"


SINGLE_TENANT = SingleTenant()


def scoped(principal: str, head: Head, policy: Policy) -> str:
    """Return the scope of a request of *principal*: the principal, or the principal and the operation."""
    if policy.scope_by == "principal":
        return principal
    scope = f"{principal}{SEPARATOR}{head.method} {head.path}"
    if len(scope) <= MAX_SCOPE_LENGTH:
        return scope
    return f"{principal}{SEPARATOR}{head.method} sha256:{hashlib.sha256(head.path.encode()).hexdigest()}"


def principal_of(named: object) -> str:
    """Return the principal that the application *named*, by one name or by several; refuse an empty one."""
    principal = named if isinstance(named, str) else _spelled_out(named)
    if not principal:
        raise ScopeMissing
    if len(principal) > MAX_PRINCIPAL_LENGTH or _CONTROL.search(principal):
        raise ConfigurationError(
            f"scope must return at most {MAX_PRINCIPAL_LENGTH} characters, none of them a control character."
        )
    return principal


def _spelled_out(named: object) -> str:
    return _joined(named) if isinstance(named, tuple) else _spelled(named)


def _joined(names: tuple[object, ...]) -> str:
    """Join *names* so that no other names give the same text: a slash in a name is escaped."""
    spelled = [_spelled(name) for name in names]
    if not all(spelled):
        raise ScopeMissing
    return "/".join(name.replace("%", "%25").replace("/", "%2F") for name in spelled)


def _spelled(name: object) -> str:
    """Return *name* as a string: primary keys are numbers or UUIDs, and 0 is one, too. Without a user it is empty."""
    if isinstance(name, str):
        return name
    if isinstance(name, int | UUID) and not isinstance(name, bool):
        return str(name)
    if not name:  # None; or False, of `user.is_authenticated and user.pk`
        return ""
    raise ConfigurationError(
        f"scope must return a string, an int, a UUID, or a tuple of them, not {type(name).__name__}."
    )


def scopes_of(principal: str) -> tuple[str, str]:
    """Return the first of the scopes of *principal*, and what comes after the last, in the order of their bytes.

    Nothing else is between them: only a control character comes before the tab, and no principal has one.
    """
    return principal, f"{principal}{_AFTER_SEPARATOR}"


def is_of(scope: str, principal: str) -> bool:
    """Whether *scope* is among those of *principal*: itself, or itself and an operation."""
    return scope == principal or scope.startswith(f"{principal}{SEPARATOR}")


def reported(scope: str) -> str:
    """Return the scope of report mode's own records for *scope*, so that enforcing starts with a clean table."""
    marked = REPORTED + scope
    if len(marked) <= MAX_SCOPE_LENGTH:
        return marked
    return f"{REPORTED}sha256:{hashlib.sha256(scope.encode()).hexdigest()}"
