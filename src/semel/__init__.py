"""Semel makes HTTP APIs safe to retry: the operation takes effect once, and every retry gets the same answer."""

from semel.core.fingerprint import Fingerprinter
from semel.core.policy import FINAL_STATUSES, Policy
from semel.core.scope import SINGLE_TENANT
from semel.errors import NoEffect, SemelError
from semel.operation import Operation, current

__all__ = [
    "FINAL_STATUSES",
    "SINGLE_TENANT",
    "Fingerprinter",
    "NoEffect",
    "Operation",
    "Policy",
    "SemelError",
    "__version__",
    "current",
]

__version__ = "0.1.0"
