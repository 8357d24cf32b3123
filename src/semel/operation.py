"""What a handler can know and say of the operation it is part of. How it is guarded is not a handler's concern."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from semel.core.derive import derive
from semel.core.record import Hold
from semel.errors import NotGuarded


@dataclass(slots=True)
class Operation:
    """One guarded request, seen from inside its handler."""

    hold: Hold
    #: Whether the handler said that nothing happened.
    has_no_effect: bool = field(default=False, init=False)

    @property
    def key(self) -> str:
        """The client's idempotency key."""
        return self.hold.key

    @property
    def scope(self) -> str:
        """Whose key it is."""
        return self.hold.scope

    @property
    def attempt(self) -> int:
        """1 the first time; more when an earlier worker died over it."""
        return self.hold.attempt

    def derive(self, name: str) -> str:
        """Return the key to send along with the call *name* to a provider: the same on every retry and attempt."""
        return derive(self.scope, self.key, name)

    def no_effect(self) -> None:
        """Say that nothing happened, so that an error answer (5xx) frees the key. ``raise NoEffect`` says it too."""
        self.has_no_effect = True


_current: ContextVar[Operation] = ContextVar("semel.operation")


def current() -> Operation:
    """Return the operation this code runs for; raise ``NotGuarded`` where there is none."""
    try:
        return _current.get()
    except LookupError:
        raise NotGuarded from None


def begin(operation: Operation) -> None:
    """Make *operation* the current one in this context, for good. For doors that run each request in its own."""
    _current.set(operation)


@contextmanager
def enter(operation: Operation) -> Iterator[None]:
    """Make *operation* the current one inside the block, and not for what this thread does next. For doors."""
    token = _current.set(operation)
    try:
        yield
    finally:
        _current.reset(token)
