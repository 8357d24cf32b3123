"""The list of all checks, in the order in which they are run. No driver is needed to read it."""

from __future__ import annotations

from semel.doctor import waiting
from semel.doctor.app import checks as app
from semel.doctor.model import Check
from semel.doctor.postgres import durability, partitions, plans, server, sessions, tables, vacuum
from semel.doctor.redis import checks as redis
from semel.doctor.sqlite import checks as sqlite

#: A check comes after those that it depends on.
CHECKS: tuple[Check, ...] = tuple(
    check
    for module in (server, durability, sessions, tables, plans, partitions, vacuum, redis, sqlite, waiting, app)
    for check in module.GROUP.checks
)
