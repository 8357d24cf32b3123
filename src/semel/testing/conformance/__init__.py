"""The tests that every store must pass: one importable suite, for Semel's stores and for yours. It uses no internals.

    # conftest.py
    pytest.register_assert_rewrite("semel.testing.conformance")

    # test_my_store.py
    class TestMyStore(StoreConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def candidate(cls) -> Candidate:
            return Candidate(open=lambda: MyStore(URL), age=make_every_record_older)

A class shares one database; each test has its own scope. It needs pytest and hypothesis.
"""

from semel.testing.conformance.accepted import Accepted
from semel.testing.conformance.answers import Answers
from semel.testing.conformance.claims import Claims
from semel.testing.conformance.endings import Endings
from semel.testing.conformance.erasing import Erasing
from semel.testing.conformance.handles import AsyncHandle, Candidate, Handle, Lent, SyncHandle, handle
from semel.testing.conformance.likeness import Likeness
from semel.testing.conformance.milestones import Milestones
from semel.testing.conformance.pending import Pending
from semel.testing.conformance.reading import Reading
from semel.testing.conformance.searching import Searching
from semel.testing.conformance.steps import Steps
from semel.testing.conformance.take_overs import TakeOvers
from semel.testing.conformance.trail import Trail
from semel.testing.conformance.transactions import Transactions
from semel.testing.conformance.upkeep import Upkeep

__all__ = ["AsyncHandle", "Candidate", "Handle", "Lent", "StoreConformance", "SyncHandle", "handle"]


class StoreConformance(
    Claims,
    TakeOvers,
    Endings,
    Answers,
    Reading,
    Searching,
    Steps,
    Upkeep,
    Erasing,
    Accepted,
    Pending,
    Milestones,
    Trail,
    Transactions,
    Likeness,
):
    """The whole suite. A subclass named ``Test…`` defines the fixture ``candidate``."""
