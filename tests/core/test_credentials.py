"""Which headers look like credentials, by their names alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semel import Policy
from semel.core.credentials import looks_secret
from semel.errors import ConfigurationError

#: The client in JavaScript has the same list.
VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "clients" / "vectors.json").read_text())[
    "secrets"
]


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["header"])
def test_names(case: dict[str, Any]) -> None:
    """What a client proves itself with, or signs with, is told by its name; what a handler may need is none, and the
    key of the operation least of all.
    """
    assert looks_secret(case["header"]) == case["expect"]
    assert Policy().stores_header(case["header"].encode()) != case["expect"]


def test_policy_says_otherwise() -> None:
    """A policy has further headers stored or left out; its own key's header is stored under whatever name."""
    policy = Policy(header="X-Intent-Key", store_headers=["X-Partition-Key"], omit_headers={"X-Weather"})
    stored = {
        name: policy.stores_header(name) for name in (b"x-intent-key", b"x-partition-key", b"x-weather", b"x-key")
    }
    assert stored == {b"x-intent-key": True, b"x-partition-key": True, b"x-weather": False, b"x-key": False}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"store_headers": ["Authorization"]}, "store_headers can't be"),
        ({"store_headers": ["cookie"]}, "hold no credentials"),
        ({"store_headers": ["a b"]}, "names of headers"),
        ({"omit_headers": ["X-Ride:"]}, "names of headers"),
        ({"store_headers": ["X-Ride"], "omit_headers": ["x-ride"]}, "other headers than those of omit_headers"),
        ({"omit_headers": ["Idempotency-Key"]}, "which a worker needs"),
    ],
)
def test_mistakes(fields: dict[str, list[str]], message: str) -> None:
    """What can't be meant is refused at start-up."""
    with pytest.raises(ConfigurationError, match=message):
        Policy(**fields)  # type: ignore[arg-type]  # of strings, all of them
