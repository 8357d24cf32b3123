"""Secrets by reference: ``env:NAME`` is a variable of the environment, ``file:PATH`` a file. None is kept here.

A reference may stand in a database, on a command line, in a log: a secret may not. It is read again for each use, so
that a file can be replaced while the program runs.
"""

from __future__ import annotations

import os
from pathlib import Path

from semel.errors import ConfigurationError

#: Longer than every secret, so that a path to a device or a log is not read into memory.
MAX_FILE = 4096

_HOW = "Write env:NAME for a variable of the environment, or file:PATH for a file."


def is_reference(text: str) -> bool:
    """Whether *text* says where a secret is, and is not one itself."""
    return text.startswith(("env:", "file:"))


def check_reference(text: object) -> str:
    """Return *text*, if it is a reference. What is not one is not repeated, since it may be the secret."""
    if not isinstance(text, str) or not is_reference(text):
        raise ConfigurationError(f"A secret is kept elsewhere, and named by where it is. {_HOW}")
    kind, _, place = text.partition(":")
    if not place or not text.isprintable():
        raise ConfigurationError(f"{kind}: names nothing. {_HOW}")
    return text


def resolved(text: str) -> str:
    """Return the secret that *text* refers to; or *text*, if it is no reference."""
    if not is_reference(text):
        return text
    kind, _, place = check_reference(text).partition(":")
    secret = os.environ.get(place) if kind == "env" else _content(Path(place))
    if not secret or not secret.strip():
        raise ConfigurationError(f"There is no secret at {text}: set it, in the environment of this process.")
    return secret.strip()


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigurationError(f"The secret in {path} can't be read: {why}.") from None
