"""Flask: a report that is accepted at once and made by a worker. The app's own login names the user of both."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from flask import Flask, abort, g, request

import semel
from semel import Policy
from semel.wsgi import PRINCIPAL, IdempotencyMiddleware, RequestView

ACCOUNTS = {"token-of-alice": "alice", "token-of-bob": "bob"}

app = Flask(__name__)


def current_account() -> str | None:
    # New in this login: what a worker runs has no token, and names its user here. No client can.
    named: str | None = request.environ.get(PRINCIPAL)
    return named or ACCOUNTS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))


def login_required(view: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(view)
    def checked(*args: Any, **kwargs: Any) -> Any:
        g.account = current_account()
        return view(*args, **kwargs) if g.account else abort(401)

    return checked


@app.post("/reports")
@login_required
def report() -> tuple[dict[str, str], int]:
    month: str = request.get_json()["month"]
    operation = semel.current()
    for number in range(3):
        operation.progress(number / 3, f"part {number + 1} of 3")
        operation.effect(f"part_{number}", write_part, month, number)
    return {"month": month, "for": g.account}, 201


def write_part(month: str, number: int, **_: str) -> str:  # A provider would get the idempotency_key.
    return f"part {number} of {month}"


def user_of(outside: RequestView) -> str | None:
    with app.request_context(outside.raw):  # The same login, around the app: it is asked at the status URL, too.
        return current_account()


app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
    app.wsgi_app,
    store="sqlite:///semel.db",
    scope=user_of,
    paths={"/reports": Policy.ietf(required=True, in_progress="accept")},
)
