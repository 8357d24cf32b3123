"""Semel as a Django app: put ``"semel.django"`` into ``INSTALLED_APPS``. Importing it touches no model and no setting.

The records are kept in Django's own database, through Django's own connections. The guards are imported on first
use: the decorator ``idempotent``, and ``IdempotencyMiddleware``; and so is what returns their ``store``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.django.conf import async_store, store
    from semel.django.middleware import IdempotencyMiddleware
    from semel.django.views import idempotent

__all__ = ["IdempotencyMiddleware", "async_store", "idempotent", "store"]

_WHERE = {
    "IdempotencyMiddleware": "semel.django.middleware",
    "async_store": "semel.django.conf",
    "idempotent": "semel.django.views",
    "store": "semel.django.conf",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_WHERE[name]), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in {"asgiref", "django"}:
            raise
        raise ImportError("semel.django needs Django. Run: pip install 'semel[django]'") from missing
