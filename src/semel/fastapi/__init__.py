"""The FastAPI entry point: a dependency that guards the routes it is given to, after the app's own login has run.

The middleware of ``semel.asgi`` holds an answer back until it is stored; ``install`` puts it around the app.

    install(app, store="postgresql://…")

    @app.post("/payments")
    async def pay(payment: Payment, operation: Annotated[Operation, Depends(Idempotent(scope=current_account))]): ...
"""

try:
    from fastapi import FastAPI as _FastAPI  # noqa: F401 - asked for here, so that its absence is explained
except ImportError as error:
    raise ImportError("semel.fastapi needs FastAPI. Run: pip install 'semel[fastapi]'") from error

from semel.fastapi.dependency import AlreadyAnswered, Idempotent
from semel.fastapi.documentation import document
from semel.fastapi.installation import install

__all__ = ["AlreadyAnswered", "Idempotent", "document", "install"]
