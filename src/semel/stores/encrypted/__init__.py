"""Stores that encrypt what they keep of requests and answers. What is encrypted is in ``sealing.py``."""

from semel.stores.encrypted.value import Encrypted

__all__ = ["Encrypted"]
