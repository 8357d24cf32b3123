"""The records in Django's admin, read-only. Nothing can be added, changed or deleted here: a record decides whether an
effect happens twice, so only ``semel keys`` changes one, and notes the operator in the audit trail.

A user who may view records sees keys, states, times, headers and the audit trail. The bodies of answers, stored
requests and the results of steps are customers' data: they are shown to superusers, and to users with the permission
``semel.view_record_contents``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.db import connections
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.timezone import is_aware, localtime

from semel.core.derive import derive
from semel.core.record import Entry
from semel.core.recovery import Done, Step, as_text
from semel.core.recovery import read_back as read_steps
from semel.core.state import State
from semel.core.trail import story
from semel.django import conf
from semel.django.models import AuditLine, Record
from semel.stores.dialect import POSTGRESQL
from semel.stores.milestones import read_back

#: Bytes of a body that are shown. ``semel keys show`` has all of them.
PREVIEW_BYTES = 4096
#: Lines of the audit trail that are shown: the last ones.
TRAIL_LINES = 200

#: Not read for a list: they may be large.
_LARGE = ("body", "fingerprint", "headers", "request", "request_body", "steps", "token")

_TEXTUAL = (
    "text/",
    "application/json",
    "application/problem+json",
    "application/xml",
    "application/x-www-form-urlencoded",
)

#: What a list may be filtered by in its URL: what it shows of every record. A filter of any other field would tell by
#: its matches what the field holds.
_LOOKED_UP = frozenset({"key", "scope", "state", "attempt", "recovery_point", "status", "created_at", "expires_at"})

_ANSWER = "SELECT semel_answer(answer_day, token) FROM semel_keys WHERE scope = %s AND key = %s"
_WITHHELD = "Shown to users with the permission semel.view_record_contents."


class Named(NamedTuple):
    """Scope and key of a record: the key alone does not identify it."""

    scope: str
    key: str

    def __str__(self) -> str:
        """Write it for a URL."""
        return json.dumps([self.scope, self.key], ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Named | None:
        """Read it back from a URL; None if it is not valid."""
        try:
            scope, key = json.loads(text)
        except (TypeError, ValueError):
            return None
        return cls(scope, key) if isinstance(scope, str) and isinstance(key, str) else None


class _Told(NamedTuple):
    """The fields of a record that its history needs."""

    scope: str
    key: str
    state: str
    attempt: int
    token: bytes
    is_accepted: bool
    created_at: datetime
    completed_at: datetime | None


class RecordList(ChangeList):  # type: ignore[misc]  # Django has no types
    """The list. Its links name scope and key."""

    def get_queryset(self, *arguments: Any, **named: Any) -> QuerySet[Record]:
        """Return the records of the list, without large fields."""
        return super().get_queryset(*arguments, **named).defer(*_LARGE)

    def url_for_result(self, result: Record) -> str:
        """Return the URL of one record's page."""
        name = f"{self.model_admin.admin_site.name}:semel_record_change"
        address: str = reverse(name, args=(quote(str(Named(result.scope, result.key))),))
        return address


@admin.register(Record)
class RecordAdmin(admin.ModelAdmin):  # type: ignore[misc]  # as above
    """Records, read-only."""

    list_display = ("key", "scope", "state", "attempt", "recovery_point", "status", "created", "expires")
    list_filter = ("state",)
    list_per_page = 50
    # Counting all of a large table takes longer than showing the page.
    show_full_result_count = False
    search_fields = ("key__startswith",)
    search_help_text = "The beginning of a key."
    fieldsets = (
        (None, {"fields": ("scope", "key", "state", "attempt", "recovery_point", "progress", "tries", "policy")}),
        ("Times", {"fields": ("created_at", "lease_expires_at", "completed_at", "expires")}),
        ("Answer", {"fields": ("status", "answer_headers", "answer_body")}),
        ("Work", {"fields": ("steps_taken", "kept_request")}),
        ("Audit trail", {"fields": ("trail",)}),
    )
    actions = None

    def get_changelist(self, _request: HttpRequest, **_: Any) -> type[RecordList]:
        """Return the list."""
        return RecordList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Record]:
        """Return the records, from the database that keeps them."""
        return super().get_queryset(request).using(conf.settings().database)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:  # noqa: ARG002 - Django's own signature
        """Whether the list's URL may filter by *lookup*. A record has no relations to other tables."""
        return lookup.partition("__")[0] in _LOOKED_UP

    def get_object(self, request: HttpRequest, object_id: str, _from_field: str | None = None) -> Record | None:
        """Find one record by scope and key."""
        named = Named.of(object_id)
        if named is None:
            return None
        found: Record | None = self.get_queryset(request).filter(scope=named.scope, key=named.key).first()
        if found is not None:
            found.may_be_read = request.user.has_perm("semel.view_record_contents")
        return found

    def get_readonly_fields(self, _request: HttpRequest, _obj: object = None) -> Sequence[str]:
        """Return all of them."""
        return [name for _, part in self.fieldsets for name in part["fields"]]

    def has_add_permission(self, _request: HttpRequest) -> bool:
        """Return False: records are read-only here."""
        return False

    def has_change_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Return False: records are read-only here."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Return False: records are read-only here."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Users with the permission, if the records are in Django's database."""
        return conf.settings().store is None and bool(super().has_view_permission(request, obj))

    def has_module_permission(self, request: HttpRequest) -> bool:
        """The same."""
        return conf.settings().store is None and bool(super().has_module_permission(request))

    @admin.display(ordering="created_at")  # type: ignore[untyped-decorator]  # as above
    def created(self, record: Record) -> str:
        """Show when the key was first seen."""
        return _time(record.created_at)

    @admin.display(ordering="expires_at")  # type: ignore[untyped-decorator]  # as above
    def expires(self, record: Record) -> str:
        """Show when its retention ends; an unknown outcome waits for an operator."""
        return "to be resolved" if record.state == State.UNKNOWN else _time(record.expires_at)

    def policy(self, record: Record) -> str:
        """Show the policy terms from the time of the claim."""
        who = "; run by a worker" if record.accepted else ""
        return f"after a crash: {record.on_crash}; after retention: {record.after_retention}{who}"

    def progress(self, record: Record) -> str:
        """Show the handler's own progress. Its note is the application's data, as the results of steps are."""
        milestone = read_back(record.milestone)
        if milestone is None:
            return "–"
        note = milestone.note if _may(record) else None
        return f"{milestone.fraction:.0%}" + (f": {note}" if note else "")

    def answer_headers(self, record: Record) -> str:
        """Show the headers of the answer, decoded."""
        return _table((), _pairs(record.headers)) if record.headers else "–"

    def answer_body(self, record: Record) -> str:
        """Show the beginning of the body, if it is text and the user may."""
        if record.status is None:
            return "–"
        body = _elsewhere(record) if record.body is None else record.body
        if body is None:
            return "Not kept: it was too large, or a stream. It was sent once."
        return _body(record, bytes(body), _pairs(record.headers))

    @admin.display(description="Steps")  # type: ignore[untyped-decorator]  # as above
    def steps_taken(self, record: Record) -> str:
        """Show each step: whether it is done, its key at the provider, and its result if the user may see it."""
        rows = [_step(record, step) for step in read_steps(record.steps).steps]
        return _table(("step", "outcome", "key at the provider", "result"), rows) if rows else "–"

    def kept_request(self, record: Record) -> str:
        """Show the request, while it is stored to be run again."""
        if record.request is None:
            return "–"
        if not _may(record):
            return _WITHHELD
        kept = json.loads(record.request)
        line = f"{kept['method']} {kept['path']}" + (f"?{kept['query']}" if kept["query"] else "")
        return _html(
            "{}{}{}",
            _text(line),
            _table((), kept["headers"]),
            _body(record, bytes(record.request_body), kept["headers"]),
        )

    def trail(self, record: Record) -> str:
        """Show what happened to this key: the lines of its audit trail, and lines made from the record."""
        lines = AuditLine.objects.using(conf.settings().database).filter(scope=record.scope, key=record.key)
        last = [
            Entry(each.at, each.scope, each.key, each.attempt, each.event, each.actor, each.detail)
            for each in reversed(lines.order_by("-id")[:TRAIL_LINES])
        ]
        told = _Told(
            record.scope,
            record.key,
            record.state,
            record.attempt,
            bytes(record.token),
            bool(record.accepted),
            record.created_at,
            record.completed_at,
        )
        rows = [
            (_time(each.at, "milliseconds"), each.event, each.attempt, each.detail or "", each.actor or "–")
            for each in story(told, last)
        ]
        return _table(("at", "event", "attempt", "detail", "by"), rows)


def _elsewhere(record: Record) -> Any:
    """Return the body of an answer that is not in its row: PostgreSQL has a layout for that."""
    connection = connections[conf.settings().database]
    if connection.vendor != POSTGRESQL:
        return None
    with connection.cursor() as cursor:
        cursor.execute(_ANSWER, [record.scope, record.key])
        found = cursor.fetchone()
    return found and found[0]


def _time(time: datetime, precision: str = "seconds") -> str:
    """Show a time in the project's own zone, to the second."""
    local: datetime = localtime(time) if is_aware(time) else time
    return local.replace(tzinfo=None).isoformat(" ", precision)


def _may(record: Record) -> bool:
    return bool(getattr(record, "may_be_read", False))


def _step(record: Record, step: Step) -> tuple[str, ...]:
    key = derive(record.scope, record.key, step.name) if step.kind == "effect" else ""
    name = f"{step.kind} {step.name}"
    if isinstance(step, Done):
        return name, "done", key, as_text(step.result) if _may(record) else _WITHHELD
    if record.state == State.UNKNOWN:
        return name, "unknown: an operator has to say whether it happened (semel keys resolve)", key, ""
    return name, "begun: whether it happened is not known yet", key, ""


def _pairs(headers: str | None) -> list[tuple[str, str]]:
    return [(name, value) for name, value in json.loads(headers or "[]")]


def _body(record: Record, body: bytes, headers: Iterable[tuple[str, str]]) -> str:
    said = {name.lower(): value for name, value in headers}
    media_type = said.get("content-type", "")
    size = f"{len(body)} bytes of {media_type or 'an unknown type'}"
    if not body:
        return "Empty."
    if not _may(record):
        return f"{size}. {_WITHHELD}"
    if not media_type.lower().startswith(_TEXTUAL) or said.get("content-encoding", "identity") != "identity":
        return f"{size}, not shown."
    more = f"… {size}, of which {PREVIEW_BYTES} are shown." if len(body) > PREVIEW_BYTES else ""
    return _html("{}{}", _text(body[:PREVIEW_BYTES].decode("utf-8", "replace")), more)


def _text(text: str) -> str:
    """Show *text* unchanged, escaped: the browser never reads it as markup."""
    return _html('<pre style="white-space: pre-wrap; margin: 0">{}</pre>', text)


def _table(titles: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = _joined("<th>{}</th>", titles)
    lines = [_html("<tr>{}</tr>", _joined("<td>{}</td>", row)) for row in rows]
    return _html("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>", head, _joined("{}", lines))


def _joined(template: str, cells: Iterable[Any]) -> str:
    return _html("{}", format_html_join("", template, ((cell,) for cell in cells)))


def _html(template: str, *parts: Any) -> str:
    """Put *parts* into *template*, each escaped, except markup that was made here."""
    made: str = format_html(template, *parts)
    return made
