"""Who may see the console, and who may act in it. It knows no page and no store."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from semel.core.text import safe
from semel.errors import ConfigurationError
from semel.stores.forks import start_afresh_in_children

Role = Literal["read", "act", "bodies"]
ROLES: frozenset[str] = frozenset(get_args(Role))

#: Characters of a token; with fewer it could be guessed.
MIN_TOKEN = 16
#: How long a login lasts, in seconds: a working day.
SESSION_SECONDS = 12 * 3600
#: Wrong tokens within a minute, of all clients together (behind a proxy, all have one address), before more are 429.
MAX_FAILURES, FAILURE_SECONDS = 10, 60.0

MAX_NAME = 100


class User:
    """A person who looks at the console, and what that person may do."""

    __slots__ = ("name", "roles")

    def __init__(self, name: str, roles: Iterable[str] = ("read",)) -> None:
        """*name* is for the audit trail; *roles* are some of ``read``, ``act`` and ``bodies``."""
        if isinstance(roles, str):
            roles = (roles,)
        self.roles = frozenset(roles)
        if unknown := self.roles - ROLES:
            raise ConfigurationError(f"There is no role {min(unknown)!a}: roles are read, act and bodies.")
        self.name = safe(str(name))[:MAX_NAME] or "unnamed"

    def may(self, role: Role) -> bool:
        """Whether the person has this role."""
        return role in self.roles


class Token:
    """Lets a person in who has a secret text: for one person, or a few who trust each other."""

    def __init__(self, secret: str, *, name: str = "operator", roles: Iterable[str] = ("read", "act")) -> None:
        """A person who logs in with *secret* is *name* in the audit trail, and has *roles*."""
        # White space at its ends would be lost on the way: pages and files add some, and is_it() strips it.
        secret = secret.strip()
        if len(secret) < MIN_TOKEN:
            raise ConfigurationError(f"A token of the console has {MIN_TOKEN} characters or more.")
        self.user = User(name, roles)
        self._secret = secret.encode("utf-8", "surrogatepass")
        self._key = hashlib.sha256(b"semel console session\0" + self._secret).digest()

    def is_it(self, text: str) -> bool:
        """Whether *text* is the secret."""
        return hmac.compare_digest(text.strip().encode("utf-8", "surrogatepass"), self._secret)

    def session(self, now: float) -> str:
        """Return a new session, for a cookie: any process with the same secret can read it."""
        text = f"{int(now) + SESSION_SECONDS}.{secrets.token_urlsafe(12)}"
        return f"{text}.{self._sign(text)}"

    def is_session(self, cookie: str, now: float) -> bool:
        """Whether *cookie* is a session that is not over."""
        text, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(text).encode()):
            return False
        return now < int(text.partition(".")[0])

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()


#: What a host application gives: from its own request to a user, or None. It may be a coroutine function under ASGI.
Lookup = Callable[[Any], Any]
Auth = Token | Lookup | None


def check_auth(auth: Auth) -> Auth:
    """Refuse what is no way to log in."""
    if auth is not None and not isinstance(auth, Token) and not callable(auth):
        raise ConfigurationError("auth= is a Token(…), or a function of the request that returns a User(…) or None.")
    return auth


def check_user(found: object) -> User | None:
    """Return what the host application's function has returned, if it can be that."""
    if found is None or isinstance(found, User):
        return found
    raise ConfigurationError(f"auth= has returned {type(found).__name__}, and not a User(…) or None.")


class Failures:
    """Counts the wrong tokens: past a limit, further ones are told to wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with none."""
        self._clock = clock
        self._times: deque[float] = deque()
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have a lock that no thread of a parent has."""
        self._mutex = threading.Lock()

    def wait(self) -> int:
        """Return for how many seconds a client with a wrong token is to wait; 0: it may try again now."""
        with self._mutex:
            now = self._clock()
            while self._times and self._times[0] <= now - FAILURE_SECONDS:
                self._times.popleft()
            if len(self._times) < MAX_FAILURES:
                return 0
            return max(1, int(self._times[0] + FAILURE_SECONDS - now) + 1)

    def note(self) -> None:
        """Count one that has failed."""
        with self._mutex:
            self._times.append(self._clock())
