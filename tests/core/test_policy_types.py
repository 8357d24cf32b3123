"""A type checker knows the fields of a policy in the presets too: it reads this file with unused ignores as errors."""

import dataclasses
from datetime import timedelta
from typing import Any, assert_type, get_args, get_type_hints

import pytest

from semel import Policy
from semel.core.policy import PolicyFields
from semel.core.vendors import VENDORS, VendorName
from semel.errors import ConfigurationError, UnknownField


def test_presets_take_the_fields_of_a_policy() -> None:
    """Each preset takes every field with its type, and returns a policy."""
    assert_type(Policy.ietf(lease=timedelta(seconds=5), mode="atomic", keep=range(200, 300)), Policy)
    assert_type(Policy.stripe(required=True, methods={"POST"}), Policy)
    assert_type(Policy.vendor("paypal", max_key_length=38), Policy)


def test_a_mistake_is_seen_by_a_checker_and_at_run_time() -> None:
    """A name that is misspelt, or a value of the wrong type, is an error to mypy and names its field when it is run."""
    with pytest.raises(UnknownField, match="Did you mean 'required'"):
        Policy.ietf(requred=True)  # type: ignore[call-arg]
    with pytest.raises(UnknownField, match="Did you mean 'retention'"):
        Policy.stripe(retenton=timedelta(days=1))  # type: ignore[call-arg]
    with pytest.raises(UnknownField, match="Did you mean 'required'"):
        Policy.vendor("paypal", requird=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="lease"):
        Policy.ietf(lease=30)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="mode"):
        Policy.ietf(mode="atomical")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Did you mean 'paypal'"):
        Policy.vendor("paypall")  # type: ignore[arg-type]


def test_the_typed_fields_are_the_fields() -> None:
    """What the presets are typed with has every field of a policy, with its type, and no other."""
    hints: dict[str, Any] = get_type_hints(Policy)
    assert get_type_hints(PolicyFields) == {each.name: hints[each.name] for each in dataclasses.fields(Policy)}
    assert not PolicyFields.__required_keys__
    assert set(get_args(VendorName)) == set(VENDORS)
