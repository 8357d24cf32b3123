"""The route of a FastAPI app's status URLs, after the app's own login.

``flows/status`` decides on the answer.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path
from fastapi.params import Depends as Dependency
from starlette.requests import HTTPConnection
from starlette.responses import Response

from semel.asgi.status import tell
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.errors import ConfigurationError
from semel.fastapi.dependency import ask, checked_principal, parameter, takes_a_view
from semel.guard.body import bodiless, framed
from semel.openapi import status_responses

_NO_SCOPE = (
    "status_scope must return the user that asks for an operation's state: give it the dependency that your routes log "
    "in with, the same as Idempotent(scope=…) has. For an API with one user, say so: semel.SINGLE_TENANT."
)


def add_status_route(app: FastAPI, path: str, scope: Any, policy: Policy) -> None:
    """Let *app* answer for the state of operations below *path*, to the user that *scope* returns."""

    async def operation_status(answer: Response) -> Response:
        """Return the state of an accepted operation: 202 while it runs, then its answer itself."""
        return answer

    # FastAPI reads the parameters here. It resolves annotations in this module's names, not in this function's.
    signature = inspect.Signature([parameter("answer", Annotated[Any, Depends(Told(scope))])])
    operation_status.__signature__ = signature  # type: ignore[attr-defined]  # inspect documents it
    where = f"{path}/{{operation_name}}"
    said: dict[int | str, Any] = dict(status_responses(policy).items())
    ok = said.pop("200")
    app.add_api_route(
        where,
        operation_status,
        methods=["GET"],
        response_class=Response,
        response_description=ok["description"],
        responses=said,
        summary="The state of an operation",
        tags=["operations"],
    )
    app.add_api_route(where, operation_status, methods=["HEAD"], include_in_schema=False)


class Told:
    """A dependency: the answer about the operation that the path names."""

    def __init__(self, scope: Any) -> None:
        """Answer the user of *scope*: a dependency, ``SINGLE_TENANT``, or a function of one ``RequestView``."""
        if scope is None or (not callable(scope) and not isinstance(scope, Dependency)):
            raise ConfigurationError(_NO_SCOPE)
        self._asks = scope if takes_a_view(scope) else None
        parameters = [
            parameter("connection", HTTPConnection),
            parameter("operation_name", Annotated[str, Path(description="As it was given with the 202.")]),
        ]
        if self._asks is None:
            depends = scope if isinstance(scope, Dependency) else Depends(scope)
            parameters.append(parameter("principal", Annotated[Any, depends]))
        #: FastAPI reads here what to call this with, and so resolves the login as it does everywhere else.
        self.__signature__ = inspect.Signature(parameters)

    async def __call__(self, connection: HTTPConnection, operation_name: str, principal: object = None) -> Response:
        """Return the answer."""
        named = checked_principal(principal) if self._asks is None else partial(ask, self._asks, connection)
        answer = await tell(connection.scope, operation_name, named)
        is_head = connection.scope["method"] == "HEAD"
        return _Given(bodiless(answer) if is_head else Answer(answer.status, framed(answer), answer.body))


class _Given(Response):
    """An answer of Semel, unchanged."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body or b"", answer.status)
        self.raw_headers = list(answer.headers)
