"""The records in Django's admin: to look at by those who may, and never to change."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client, override_settings
from django.urls import reverse

from semel.core.commands import Complete, Mark, Now, Park, Save, TakeOver
from semel.core.derive import derive
from semel.core.message import Answer, Head, Request
from semel.core.record import Hold, Milestone
from semel.core.recovery import Begun
from semel.core.state import Event
from semel.django.admin import PREVIEW_BYTES, Named
from semel.django.models import AuditLine, Record
from semel.stores.django import DjangoStore
from tests.django import project
from tests.django.operations import ANSWER, STEPS, claim_on

LIST = "/admin/semel/record/"

ODD = Named("user:7/ü?#", 'a/b "<script>alert(1)</script>" %20_3F')


@pytest.fixture
def store(database: str) -> DjangoStore:
    return DjangoStore()


@pytest.fixture
def root(store: DjangoStore) -> Any:
    """A superuser."""
    User.objects.create_superuser("root", password="root")
    client = Client()
    assert client.login(username="root", password="root")
    return client


def staff(*permissions: str) -> Client:
    user = User.objects.create_user("staff", password="staff", is_staff=True)
    user.user_permissions.add(*Permission.objects.filter(codename__in=permissions))
    client = Client()
    assert client.login(username="staff", password="staff")
    return client


def keep(store: DjangoStore, named: Named = ODD, answer: Answer = ANSWER) -> Hold:
    """Have a record of an operation that was answered."""
    hold = store.perform(claim_on(named.key, named.scope))
    assert isinstance(hold, Hold)
    store.perform(Save(hold, STEPS))
    claimed_by = store.perform(Now())
    while store.perform(Now()) == claimed_by:
        """What begins and ends in one moment of the store's clock was not claimed: it is one of atomic mode."""
    store.perform(Complete(hold, Event.COMPLETE, answer))
    return hold


def page(client: Client, named: Named = ODD) -> str:
    """Go to a record's page by the link in the list."""
    listed = client.get(LIST, {"q": named.key[:3]})
    assert listed.status_code == 200
    addresses = [each.split('"')[0] for each in listed.content.decode().split('href="')[1:]]
    (address,) = {html.unescape(each) for each in addresses if each.startswith(LIST) and "/change/" in each}
    answer = client.get(address)
    assert answer.status_code == 200, address
    text: str = answer.content.decode()
    return text


class TestList:
    def test_columns(self, store: DjangoStore, root: Client) -> None:
        """The list shows whose key it is, its state, how far it has come, how it was answered, and until when."""
        keep(store)
        text = html.unescape(root.get(LIST).content.decode())
        for shown in (*ODD, "complete", "payment_made", "201"):
            assert shown in text
        assert "<script>alert(1)" not in root.get(LIST).content.decode()
        assert datetime.now(UTC).strftime("%Y") in text  # noqa: TID251 - what a person would see

    def test_what_is_to_be_resolved(self, store: DjangoStore, root: Client) -> None:
        """One whose outcome is unknown is in the list past its retention, too, and says that it is to be resolved."""
        hold = store.perform(replace(claim_on("parked-1"), retention=timedelta(milliseconds=1)))
        assert isinstance(hold, Hold)
        store.perform(Park(hold))
        text = root.get(LIST, {"state__exact": "unknown"}).content.decode()
        assert ">parked-1<" in text
        assert "to be resolved" in text
        assert "to be resolved" in page(root, Named(hold.scope, "parked-1"))

    def test_filter_and_search(self, store: DjangoStore, root: Client) -> None:
        """States can be picked out, and keys found by their beginning."""
        keep(store, Named("alice", "done-1"))
        store.perform(claim_on("running-1"))
        for query, expected in (
            ({"state__exact": "processing"}, "running-1"),
            ({"state__exact": "complete"}, "done-1"),
            ({"q": "run"}, "running-1"),
        ):
            text = root.get(LIST, query).content.decode()
            assert [key for key in ("done-1", "running-1") if f">{key}<" in text] == [expected]

    @pytest.mark.parametrize("permissions", [("view_record",), ("view_record", "view_record_contents")])
    def test_filter_by_what_is_not_shown(self, store: DjangoStore, permissions: tuple[str, ...]) -> None:
        """No filter in the list's URL, and no order, tells what a field holds that the list does not show."""
        keep(store)
        client = staff(*permissions)
        hidden = {each.name for each in Record._meta.get_fields()} - {
            *("key", "scope", "state", "attempt", "recovery_point", "status", "created_at", "expires_at")
        }
        assert {"request", "steps", "token", "body", "milestone"} <= hidden
        for name in sorted(hidden):
            for lookup in (name, f"{name}__contains", f"{name}__gt", f"{name}__isnull", f"{name}__startswith"):
                assert client.get(LIST, {lookup: "1"}).status_code == 400, lookup
        shown = client.get(LIST, {"scope__exact": ODD.scope, "status__gte": "200", "key__startswith": ODD.key[:3]})
        assert html.escape(ODD.key) in shown.content.decode()
        for order in ("steps", "request", "-token"):
            assert client.get(LIST, {"o": order}).status_code == 200
        assert client.get(LIST, {"_to_field": "request"}).status_code == 400

    def test_same_key_of_two(self, store: DjangoStore, root: Client) -> None:
        """Two principals with one key are two records, each with its own page."""
        for scope in ("alice", "bob"):
            keep(store, Named(scope, "key"), Answer(200, (), scope.encode()))
        for scope in ("alice", "bob"):
            address = reverse("admin:semel_record_change", args=[str(Named(scope, "key"))])
            assert f"{len(scope)} bytes" in root.get(address).content.decode()

    def test_times(self, store: DjangoStore) -> None:
        """Times are read, and can be compared, on either database."""
        keep(store)
        record = Record.objects.get()
        now = datetime.now(UTC)  # noqa: TID251 - compared with the database's, roughly
        assert abs(now - record.created_at) < timedelta(hours=1)
        assert record.lease_expires_at is None
        assert Record.objects.filter(created_at__lte=now + timedelta(hours=1)).count() == 1
        assert Record.objects.filter(expires_at__lte=now).count() == 0
        with override_settings(USE_TZ=False):
            assert AuditLine.objects.order_by("id")[0].at is not None


class TestPage:
    def test_all_of_it(self, store: DjangoStore, root: Client) -> None:
        """A superuser sees the answer, its headers, the steps, and who did what."""
        keep(store)
        text = page(root)
        shown = html.unescape(text)
        for expected in (*ODD, "content-type", "application/json", '{"id": 1}', "payment_made", "claimed", "completed"):
            assert expected in shown
        assert "<script>alert(1)" not in text

    @pytest.mark.parametrize(
        "answer, expected, hidden",
        [
            (Answer(200, ((b"Content-Type", b"text/html"),), b"<b>bold</b>"), "&lt;b&gt;bold", "<b>bold</b>"),
            (Answer(200, ((b"content-type", b"text/plain"),), b"\xff\x00"), "�", "not shown"),
            (Answer(200, ((b"content-type", b"image/png"),), b"PNG"), "3 bytes of image/png, not shown", "PNG<"),
            (
                Answer(200, ((b"content-type", b"text/plain"), (b"content-encoding", b"gzip")), b"zipped"),
                "6 bytes of text/plain, not shown",
                "zipped",
            ),
            (Answer(200, (), b"?"), "1 bytes of an unknown type", "<pre>?"),
            (Answer(204), "Empty.", "<pre"),
            (Answer(200, (), None), "It was sent once", "<pre"),
        ],
    )
    def test_bodies(self, store: DjangoStore, root: Client, answer: Answer, expected: str, hidden: str) -> None:
        """A body is shown as text if it is text, and otherwise by its size; whatever it is, it is harmless."""
        hold = store.perform(claim_on(*reversed(ODD)))
        assert isinstance(hold, Hold)
        store.perform(Complete(hold, Event.COMPLETE, answer))
        text = page(root)
        assert expected in text
        assert hidden not in text

    def test_large_body(self, store: DjangoStore, root: Client) -> None:
        """Of a large body the beginning is shown."""
        keep(store, answer=Answer(200, ((b"content-type", b"text/plain"),), b"x" * 2 * PREVIEW_BYTES))
        text = page(root)
        assert "x" * PREVIEW_BYTES in text
        assert "x" * (PREVIEW_BYTES + 1) not in text
        assert f"of which {PREVIEW_BYTES} are shown" in text

    def test_body_in_a_partition(self, store: DjangoStore, root: Client) -> None:
        """So it is where PostgreSQL has it in a partition, and not in the row."""
        if connection.vendor != "postgresql":
            pytest.skip("PostgreSQL has partitions.")
        with connection.cursor() as cursor:
            cursor.execute((files("semel.stores.postgres") / "partitioned.sql").read_text())
        keep(store, answer=Answer(200, ((b"content-type", b"text/plain"),), b"x" * 2 * PREVIEW_BYTES))
        assert "x" * PREVIEW_BYTES in page(root)

    def test_kept_request(self, store: DjangoStore, root: Client) -> None:
        """A request that is kept to be run again is shown with its body."""
        claim = claim_on(*reversed(ODD))
        head = Head("POST", "/rides", b"a=1", ((b"content-type", b"application/json"),))
        store.perform(type(claim)(**_fields(claim) | {"request": Request(head, b'{"to": "Rome"}', "user:7")}))
        text = html.unescape(page(root))
        assert "POST /rides?a=1" in text
        assert '{"to": "Rome"}' in text

    def test_progress(self, store: DjangoStore, root: Client) -> None:
        """A page shows whether a worker runs it and how far it is; the note is for those who may see contents."""
        request = Request(Head("POST", "/reports", b"", ()), b"", "alice")
        hold = store.perform(replace(claim_on("report"), request=request, is_accepted=True))
        assert isinstance(hold, Hold)
        named = Named("alice", "report")
        assert "; run by a worker" in page(root, named)
        begun = store.perform(TakeOver(claim_on("report"), hold, is_abandoned=True))
        assert isinstance(begun, Hold)
        store.perform(Mark(begun, Milestone(0.4, "<b>charging</b>")))
        assert "40%: &lt;b&gt;charging&lt;/b&gt;" in page(root, named)
        shown = page(staff("view_record"), named)
        assert "40%" in shown
        assert "charging" not in shown
        store.perform(Mark(begun, Milestone(1)))
        assert "100%<" in page(root, named).replace("\n", "")

    def test_contents_are_for_those_who_may(self, store: DjangoStore, database: str) -> None:
        """Who may view records sees no bodies and no results of steps, unless allowed to in so many words."""
        keep(store)
        text = html.unescape(page(staff("view_record")))
        assert "semel.view_record_contents" in text
        assert "completed" in text
        assert '{"id": 1}' not in text
        User.objects.all().delete()
        text = html.unescape(page(staff("view_record", "view_record_contents")))
        assert '{"id": 1}' in text

    def test_begun_done_and_unknown(self, store: DjangoStore, root: Client) -> None:
        """Of each step it is shown whether it is done, under way or unknown; the names are no secret."""
        hold = store.perform(claim_on(*reversed(ODD)))
        assert isinstance(hold, Hold)
        begun = STEPS.plus(Begun("card_charged"))
        store.perform(Save(hold, begun))
        key = derive(*ODD, "card_charged")
        for text in (page(root), page(staff("view_record"))):
            for shown in ("phase payment_made", "<td>done</td>", "effect card_charged", key, "<td>begun: "):
                assert shown in text
        store.perform(Park(hold, reason="effect card_charged unknown"))
        text = page(root)
        assert "<td>unknown: " in text
        assert "<td>begun: " not in text
        for line in ("effect card_charged begun", "effect card_charged unknown"):
            assert f"<td>{line}</td>" in text

    def test_absent(self, root: Client) -> None:
        """An address that names no record leads back, whatever is in it."""
        for named in (str(Named("nobody", "nothing")), "key", "[1,2]", "[]", "{"):
            answer = root.get(reverse("admin:semel_record_change", args=[named]))
            assert answer.status_code == 302


class TestReadOnly:
    def test_nobody_changes_anything(self, store: DjangoStore, root: Client) -> None:
        """Not even a superuser can add, change or delete a record, by any form."""
        keep(store)
        address = reverse("admin:semel_record_change", args=[str(ODD)])
        text = page(root)
        assert "<input" not in text.split('id="record_form"')[1].replace('<input type="hidden"', "")
        assert root.post(address, {"state": "failed"}).status_code == 403
        assert root.post(address.replace("/change/", "/delete/"), {"post": "yes"}).status_code == 403
        assert root.get(LIST + "add/").status_code == 403
        assert root.post(LIST, {"action": "delete_selected", "_selected_action": [ODD.key]}).status_code in {200, 302}
        assert Record.objects.get().state == "complete"

    def test_strangers(self, store: DjangoStore) -> None:
        """Who may not view records does not see that there are any."""
        keep(store)
        client = staff()
        assert client.get(LIST).status_code == 403
        assert "semel" not in client.get("/admin/").content.decode()

    def test_store_of_its_own(self, store: DjangoStore, root: Client) -> None:
        """Where the records are not in Django's database, there is nothing to look at."""
        with override_settings(SEMEL={"STORE": "memory://"}):
            assert root.get(LIST).status_code == 403
            assert "semel/record" not in root.get("/admin/").content.decode()

    def test_other_database(self, django_postgres_url: str, django_sqlite_url: str) -> None:
        """The records are read from the database that keeps them."""
        with (
            project.databases(default=django_postgres_url, records=django_sqlite_url),
            override_settings(SEMEL={"DATABASE": "records"}),
        ):
            keep(DjangoStore("records"))
            User.objects.create_superuser("root", password="root")
            client = Client()
            client.login(username="root", password="root")
            assert "claimed" in page(client)


def _fields(claim: Any) -> dict[str, Any]:
    return {name: getattr(claim, name) for name in claim.__dataclass_fields__}


def test_names_of_records() -> None:
    """Scope and key go into an address and come back, whatever they are."""
    assert Named.of(str(ODD)) == ODD
    assert json.loads(str(ODD)) == [*ODD]
