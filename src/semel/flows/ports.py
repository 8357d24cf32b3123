"""What a flow may ask of the world around it: its ports. Nothing here does any of it.

A flow is a coroutine over one of these objects. On an event loop it runs natively; in a thread every port answers at
once, so that one ``send(None)`` runs the flow to its end (``guard/running.py``); in tests a port may stop it before and
after each call, as if the process had died there. One call is one round trip, or one transaction that the store owns.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from semel.core.commands import Again, Begin, Claim, Command, Commit, FindStuck, Finish, TakeOver, Verdict
from semel.core.events import Happening
from semel.core.fingerprint import Buffer
from semel.core.handler import Applied, Doubt, Ending, RunHandler, TooManyWaiters, Wait
from semel.core.policy import Policy
from semel.core.record import Found, Hold, Stuck

T = TypeVar("T")


class Ports(Protocol):
    """What every flow needs: a store, and a way to let people know."""

    def ask(self, command: Command[T], /) -> Awaitable[T]:
        """Have the store carry out one command."""

    def tell(self, happening: Happening, /) -> None:
        """Let people know."""


class WaitingPorts(Ports, Protocol):
    """What it takes to wait for an operation that another request runs."""

    def wait(self, wish: Wait, /) -> Awaitable[Found | Again | TooManyWaiters]:
        """Wait, with nothing held, until more may be known of a key in progress. ``Interrupted``: the client has gone.

        ``AGAIN`` is to ask the store: it is this request's turn, or the operation is said to have ended. ``Found`` is
        what another waiter has found. The time is counted from the first call for one request.
        """

    def announce(self, scope: str, key: str, found: Found, /) -> None:
        """Tell the waiters of this process what was found of a key: it has ended."""


class StatusPorts(WaitingPorts, Protocol):
    """What it takes to tell a client the state of its operation."""

    def principal(self) -> Awaitable[object]:
        """Ask the application for the authenticated user of this request."""


class GuardPorts(StatusPorts, Protocol):
    """What guarding one request takes."""

    def read_body(self, limit: int, /) -> Awaitable[Buffer | None]:
        """Read the whole request body; None: it is larger than *limit*. ``Interrupted``: the client has gone."""

    def claim(self, claim: Claim, /) -> Awaitable[Hold | Found | Again]:
        """Claim the key. If it is won, its lease begins now."""

    def take_over(self, command: TakeOver, /) -> Awaitable[Hold | Again]:
        """Take the key from a worker that lost it. If it is won, its lease begins now."""

    def begin(self, command: Begin, /) -> Awaitable[Hold | Found]:
        """Open the transaction that the handler will write in, and take the key's lock (atomic mode)."""

    def finish(self, command: Finish, /) -> Awaitable[Verdict]:
        """Write the record into that transaction, and commit."""

    def undo(self) -> Awaitable[None]:
        """Roll that transaction back. Nothing happens where there is none."""

    def run_handler(self, run: RunHandler, /) -> Awaitable[Ending]:
        """Let the application handle the request, and hold its answer back. From now on nothing interrupts the flow."""

    def run_unguarded(self, hold: Hold | None, lease: timedelta | None, /) -> Awaitable[int | None]:
        """Let the application handle and answer the request as if it were not guarded (report mode).

        An implementation

        - gives the handler the request as it came: what was read of its body, and then the rest of it;
        - lets the answer through as it comes, streams included, with every header, and holds nothing of it back;
        - leaves ``current()`` as it would be without a guard;
        - renews *lease* meanwhile, where there is a *hold*. A lease that is lost ends nothing;
        - answers when the answer has left (or, inside a framework, when the handler has returned it), or when the
          handler has raised: with the status that the answer began with, None where it never began one;
        - keeps what the handler raised to itself until the flow has ended, and raises it then, unchanged.

        The flow ends with the reply ``Done``.
        """

    def endpoint(self) -> str | None:
        """Return the template of the route, where it is known; never what the client sent."""

    def keep(self, hold: Hold, commands: tuple[Command[Verdict], ...], lease: timedelta, /) -> object:
        """Keep the claim of *hold*, and try *commands*, which the store does not carry out now, until it does."""

    def saw_outage(self) -> object:
        """Take note that the store was away: leases may end meanwhile, and their workers live."""

    def is_kept(self, hold: Hold, /) -> bool:
        """Whether this process works under *hold*, or keeps its answer and tries to store it; or another process may,
        and could not renew its lease, since the store was away until a moment ago.
        """

    def pause(self, duration: timedelta, /) -> Awaitable[None]:
        """Wait."""


class StoredPorts(GuardPorts, Protocol):
    """What running one stored request takes."""

    def route_policy(self) -> Policy | None:
        """Return the policy of the route that the request came to, where only the route knows it."""


class StepPorts(Ports, Protocol):
    """What one phase or effect of a handler takes."""

    def open(self) -> Awaitable[None]:
        """Open the transaction of the phase."""

    def call_inside(self) -> Awaitable[Any]:
        """Call the function of the phase, with the open connection."""

    def commit(self, command: Commit, /) -> Awaitable[Verdict]:
        """Write how far the operation has come into the phase's transaction, and commit."""

    def undo(self) -> Awaitable[None]:
        """Roll the transaction back. Nothing happens where there is none."""

    def call_outside(self, key: str, /) -> Awaitable[Any]:
        """Call the function of the effect, with the key derived for it. No transaction is open meanwhile."""

    def verify(self, key: str, /) -> Awaitable[Applied | Doubt]:
        """Ask the provider whether an effect that was begun has happened."""

    def is_sure(self, hold: Hold, /) -> bool:
        """Whether the store has said lately that *hold* is ours, so that no other worker can have it yet."""

    def renew(self, hold: Hold, /) -> Awaitable[None]:
        """Renew its lease now. Whether it was lost, the next write tells."""

    def pause(self, duration: timedelta, /) -> Awaitable[None]:
        """Wait."""


class CompleterPorts(Ports, Protocol):
    """What running stored requests takes."""

    def find_stuck(self, command: FindStuck, /) -> Awaitable[tuple[Stuck, ...]]:
        """Find the operations to run."""

    def finish_one(self, stuck: Stuck, /) -> Awaitable[int | Again | None]:
        """Run a stuck operation's stored request through the application, on from its recovery point.

        The answer is the status that it ended with, or None when it did not end. ``AGAIN``: it was not run, since
        another worker has it, or this process is about to end.
        """
