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
        self._patterns: dict[str, re.Pattern[str]] = {}
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
        found = next((name for name, pattern in tuple(self._patterns.items()) if pattern.fullmatch(path)), None)
        if len(self._paths) >= MAX_PATHS:
            self._paths.clear()
        self._paths[path] = found
        return found


def _pattern(template: str) -> re.Pattern[str]:
    parts, end = [], 0
    for match in _PARAMETER.finditer(template):
        parts += [re.escape(template[end : match.start()]), ".+" if _LONG.match(match[0]) else "[^/]+"]
        end = match.end()
    # Below the path at which the application is mounted, if it is.
    return re.compile("(?:/.*)?" + "".join(parts) + re.escape(template[end:]))


#: Labels are of the process, and so is their limit.
ENDPOINTS = Bounded()
