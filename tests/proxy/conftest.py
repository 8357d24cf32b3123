"""The databases that the proxy's tests share with those of the other entry points."""

from tests.web.conftest import shared_postgres_url

__all__ = ["shared_postgres_url"]
