"""drf-spectacular: guarded operations show the header to send, the refusals, and ``x-idempotency``.

    REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "semel.django.spectacular.AutoSchema"}

A project with its own schema class puts ``IdempotentSchema`` first among its bases. The texts are in ``semel.openapi``;
this module only finds the guarded operations.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from semel import openapi
from semel.core.policy import Policy
from semel.django.rest import IdempotentMixin
from semel.django.views import choice_of

try:
    from drf_spectacular import openapi as spectacular
    from drf_spectacular import plumbing
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("semel.django.spectacular needs drf-spectacular. Run: pip install drf-spectacular") from error


Component: Any = plumbing.ResolvedComponent


class IdempotentSchema:
    """Adds the header and the refusals to the operations of guarded views."""

    view: Any

    def get_operation(
        self, path: str, path_regex: str, path_prefix: str, method: str, registry: Any
    ) -> dict[str, Any] | None:
        """Return the operation, with all of this added if it is guarded."""
        operation: dict[str, Any] | None = super().get_operation(path, path_regex, path_prefix, method, registry)  # type: ignore[misc]  # AutoSchema's
        policy = policy_of(self.view, method)
        if operation is None or policy is None:
            return operation
        for name, schema in openapi.schemas(policy).items():
            registry.register_on_missing(Component(name, Component.SCHEMA, schema, object=name))
        return openapi.described(operation, policy)


class AutoSchema(IdempotentSchema, spectacular.AutoSchema):
    """drf-spectacular's own schema class, with guarded operations described."""


def policy_of(view: Any, method: str) -> Policy | None:
    """Return the policy of requests of *method* to *view*; None: they are not guarded."""
    if isinstance(view, IdempotentMixin):
        # drf-spectacular gives the view a request with the method that is described.
        return view.get_idempotency_policy(getattr(view, "request", None))
    choice = choice_of(SimpleNamespace(cls=type(view)))
    return None if choice is None else choice.policy_for(method.upper())
