"""The set-up of a server of the bench: where its keys are, what its handler does. Plain values that pass as JSON, and
nothing that starts one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bench.cases import Work


@dataclass(frozen=True, slots=True)
class Place:
    """Where keys are kept."""

    url: str
    #: A Redis that answers in front of it.
    cache: str | None = None

    def given(self) -> Any:
        """Return what a middleware takes as its store."""
        if self.cache is None:
            return self.url
        from semel.stores.tiered import Tiered  # noqa: PLC0415 - it needs Redis's driver, and other cases do not

        return Tiered(durable=self.url, cache=self.cache)


@dataclass(frozen=True, slots=True)
class Setup:
    """One server."""

    #: None: nothing is guarded.
    place: Place | None = None
    work: Work = "nothing"
    #: The handler's own.
    database: str | None = None
    framework: Literal["Starlette", "Django"] = "Starlette"
    #: How many duplicates may wait for the first; without any, they are refused.
    waiters: int = 0
    lease_seconds: float | None = None
    #: Whether ``/held`` waits until it is released.
    holds: bool = False

    def as_json(self) -> str:
        """Write it on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setup:
        """Read it back."""
        read = json.loads(text)
        return cls(**{**read, "place": read["place"] and Place(**read["place"])})
