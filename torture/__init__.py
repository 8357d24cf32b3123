"""Faults on purpose, against real databases, and an independent checker of what they did. Not part of the package."""
