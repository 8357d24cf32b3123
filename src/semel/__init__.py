"""Semel makes HTTP APIs safe to retry: the operation takes effect once, and every retry gets the same answer."""

from typing import TYPE_CHECKING

from semel.calls import in_thread
from semel.core.body_hash import BodyHash
from semel.core.fingerprint import Fingerprinter
from semel.core.handler import Applied, Doubt
from semel.core.policy import FINAL_STATUSES, Policy
from semel.core.scope import SINGLE_TENANT
from semel.errors import NoEffect, SemelError
from semel.operation import Operation, current

#: What ``verify`` may say of an effect, beside ``Applied(result)``.
NOT_APPLIED = Doubt.NOT_APPLIED
CANT_TELL = Doubt.CANT_TELL

__all__ = [
    "CANT_TELL",
    "FINAL_STATUSES",
    "NOT_APPLIED",
    "SINGLE_TENANT",
    "Applied",
    "BodyHash",
    "Doubt",
    "Fingerprinter",
    "NoEffect",
    "Operation",
    "Policy",
    "SemelError",
    "__version__",
    "current",
    "in_thread",
]

__version__ = "0.1.0"


#: What is looked for here.
_ELSEWHERE = {
    "idempotent": ("semel.functions", "semel.flask", "semel.django"),
    "once": ("semel.functions",),
    "Idempotent": ("semel.fastapi",),
    "IdempotencyMiddleware": ("semel.asgi", "semel.wsgi", "semel.django"),
    "Semel": ("semel.flask",),
    "IdempotentTransport": ("semel.client.httpx",),
    "Outbox": ("semel.outbox",),
    "Inbox": ("semel.inbox",),
}

if not TYPE_CHECKING:  # A type checker would take every name for one that is here.

    def __getattr__(name: str) -> object:
        if name in _ELSEWHERE:
            # Of an AttributeError, `from semel import …` says nothing.
            raise ImportError(f"{name!r} is not in semel. Write: from {' or '.join(_ELSEWHERE[name])} import {name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
