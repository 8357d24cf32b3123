"""The API: ``POST /reports`` is accepted at once, and written by a worker, section by section.

A worker that takes over from a dead one goes on with the section that is missing. No handler needs to know of workers,
status URLs or retries: Semel's middleware stores the request, answers 202, and runs this very app with it later.
"""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
from semel.asgi import IdempotencyMiddleware
from semel.guard.request import RequestView

STORE = os.environ.get("REPORT_STORE", "sqlite:///report.db")
SECONDS = float(os.environ.get("REPORT_SECONDS", "10"))

LEASE = timedelta(seconds=2)  # How long a killed worker's report waits. Short for the story; the usual 30 s is fine.
SECTIONS = ("Summary", "Sales", "Returns", "Stock", "Suppliers", "Staff", "Costs", "Taxes", "Outlook", "Notes")

_TABLES = """
CREATE TABLE IF NOT EXISTS sections (key TEXT PRIMARY KEY, report TEXT, title TEXT, written_by INTEGER);
CREATE TABLE IF NOT EXISTS reports (id INTEGER PRIMARY KEY, owner TEXT, month TEXT, text TEXT);
"""


async def make_report(request: Request) -> JSONResponse:
    """Each section is an effect: slow, outside of any transaction, and its result is kept. The end is one commit."""
    operation, month = semel.current(), await _month(request)
    sections = []
    for number, title in enumerate(SECTIONS):
        await operation.progress(number / len(SECTIONS), f"Writing {title}")
        name = f"section_{number}"
        sections.append(await operation.effect(name, write_section, operation.key, month, title))
    await operation.progress(1, "Saving")
    report = await operation.phase("report_saved", semel.in_thread(save_report), operation.scope, month, sections)
    return JSONResponse(report, 201)


async def write_section(report: str, month: str, title: str, *, idempotency_key: str) -> str:
    """After a kill between its end and its record, it is written again under the same key, and is there once."""
    await asyncio.sleep(SECONDS / len(SECTIONS))
    with closing(_connect()) as connection:
        row = (idempotency_key, report, title, os.getpid())
        connection.execute("INSERT INTO sections VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", row)
    return f"{title} of {month}: all is well."


def save_report(connection: sqlite3.Connection, owner: str, month: str, sections: list[str]) -> dict[str, Any]:
    """A phase: the report is there, and the operation knows it, in one commit."""
    row = (owner, month, "\n".join(sections))
    cursor = connection.execute("INSERT INTO reports (owner, month, text) VALUES (?, ?, ?)", row)
    return {"id": cursor.lastrowid, "month": month, "sections": len(sections)}


async def list_sections(_request: Request) -> JSONResponse:
    """Not guarded: what was written, and by which process."""
    with closing(_connect()) as connection:
        return JSONResponse(connection.execute("SELECT report, title, written_by FROM sections").fetchall())


async def _month(request: Request) -> str:
    try:
        return str((await request.json())["month"])
    except (ValueError, TypeError, KeyError):
        raise HTTPException(400, 'Send {"month": ...}.') from None


def _connect() -> sqlite3.Connection:
    return sqlite3.connect(STORE.removeprefix("sqlite:///"), isolation_level=None, timeout=30)


def user_of(request: RequestView) -> str | None:
    """Return the owner of the report. A real API asks its authentication."""
    return request.headers.get("x-user")


@asynccontextmanager
async def _lifespan(_app: Starlette) -> AsyncIterator[None]:
    with closing(_connect()) as connection:
        connection.executescript(_TABLES)
    yield


_routes = [Route("/reports", make_report, methods=["POST"]), Route("/sections", list_sections)]
app = IdempotencyMiddleware(
    Starlette(routes=_routes, lifespan=_lifespan),
    store=STORE,
    scope=user_of,
    policy=semel.Policy.ietf(required=True, in_progress="accept", lease=LEASE),
)
