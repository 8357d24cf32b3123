"""The app's configuration for Django. It defines no model."""

from __future__ import annotations

from typing import Any

try:
    from django.apps import AppConfig
    from django.db import connections
    from django.db.models.signals import post_migrate
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("semel.django needs Django. Run: pip install 'semel[django]'") from error


class SemelConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The app, labelled ``semel``."""

    name = "semel.django"
    label = "semel"
    verbose_name = "Semel"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks of the settings, and the clean-up between tests."""
        from semel.django import checks  # noqa: F401, PLC0415 - registers them, once Django is set up

        post_migrate.connect(_forget_what_tests_left, sender=self, dispatch_uid="semel")


def _forget_what_tests_left(*, using: str, plan: object = None, **_: Any) -> None:
    """Empty the tables when ``TransactionTestCase`` has emptied all others: Django does not empty unmanaged tables.

    Only in a test run. Some projects send this signal by hand elsewhere, and must not lose their records.
    """
    from semel.stores.django import schema, wrapper  # noqa: PLC0415 - once Django is set up

    if plan is None and wrapper.is_test_run():
        schema.clear(connections[using])
