"""Assertions of the conformance suite explain themselves, as those of a test file do."""

import pytest

pytest.register_assert_rewrite("semel.testing.conformance")
