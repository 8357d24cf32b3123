"""What people may want to know of."""

from dataclasses import fields
from typing import get_args

import pytest

from semel.core.events import Happening


@pytest.mark.parametrize("kind", get_args(Happening))
def test_happenings_explain_themselves(kind: type) -> None:
    """Each happening is a frozen value that says in a sentence what happened, and to which key."""
    assert (kind.__doc__ or "").endswith(".")
    assert fields(kind)[0].name == "key"
    happening = kind(*["x"] * len(fields(kind)))
    assert hash(happening) == hash(kind(*["x"] * len(fields(kind))))
