"""REST framework's views: the guard comes after its login, and keeps what its exception handler answers."""

from typing import Any, ClassVar

import pytest
from django.db import connection, transaction
from django.urls import include, path
from rest_framework import serializers
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.exceptions import APIException, AuthenticationFailed, PermissionDenied, ValidationError
from rest_framework.generics import CreateAPIView
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.renderers import BaseRenderer
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import ModelViewSet

import semel
from semel import NoEffect, Policy
from semel.django import idempotent
from semel.django.rest import IdempotentMixin
from semel.errors import ConfigurationError
from tests.django import project
from tests.django.entry import ASGI, WSGI, Visitor, amounts, assert_kept, code, everybody, is_replay, records
from tests.django.shop.models import Payment
from tests.web.scenarios import multipart

ATOMIC = Policy.ietf(mode="atomic")
OURS = "semel.django.IdempotencyMiddleware"


class Person:
    is_authenticated = True

    def __init__(self, pk: str) -> None:
        self.pk = pk


#: Who has which token.
TOKENS: dict[str, str] = {}


class ByToken(BaseAuthentication):  # type: ignore[misc]  # REST framework has no types
    def authenticate(self, request: Any) -> tuple[Person, str] | None:
        token = request.headers.get("Authorization")
        if token is None:
            return None
        if token not in TOKENS:
            raise AuthenticationFailed
        return Person(TOKENS[token]), token

    def authenticate_header(self, _request: Any) -> str:
        return "Bearer"


class NotBanned(BasePermission):  # type: ignore[misc]  # REST framework has no types
    banned: ClassVar[set[str]] = set()

    def has_permission(self, request: Any, _view: Any) -> bool:
        return request.user.pk not in self.banned


class PaymentSerializer(serializers.ModelSerializer):  # type: ignore[misc]  # REST framework has no types
    class Meta:
        model = Payment
        fields = ("id", "amount", "account")


class Payments(IdempotentMixin, CreateAPIView):  # type: ignore[misc]  # REST framework has no types
    authentication_classes: Any = (ByToken,)
    permission_classes = (IsAuthenticated, NotBanned)
    queryset = Payment.objects.all()
    serializer_class = PaymentSerializer


@pytest.fixture(autouse=True)
def _tokens() -> Any:
    TOKENS.update({"one": "jane", "two": "joe"})
    yield
    TOKENS.clear()
    NotBanned.banned.clear()


@pytest.fixture(params=[WSGI, ASGI])
def under(request: pytest.FixtureRequest) -> str:
    """Either kind of server."""
    return str(request.param)


BODY = {"amount": 5, "account": "a"}


def ask(url: str = "/pay", *, who: str | None = "one", key: str | None = "key-1", **more: Any) -> Any:
    """Pay, with the token *who*."""
    visitor = Visitor(more.pop("under", WSGI))
    headers = {} if who is None else {"Authorization": who}
    return visitor.post(url, key=key, headers=headers, **(more or {"data": BODY, "content_type": "application/json"}))


def serving(*views: Any, **settings: Any) -> Any:
    patterns = [path(f"pay{number + 1 if number else ''}", view) for number, view in enumerate(views)]
    return project.serving(patterns, **settings)


AUTH = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]


class Unmixed(CreateAPIView):  # type: ignore[misc]  # REST framework has no types
    """A view that logs in by a token, inside, and that nothing of Semel's knows of."""

    authentication_classes: Any = (ByToken,)
    permission_classes = (IsAuthenticated,)
    queryset = Payment.objects.all()
    serializer_class = PaymentSerializer


class WithoutCsrf(SessionAuthentication):  # type: ignore[misc]  # REST framework has no types
    def enforce_csrf(self, request: Any) -> None:
        """Nothing is asked for."""


class BySession(Unmixed):
    """One that takes the user from Django's own login."""

    authentication_classes = (SessionAuthentication, WithoutCsrf)


@pytest.mark.parametrize("allow", [False, True])
def test_a_middleware_before_the_views_own_login(
    sqlite: str, under: str, allow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The middleware refuses a view that logs in inside, before anything runs: it can't know a token's user."""
    with serving(Unmixed.as_view(), MIDDLEWARE=[*AUTH, OURS], SEMEL={"ALLOW_ANONYMOUS": allow}):
        answers = [ask(who=who, under=under) for who in ("one", "two", "wrong", None)]
        assert [each.status_code for each in answers] == [500] * 4
        assert "IdempotentMixin" in caplog.text
        assert ask(key=None, under=under).status_code == 201
    assert len(amounts()) == 1
    assert records() == []


def by_token(request: Any) -> str | None:
    return TOKENS.get(request.headers.get("Authorization", ""))


def test_a_middleware_that_is_told_how_to_find_the_user(sqlite: str, under: str) -> None:
    """With a scope of the project's own, or a view that uses Django's login, the middleware guards it."""
    with serving(Unmixed.as_view(), MIDDLEWARE=[*AUTH, OURS], SEMEL={"SCOPE": by_token}):
        assert_kept(ask(under=under), ask(under=under))
        assert not is_replay(ask(who="two", under=under))
        assert [ask(who=who, under=under).status_code for who in ("wrong", None)] == [400, 400]
    with serving(BySession.as_view(), MIDDLEWARE=[*AUTH, OURS]):
        visitor = Visitor(under)
        visitor.log_in()
        assert_kept(*(visitor.post(data=BODY, content_type="application/json") for _ in range(2)))


@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC])
def test_a_retry_is_a_replay(database: str, under: str, policy: Policy) -> None:
    """A generic view runs once; its retry gets the very bytes, and is not rendered again."""

    class Guarded(Payments):
        idempotency_policy = policy

    with serving(Guarded.as_view()):
        first, again = ask(under=under), ask(under=under)
        assert (first.status_code, first.json()["amount"]) == (201, 5)
        assert_kept(first, again)
        assert again["Content-Type"] == "application/json"
        assert not isinstance(again, Response)
        assert code(ask(data={**BODY, "amount": 6}, content_type="application/json")) == "idempotency-key-reused"
    assert amounts() == [5]


def test_the_scope_is_the_user_of_rest_framework(sqlite: str) -> None:
    """A key belongs to whom REST framework's authentication names; another token of the same user gets the replay."""
    with serving(Payments.as_view()):
        assert not is_replay(ask(who="one"))
        assert not is_replay(ask(who="two"))
        TOKENS["three"] = "jane"
        assert is_replay(ask(who="three"))
    assert {each.scope for each in records()} == {"user:jane", "user:joe"}


def test_who_is_not_let_in_gets_no_replay(sqlite: str) -> None:
    """A user who is gone gets 401, one who may not any more 403, one who is too quick 429; nothing of it is kept."""

    class Slowly(BaseThrottle):  # type: ignore[misc]  # REST framework has no types
        is_over = False

        def allow_request(self, *_: Any) -> bool:
            return not self.is_over

    class Throttled(Payments):
        throttle_classes = (Slowly,)

    with serving(Throttled.as_view()):
        assert ask(who=None).status_code == 401
        assert ask().status_code == 201
        NotBanned.banned.add("jane")
        assert ask().status_code == 403
        NotBanned.banned.clear()
        Slowly.is_over = True
        assert ask().status_code == 429
        Slowly.is_over = False
        assert is_replay(ask())
        del TOKENS["one"]
        assert ask().status_code == 401
    assert amounts() == [5]


@pytest.mark.parametrize("by", ["attribute", "method"])
def test_a_scope_of_ones_own(sqlite: str, by: str) -> None:
    """The scope is a function of REST framework's request, or a method."""

    class ByFunction(Payments):
        idempotency_scope = staticmethod(lambda request: f"token {request.auth}")

    class ByMethod(Payments):
        def get_idempotency_scope(self, request: Any) -> str:
            return f"token {request.auth}"

    with serving((ByFunction if by == "attribute" else ByMethod).as_view()):
        assert [is_replay(ask(who=token)) for token in ("one", "two", "one")] == [False, False, True]
    assert {each.scope for each in records()} == {"token one", "token two"}


@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC])
@pytest.mark.parametrize("wrong", ['{"amount": "much"}', '{"amount": '])
def test_body_that_does_not_fit_frees_the_key(database: str, under: str, policy: Policy, wrong: str) -> None:
    """A body that the serializer or the parser refuses is not kept: corrected, it runs under the same key."""

    class Guarded(Payments):
        idempotency_policy = policy

    with serving(Guarded.as_view()):
        for _ in range(2):
            refused = ask(under=under, data=wrong, content_type="application/json")
            assert (refused.status_code, is_replay(refused)) == (400, False)
        assert records() == []
        assert_kept(ask(under=under), ask(under=under))
    assert amounts() == [5]


def test_validation_of_the_handlers_own_is_an_answer(sqlite: str, under: str) -> None:
    """A 400 for anything but the body as it was sent is the handler's answer: it may have done something before."""

    class Receipt(serializers.Serializer):  # type: ignore[misc]  # REST framework has no types
        number = serializers.IntegerField()

    class Guarded(Payments):
        def perform_create(self, serializer: Any) -> None:
            serializer.save()
            Receipt(data={"number": "none"}).is_valid(raise_exception=True)

    with serving(Guarded.as_view()):
        first, again = ask(under=under), ask(under=under)
    assert first.json() == {"number": ["A valid integer is required."]}
    assert_kept(first, again)
    assert amounts() == [5]


@pytest.mark.parametrize("many", [False, True])
def test_second_validation_of_the_body_is_an_answer(sqlite: str, under: str, *, many: bool) -> None:
    """A 400 for a body that one serializer has passed and a second one turns down is kept: the first may be saved."""

    class Receipt(serializers.Serializer):  # type: ignore[misc]  # REST framework has no types
        number = serializers.IntegerField()

    class Guarded(Payments):
        def post(self, request: Any) -> Response:
            assert request.query_params is not None
            Receipt(data={"number": 1}).is_valid(raise_exception=True)  # Other data says nothing of the body.
            payment = PaymentSerializer(data=request.data, many=many)
            payment.is_valid(raise_exception=True)
            payment.save()
            Receipt(data=request.data, many=many).is_valid(raise_exception=True)
            raise AssertionError

    def pay(amount: object) -> Any:
        body: Any = {**BODY, "amount": amount}
        return ask(under=under, data=[body] if many else body, content_type="application/json")

    with serving(Guarded.as_view()):
        assert [is_replay(each) for each in (pay("much"), pay("much"))] == [False, False]
        first, again = pay(5), pay(5)
    assert first.status_code == 400
    assert_kept(first, again)
    assert amounts() == [5]


def test_validation_after_a_step_is_an_answer(sqlite: str) -> None:
    """A body that is refused after a step was taken has had an effect: its 400 ends the operation."""
    charged: list[str] = []

    def charge(*, idempotency_key: str) -> None:
        charged.append(idempotency_key)

    class Guarded(Payments):
        def create(self, request: Any, *args: Any, **kwargs: Any) -> Response:
            semel.current().effect("charged", charge)
            return super().create(request, *args, **kwargs)

    with serving(Guarded.as_view()):
        wrong: dict[str, Any] = {"data": {"amount": "much"}, "content_type": "application/json"}
        assert_kept(ask(**wrong), ask(**wrong))
    assert len(charged) == 1


def test_exception_handlers(sqlite: str) -> None:
    """A custom exception handler answers for the view, once; what it does not know is raised, once."""
    asked: list[str] = []

    def handler(error: Exception, _context: Any) -> Response | None:
        asked.append(str(error))
        return Response({"sorry": str(error)}, 409) if isinstance(error, LookupError) else None

    class Failing(Payments):
        error: Exception = LookupError("no account")

        def create(self, *_: Any, **__: Any) -> Response:
            raise self.error

        def get_exception_handler(self) -> Any:
            return handler

    class Broken(Failing):
        error = RuntimeError("oops")
        idempotency_policy = Policy.ietf(server_errors="release")

    class Closed(Failing):
        error = NoEffect("closed")

    with serving(Failing.as_view(), Broken.as_view(), Closed.as_view()):
        first, again = ask(), ask()
        assert (first.status_code, first.json()) == (409, {"sorry": "no account"})
        assert_kept(first, again)
        assert ask("/pay2", key="key-2").status_code == 500
        assert code(ask("/pay3", key="key-3")) == "no-effect"
    assert asked == ["no account", "oops", "closed"]
    assert [each.key for each in records()] == ["key-1"]


def test_responses_are_finalized_once(sqlite: str) -> None:
    """A view's own finalize_response is asked once for its response, and never for a replay."""
    asked: list[Any] = []

    class Counting(Payments):
        def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(response.data)
            response = super().finalize_response(request, response, *args, **kwargs)
            response["Location"] = "/payments/1"
            return response

    with serving(Counting.as_view()):
        first, again = ask(), ask()
    assert_kept(first, again)
    assert again["Location"] == "/payments/1"
    assert len(asked) == 1


class ViewSet(IdempotentMixin, ModelViewSet):  # type: ignore[misc]  # REST framework has no types
    authentication_classes: Any = (ByToken,)
    permission_classes = (IsAuthenticated,)
    queryset = Payment.objects.order_by("pk")
    serializer_class = PaymentSerializer


def test_viewsets(sqlite: str) -> None:
    """A viewset is guarded at the actions that are named, or at all that have a guarded method."""

    class OnlyCreate(ViewSet):
        idempotency_actions = ("create",)

    for kind, is_patch_guarded in ((ViewSet, True), (OnlyCreate, False)):
        router = SimpleRouter(trailing_slash=False)
        router.register("payments", kind)
        Payment.objects.all().delete()
        with project.serving([path("", include(router.urls))]):
            key = f"create-{is_patch_guarded}"
            first, again = ask("/payments", key=key), ask("/payments", key=key)
            assert_kept(first, again)
            one = f"/payments/{first.json()['id']}"
            client = Visitor().client
            headers = {"Authorization": "one", "Idempotency-Key": f"patch-{is_patch_guarded}"}
            json = {"content_type": "application/json", "headers": headers}
            patched = [client.patch(one, {"amount": 7}, **json) for _ in range(2)]
            assert [each.status_code for each in patched] == [200, 200]
            assert is_replay(patched[1]) == is_patch_guarded
            assert client.get(one, headers=headers).json()["amount"] == 7
            assert client.delete(one, headers=headers).status_code == 204


def test_methods_that_are_not_there(sqlite: str) -> None:
    """A method that the view lacks is 405, of REST framework, and takes no key."""
    with serving(Payments.as_view()):
        answer = Visitor().client.patch("/pay", headers={"Authorization": "one", "Idempotency-Key": "k"})
        options = Visitor().client.options("/pay", headers={"Authorization": "one", "Idempotency-Key": "k"})
    assert (answer.status_code, options.status_code) == (405, 200)
    assert records() == []


@pytest.mark.parametrize("middleware", [[], [OURS]])
@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC])
def test_functions(sqlite: str, under: str, middleware: list[str], policy: Policy) -> None:
    """A function below @api_view is guarded by @idempotent, whoever else is there."""

    @api_view(["POST", "PUT"])  # type: ignore[untyped-decorator]  # REST framework has no types
    @authentication_classes([ByToken])  # type: ignore[untyped-decorator]  # as above
    @permission_classes([IsAuthenticated])  # type: ignore[untyped-decorator]  # as above
    @idempotent(policy=policy)
    def view(request: Any) -> Response:
        serializer = PaymentSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        serializer.save()
        return Response(serializer.data, 201)

    with serving(view, MIDDLEWARE=middleware):
        assert ask(who=None).status_code == 401
        first, again = ask(under=under), ask(under=under)
        assert first.status_code == 201
        assert_kept(first, again)
        wrong = [ask(key="key-2", data={}, content_type="application/json") for _ in range(2)]
        assert wrong[0].json() == {"amount": ["This field is required."], "account": ["This field is required."]}
        assert not any(is_replay(each) for each in wrong)
    assert amounts() == [5]
    assert {each.scope for each in records()} == {"user:jane"}


def test_the_middleware_leaves_it_alone(sqlite: str, under: str) -> None:
    """Where the whole project is guarded, a view with the mixin is guarded once, by itself."""
    with serving(Payments.as_view(), MIDDLEWARE=[OURS], SEMEL={"SCOPE": everybody}):
        assert_kept(ask(under=under), ask(under=under))
    assert [each.scope for each in records()] == ["everybody"]
    assert len(records()) == 1


def test_the_wrong_way_round_is_refused(sqlite: str) -> None:
    """A decorator around a view of REST framework's would not know its user, and says what to use instead."""
    with pytest.raises(ConfigurationError, match="IdempotentMixin"):
        idempotent(Payments.as_view())
    with pytest.raises(ConfigurationError, match="IdempotentMixin"):
        idempotent(Payments)


# Bodies


@pytest.mark.parametrize("method", ["post", "patch"])
@pytest.mark.parametrize("reads_early", [False, True])
def test_an_upload_with_another_boundary(sqlite: str, method: str, reads_early: bool) -> None:
    """A form with files is the same whatever its boundary, also where a permission has read it before."""
    seen: list[Any] = []

    class Reading(BasePermission):  # type: ignore[misc]  # REST framework has no types
        def has_permission(self, request: Any, _view: Any) -> bool:
            return not reads_early or bool(request.data["note"])

    class Uploads(IdempotentMixin, APIView):  # type: ignore[misc]  # REST framework has no types
        authentication_classes: Any = (ByToken,)
        permission_classes = (Reading,)
        parser_classes = (MultiPartParser, JSONParser)

        def post(self, request: Any) -> Response:
            seen.extend([request.data["note"], request.FILES["file"].read()])
            return Response({"ok": True})

        patch = post

    with serving(Uploads.as_view()):
        for content in (b"x" * 300_000, b"x" * 300_000, b"other"):
            sent = multipart(content)
            headers = {"Authorization": "one", "Idempotency-Key": "k"}
            send = getattr(Visitor().client, method)
            last = send("/pay", sent["body"], content_type=sent["content_type"], headers=headers)
    assert last.status_code == 422
    assert seen == ["n", b"x" * 300_000]


@pytest.mark.parametrize("reads_early", [False, True])
def test_a_form_that_was_read_before(sqlite: str, reads_early: bool) -> None:
    """A form is told from another by its fields, also where a permission has read it: ``A%2BB`` is not ``A+B``."""
    seen: list[Any] = []

    class Reading(BasePermission):  # type: ignore[misc]  # REST framework has no types
        def has_permission(self, request: Any, _view: Any) -> bool:
            return not reads_early or bool(request.data)

    class Notes(IdempotentMixin, APIView):  # type: ignore[misc]  # REST framework has no types
        authentication_classes: Any = (ByToken,)
        permission_classes = (Reading,)
        parser_classes = (FormParser,)

        def post(self, request: Any) -> Response:
            seen.append(request.data["a"])
            return Response({"ok": True})

    with serving(Notes.as_view()):
        headers = {"Authorization": "one", "Idempotency-Key": "k"}
        statuses = [
            Visitor()
            .client.post("/pay", body, content_type="application/x-www-form-urlencoded", headers=headers)
            .status_code
            for body in ("a=A%2BB", "a=%41%2bB", "a=A+B", "a=A%20B")
        ]
    assert statuses == [200, 200, 422, 422]
    assert seen == ["A+B"]


# Transactions


@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC])
def test_atomic_requests(database: str, policy: Policy) -> None:
    """Under ATOMIC_REQUESTS what REST framework answers for is rolled back, and its answer is kept."""
    seen: list[bool] = []

    class Refusing(Payments):
        idempotency_policy = policy

        def perform_create(self, serializer: Any) -> None:
            seen.append(connection.in_atomic_block)
            super().perform_create(serializer)
            raise ValidationError("Not on Sundays.")

    class Failing(Refusing):
        def perform_create(self, serializer: Any) -> None:
            serializer.save()
            raise APIException("oops")

    class Reading(Payments):
        def get(self, _request: Any) -> Response:
            seen.append(connection.in_atomic_block)
            return Response([])

    entry = {**project.settings_of(database), "ATOMIC_REQUESTS": True}
    with (
        project.databases(default=entry),
        serving(
            Refusing.as_view(), Failing.as_view(), Reading.as_view(), transaction.non_atomic_requests(Reading.as_view())
        ),
    ):
        first, again = ask(), ask()
        assert (first.status_code, first.json()) == (400, ["Not on Sundays."])
        assert_kept(first, again)
        assert ask("/pay2", key="key-2").status_code == 500
        assert ask("/pay3", key="key-3").status_code == 201
        for url in ("/pay3", "/pay4"):
            Visitor().client.get(url, headers={"Authorization": "one"})
        assert amounts() == [5]
    assert seen == [True, True, False]


def test_atomic_mode_takes_back_what_was_written_before_a_refusal(database: str) -> None:
    """In atomic mode what the exception handler answers is kept, without what the handler wrote before it raised."""

    class Refusing(Payments):
        idempotency_policy = ATOMIC

        def perform_create(self, serializer: Any) -> None:
            serializer.save()
            raise ValidationError("Not on Sundays.")

    with serving(Refusing.as_view()):
        first, again = ask(), ask()
    assert (first.status_code, first.json()) == (400, ["Not on Sundays."])
    assert_kept(first, again)
    assert amounts() == []


def test_a_scope_that_says_no(sqlite: str) -> None:
    """What the scope raises is REST framework's to answer, and nothing is kept of it."""

    class Nameless(Payments):
        def get_idempotency_scope(self, _request: Any) -> str:
            raise PermissionDenied("Say for which account.")

    with serving(Nameless.as_view()):
        response = ask()
        assert (response.status_code, response.json()) == (403, {"detail": "Say for which account."})
        assert records() == []


def test_the_mixin_comes_first() -> None:
    """Behind the view the mixin would guard nothing: that is an error where the class is written."""
    with pytest.raises(ConfigurationError, match="first among the bases"):
        type("Payments", (CreateAPIView, IdempotentMixin), {})
    type("Derived", (Payments, CreateAPIView), {"initialize_request": APIView.initialize_request})


def test_a_policy_that_depends_on_who_it_is(database: str) -> None:
    """get_idempotency_policy may ask who has logged in; under ATOMIC_REQUESTS who is not guarded has a transaction."""

    class Choosing(Payments):
        def get_idempotency_policy(self, request: Any) -> Policy | None:
            return None if request.user.pk == "joe" else Policy.ietf()

        def perform_create(self, serializer: Any) -> None:
            serializer.save()
            raise ValidationError("Not on Sundays.")

    entry = {**project.settings_of(database), "ATOMIC_REQUESTS": True}
    with project.databases(default=entry), serving(Choosing.as_view(), MIDDLEWARE=[]):
        assert_kept(ask(), ask())
        answers = [ask(who="two") for _ in range(2)]
        assert [(each.status_code, is_replay(each)) for each in answers] == [(400, False)] * 2
        assert (amounts(), len(records())) == ([], 1)


def test_atomic_mode_rolls_back_what_is_refused(database: str) -> None:
    """In atomic mode a server error of REST framework's takes everything back; a hook runs once, after the commit."""
    hooks: list[int] = []

    class Hooked(Payments):
        idempotency_policy = ATOMIC

        def perform_create(self, serializer: Any) -> None:
            serializer.save()
            transaction.on_commit(lambda: hooks.append(len(records())))
            assert semel.current().connection.alias == "default"

    class Failing(Hooked):
        def perform_create(self, serializer: Any) -> None:
            super().perform_create(serializer)
            raise APIException("oops")

    with serving(Hooked.as_view(), Failing.as_view()):
        assert ask("/pay2").status_code == 500
        assert (amounts(), records(), hooks) == ([], [], [])
        assert_kept(ask(), ask())
    assert (amounts(), hooks) == ([5], [1])


# In the tests of an application


@pytest.fixture
def test_case(database: str) -> Any:
    """The block that ``django.test.TestCase`` puts around a test, in a project with ATOMIC_REQUESTS."""
    entry = {**project.settings_of(database), "ATOMIC_REQUESTS": True}
    block = transaction.atomic()
    block._from_testcase = True
    with project.databases(default=entry), block:
        yield
        transaction.set_rollback(True)


class Closed(BaseThrottle):  # type: ignore[misc]  # REST framework has no types
    def allow_request(self, *_: Any) -> bool:
        return False


class TooQuick(Payments):
    throttle_classes = (Closed,)


class Chosen(Payments):
    def get_idempotency_policy(self, _request: Any) -> Policy | None:
        return None

    def perform_create(self, serializer: Any) -> None:
        serializer.save()
        raise ValidationError("Not on Sundays.")


@pytest.mark.usefixtures("test_case")
@pytest.mark.parametrize(
    "view, who, status",
    [(Payments, None, 401), (Payments, "nobody's", 401), (TooQuick, "one", 429), (Chosen, "one", 400)],
)
def test_refusals_leave_a_test_case_alone(view: Any, who: str | None, status: int) -> None:
    """Who is refused outside of the guard can be looked for in the database after it, as without a guard."""
    with serving(view.as_view()):
        assert ask(who=who).status_code == status
        assert amounts() == []
        assert records() == []


@pytest.mark.usefixtures("test_case")
def test_a_method_that_is_not_there_leaves_a_test_case_alone() -> None:
    """A 405 can be looked for in the database after it."""
    with serving(Payments.as_view()):
        assert Visitor().client.patch("/pay", headers={"Authorization": "one"}).status_code == 405
        assert amounts() == []


@pytest.mark.usefixtures("test_case")
@pytest.mark.parametrize("policy", [Policy.ietf(), ATOMIC])
def test_the_whole_story_in_a_test_case(policy: Policy) -> None:
    """A refusal, a payment, its replay and a reused key are asserted in one test, each with its data."""

    class Guarded(Payments):
        idempotency_policy = policy

    with serving(Guarded.as_view()):
        assert ask(who=None).status_code == 401
        first, again = ask(), ask()
        assert_kept(first, again)
        assert again.data == first.data == {"id": first.data["id"], **BODY}
        reused = ask(data={**BODY, "amount": 6}, content_type="application/json")
        assert reused.data["code"] == "idempotency-key-reused"
        assert amounts() == [5]


def test_data_of_a_replay_that_is_not_json(sqlite: str) -> None:
    """A replay has data where its body is JSON, as a response of REST framework's has; else it has None."""

    class Plain(BaseRenderer):  # type: ignore[misc]  # REST framework has no types
        media_type = "text/plain"
        format = "txt"

        def render(self, data: Any, *_: Any) -> str:
            return str(data)

    class Guarded(Payments):
        renderer_classes = (Plain,)

    class Empty(Payments):
        def create(self, *_: Any, **__: Any) -> Response:
            return Response(status=204)

    with serving(Guarded.as_view(), Empty.as_view()):
        assert_kept(ask(), ask())
        assert ask().data is None
        assert ask("/pay2", key="key-2").status_code == 204
        assert ask("/pay2", key="key-2").data is None
