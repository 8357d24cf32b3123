"""What runs beside the requests: services that clean up after crashes and past retention, and run what was accepted."""

from semel.work.backlog import AsyncBacklog, Backlog
from semel.work.completer import AsyncCompleter, Completer
from semel.work.inbox_reaper import AsyncInboxReaper, InboxReaper
from semel.work.loop import AsyncWorkers, Workers
from semel.work.plan import Plan
from semel.work.reaper import AsyncReaper, Reaper
from semel.work.relay import AsyncRelay, Relay
from semel.work.service import AsyncService, Report, Service, StoreService
from semel.work.surveyor import AsyncSurveyor, Surveyor
from semel.work.sweeper import AsyncSweeper, Sweeper

__all__ = [
    "AsyncBacklog",
    "AsyncCompleter",
    "AsyncInboxReaper",
    "AsyncReaper",
    "AsyncRelay",
    "AsyncService",
    "AsyncSurveyor",
    "AsyncSweeper",
    "AsyncWorkers",
    "Backlog",
    "Completer",
    "InboxReaper",
    "Plan",
    "Reaper",
    "Relay",
    "Report",
    "Service",
    "StoreService",
    "Surveyor",
    "Sweeper",
    "Workers",
]
