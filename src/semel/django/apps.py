"""The app as Django knows it."""

from __future__ import annotations

try:
    from django.apps import AppConfig
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("semel.django needs Django. Run: pip install 'semel[django]'") from error


class SemelConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The app, labelled ``semel``."""

    name = "semel.django"
    label = "semel"
    verbose_name = "Semel"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Have the settings checked."""
        from semel.django import checks  # noqa: F401, PLC0415 - registers them, once Django is set up
