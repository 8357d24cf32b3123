"""A client with one key, and the processes that serve it: each of them may die anywhere."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from semel.calls import Call
from semel.core.commands import Begin, Command, Finish, Undo
from semel.core.events import Happening
from semel.core.handler import Applied, Doubt, Ending, RunHandler
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import Found, Hold
from semel.core.replay import MARKER
from semel.flows.reply import Reply, Send
from semel.flows.serve import serve
from semel.guard.endings import answered, raised
from semel.guard.steps import ThreadStepPorts
from semel.operation import Operation
from semel.stores.transaction import Transaction
from tests.flows.shops import Shop
from tests.kit.crash import Process
from tests.kit.ports import PORTS, NameScope, ReadBody, Tell, carry_out
from tests.kit.ports import drive as run

LEASE = timedelta(seconds=30)

Handler = Callable[["World", Operation], Answer]


class World:
    """One client with one key, the shop, and what its handler does."""

    def __init__(self, shop: Shop, policy: Policy, handler: Handler, provider: "Provider | None" = None) -> None:
        self.shop = shop
        self.policy = policy
        self.handler = handler
        self.provider = provider or Provider()
        self.told: list[Happening] = []
        self.key = uuid4().hex

    def live(self, process: Process) -> Reply:
        """One request, in a process that knows nothing of those before."""
        head = Head("POST", "/orders", b"", ((b"idempotency-key", self.key.encode()),))
        return run(serve(PORTS, head, self.policy, uuid4().bytes), process.performing(Entry(self, process).perform))

    def request(self) -> Answer:
        """The same in a process that does not die: what the client gets, without the mark of a replay."""
        reply = self.live(Process())
        assert isinstance(reply, Send), reply
        answer = reply.answer
        return Answer(answer.status, tuple(pair for pair in answer.headers if pair != MARKER), answer.body)

    def age(self, duration: timedelta = LEASE) -> None:
        """Let time pass."""
        self.shop.age(self.key, duration)

    def enter(self, connection: Any, entry: str) -> None:
        """Make an entry in the books under the client's key."""
        self.shop.enter(connection, self.key, entry)

    @property
    def entries(self) -> list[str]:
        """What the books say of this client."""
        return self.shop.entries(self.key)


class Entry:
    """What a process does about one request, as a web framework's entry point would."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._transaction: Transaction | None = None

    def perform(self, command: Command[Any]) -> Any:
        answer: Any = None
        match command:
            case NameScope():
                answer = "alice"
            case ReadBody():
                answer = b"{}"
            case Tell(happening):
                self._world.told.append(happening)
            case Begin():
                answer = self._begin(command)
            case Finish() | Undo():
                assert self._transaction is not None
                ending: Command[Any] = command
                answer = self._transaction.perform(ending)
            case RunHandler():
                answer = self._run(command)
            case _:
                answer = self._world.shop.store.perform(command)
        return answer

    def _begin(self, command: Begin) -> Hold | Found:
        transaction = self._transaction = self._world.shop.store.transaction()
        # The database ends the transaction of a process that is gone.
        self._process.owns(lambda: transaction.perform(Undo()))
        return transaction.perform(command)

    def _end(self, command: Command[Any]) -> Any:
        assert self._transaction is not None
        return self._transaction.perform(command)

    def _run(self, command: RunHandler) -> Ending:
        steps = None if self._transaction else partial(MortalSteps, self._world, self._process)
        operation = Operation(command.hold, command.progress, steps=steps, transaction=self._transaction)
        try:
            answer = self._world.handler(self._world, operation)
        except Exception as error:  # noqa: BLE001 - as entry points do; a death is no Exception
            return raised(error, operation)
        return answered(answer, operation, reached_handler=True)


class MortalSteps:
    """Takes the steps of a handler in a process: it may die at each of their boundaries, too."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def take(self, call: Call, flow: Any, /, *args: Any) -> Any:
        ports = ThreadStepPorts(self._world.shop.store, call)
        # The database ends the transaction of a process that is gone.
        self._process.owns(lambda: carry_out(ports, Undo()))

        def perform(command: Any) -> Any:
            if isinstance(command, Tell):
                return self._world.told.append(command.happening)
            return carry_out(ports, command)

        return run(flow(PORTS, *args), self._process.performing(perform))

    def note(self, flow: Any, /, *args: Any) -> Any:
        return self.take(Call("", created), flow, *args)

    async def stop(self) -> None:
        """Have nothing under way."""


@dataclass
class Provider:
    """Somebody outside, who charges cards and keeps books of their own."""

    honours_keys: bool = True
    #: By key: what was charged, and how often.
    charges: dict[str, list[str]] = field(default_factory=dict)
    calls: int = 0

    def charge(self, what: str, *, idempotency_key: str) -> str:
        self.calls += 1
        made = self.charges.setdefault(idempotency_key, [])
        if not (made and self.honours_keys):
            made.append(what)
        return f"{what} charged {len(made)}"

    def look_up(self, what: str, *, idempotency_key: str) -> Applied | Doubt:
        made = self.charges.get(idempotency_key)
        return Applied(f"{what} charged {len(made)}") if made else Doubt.NOT_APPLIED

    @property
    def charged(self) -> list[str]:
        """Everything that was charged."""
        return sorted(what for made in self.charges.values() for what in made)


def created(**what: object) -> Answer:
    """The answer of a handler that is through."""
    return Answer(201, ((b"content-type", b"application/json"),), json.dumps(what).encode())
