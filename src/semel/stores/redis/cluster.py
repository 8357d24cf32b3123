"""How commands reach the server that has their keys: routes, redirections, unknown scripts, lost replies. How bytes are
sent is in ``connection.py``.

It is written once for sync and async: over connections for threads nothing here waits for a loop
(``at_once``). Every command may be sent again (guarantee 7 of ``stores/base.py``), so one with a lost reply
is.

The slots of a Cluster are read over the existing connections. redis-py's own client would first send COMMAND, which is
not allowed to the store's user, and take three times as long; and it raises the same error for a server that belongs to
no Cluster and for one that can't be reached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy

from hiredis import ReplyError

from semel.errors import StoreError, StoreNotReady, StoreUnavailable
from semel.stores.redis.address import Address, Node
from semel.stores.redis.connection import Failure, Pipeline, Servers
from semel.stores.redis.protocol import SLOTS, Call, Reply, Script, code_of, lost, packed, slot_of, translated

#: How often a command is sent at most. A lost connection, a moved slot, and a script that the new server does not know
#: yet are handled here, and all of them can happen to one command.
MAX_TRIES = 5

_ASKING = packed("ASKING")


class Client:
    """The routing of one batcher. It is used by one batch at a time."""

    def __init__(self, address: Address, servers: Servers) -> None:
        """Start with the *address* only, without a map of the slots."""
        self.address = address
        self.servers = servers
        self._standalone = address.nodes[0] if address.kind == "standalone" else None
        self._master: Node | None = None
        self._slots: list[Node] = []
        #: Servers that may be asked for the slots or the master: those last reported, and those of the address.
        self._known = address.nodes
        #: The server that failed last, and is asked last.
        self._suspect: Node | None = None

    @property
    def is_standalone(self) -> bool:
        """Whether there is one server only, without fail-over."""
        return self._standalone is not None

    @property
    def takes_many_keys(self) -> bool:
        """Whether one script may be called on several keys."""
        return self.address.kind != "cluster"

    async def execute(self, calls: Sequence[Call]) -> list[Reply]:
        """Carry out every call; one that fails is a ``StoreError`` in its place."""
        if not calls:
            return []
        node = self._standalone
        if node is None:
            return await _Delivery(self, calls).run()
        # The usual case, as short as possible.
        data = calls[0].data if len(calls) == 1 else b"".join([call.data for call in calls])
        carried = await self.servers.exchange(Pipeline(node, data, len(calls)))
        if type(carried) is list:
            for reply in carried:
                if type(reply) is ReplyError:
                    break
            else:
                return carried
        return await _Delivery(self, calls).go_on(carried, node)

    async def read(self, calls: Sequence[Call]) -> list[Reply]:
        """Carry out every call, and return the replies. Raises if one fails."""
        replies = await self.execute(calls)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def read_one(self, call: Call) -> Reply:
        """Carry out one call, and return its reply. Raises if it fails."""
        return (await self.read([call]))[0]

    async def masters(self) -> list[Node]:
        """Return every server that has data."""
        if self.address.kind == "cluster":
            await self.find()
            return list(dict.fromkeys(self._slots))
        return [await self.node_of(Call(b"", b""))]

    async def check(self) -> None:
        """Connect to every server that has data, and raise if one can't serve."""
        await self.read([Call(b"", packed("PING"), node=node) for node in await self.masters()])

    async def node_of(self, call: Call) -> Node:
        """Return the server for a call."""
        node = call.node or self._standalone
        if node is not None:
            return node
        if self._master is None and not self._slots:
            await self.find()
        return self._master or self._slots[slot_of(call.key)]

    async def find(self) -> None:
        """Find the slots or the master."""
        if self.address.kind == "sentinel":
            self._master = await self.servers.find_master()
        elif self.address.kind == "cluster":
            self._slots = await self._find_slots()
            self._known = tuple(dict.fromkeys([*self._slots, *self.address.nodes]))

    def forget(self, suspect: Node | None) -> None:
        """Find them again before the next call: what is known is out of date, since *suspect* failed."""
        self._master = None
        self._slots = []
        self._suspect = suspect

    def moved(self, slot: int, node: Node) -> None:
        """Remember where one slot is now."""
        if self._slots:
            self._slots[slot] = node

    def refusal(self, error: ReplyError, *, was_sent: bool = False) -> StoreError:
        """Return the ``StoreError`` for an error reply."""
        return translated(error, self.address, was_sent=was_sent)

    async def _find_slots(self) -> list[Node]:
        # Any of them knows the slots, and not all processes should ask the same one.
        order = sorted(random.sample(self._known, len(self._known)), key=lambda node: node == self._suspect)
        errors: list[BaseException] = []
        for node in order:
            carried = await self.servers.exchange(Pipeline(node, packed("CLUSTER", "SLOTS"), 1))
            if isinstance(carried, Failure):
                errors.append(carried.error)
                continue
            if isinstance(carried[0], ReplyError):
                if "cluster support disabled" in str(carried[0]):
                    raise StoreNotReady(f"{node} belongs to no Redis Cluster. Use redis://{node}")
                errors.append(translated(carried[0], self.address))
                continue
            slots: list[Node | None] = [None] * SLOTS
            for first, last, (host, port, *_), *_ in carried[0]:
                # A server that does not know its own name sends none: it is then the one that was asked.
                slots[first : last + 1] = [Node(host.decode() if host else node.host, port)] * (last + 1 - first)
            whole = [each for each in slots if each is not None]
            if len(whole) == SLOTS:
                return whole
            errors.append(StoreUnavailable("some slots have no master"))
        raise lost(errors[0], self.address, None, was_sent=False)


class _Delivery:
    """Some calls under way, with their retries."""

    def __init__(self, client: Client, calls: Sequence[Call]) -> None:
        self._client = client
        self._calls = calls
        self._outcomes: list[Reply] = [None] * len(calls)
        self._was_sent = [False] * len(calls)
        #: Where a server has sent a call just this once (ASK): its slot is being moved there.
        self._detours: dict[int, Node] = {}
        self._unknown: dict[Node, set[Script]] = {}
        #: The calls to send, or to send again.
        self._due = list(range(len(calls)))

    async def go_on(self, carried: list[Reply] | Failure, node: Node) -> list[Reply]:
        """Go on after a first try at *node* that did not do all."""
        places, self._due = self._due, []
        self._take(places, carried, node)
        return await self.run()

    async def run(self) -> list[Reply]:
        """Send the calls, until all are done or were tried often enough."""
        for _ in range(MAX_TRIES):
            if not self._due:
                break
            due, self._due = self._due, []
            try:
                pipelines = await self._pack(due)
            except StoreError as error:
                for place in due:
                    self._fail(place, Failure(error, was_sent=False), None)
                break
            carried = await self._client.servers.exchange_all([pipeline for pipeline, _ in pipelines])
            for (pipeline, places), each in zip(pipelines, carried, strict=True):
                self._take(places, each, pipeline.node)
        return self._outcomes

    def _take(self, places: list[int], carried: list[Reply] | Failure, node: Node) -> None:
        """Note the replies of *node* to the calls at *places*; -1 is a reply that no caller waits for."""
        if isinstance(carried, Failure):
            self._client.forget(node)
            for place in places:
                self._fail(place, carried, node)
            return
        for place, reply in zip(places, carried, strict=True):
            if place < 0:
                continue
            if isinstance(reply, ReplyError):
                self._redirect(place, reply, node)
            else:
                self._outcomes[place] = reply

    async def _pack(self, due: list[int]) -> list[tuple[Pipeline, list[int]]]:
        """Sort the calls by server."""
        by_node: dict[Node, tuple[list[bytes], list[int]]] = {}
        for node, scripts in self._unknown.items():
            by_node[node] = ([script.loading for script in scripts], [-1] * len(scripts))
        self._unknown = {}
        for place in due:
            call = self._calls[place]
            detour = self._detours.get(place)
            node = detour or await self._client.node_of(call)
            data, places = by_node.setdefault(node, ([], []))
            if detour:
                data.append(_ASKING)
                places.append(-1)
            data.append(call.data)
            places.append(place)
        return [(Pipeline(node, b"".join(data), len(places)), places) for node, (data, places) in by_node.items()]

    def _fail(self, place: int, failure: Failure, node: Node | None) -> None:
        if place < 0:
            return
        self._was_sent[place] |= failure.was_sent
        self._detours.pop(place, None)
        self._outcomes[place] = self._told(failure, node, was_sent=self._was_sent[place])
        # If no connection could be opened, the next try would fail at once, too.
        if failure.was_sent and not failure.is_too_slow:
            self._due.append(place)

    def _told(self, failure: Failure, node: Node | None, *, was_sent: bool) -> StoreError:
        """Return the error for one of the callers."""
        if not isinstance(failure.error, StoreError):
            told = lost(failure.error, self._client.address, node, was_sent=was_sent)
            told.was_too_slow = failure.is_too_slow
            return told
        # The server can't be used. A new exception, since one that is raised twice collects both tracebacks.
        said = copy(failure.error)
        if isinstance(said, StoreUnavailable):
            said.was_sent = was_sent
        return said

    def _redirect(self, place: int, error: ReplyError, node: Node) -> None:
        """Handle an error reply: send the command again if that can help."""
        self._outcomes[place] = self._client.refusal(error, was_sent=self._was_sent[place])
        call = self._calls[place]
        detour = self._detours.pop(place, None)
        match code_of(error):
            case "NOSCRIPT" if call.script is not None:
                self._unknown.setdefault(node, set()).add(call.script)
                if detour:
                    self._detours[place] = detour
            case "MOVED":
                self._client.moved(*_where(error, node))
            case "ASK":
                self._detours[place] = _where(error, node)[1]
            case "READONLY" if not self._client.is_standalone:
                # A fail-over: it is a replica now, and others know the new master.
                self._client.forget(node)
            case _:
                return
        self._due.append(place)


def _where(error: ReplyError, asked: Node) -> tuple[int, Node]:
    """Parse ``MOVED 3999 127.0.0.1:6381``. Without a host it is the one that was *asked*, at another port."""
    _, slot, where = str(error).split()[:3]
    host, _, port = where.rpartition(":")
    return int(slot), Node(host.strip("[]") or asked.host, int(port))
