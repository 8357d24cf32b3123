"""Guarded routes in an app's OpenAPI schema. The texts are in ``semel.openapi``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from semel.core.policy import Policy
from semel.fastapi.routes import guarded_routes
from semel.openapi import described, schemas

_VALIDATION = {"$ref": "#/components/schemas/HTTPValidationError"}


def document(app: FastAPI, policy: Policy | None = None) -> None:
    """Make *app*'s OpenAPI schema show its guarded routes; *policy* is for routes without one of their own.

    ``install`` does this for its app. A mounted app has its own schema. An ``app.openapi`` of your own
    is called first, if it is there already.
    """
    default = Policy.ietf() if policy is None else policy
    generate = app.openapi
    # The last result: FastAPI and most replacements of its method return app.openapi_schema if it is set.
    made: list[dict[str, Any]] = []

    def openapi() -> dict[str, Any]:
        schema = generate()
        if not made or schema is not made[0]:
            made[:] = [_described(app, schema, default)]
            app.openapi_schema = made[0]
        return made[0]

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI's documentation gives


def _described(app: FastAPI, schema: dict[str, Any], default: Policy) -> dict[str, Any]:
    paths: dict[str, Any] = dict(schema.get("paths", {}))
    components: dict[str, Any] = dict(schema.get("components", {}))
    for guarded in guarded_routes(app.routes):
        policy = guarded.guards[0].policy or default
        path = guarded.route.path_format
        for method in sorted(guarded.methods & frozenset(policy.methods)):
            operation = paths.get(path, {}).get(method.lower())
            if operation is not None:
                paths[path] = {**paths[path], method.lower(): _operation(operation, policy)}
                components["schemas"] = {**schemas(policy), **components.get("schemas", {})}
    return {**schema, "paths": paths, **({"components": components} if components else {})}


def _operation(operation: dict[str, Any], policy: Policy) -> dict[str, Any]:
    refused = operation.get("responses", {}).get("422", {}).get("content", {}).get("application/json", {})
    is_fastapis = refused.get("schema") == _VALIDATION
    return described(operation, policy, not_stored={"422"} if is_fastapis else ())
