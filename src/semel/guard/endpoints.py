"""Names of endpoints for metrics: route templates, and only so many of them. A path that a client sent is never one.

A framework knows the template once it has routed a request. A replay is answered before that, so templates that were
seen are remembered, and a path is compared with them.
"""

from __future__ import annotations

import re
import threading

from semel.core.message import one_line

#: For what has no template, or one too many.
OTHER = "other"
#: Each makes some dozen series.
MAX_ENDPOINTS = 500
#: How many paths are remembered with their template.
MAX_PATHS = 1000
#: Characters and parts of a path that is compared. A longer one is known by no name: it is not what a router is made
#: for, and a client chooses it.
MAX_PATH = 1024
MAX_SEGMENTS = 64

#: A parameter of a template: ``{id}``, ``{id:int}``, ``<int:id>``.
_PARAMETER = re.compile(r"\{[^{}]*\}|<[^<>]*>")
#: One that stands for several parts of a path.
_LONG = re.compile(r"[{<](path:|.*:path\})")


class Bounded:
    """The endpoints of this process."""

    def __init__(self, limit: int = MAX_ENDPOINTS) -> None:
        """Let *limit* of them have their name."""
        self._limit = limit
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    def name(self, endpoint: str | None) -> str:
        """Return *endpoint*, or ``other``."""
        if endpoint is None:
            return OTHER
        known = self._names.get(endpoint)
        if known is not None:
            return known
        with self._lock:
            if len(self._names) >= self._limit:
                return OTHER
            return self._names.setdefault(endpoint, one_line(endpoint))


class Templates:
    """The route templates of one application, as they were seen."""

    def __init__(self) -> None:
        """None was seen yet."""
        self._patterns: dict[str, _Pattern] = {}
        self._paths: dict[str, str | None] = {}

    def learn(self, template: str) -> None:
        """Remember *template*."""
        if template not in self._patterns and len(self._patterns) < MAX_ENDPOINTS:
            self._patterns[template] = _pattern(template)
            self._paths.clear()  # What was no known path may be one now.

    def find(self, path: str) -> str | None:
        """Return the template of *path*, where one was seen that fits."""
        if path in self._paths:
            return self._paths[path]
        if len(path) > MAX_PATH or path.count("/") > MAX_SEGMENTS:
            return None
        parts = path.removeprefix("/").split("/")
        found = next((name for name, pattern in tuple(self._patterns.items()) if _fits(parts, pattern)), None)
        if len(self._paths) >= MAX_PATHS:
            self._paths.clear()
        self._paths[path] = found
        return found


#: The text of one part of a template, around its parameters: what is whole text has no second one.
_Segment = tuple[str, ...]
#: The parts of a template between its parameters that stand for several.
_Pattern = tuple[tuple[_Segment, ...], ...]


def _pattern(template: str) -> _Pattern:
    runs: list[list[_Segment]] = [[]]
    # A parameter may have a slash in its own pattern.
    names = _PARAMETER.findall(template)
    for part in _PARAMETER.sub("\0", template).removeprefix("/").split("/"):
        here, names = names[: part.count("\0")], names[part.count("\0") :]
        if any(_LONG.match(each) for each in here):
            runs.append([])
        else:
            runs[-1].append(tuple(part.split("\0")))
    return tuple(map(tuple, runs))


def _fits(parts: list[str], pattern: _Pattern) -> bool:
    """Whether a path is one of a template. Each part is compared a few times at most. An expression would try all ways
    to share a path among its parameters, and any client can send a path.
    """
    *runs, last = pattern
    end = len(parts) - len(last)
    if end < 0 or not _begins(parts, end, last):
        return False
    # What is in front is the path at which the application is mounted, if it is.
    at = 0
    for run in runs:
        # The first place that fits leaves the most to what follows; one part at least is the parameter's.
        at = next((each for each in range(at, end - len(run)) if _begins(parts, each, run)), end) + len(run) + 1
    return at <= end


def _begins(parts: list[str], at: int, run: tuple[_Segment, ...]) -> bool:
    return all(_is_like(part, segment) for part, segment in zip(parts[at : at + len(run)], run, strict=True))


def _is_like(part: str, segment: _Segment) -> bool:
    first, *middle = segment
    if not middle:
        return part == first
    if not part.startswith(first):
        return False
    at = len(first)
    *middle, last = middle
    for text in middle:
        # One character at least is the parameter's.
        at = part.find(text, at + 1)
        if at < 0:
            return False
        at += len(text)
    return at + 1 <= len(part) - len(last) and part.endswith(last)


#: Labels are of the process, and so is their limit.
ENDPOINTS = Bounded()
