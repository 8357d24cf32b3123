"""Records in one of Django's own databases, through Django's own connections. No connection here is Semel's."""

from semel.stores.django.async_store import AsyncDjangoStore
from semel.stores.django.store import DjangoStore

__all__ = ["AsyncDjangoStore", "DjangoStore"]
