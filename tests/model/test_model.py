"""The model in ``model/`` keeps every promise in every state that it can get into; and each bug that is planted into it
is found, by the promise that is named here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from tests.kit.servers.programs import JAVA, find
from tests.kit.tlc import Explored, explore


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return find(JAVA, tmp_path_factory.mktemp("java")) / "java"


GUARD = {"Modes": '{"guard"}'}
ATOMIC = {"Modes": '{"atomic"}'}
REFUSE = {"OnCrash": '"refuse"'}
FAILS_OVER = {"FailsOver": "TRUE"}
ONE_OPERATION = {"Operations": "1"}
ONE_FAULT = {"Faults": "1"}

#: What docs/how-to/fail-over.md says that an asynchronous standby may cost: a commit that was acknowledged, and with it
#: a claim, an answer, and the knowledge that a handler has run. Nothing else.
LOST_BY_FAIL_OVER = (
    "AtMostOneLiveClaim",
    "NothingInFlightIsReaped",
    "AnswerIsStoredFirst",
    "OneAnswer",
    "AtMostOnce",
    "AnswerIsFinal",
)


@dataclass(frozen=True)
class World:
    """What the model is asked to explore, how many states it has at least, and which actions have no place in it."""

    module: str
    constants: Mapping[str, str]
    at_least: int
    never: frozenset[str] = frozenset()
    without: tuple[str, ...] = ()


WORLDS = {
    "guard": World("Once", GUARD | ONE_FAULT, 10_000),
    "guard that refuses": World("Once", GUARD | REFUSE | ONE_FAULT, 8_000),
    "atomic": World("Once", ATOMIC | {"Faults": "3"}, 4_000),
    "both": World("Once", ONE_OPERATION, 50_000),
    "both that refuse": World("Once", REFUSE | ONE_OPERATION, 10_000),
    "guard that fails over": World(
        "Once", GUARD | FAILS_OVER | ONE_FAULT | ONE_OPERATION, 10_000, without=LOST_BY_FAIL_OVER
    ),
    "atomic that fails over": World("Once", ATOMIC | FAILS_OVER, 40_000, without=LOST_BY_FAIL_OVER),
    "messages": World("Messages", ONE_FAULT, 8_000),
}


@pytest.mark.parametrize("name", WORLDS)
def test_promises_hold(java: Path, tmp_path: Path, name: str) -> None:
    """In every state that can be reached every promise holds, and every action is taken that has a place there."""
    world = WORLDS[name]
    explored = explore(java, tmp_path, world.module, world.constants, without=world.without)
    print(name, explored.states, sorted(a for a, c in explored.taken.items() if c == 0))
    assert explored.broken is None
    assert explored.states >= world.at_least
