"""With Django: what `transaction.atomic` commits. In a project, only `pay` and its imports are needed."""

import django
from django.conf import settings
from django.db import connection, models, transaction

from semel.outbox import Outbox
from semel.stores.django import DjangoStore

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["semel.django"],
)
django.setup()

outbox = Outbox(DjangoStore())


class Order(models.Model):  # type: ignore[misc]  # noqa: DJ008 - Django has no types; and it is shown nowhere
    number = models.IntegerField()

    class Meta:
        app_label = "shop"
        db_table = "orders"


def pay(order: int) -> str:
    with transaction.atomic():
        Order.objects.create(number=order)
        message_id: str = outbox.add(connection, "order.paid", {"order": order}, key=f"order-{order}")
    return message_id
