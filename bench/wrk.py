"""Load from ``wrk``, which takes less of a core than a client in Python. It does what a script of ours says."""

from __future__ import annotations

import math
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.load import AFTER_KEY, BEFORE_KEY, KEY_DIGITS, LOOPBACK, Load, Outcome, outcome_of

NEW_KEYS = """
math.randomseed({seed})
local function key()
  local random = math.random
  return string.format("{format}", {numbers})
end
"""

#: Each thread would go through the keys by itself; there is one.
SAME_KEYS = """
local keys, last = {{}}, 0
for line in io.lines("{path}") do keys[#keys + 1] = line end
local function key()
  last = last % #keys + 1
  return keys[last]
end
"""

REQUEST = """
local before, after = {before}, {after}
function request() return before .. key() .. after end

function done(summary, latency, requests)
  local errors = summary.errors
  local faults = errors.connect + errors.read + errors.write + errors.timeout + errors.status
  io.write(string.format('{{"requests":%d,"seconds":%.6f,"faults":%d,"p50_ms":%.4f,"p99_ms":%.4f}}\\n',
    summary.requests, summary.duration / 1e6, faults, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
"""


def version() -> str | None:
    """Say which wrk is installed, or None."""
    program = shutil.which("wrk")
    if program is None:
        return None
    # It says its version, then how it is used, and fails.
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return " ".join((said.stdout + said.stderr).split()[:2])


def send(load: Load) -> Outcome:
    """Send *load*: for a time, since wrk can't count. It knows whole seconds only."""
    if load.seconds is None:
        raise ValueError("wrk sends for a number of seconds, not for a number of requests.")
    seconds = math.ceil(load.seconds)
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
        script = Path(folder, "load.lua")
        script.write_text(_script(load))
        words = ["wrk", "-t1", f"-c{load.connections}", f"-d{seconds}s", "-s", str(script)]
        return outcome_of([*words, f"http://{LOOPBACK}:{load.port}"])


def _script(load: Load) -> str:
    if load.keys is None:
        quads = KEY_DIGITS // 4
        numbers = ", ".join(["random(0, 65535)"] * quads)
        keys = NEW_KEYS.format(seed=secrets.randbits(32), format="%04x" * quads, numbers=numbers)
    else:
        keys = SAME_KEYS.format(path=load.keys)
    return keys + REQUEST.format(before=_quoted(BEFORE_KEY), after=_quoted(AFTER_KEY))


def _quoted(text: bytes) -> str:
    """Spell *text* as a Lua string: every byte by its number."""
    return '"' + "".join(f"\\{byte:03d}" for byte in text) + '"'
