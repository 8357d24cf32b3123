"""Starlette: the scope is the user that an outer authentication layer has put into the ASGI scope."""

from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from semel import Policy
from semel.asgi import IdempotencyMiddleware, RequestView

orders: list[str] = []


class ByHeader(AuthenticationBackend):
    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        name = conn.headers.get("x-user")
        return (AuthCredentials(["authenticated"]), SimpleUser(name)) if name else None


def user_of(request: RequestView) -> str | None:
    user = request.raw["user"]
    return user.display_name if user.is_authenticated else None


async def order(request: Request) -> JSONResponse:
    orders.append((await request.json())["item"])
    return JSONResponse({"order": len(orders)}, status_code=201, headers={"Location": f"/orders/{len(orders)}"})


app = Starlette(
    routes=[Route("/orders", order, methods=["POST"])],
    middleware=[  # the outermost first: who it is, then what was asked before
        Middleware(AuthenticationMiddleware, backend=ByHeader()),
        Middleware(
            IdempotencyMiddleware,
            store="sqlite:///semel.db",
            scope=user_of,
            policy=Policy.ietf(required=True),
        ),
    ],
)
