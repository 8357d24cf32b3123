"""The control: the cheapest correct guard that can be written by hand, two statements around the handler. It is what
Semel is compared with, and uses nothing of it.

Correct is little here: one run for each key, one answer for ever, another body refused. There is no lease, so a crash
leaves its key stuck; there are no batches, no audit, no limits, no policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

#: Half of each page stays free for answers, so that they are stored beside their claims (HOT updates).
TABLE = """
CREATE TABLE IF NOT EXISTS control (key text PRIMARY KEY, fingerprint bytea NOT NULL, status int, body bytea)
WITH (fillfactor = 50)
"""

#: One row: a new key, or what is there. No row: another process has claimed it since this statement began.
CLAIM = """
WITH claimed AS (
  INSERT INTO control (key, fingerprint) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING RETURNING fingerprint
)
SELECT true AS is_new, fingerprint, NULL::int AS status, NULL::bytea AS body FROM claimed
UNION ALL SELECT false, fingerprint, status, body FROM control WHERE key = $1
"""

COMPLETE = "UPDATE control SET status = $2, body = $3 WHERE key = $1"


async def once(pool: Any, request: Request, handle: Callable[[Request], Awaitable[JSONResponse]]) -> Response:
    """Answer *request*: run *handle* for a new key, else repeat what it said."""
    key = request.headers["idempotency-key"]
    fingerprint = hashlib.sha256(await request.body()).digest()
    claimed = await pool.fetchrow(CLAIM, key, fingerprint)
    if claimed is None:
        return Response(status_code=409)
    if claimed["fingerprint"] != fingerprint:
        return Response(status_code=422)
    if claimed["is_new"]:
        answer = await handle(request)
        await pool.execute(COMPLETE, key, answer.status_code, answer.body)
        return answer
    if claimed["status"] is None:
        return Response(status_code=409)
    return Response(claimed["body"], claimed["status"], {"idempotent-replayed": "true"}, "application/json")
