"""Header pairs as readable text, and back. Latin-1 maps every byte to a character, and back."""

from __future__ import annotations

import json
from functools import lru_cache

from semel.core.message import Headers

_write = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@lru_cache(maxsize=256)  # An API answers with the same few headers over and over.
def written(headers: Headers) -> str:
    """Return header pairs as they are stored: a JSON array of [name, value], in order, with repeated ones."""
    return _write([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])


@lru_cache(maxsize=256)  # as above
def read_back(text: str) -> Headers:
    """Return stored header pairs."""
    return tuple([(name.encode("latin-1"), value.encode("latin-1")) for name, value in json.loads(text)])
