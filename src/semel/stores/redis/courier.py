"""How commands reach the server that has their keys: routes, redirections, scripts that it does not know, lost replies.

Written once, as generators that yield parcels and are sent what came back; ``wires.py`` and ``async_wires.py`` carry
them. Every command of ours may be sent again (guarantee 7 of ``stores/base.py``), so one whose reply was lost is.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from copy import copy
from typing import TypeVar

from semel.errors import StoreError, StoreNotReady, StoreUnavailable
from semel.stores.redis.address import Address, Node
from semel.stores.redis.errors import code_of, lost, translated
from semel.stores.redis.wire import SLOTS, Call, Parcel, Reply, ReplyError, Script, Trouble, packed, slot_of

T = TypeVar("T")
Carried = list[Reply] | Trouble
#: Yields parcels for different servers, is sent for each what came back, and returns at last.
Talk = Generator[list[Parcel], list[Carried], T]

#: How often a command is sent at most: that a connection was lost, that a slot has moved, or that its new server does
#: not know the script yet, is not the caller's affair, and all of it can happen to one command.
TRIES = 5

_ASKING = packed("ASKING")


class Courier:
    """Knows the way for one lane. It is used by one batch at a time."""

    def __init__(self, address: Address) -> None:
        """Know nothing of where things are but the *address*."""
        self._address = address
        self._lone = address.nodes[0] if address.kind == "lone" else None
        self._master: Node | None = None
        self._slots: list[Node] = []
        #: Who may be asked where things are: whoever was heard of last, and those of the address.
        self._known = address.nodes
        #: Who was of no help last, and is asked last.
        self._suspect: Node | None = None

    @property
    def is_lone(self) -> bool:
        """Whether there is one server, and none to take its place."""
        return self._lone is not None

    def deliver(self, calls: Sequence[Call]) -> Talk[list[Reply]]:
        """Have every call carried out; what can't be is a ``StoreError`` in its place."""
        if not calls:
            return []
        if self._lone is not None:
            # The usual case, and no more than it takes.
            carried = (yield [Parcel(self._lone, b"".join([call.data for call in calls]), len(calls))])[0]
            if not isinstance(carried, Trouble) and not any(isinstance(reply, ReplyError) for reply in carried):
                return carried
            return (yield from _Delivery(self, calls).go_on(carried, self._lone))
        return (yield from _Delivery(self, calls).begin())

    def masters(self) -> Talk[list[Node]]:
        """Return every server that has data."""
        if self._address.kind == "cluster":
            yield from self.find()
            return list(dict.fromkeys(self._slots))
        return [(yield from self.node_of(Call(b"", b"")))]

    def check(self) -> Talk[None]:
        """Connect to every server that has data, and raise where one can't serve."""
        nodes = yield from self.masters()
        for reply in (yield from self.deliver([Call(b"", packed("PING"), node=node) for node in nodes])):
            if isinstance(reply, Exception):
                raise reply

    def node_of(self, call: Call) -> Talk[Node]:
        """Return the server for a call."""
        if call.node is not None:
            return call.node
        if self._lone is not None:
            return self._lone
        if self._master is None and not self._slots:
            yield from self.find()
        return self._master or self._slots[slot_of(call.key)]

    def find(self) -> Talk[None]:
        """Ask where things are."""
        if self._address.kind == "sentinel":
            self._master = yield from self._find_master()
        elif self._address.kind == "cluster":
            self._slots = yield from self._find_slots()
            self._known = tuple(dict.fromkeys([*self._slots, *self._address.nodes]))

    def forget(self, suspect: Node | None) -> None:
        """Ask again before the next call: what is known is out of date, since *suspect* was of no help."""
        self._master = None
        self._slots = []
        self._suspect = suspect

    def moved(self, slot: int, node: Node) -> None:
        """Remember where one slot is now."""
        if self._slots:
            self._slots[slot] = node

    def failure(self, trouble: Trouble, node: Node | None, *, was_sent: bool) -> StoreError:
        """Say what is wrong, to one of those who wait."""
        if not isinstance(trouble.error, StoreError):
            told = lost(trouble.error, self._address, node, was_sent=was_sent)
            told.was_too_slow = trouble.is_too_slow
            return told
        # The server is there, and is not one to use. An exception that is raised twice gathers both tracebacks.
        said = copy(trouble.error)
        if isinstance(said, StoreUnavailable):
            said.was_sent = was_sent
        return said

    def refusal(self, error: ReplyError, *, was_sent: bool) -> StoreError:
        """Say what an error reply means."""
        return translated(error, self._address, was_sent=was_sent)

    def _find_master(self) -> Talk[Node]:
        question = packed("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
        errors: list[BaseException] = []
        for sentinel in self._address.nodes:
            [carried] = yield [Parcel(sentinel, question, 1)]
            if isinstance(carried, Trouble):
                errors.append(carried.error)
            elif isinstance(carried[0], ReplyError):
                errors.append(translated(carried[0], self._address))
            elif carried[0] is not None:
                host, port = carried[0]
                return Node(host.decode(), int(port))
        if not errors:
            raise StoreNotReady(
                f"The sentinels of {self._address} watch no {self._address.service!r}. Write redis+sentinel://host/NAME/0."
            )
        raise lost(errors[0], self._address, None, was_sent=False)

    def _find_slots(self) -> Talk[list[Node]]:
        # Any of them knows, and none should be asked by everybody.
        order = sorted(random.sample(self._known, len(self._known)), key=lambda node: node == self._suspect)
        errors: list[BaseException] = []
        for node in order:
            [carried] = yield [Parcel(node, packed("CLUSTER", "SLOTS"), 1)]
            if isinstance(carried, Trouble):
                errors.append(carried.error)
                continue
            if isinstance(carried[0], ReplyError):
                if "cluster support disabled" in str(carried[0]):
                    raise StoreNotReady(f"{node} belongs to no Redis Cluster. Use redis://{node}")
                errors.append(translated(carried[0], self._address))
                continue
            slots: list[Node | None] = [None] * SLOTS
            for first, last, (host, port, *_), *_ in carried[0]:
                # A server that was told no name for itself gives none: it is then the one that was asked.
                slots[first : last + 1] = [Node(host.decode() if host else node.host, port)] * (last + 1 - first)
            whole = [each for each in slots if each is not None]
            if len(whole) == SLOTS:
                return whole
            errors.append(StoreUnavailable("some slots have no master"))
        raise lost(errors[0], self._address, None, was_sent=False)


class _Delivery:
    """Some calls on their way, with all that can go wrong."""

    def __init__(self, courier: Courier, calls: Sequence[Call]) -> None:
        self._courier = courier
        self._calls = calls
        self._outcomes: list[Reply] = [None] * len(calls)
        self._was_sent = [False] * len(calls)
        #: Where a server has told us to ask just this once: a slot is on its way there.
        self._detours: dict[int, Node] = {}
        self._unknown: dict[Node, set[Script]] = {}
        self._again: list[int] = []

    def go_on(self, carried: Carried, node: Node) -> Talk[list[Reply]]:
        """Deliver what a first try at *node* did not."""
        self._take(list(range(len(self._calls))), carried, node)
        return (yield from self._run())

    def begin(self) -> Talk[list[Reply]]:
        """Deliver all."""
        self._again = list(range(len(self._calls)))
        return (yield from self._run())

    def _run(self) -> Talk[list[Reply]]:
        for _ in range(TRIES):
            if not self._again:
                break
            due, self._again = self._again, []
            try:
                parcels = yield from self._pack(due)
            except StoreError as error:
                for place in due:
                    self._fail(place, Trouble(error, was_sent=False), None)
                break
            carried = yield [parcel for parcel, _ in parcels]
            for (parcel, places), each in zip(parcels, carried, strict=True):
                self._take(places, each, parcel.node)
        return self._outcomes

    def _pack(self, due: list[int]) -> Talk[list[tuple[Parcel, list[int]]]]:
        """Sort the calls by server. A place of -1 is a reply that nobody waits for."""
        by_node: dict[Node, tuple[list[bytes], list[int]]] = {}
        for node, scripts in self._unknown.items():
            by_node[node] = ([script.loading for script in scripts], [-1] * len(scripts))
        self._unknown = {}
        for place in due:
            call = self._calls[place]
            detour = self._detours.get(place)
            node = detour or (yield from self._courier.node_of(call))
            data, places = by_node.setdefault(node, ([], []))
            if detour:
                data.append(_ASKING)
                places.append(-1)
            data.append(call.data)
            places.append(place)
        return [(Parcel(node, b"".join(data), len(places)), places) for node, (data, places) in by_node.items()]

    def _take(self, places: list[int], carried: Carried, node: Node | None) -> None:
        if isinstance(carried, Trouble):
            self._courier.forget(node)
            for place in places:
                self._fail(place, carried, node)
            return
        for place, reply in zip(places, carried, strict=True):
            if isinstance(reply, ReplyError):
                self._redirect(place, reply, node)
            else:
                self._settle(place, reply)

    def _fail(self, place: int, trouble: Trouble, node: Node | None) -> None:
        if place < 0:
            return
        self._was_sent[place] |= trouble.was_sent
        self._detours.pop(place, None)
        self._outcomes[place] = self._courier.failure(trouble, node, was_sent=self._was_sent[place])
        # Where there was no connection to be had, there will be none right away, either.
        if trouble.was_sent and not trouble.is_too_slow:
            self._again.append(place)

    def _redirect(self, place: int, error: ReplyError, node: Node | None) -> None:
        """Do about an error reply what can be done, and send the command again if that will help."""
        outcome = self._courier.refusal(error, was_sent=place >= 0 and self._was_sent[place])
        self._settle(place, outcome)
        if place < 0:
            return
        call = self._calls[place]
        detour = self._detours.pop(place, None)
        match code_of(error):
            case "NOSCRIPT" if call.script is not None and node is not None:
                self._unknown.setdefault(node, set()).add(call.script)
                if detour:
                    self._detours[place] = detour
            case "MOVED":
                self._courier.moved(*_where(error, node))
            case "ASK":
                self._detours[place] = _where(error, node)[1]
            case "READONLY" if not self._courier.is_lone:
                # A fail-over: it is a replica now, and who is the master, others know.
                self._courier.forget(node)
            case _:
                return
        self._again.append(place)

    def _settle(self, place: int, outcome: Reply) -> None:
        if place >= 0:
            self._outcomes[place] = outcome


def _where(error: ReplyError, asked: Node | None) -> tuple[int, Node]:
    """Read ``MOVED 3999 127.0.0.1:6381``. Without a host it is the one that was *asked*, at another port."""
    _, slot, where = str(error).split()[:3]
    host, _, port = where.rpartition(":")
    return int(slot), Node(host.strip("[]") or (asked.host if asked else ""), int(port))
