"""What a handler can know, say and do of the operation it is part of. How it is guarded is not a handler's concern."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, overload

from semel.calls import Call, Effect0, Effect1, Effect2, Effect3, Effect4, check
from semel.core.derive import derive
from semel.core.record import Hold, Milestone
from semel.core.recovery import Progress
from semel.errors import ConfigurationError, NoConnection, NotGuarded
from semel.flows.serve import Around
from semel.flows.steps import OnUnknown, Story, effect, mark, park, phase
from semel.outbox import Headers, Publishing, publishing
from semel.stores.transaction import AsyncTransaction, Transaction

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

#: What ``verify`` is.
Verify = Callable[..., Any]


class Steps(Protocol):
    """What takes the steps of an operation, in a thread or on an event loop (``guard/steps.py``)."""

    def take(self, call: Call, flow: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any) -> Any:
        """Take one step: run *flow* over ports that make *call*. On an event loop, return what is to be awaited."""

    def note(self, flow: Callable[..., Coroutine[Any, Any, None]], /, *args: Any) -> Any:
        """Run *flow*, which is no step and calls no function; on an event loop, return what is to be awaited."""

    async def stop(self) -> None:
        """Cancel the steps under way in other tasks than this one, and wait until they have ended."""


class Operation:
    """One guarded request, seen from inside its handler."""

    __slots__ = (
        "_is_recorded",
        "_publishing",
        "_request",
        "_steps",
        "_take_steps",
        "_transaction",
        "has_no_effect",
        "hold",
        "is_freed",
        "is_refused",
        "story",
    )

    def __init__(
        self,
        hold: Hold,
        progress: Progress | None = None,
        *,
        steps: Callable[[], Steps] | None = None,
        transaction: Transaction | AsyncTransaction | None = None,
        request: str = "",
        is_recorded: bool = True,
    ) -> None:
        """The operation that *hold* is held for; *steps* makes what takes its steps, or all of it is in *transaction*.

        *request* is which request it is for, as ``request_of`` writes it. One that is not recorded holds no key.
        """
        self.hold = hold
        self.story = Story(hold, progress or Progress())
        #: Whether the handler said that nothing happened.
        self.has_no_effect = False
        #: Whether a framework refused the request as it was sent, before the handler could do anything. Internal.
        self.is_refused = False
        #: Whether the key is freed, whatever the answer: nothing was begun, or another guard keeps it. Internal.
        self.is_freed = False
        self._take_steps = steps
        #: Made with the first step: most handlers take none.
        self._steps: Steps | None = None
        self._transaction = transaction
        #: Made with the first message of atomic mode.
        self._publishing: Publishing | None = None
        self._request = request
        self._is_recorded = is_recorded

    @property
    def key(self) -> str:
        """The client's idempotency key."""
        return self.hold.key

    @property
    def scope(self) -> str:
        """The owner of the key."""
        return self.hold.scope

    @property
    def attempt(self) -> int:
        """1 the first time; more when an earlier worker died over it."""
        return self.hold.attempt

    @property
    def recovery_point(self) -> str | None:
        """The last step that is done, by this attempt or an earlier one; None before the first."""
        return self.story.progress.recovery_point

    @property
    def connection(self) -> Any:
        """The open connection of atomic mode, in its driver's own type: what it writes commits with the answer."""
        if self._transaction is None:
            raise NoConnection
        return self._transaction.connection

    def phase(self, name: str, function: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function(connection, *args, **kwargs)`` in a transaction that commits its result with it.

        The result must be what JSON can hold. A retry gets it back without calling *function*. In an async handler
        this is to be awaited; a *function* that is not ``async`` runs in a thread there, and ``semel.in_thread`` tells
        a type checker so.
        """
        steps = self._steps or self._here("phase", name)
        try:
            # The connection is not there yet, and any will do to see whether one is taken.
            check("phase %r", name, function, (None, *args), kwargs, wanted="with a connection first, then with these")
        except ConfigurationError:
            self.story.is_used = True  # As in ``effect``.
            raise
        self.story.promised.append(name)
        return steps.take(Call(name, function, args, kwargs), phase, self.story, name)  # type: ignore[no-any-return]  # what it returns, or what is awaited for it

    @overload
    def effect(
        self,
        name: str,
        function: Effect0[R],
        /,
        *,
        verify: Verify | None = None,
        on_unknown: OnUnknown | None = None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def effect(
        self,
        name: str,
        function: Effect1[A, R],
        a: A,
        /,
        *,
        verify: Verify | None = None,
        on_unknown: OnUnknown | None = None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def effect(
        self,
        name: str,
        function: Effect2[A, B, R],
        a: A,
        b: B,
        /,
        *,
        verify: Verify | None = None,
        on_unknown: OnUnknown | None = None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def effect(
        self,
        name: str,
        function: Effect3[A, B, C, R],
        a: A,
        b: B,
        c: C,
        /,
        *,
        verify: Verify | None = None,
        on_unknown: OnUnknown | None = None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def effect(
        self,
        name: str,
        function: Effect4[A, B, C, D, R],
        a: A,
        b: B,
        c: C,
        d: D,
        /,
        *,
        verify: Verify | None = None,
        on_unknown: OnUnknown | None = None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def effect(
        self,
        name: str,
        function: Callable[..., R],
        a: Any,
        b: Any,
        c: Any,
        d: Any,
        e: Any,
        /,
        *args: Any,
        verify: Verify | None = None,
        on_unknown: OnUnknown | None = None,
        **kwargs: Any,
    ) -> R: ...
    def effect(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        verify: Verify | None = None,
        on_unknown: OnUnknown | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call ``function(*args, idempotency_key=derived, **kwargs)``: the outside world, outside any transaction.

        That it is about to be called is stored before, and its result after. When a crash in between leaves no one who
        knows, *on_unknown* decides: "retry" calls it again with the same key; "verify" (the default where *verify* is
        given) asks ``verify(*args, idempotency_key=derived, **kwargs)``, which returns ``Applied(result)``,
        ``NOT_APPLIED`` or ``CANT_TELL``; "park" waits for an operator. In an async handler this is to be awaited, as
        ``phase`` is.
        """
        choice: OnUnknown = on_unknown or ("verify" if verify else "retry")
        if choice not in get_args(OnUnknown) or (choice == "verify") != (verify is not None):
            raise ConfigurationError(
                f'effect {name!r}: on_unknown is "retry", "park", or "verify" with a function verify=, not {choice!r}.'
            )
        steps = self._steps or self._here("effect", name)
        named = {**kwargs, "idempotency_key": ""}
        try:
            check("effect %r", name, function, args, named, wanted="with these and idempotency_key=", is_stored=True)
            if verify is not None:
                check("effect %r, verify", name, verify, args, named, wanted="as the effect is")
        except ConfigurationError:
            # Its steps tell what it did, and this one was not taken: once it is corrected, a retry may go on.
            self.story.is_used = True
            raise
        self.story.promised.append(name)
        return steps.take(Call(name, function, args, kwargs, verify), effect, self.story, name, choice)

    def publish(
        self,
        type: str,  # noqa: A002 - as brokers and CloudEvents call it
        payload: Any,
        /,
        *,
        key: str | None = None,
        to: str | None = None,
        headers: Headers = None,
        content_type: str | None = None,
        source: str | None = None,
        traceparent: str | None = None,
    ) -> Any:
        """Write one message to the outbox, in the transaction of atomic mode or of the phase that this is called in; a
        relay sends it once that has committed. Return its id: it is derived from the operation, and the same whenever
        the handler runs again. In an async handler this is to be awaited. The arguments are those of ``Outbox.add``.
        """
        self.story.check()
        into = publishing.get()
        if into is None and self._transaction is not None:
            into = self._publishing = self._publishing or Publishing(self._transaction, promised=self.story.promised)
        if into is None:
            raise ConfigurationError(
                f"publish {type!r}: no transaction is open here that it could commit with. Call it inside a phase, or "
                'in mode="atomic"; elsewhere use Outbox(store).add(connection, …).'
            )
        return into.publish(
            self.scope,
            self.key,
            type,
            payload,
            key=key,
            to=to,
            headers=headers,
            content_type=content_type,
            source=source,
            traceparent=traceparent,
        )

    def progress(self, fraction: float, note: str | None = None) -> Any:
        """Say how far it is, between 0 and 1, and perhaps in words: a request for its state is told.

        It is one small write, and nothing depends on it: where the store can't be reached it is left out. In an async
        handler this is to be awaited.
        """
        milestone = Milestone(fraction, note)
        steps = self._made()
        if steps is None:
            raise ConfigurationError(
                'progress: in mode="atomic" nothing of an operation is stored before its one commit, so none could '
                'see it. Use mode="guard".'
            )
        return steps.note(mark, self.story, milestone)

    def derive(self, name: str) -> str:
        """Return the key to send along with the call *name* to a provider: the same on every retry and attempt."""
        return derive(self.scope, self.key, name)

    def no_effect(self) -> None:
        """Say that nothing happened, so that an error answer (5xx) frees the key. ``raise NoEffect`` says it too."""
        self.has_no_effect = True

    def park(self, what: str) -> Any:
        """Say that it can't be known what became of *what*: an operator is to resolve it. The handler then ends.

        To be awaited in an async handler. Internal.
        """
        return self._here("park", what).note(park, self.story, what)

    @property
    def around(self) -> Around | None:
        """This operation to a guard inside of it; None: its handler has ended, or it holds no key. Internal."""
        if self.story.is_over or not self._is_recorded:
            return None
        return Around(self.hold.scope, self.hold.key, self.hold.token, self._request, self._transaction is not None)

    @property
    def loose_ends(self) -> bool:
        """Whether a step is still under way in a task that the handler did not wait for. Internal."""
        return self.story.running is not None

    async def tie_up(self) -> None:
        """Stop the steps that the handler did not wait for: its key must not be freed beside them. Internal."""
        if self._steps is not None:
            await self._steps.stop()

    def _made(self) -> Steps | None:
        if self._steps is None and self._take_steps is not None:
            self._steps = self._take_steps()
        return self._steps

    def _here(self, kind: str, name: str) -> Steps:
        steps = self._made()
        if steps is None:
            raise ConfigurationError(
                f'{kind} {name!r}: in mode="atomic" the whole handler is one transaction, and has no steps. '
                'Use mode="guard" for a handler with phases and effects.'
            )
        return steps


_current: ContextVar[Operation | None] = ContextVar("semel.operation", default=None)


def current() -> Operation:
    """Return the operation this code runs for; raise ``NotGuarded`` where there is none."""
    operation = _current.get()
    if operation is None:
        raise NotGuarded
    return operation


def around() -> Around | None:
    """Return the operation that this code is part of, for a guard that may be inside of another. Internal."""
    operation = _current.get()
    return operation.around if operation is not None else None


def is_left_over() -> bool:
    """Whether the operation of this context has ended: it is that of another request, served before. Internal."""
    operation = _current.get()
    return operation is not None and operation.story.is_over


def note_refusal() -> None:
    """Say that a framework has refused the request of this code as it was sent. Internal."""
    operation = _current.get()
    if operation is not None:
        operation.is_refused = True


def begin(operation: Operation) -> None:
    """Make *operation* the current one in this context, for good. Internal."""
    _current.set(operation)
    publishing.set(None)  # As in ``enter``.


def leave() -> None:
    """Be part of no operation any more, in this context. Internal."""
    _current.set(None)


@contextmanager
def enter(operation: Operation | None) -> Iterator[None]:
    """Make *operation* the current one inside the block, and not for what this thread does next. Internal."""
    token = _current.set(operation)
    # Around this operation there may be a phase of another one: its transaction is not this one's.
    phase_token = publishing.set(None)
    try:
        yield
    finally:
        publishing.reset(phase_token)
        _current.reset(token)
