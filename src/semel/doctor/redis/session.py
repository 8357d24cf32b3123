"""Connections to the servers of a Redis store, over which nothing is written. What the answers mean, the checks say.

Of a Cluster every master is asked, of a master behind sentinels the one that they name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

from semel.doctor.model import Kind
from semel.doctor.redis.facts import Keys, Server
from semel.doctor.session import Handled, Session, Some, Unavailable
from semel.stores.redis.address import Address
from semel.stores.redis.connection import client_options
from semel.stores.redis.protocol import lost
from semel.stores.redis.records import ANY_DIGEST, read

try:
    import redis
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("Redis needs redis-py. Run: pip install 'semel[redis]'") from error

#: Settings that INFO does not show.
_SETTINGS = ("save", "appendfsync", "min-replicas-to-write")
#: How far a walk through the keys goes on each server: a fraction of a second.
_STEP, _STEPS = 1000, 10
_FIELDS = (
    "state",
    "lease_expires_at",
    "created_at",
    "expires_at",
    "completed_at",
    "attempt",
    "accepted",
    "status",
    "after_retention",
    "request_line",
    "headers",
)
_TERMINAL = frozenset({"complete", "failed"})


@dataclass(frozen=True, slots=True)
class _Record:
    """The part of a record that is judged; times are microseconds by its own server's clock, as is *now*."""

    values: dict[str, str | None]
    has_body: bool
    now: int

    @property
    def state(self) -> str | None:
        return self.values["state"]

    def age(self, name: str) -> timedelta:
        return timedelta(microseconds=self.now - int(self.values[name] or self.now))

    @property
    def is_unkept(self) -> bool:
        """Whether it has ended with an answer that could not be kept. One without headers and line was erased."""
        was_erased = self.values["headers"] == "[]" and self.values["request_line"] is None
        return not (self.has_body or was_erased)

    @property
    def took(self) -> timedelta | None:
        done, made = self.values["completed_at"], self.values["created_at"]
        if self.values["attempt"] != "1" or self.values["accepted"] is not None or done is None or made is None:
            return None
        return timedelta(microseconds=int(done) - int(made))


class Redis(Session):
    """The servers of a Redis store."""

    kind: ClassVar = Kind.REDIS

    def __init__(self, address: Address, seconds: float) -> None:
        """Connect on first use; a server may take *seconds* to answer."""
        self.address = address
        self.where = str(address)
        self._options = client_options(address, address.login)
        wait = min(address.connect_seconds, seconds)
        self._options |= {"socket_connect_timeout": wait, "socket_timeout": seconds, "decode_responses": False}
        self._clients: dict[str, redis.Redis] = {}
        self._records: tuple[list[_Record], bool] | None = None

    @classmethod
    def at(cls, url: str, seconds: float) -> Self:
        """Use the servers at *url*."""
        return cls(Address.of(url), seconds)

    @classmethod
    def of(cls, store: Any, seconds: float) -> Self:
        """Use the servers of *store*."""
        return cls(store.address, seconds)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The passwords."""
        return tuple(each.password for each in (self.address.login, self.address.sentinel_login) if each.password)

    def close(self) -> None:
        """Disconnect."""
        clients, self._clients = self._clients, {}
        for each in clients.values():
            with suppress(redis.RedisError):
                each.close()

    def abandon(self) -> None:
        """Leave the connections to the thread that waits for them."""
        self._clients = {}

    @property
    def clients(self) -> dict[str, redis.Redis]:
        """A client for each server that takes writes."""
        if not self._clients:
            self._clients = {f"{host}:{port}": self._client(host, port) for host, port in self._masters()}
        return self._clients

    def reach(self) -> tuple[float, str | None]:
        """Return how long it took to get an answer of each server; and, if one gave none, what was said instead."""
        begun = time.monotonic()
        try:
            for client in self.clients.values():
                with suppress(redis.exceptions.NoPermissionError):  # That is an answer, too.
                    _asked(client, "PING")
        except (redis.RedisError, Unavailable, OSError) as error:
            return time.monotonic() - begun, str(lost(error, self.address, None, was_sent=False))
        return time.monotonic() - begun, None

    def servers(self) -> list[Server]:
        """What each server says of itself."""
        return [
            Server(name, _lines(_asked(client, "INFO")), self._settings(client))
            for name, client in self.clients.items()
        ]

    def clock(self) -> tuple[float, float]:
        """How far the first server's clock is from this machine's, and how long the question took."""
        client = next(iter(self.clients.values()))
        begun, mark = time.time(), time.monotonic()
        seconds, micros = client.time()
        took = time.monotonic() - mark
        return seconds + micros / 1_000_000 - (begun + took / 2), took

    def slots(self) -> dict[str, str]:
        """What a Cluster says of itself."""
        if self.address.kind != "cluster":
            return {}
        try:
            return _lines(_asked(next(iter(self.clients.values())), "CLUSTER", "INFO"))
        except redis.ResponseError as error:
            raise Unavailable(f"CLUSTER INFO is not allowed: {error}") from error

    def keys(self) -> Keys:
        """A part of the keys: how many are Semel's, and what others begin with."""
        ours, others, seen = 0, set[str](), 0
        is_all = True
        head = f"{self.address.prefix}:".encode()
        for client in self.clients.values():
            names, is_whole = self._scan(client)
            is_all = is_all and is_whole
            seen += len(names)
            for name in names:
                if name.startswith(head):
                    ours += 1
                else:
                    others.add(name.split(b":", 1)[0].decode("utf-8", "replace")[:20])
        return Keys(ours, seen - ours, tuple(sorted(others)[:5]), is_all=is_all)

    def parked(self) -> Some:
        """Records that wait for a person."""
        return self._some("created_at", lambda each: each.state == "unknown")

    def stuck(self) -> Some:
        """Records under a lease that is over."""
        return self._some(
            "lease_expires_at",
            lambda each: (
                each.state == "processing"
                and each.values["lease_expires_at"] is not None
                and each.age("lease_expires_at") > timedelta()
            ),
        )

    def pending(self) -> Some:
        """Records that were accepted and not begun."""
        return self._some("created_at", lambda each: each.state == "pending" and each.age("expires_at") < timedelta())

    def expired(self) -> Some:
        """Records past their retention: Redis deletes most by itself, and the reaper the rest."""
        return self._some(
            "expires_at",
            lambda each: (
                each.state in _TERMINAL
                and each.values["after_retention"] not in {None, "keep"}
                and each.age("expires_at") > timedelta()
            ),
        )

    def waiting_messages(self) -> Some:
        """None: there is no outbox."""
        return Some(0)

    def dead_letters(self) -> Some:
        """None: there is no outbox."""
        return Some(0)

    def parked_messages(self) -> Some:
        """None: there is no inbox."""
        return Some(0)

    def closed_endpoints(self) -> list[tuple[str, str]]:
        """None: there are no webhooks."""
        return []

    def handled(self) -> Handled:
        """What the finished records tell."""
        records, _ = self._walked()
        ended = [each for each in records if each.state in _TERMINAL]
        timed = [(each.took, each.values["request_line"]) for each in ended if each.took is not None]
        took, line = max(timed, key=lambda each: each[0] or timedelta(), default=(None, None))
        return Handled(len(ended), took, line, sum(each.is_unkept for each in ended))

    def last_upkeep(self) -> timedelta | None:
        """Not known: the services leave no mark in Redis that stays."""
        raise Unavailable("Redis does not show whether a service is at work.")

    def _some(self, name: str, is_wanted: Any) -> Some:
        records, is_all = self._walked()
        ages = [each.age(name) for each in records if is_wanted(each)]
        return Some(len(ages), max(ages, default=None), is_more=not is_all, is_all=is_all)

    def _walked(self) -> tuple[list[_Record], bool]:
        if self._records is None:
            is_all = True
            records: list[_Record] = []
            for client in self.clients.values():
                names, is_whole = self._scan(client, MATCH=f"{self.address.prefix}:{ANY_DIGEST}", TYPE="hash")
                is_all = is_all and is_whole
                records += self._read(client, names)
            self._records = records, is_all
        return self._records

    def _read(self, client: redis.Redis, names: list[bytes]) -> Iterator[_Record]:
        seconds, micros = client.time()
        now = seconds * 1_000_000 + micros
        for start in range(0, len(names), _STEP):
            chunk = names[start : start + _STEP]
            pipeline = client.pipeline(transaction=False)
            for name in chunk:
                pipeline.hmget(name, _FIELDS)
                pipeline.hexists(name, "body")
            replies = pipeline.execute(raise_on_error=False)
            for values, has_body in zip(replies[::2], replies[1::2], strict=True):
                if isinstance(values, list) and values[0] is not None:
                    fields = [None if each is None else read(each) for each in values]
                    yield _Record(dict(zip(_FIELDS, fields, strict=True)), bool(has_body), now)

    @staticmethod
    def _scan(client: redis.Redis, **words: str) -> tuple[list[bytes], bool]:
        """Walk a part of a server's keys; return them, and whether they are all."""
        found: dict[bytes, None] = {}
        cursor: Any = 0
        asked = [word for pair in words.items() for word in pair]
        for _ in range(_STEPS):
            cursor, names = _asked(client, "SCAN", cursor, "COUNT", _STEP, *asked)
            found.update(dict.fromkeys(names))
            if int(cursor) == 0:
                return list(found), True
        return list(found), False

    def _settings(self, client: redis.Redis) -> dict[str, str] | None:
        """Settings, or None where they are not told: managed servers forbid it."""
        settings: dict[str, str] = {}
        for name in _SETTINGS:
            try:
                reply = _asked(client, "CONFIG GET", name)
            except redis.ResponseError:
                return None
            # redis-py makes a dictionary of it in some versions.
            pairs = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
            settings |= {_text(key): _text(value) for key, value in pairs.items()}
        return settings

    def _client(self, host: str, port: int) -> redis.Redis:
        database = 0 if self.address.kind == "cluster" else self.address.database
        return redis.Redis(host, port, db=database, **self._options)

    def _masters(self) -> list[tuple[str, int]]:
        nodes = self.address.nodes
        if self.address.kind == "standalone":
            return [(nodes[0].host, nodes[0].port)]
        errors: list[Exception] = []
        login = self.address.sentinel_login if self.address.kind == "sentinel" else self.address.login
        options = self._options | {"username": login.user, "password": login.password}
        for node in nodes:
            with redis.Redis(node.host, node.port, **options) as client:
                try:
                    found = _named(client, self.address)
                except redis.RedisError as error:
                    errors.append(error)
                    continue
            if found:
                return found
        if errors:
            raise errors[0]
        raise Unavailable(f"The sentinels do not know {self.address.service!r}.")


def _named(client: redis.Redis, address: Address) -> list[tuple[str, int]]:
    if address.kind == "sentinel":
        found: Any = _asked(client, "SENTINEL GET-MASTER-ADDR-BY-NAME", address.service)
        return [(_text(found[0]), int(found[1]))] if found else []
    slots: Any = _asked(client, "CLUSTER", "SLOTS")
    ranges = slots.values() if isinstance(slots, dict) else slots
    masters = [each[2] if isinstance(each, list) else each["primary"] for each in ranges]
    return list(dict.fromkeys((_text(each[0]), int(each[1])) for each in masters))


def _asked(client: redis.Redis, *words: object) -> Any:
    """Send one command. redis-py has no types for it."""
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


def _lines(reply: Any) -> dict[str, str]:
    if isinstance(reply, dict):
        return {_text(name): _text(value) for name, value in reply.items()}
    return dict(line.split(":", 1) for line in _text(reply).splitlines() if ":" in line)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
