"""The step of Django's migrations that makes Semel's own tables. What it runs is in ``stores/*/migrations/*.sql``."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from semel.django import conf
from semel.stores.django import schema


class ApplySQL(Operation):  # type: ignore[misc]  # Django has no types
    """Applies one of Semel's own migrations, only on the database that keeps the records."""

    reduces_to_sql = True
    reversible = True

    def __init__(self, name: str) -> None:
        """Apply the migration *name*, such as ``0001_pre_keys``."""
        self.name = name

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return how a migration file spells it."""
        return type(self).__name__, [], {"name": self.name}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: the models are not managed by Django."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:  # noqa: ARG002 - Django's own signature
        """Apply it."""
        if self._is_meant(app_label, schema_editor.connection):
            schema.apply(schema_editor, self.name)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:  # noqa: ARG002 - as above
        """Drop the tables, and make those of the migration before, empty."""
        if self._is_meant(app_label, schema_editor.connection):
            schema.revert(schema_editor, self.name)

    def describe(self) -> str:
        """Return the line that Django shows for it."""
        return f"Apply Semel's {self.name}.sql"

    @property
    def migration_name_fragment(self) -> str:
        """The name of a migration with this operation alone."""
        return f"semel_{self.name}"

    @staticmethod
    def _is_meant(app_label: str, connection: Any) -> bool:
        return (
            connection.vendor in schema.PACKAGES
            and connection.alias == conf.settings().database
            and router.allow_migrate(connection.alias, app_label, model_name="record")
        )
