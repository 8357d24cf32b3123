"""REST framework: a mixin that guards its views after its own authentication, permissions and throttles.

    class Payments(IdempotentMixin, ModelViewSet):
        idempotency_policy = Policy.ietf(mode="atomic")
        idempotency_actions = ["create"]

An answer of its exception handler is kept like any other. The exception is a body that its parser or a serializer has
refused: that frees the key, as in FastAPI. A replay is a plain response: it is not rendered again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from traceback import walk_tb
from typing import Any, ClassVar

from django.http import HttpResponse
from django.utils.functional import cached_property

from semel.core.policy import Policy
from semel.django import atomicity, guards
from semel.django.messages import Request, Response, checked, claim, release
from semel.django.views import MARK, Choice, DjangoView
from semel.errors import ConfigurationError
from semel.guard.views import ViewPorts
from semel.operation import note_refusal

try:
    from rest_framework.exceptions import ParseError, ValidationError
    from rest_framework.serializers import BaseSerializer, ListSerializer
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("semel.django.rest needs REST framework. Run: pip install djangorestframework") from error


#: The functions in which REST framework refuses a body, by module and name.
_PARSING = ("rest_framework.request", "_parse")
_VALIDATING = ("rest_framework.serializers", "is_valid")
#: The data that serializers have found valid since the handler was called.
_passed: ContextVar[list[Any] | None] = ContextVar("semel.django.rest.passed", default=None)
#: Marks a view with open transactions.
_IS_INSIDE = "_semel_is_inside"


class PlainResponse(HttpResponse):  # type: ignore[misc]  # Django has no types
    """A replay, or a refusal: bytes. It also has ``data``, as tests of a view expect of its responses."""

    @cached_property  # type: ignore[untyped-decorator]  # as above
    def data(self) -> Any:
        """The parsed body, if it is JSON; else None."""
        media_type = self.get("Content-Type", "").partition(";")[0].strip().lower()
        is_json = media_type == "application/json" or media_type.endswith("+json")
        is_plain = self.get("Content-Encoding", "identity") == "identity"
        return json.loads(self.content) if is_json and is_plain and self.content else None


class _RestView(DjangoView):
    """One request to a REST framework view."""

    response_class = PlainResponse


class IdempotentMixin:
    """Guards a REST framework view. It comes first among the bases."""

    #: None is what the settings say.
    idempotency_policy: ClassVar[Policy | None] = None
    #: Returns the user of a REST framework request; None is what the settings say. Or override
    #: ``get_idempotency_scope``.
    idempotency_scope: ClassVar[Any] = None
    #: The actions of a viewset that are guarded; None is all of them that have a guarded method.
    idempotency_actions: ClassVar[Collection[str] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a view class before the mixin among the bases: it would silently not be guarded."""
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(IdempotentMixin)]
        if any(hasattr(each, "initialize_request") and not issubclass(each, IdempotentMixin) for each in before):
            raise ConfigurationError(f"{cls.__name__}: IdempotentMixin must be first among the bases, before the view.")

    @classmethod
    def as_view(cls, *args: Any, **kwargs: Any) -> Any:
        """Mark the view: the middleware does not guard it, and its transactions are opened inside the guard."""
        view = super().as_view(*args, **kwargs)  # type: ignore[misc]  # APIView's
        setattr(view, MARK, Choice(cls.idempotency_policy))
        return atomicity.see_to(view)

    def get_idempotency_policy(self, request: Request) -> Policy | None:
        """Return the policy of *request*; None: it is not guarded. Override it to choose by request."""
        action = (getattr(self, "action_map", None) or {}).get(request.method.lower())
        if self.idempotency_actions is not None and action not in self.idempotency_actions:
            return None
        return Choice(self.idempotency_policy).policy_for(request.method)

    def get_idempotency_scope(self, request: Request) -> Any:
        """Return the user of *request*: a string, or a primary key."""
        scope = type(self).idempotency_scope
        return Choice(None, scope).principal(request)

    def dispatch(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Serve *request*."""
        dispatch = super().dispatch  # type: ignore[misc]  # APIView's
        if self._may_be_guarded(request):
            return dispatch(request, *args, **kwargs)
        # It is not guarded, so everything runs in the transaction that Django would have opened.
        with _blocks(self, None):
            return dispatch(request, *args, **kwargs)

    def handle_exception(self, error: Exception) -> Response:
        """Answer *error* in a transaction, if Django would have opened one around the request.

        REST framework marks the innermost transaction for rollback. Outside of Semel's that is another one, such as
        ``TestCase``'s around a test.
        """
        handle = super().handle_exception  # type: ignore[misc]  # APIView's
        if getattr(self, _IS_INSIDE, False):
            return handle(error)
        with _blocks(self, None):
            return handle(error)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Let REST framework check the request; one that passes goes to the guard next, and then to the handler."""
        super().initial(request, *args, **kwargs)  # type: ignore[misc]  # APIView's
        view: Any = self
        name = request.method.lower()
        handler = getattr(self, name, None) if name in view.http_method_names else None
        policy = self.get_idempotency_policy(request)
        if handler is not None and policy is not None:
            choice = Choice(policy, self.get_idempotency_scope)

            def guarded(request: Request, *args: Any, **kwargs: Any) -> Response:
                return serve(self, partial(handler, request, *args, **kwargs), request, choice)

            setattr(self, name, guarded)
        elif handler is not None and self._may_be_guarded(request):

            def in_transactions(request: Request, *args: Any, **kwargs: Any) -> Response:
                with _blocks(self, None):
                    return handler(request, *args, **kwargs)

            setattr(self, name, in_transactions)

    def _may_be_guarded(self, request: Request) -> bool:
        """Whether the request may be guarded, before the login: a choice by request may need the user."""
        is_chosen = type(self).get_idempotency_policy is not IdempotentMixin.get_idempotency_policy
        return is_chosen or self.get_idempotency_policy(request) is not None


class _Refused(Exception):
    """Rolls back what a handler wrote before it raised an exception that the view's exception handler answered."""

    def __init__(self, response: Response) -> None:
        self.response = response


def serve(view: Any, handler: Callable[[], Response], request: Request, choice: Choice) -> Response:
    """Call the *handler* of a REST framework *view*, guarded; return its response as the view has finalized it."""
    policy = choice.policy_for(request.method)
    if policy is None or not claim(request):
        return handler()
    raised: list[Exception] = []

    def call() -> Response:
        passed: list[Any] = []
        token = _passed.set(passed)
        try:
            with _blocks(view, policy):
                try:
                    response = handler()
                except Exception as error:
                    raised.append(error)
                    if _is_for_the_body(error, request, passed):
                        note_refusal()
                    # Inside the transaction, which it may have marked for rollback.
                    response = view.handle_exception(error)
                    if policy.mode == "atomic":
                        raise _Refused(response) from error
        except _Refused as refused:
            response = refused.response
        finally:
            _passed.reset(token)
        return checked(view.finalize_response(request, response, *view.args, **view.kwargs), view)

    try:
        response = ViewPorts(guards.guard(), policy, _RestView(request, call, choice)).serve()
    except Exception:
        if raised:
            # The view's own exception handler has been tried.
            view.handle_exception = _raise
        raise
    finally:
        release(request)
    # It is finalized, or it is Semel's own plain response.
    view.finalize_response = _as_it_is
    return response


def _is_for_the_body(error: Exception, request: Request, passed: Collection[Any]) -> bool:
    """Whether *error* refuses the body as it was sent. A view validates that first, and has had no effect before.

    A ``ValidationError`` that the view raises itself, or for other data, may come after an effect. So may one for a
    body that another serializer has *passed*: the data from that one may be saved already.
    """
    if not isinstance(error, ParseError | ValidationError):
        return False
    for frame, _ in walk_tb(error.__traceback__):
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place == _PARSING and isinstance(error, ParseError):
            return True
        if place == _VALIDATING:
            return bool(frame.f_locals["self"].initial_data == request.data) and request.data not in passed
    return False


def _see_what_passes(serializer: Any) -> None:
    """Make serializers of this class note the data that they found valid, inside a guarded handler."""
    is_valid = serializer.is_valid

    @wraps(is_valid)
    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_passed = is_valid(self, *args, **kwargs)
        passed = _passed.get()
        if is_passed and passed is not None:
            passed.append(self.initial_data)
        return is_passed

    serializer.is_valid = seen


_see_what_passes(BaseSerializer)
_see_what_passes(ListSerializer)


@contextmanager
def _blocks(view: Any, policy: Policy | None) -> Iterator[None]:
    """Open the transactions of *view*; its exceptions are handled inside them."""
    with atomicity.blocks(atomicity.opted_out(type(view).dispatch, view.request), policy):
        setattr(view, _IS_INSIDE, True)
        try:
            yield
        finally:
            setattr(view, _IS_INSIDE, False)


def _raise(error: Exception) -> Response:
    raise error


def _as_it_is(_request: Request, response: Response, *_args: Any, **_kwargs: Any) -> Response:
    return response
