"""Finds what is wrong with a store and with the application around it. It reads, and changes nothing.

``examine(url)`` runs every check that applies; ``semel doctor`` prints what it has found.
"""

from semel.doctor.catalogue import CHECKS
from semel.doctor.examining import examine
from semel.doctor.model import Check, Finding, Limits, Report, Severity, Verdict

__all__ = ["CHECKS", "Check", "Finding", "Limits", "Report", "Severity", "Verdict", "examine"]
