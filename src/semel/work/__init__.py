"""What runs beside the requests: services that clean up after crashes and past retention. Requests do without them."""

from semel.work.completer import AsyncCompleter, Completer
from semel.work.loop import AsyncWorkers, Workers
from semel.work.reaper import AsyncReaper, Reaper
from semel.work.service import AsyncService, Report, Service
from semel.work.sweeper import AsyncSweeper, Sweeper

__all__ = [
    "AsyncCompleter",
    "AsyncReaper",
    "AsyncService",
    "AsyncSweeper",
    "AsyncWorkers",
    "Completer",
    "Reaper",
    "Report",
    "Service",
    "Sweeper",
    "Workers",
]
