"""How a stored value shows that it is encrypted. Nothing here encrypts, or has a secret.

A store with ``?encrypt=`` writes what a person may not read in this form and takes it back, so that no other code meets
it. A process without the secret does meet it: it must not send it to a client, nor give it to a handler.
"""

from __future__ import annotations

from typing import Any

from semel.core.message import Headers
from semel.errors import SecretMissing

#: The only header of an encrypted answer or request, and the only member of an encrypted result of a step.
MARK = "semel-encrypted"
HEADER = MARK.encode()


def is_marked(headers: Headers) -> bool:
    """Whether these are the headers of what is encrypted."""
    return len(headers) == 1 and headers[0][0] == HEADER


def is_marked_result(result: Any) -> bool:
    """Whether this is the result of a step, encrypted."""
    return isinstance(result, dict) and len(result) == 1 and MARK in result


def refuse_marked(headers: Headers) -> None:
    """Raise where what was stored can't be read by this process."""
    if is_marked(headers):
        raise SecretMissing
