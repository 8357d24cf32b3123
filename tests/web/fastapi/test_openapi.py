"""Guarded routes in the OpenAPI schema, compared with ``openapi.json`` and with OpenAPI's own schema."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import jsonschema  # type: ignore[import-untyped]  # its types are a package of their own
import pytest
from drf_spectacular import validation
from fastapi import APIRouter, Depends, FastAPI, Header
from pydantic import BaseModel

from semel import SINGLE_TENANT, Fingerprinter, Operation, Policy
from semel.fastapi import Idempotent, document, install
from tests.web.fastapi.shop import client_of

GOLDEN = Path(__file__).with_name("openapi.json")
OPENAPI_3_1 = Path(validation.__file__).with_name("openapi_3_1_schema.json")


class Payment(BaseModel):
    amount: int


def current_account(authorization: Annotated[str, Header()]) -> str:
    return authorization


def golden_app() -> FastAPI:
    """One of everything."""
    app = FastAPI(title="Shop", version="1")
    install(app, store="memory://", status_scope=current_account)
    later = Policy.ietf(in_progress="accept", preferences={"wait", "respond-async"})
    stripe = Policy.stripe(required=True, header=("Idempotency-Key", "X-Request-Key"))
    strict = Policy.ietf(
        strict=True,
        required=True,
        late="refuse",
        methods={"PUT"},
        retention=timedelta(days=7),
        scope_by="operation",
        fingerprint=Fingerprinter(headers=("API-Version",)),
    )

    @app.post("/payments", status_code=201)
    def pay(payment: Payment, _: Annotated[Operation, Depends(Idempotent(scope=current_account))]) -> Payment:
        return payment

    @app.get("/payments")
    def payments() -> list[Payment]:
        return []

    @app.put("/payments/{number}", responses={409: {"description": "Settled already.", "model": Payment}})
    def change(
        number: int, payment: Payment, _: Annotated[Operation, Depends(Idempotent(scope=SINGLE_TENANT, policy=strict))]
    ) -> Payment:
        return payment

    router = APIRouter(prefix="/v1", dependencies=[Depends(Idempotent(scope=SINGLE_TENANT, policy=stripe))])

    @router.post("/charges", responses={400: {"description": "Refused.", "model": Payment}})
    def charge(payment: Payment) -> Payment:
        return payment

    @router.get("/charges")
    def charges() -> list[Payment]:
        return []

    app.include_router(router)

    @app.post("/reports", status_code=201)
    def report(_: Annotated[Operation, Depends(Idempotent(scope=current_account, policy=later))]) -> str:
        return "written"

    return app


def test_the_schema_is_what_it_was() -> None:
    """The schema of an app with guarded routes is openapi.json, to the letter.

    To write it anew: ``SEMEL_WRITE_GOLDEN=1 pytest tests/web/fastapi/test_openapi.py``; then read the difference.
    """
    schema = json.dumps(golden_app().openapi(), indent=2, ensure_ascii=False) + "\n"
    if "SEMEL_WRITE_GOLDEN" in os.environ:
        GOLDEN.write_text(schema)
    assert schema == GOLDEN.read_text()


def test_the_schema_is_openapi() -> None:
    """The schema is valid by the schema of OpenAPI 3.1, and its references lead somewhere."""
    schema = golden_app().openapi()
    jsonschema.validate(schema, json.loads(OPENAPI_3_1.read_text()))
    for reference in references(schema):
        found: Any = schema
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [each for value in node.values() for each in references(value)]
    return [each for value in node for each in references(value)] if isinstance(node, list) else []


def operation_of(schema: dict[str, Any], path: str = "/pay") -> dict[str, Any]:
    operation: dict[str, Any] = schema["paths"][path]["post"]
    return operation


def add_route(app: FastAPI, path: str = "/pay", **settings: Any) -> None:
    @app.post(path, **settings)
    def pay(payment: Payment, _: Annotated[Operation, Depends(Idempotent(scope=current_account))]) -> None: ...


def test_both_kinds_of_422() -> None:
    """FastAPI's own 422 stays beside Semel's, each in its media type; only a stored answer can be a replay."""
    app = FastAPI()
    install(app, store="memory://")
    add_route(app)
    answers = operation_of(app.openapi())["responses"]
    assert set(answers["422"]["content"]) == {"application/json", "application/problem+json"}
    assert "headers" not in answers["422"]
    assert "Idempotent-Replayed" in answers["200"]["headers"]
    assert "Retry-After" in answers["409"]["headers"]


def test_the_key_is_not_a_parameter_of_fastapis() -> None:
    """The header is in the schema, and FastAPI does not ask for it: a missing key is refused by Semel, with 400."""
    app = FastAPI()
    install(app, store="memory://", policy=Policy.ietf(required=True))
    add_route(app)
    headers = [each for each in operation_of(app.openapi())["parameters"] if each["in"] == "header"]
    assert [(each["name"], each["required"]) for each in headers] == [
        ("authorization", True),
        ("Idempotency-Key", True),
    ]


def test_a_route_that_is_added_later_is_shown() -> None:
    """The schema is made once, and anew when a route is added."""
    app = FastAPI()
    install(app, store="memory://")
    add_route(app)
    assert app.openapi() is app.openapi() is app.openapi_schema
    add_route(app, "/later")
    assert "x-idempotency" in operation_of(app.openapi(), "/later")
    assert app.openapi() is app.openapi()


def test_a_schema_of_your_own_is_asked_first() -> None:
    """An app.openapi that was replaced before install() is what the guarded routes are added to."""
    app = FastAPI()
    generate = app.openapi

    def mine() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = {**generate(), "x-mine": True}
        return app.openapi_schema

    app.openapi = mine  # type: ignore[method-assign]  # the way that FastAPI's documentation gives
    install(app, store="memory://")
    add_route(app)
    for _ in range(2):
        schema = app.openapi()
        assert schema["x-mine"] is True
        (key,) = [each for each in operation_of(schema)["parameters"] if each["name"] == "Idempotency-Key"]
        assert key["schema"]["maxLength"] == 255


def test_a_mounted_app_has_its_own_schema() -> None:
    """A mounted app's schema shows its guarded routes once it has been told to."""
    inner = FastAPI()
    add_route(inner)
    document(inner, Policy.ietf(required=True))
    assert operation_of(inner.openapi())["x-idempotency"]["required"] is True


def test_a_hidden_route_stays_hidden() -> None:
    """A route that is not in the schema is not put there."""
    app = FastAPI()
    install(app, store="memory://")
    add_route(app, include_in_schema=False)
    assert app.openapi()["paths"] == {}


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_the_schema_is_served(path: str) -> None:
    """The app serves its schema and its documentation as before."""
    async with client_of(golden_app()) as client:
        assert (await client.get(path)).status_code == 200
