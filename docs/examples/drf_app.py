"""REST framework in one file: a viewset with a guarded `create`, after REST framework's own login."""

import django
from django.conf import settings

settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "rest_framework", "semel.django"],
    REST_FRAMEWORK={"DEFAULT_SCHEMA_CLASS": "semel.django.spectacular.AutoSchema"},
    ROOT_URLCONF=__name__,
)
django.setup()

from django.core.wsgi import get_wsgi_application  # noqa: E402 - a project has its settings in another file
from django.db import models  # noqa: E402
from django.urls import path  # noqa: E402
from rest_framework import decorators, permissions, routers, serializers, viewsets  # noqa: E402
from rest_framework.response import Response  # noqa: E402

from semel import Policy  # noqa: E402
from semel.django import idempotent  # noqa: E402
from semel.django.rest import IdempotentMixin  # noqa: E402


class Payment(models.Model):  # type: ignore[misc]  # noqa: DJ008 - Django has no types; and it is shown nowhere
    amount = models.IntegerField()

    class Meta:
        app_label = "shop"


class PaymentSerializer(serializers.ModelSerializer):  # type: ignore[misc]  # nor has REST framework
    class Meta:
        model = Payment
        fields = ("id", "amount")


class Payments(IdempotentMixin, viewsets.ModelViewSet):  # type: ignore[misc]
    permission_classes = (permissions.IsAuthenticated,)
    queryset = Payment.objects.order_by("pk")
    serializer_class = PaymentSerializer
    idempotency_policy = Policy.ietf(mode="atomic", required=True)
    idempotency_actions = ("create",)


router = routers.SimpleRouter(trailing_slash=False)
router.register("payments", Payments)


@decorators.api_view(["POST"])
@idempotent
def transfer(request):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    return Response({"from": request.user.username, "amount": request.data["amount"]}, 201)


urlpatterns = [*router.urls, path("transfers", transfer)]
application = get_wsgi_application()
