"""Changing the layout of a PostgreSQL store while requests go on: *plain*, or *partitioned*, where large answers are in
partitions by the day on which they expire. What each layout has is in ``partitioned.sql`` and ``plain.sql``.

Nothing is copied. What was stored before stays where it is until it expires, and every process reads both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from typing import NamedTuple

from semel.errors import ConfigurationError
from semel.stores.migration import Layout, PlannedMigration
from semel.stores.postgres.builder import PACKAGE
from semel.stores.postgres.locks import Step, steps_of
from semel.stores.postgres.migrating import Migrator, Watch

#: The migration that brings what every layout needs.
NEEDED = "0008_pre_answers"


class Found(NamedTuple):
    """Which layout there is."""

    has_table: bool
    has_trigger: bool
    #: The last day of which there is an answer in semel_answers, if it is not over for an hour.
    last_day: str | None = None


class LayoutMigrator(Migrator):
    """Gives the tables with certain names one layout or the other. It is safe to repeat."""

    def plan_layout(self, layout: Layout) -> tuple[PlannedMigration, ...]:
        """Return what ``lay_out`` would do. Nothing is changed."""
        found = self._found()
        steps = tuple(self._steps(layout, found))
        if layout == "plain" and found.has_trigger:  # The table goes in the same run, unless an answer comes before.
            steps += tuple(self._steps(layout, found._replace(has_trigger=False)))
        name = f"{layout} layout"
        return (PlannedMigration(name, 0, tuple(step.planned for step in steps)),) if steps else ()

    def lay_out(self, layout: Layout) -> list[str]:
        """Do what is missing; return what to tell people."""
        with self._alone():
            if NEEDED not in self._book().names:
                raise ConfigurationError(f"{self._where} lacks {NEEDED}. Run: semel migrate")
            count = self._apply(layout)
            if layout == "plain":  # Without the trigger no answer comes any more, so the table may go.
                count += self._apply(layout)
            done = [f"{layout} layout applied"] if count else []
            left = self._found().last_day if layout == "plain" else None
            if left is not None:
                done.append(
                    f"{self._names.answers} has answers until {left}, which are served from there and go by the day. "
                    "The table can go when that day is over: semel migrate --layout plain"
                )
            return done

    def _apply(self, layout: Layout) -> int:
        steps = list(self._steps(layout, self._found()))
        for step in steps:
            what = f"The {layout} layout needs {step.lock} on {step.table}"
            while self._tried(what, partial(self._done, step)):
                pass
        return len(steps)

    def _done(self, step: Step, watch: Watch) -> bool:
        """Run one statement; return whether it has to be run again."""
        with self._transaction():
            ((watch.pid,),) = self._session.run("SELECT pg_backend_pid()")
            return bool(self._session.run(step.text) == [(1,)])

    def _steps(self, layout: Layout, found: Found) -> Iterator[Step]:
        script = self._names.put_into((files(PACKAGE) / f"{layout}.sql").read_text("utf-8"))
        steps = steps_of(script, self._names)
        if layout == "partitioned" and not (found.has_table and found.has_trigger):
            yield from steps[:2]
            yield from steps_of("; ".join(self._grants()), self._names)
            yield from steps[2:]
        elif layout == "plain":
            trigger, table = steps
            if found.has_trigger:
                yield trigger
            elif found.has_table and found.last_day is None:
                yield table

    def _grants(self) -> list[str]:
        """What roles may do with the records, they may do with the answers."""
        rows = self._session.run(_GRANTS.format(self._names.put_into("semel_keys")))
        tables = (self._names.put_into("semel_answers"), self._names.put_into("semel_answers_rest"))
        return [f"GRANT {what} ON {table} TO {role}" for role, what in rows for table in tables]

    def _found(self) -> Found:
        keys, answers = self._names.put_into("semel_keys"), self._names.put_into("semel_answers")
        trigger = self._names.put_into("semel_keys_answer")
        rows = self._session.run(_FOUND.format(keys=keys, answers=answers, trigger=trigger))
        has_table, has_trigger = rows[0]
        last = self._session.run(_LAST.format(answers)) if has_table else [(None,)]
        return Found(has_table, has_trigger, last[0][0])


_FOUND = """\
SELECT to_regclass('{answers}') IS NOT NULL,
       EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass('{keys}') AND tgname = '{trigger}')
"""
_LAST = """\
SELECT max(day)::text FROM {} WHERE day >= ((clock_timestamp() - interval '1 hour') AT TIME ZONE 'UTC')::date
"""
_GRANTS = """\
SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, string_agg(privilege_type, ', ')
  FROM pg_class, aclexplode(relacl)
 WHERE oid = to_regclass('{}') AND grantee <> relowner
   AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
 GROUP BY grantee ORDER BY 1
"""
