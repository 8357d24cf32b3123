"""Every experiment, in the order in which they are run. What each of them checks is in the file of its subject."""

from __future__ import annotations

from semel.verify.checks import failures, keys, payload, races, replay, scope

EXPERIMENTS = (
    *replay.EXPERIMENTS,
    *keys.EXPERIMENTS,
    *payload.EXPERIMENTS,
    *races.EXPERIMENTS,
    *scope.EXPERIMENTS,
    *replay.LAST,
    *failures.EXPERIMENTS,
)
