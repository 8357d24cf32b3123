"""Flask: the middleware goes around `app.wsgi_app`, so `app` itself stays the Flask object."""

from flask import Flask, request

from semel.door import RequestView
from semel.wsgi import IdempotencyMiddleware

payments: list[int] = []

app = Flask(__name__)


def whose_request(request: RequestView) -> str | None:
    return request.headers.get("x-account")


@app.post("/payments")
def pay() -> tuple[dict[str, int], int]:
    payments.append(request.get_json()["amount"])
    return {"payment": len(payments), "amount": payments[-1]}, 201


app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]  # Flask's own way to add WSGI middleware
    app.wsgi_app, store="sqlite:///semel.db", scope=whose_request
)
