"""What is known of the servers of a Redis store. How it is asked for, and what it means, is said elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Server:
    """One server: what INFO says, and the settings; None where it does not tell them."""

    name: str
    info: Mapping[str, str]
    settings: Mapping[str, str] | None = field(default_factory=dict)

    def number(self, name: str) -> int:
        """A figure of INFO; 0 where it is missing."""
        return int(self.info.get(name, "0") or 0)


@dataclass(frozen=True, slots=True)
class Keys:
    """What is in the database: how many of the keys that were seen are Semel's, how many are not, what those begin
    with.
    """

    ours: int
    others: int
    heads: tuple[str, ...] = ()
    is_all: bool = True


@dataclass(frozen=True, slots=True)
class Link:
    """How a server is reached."""

    kind: str
    hosts: tuple[str, ...]
    is_encrypted: bool
