"""Records in one of Django's own databases, through Django's own connections. Semel opens no connection here."""

from semel.stores.django.async_store import AsyncDjangoStore
from semel.stores.django.store import DjangoStore

__all__ = ["AsyncDjangoStore", "DjangoStore"]
