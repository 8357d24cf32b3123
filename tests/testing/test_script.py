"""A script holds a flow to its order."""

import pytest

from tests.kit.ports import PORTS, NameScope, ReadBody
from tests.kit.script import OffScript, Played, play


async def talk() -> list[object]:
    said: list[object] = []
    for call in (PORTS.principal, lambda: PORTS.read_body(1)):
        try:
            said.append(await call())
        except OSError as error:
            said.append(str(error))
    return said


def test_flow_that_keeps_to_the_script() -> None:
    """A flow gets the script's answers, exceptions thrown where they stand, and ends where it ends."""
    result = play(talk(), [(NameScope, "alice"), (ReadBody, OSError("broken"))])
    assert result == Played((NameScope(), ReadBody(1)), ["alice", "broken"])


@pytest.mark.parametrize(
    "script, said",
    [
        ([(ReadBody, b"")], "Step 1 is NameScope.*says ReadBody"),
        ([(NameScope, "alice")], "script is over, and the flow asks for ReadBody"),
        ([(NameScope, "a"), (ReadBody, b""), (ReadBody, b"")], "ended after step 2, and the script goes on"),
    ],
)
def test_flow_that_does_not(script: list[tuple[type, object]], said: str) -> None:
    """A flow that asks for something else, for more or for less, is told where."""
    with pytest.raises(OffScript, match=said):
        play(talk(), script)
