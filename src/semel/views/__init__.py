"""The door for views: functions that a framework calls with a request, and that return it a response.

What is the framework's own is behind ``View``; Flask's and Django's are in ``semel.flask`` and ``semel.django``. It is
reached after the framework's own authentication, and what it gives back is the framework's own response.
"""

from semel.views.async_exchange import AsyncView, AsyncViewExchange
from semel.views.base import Taken, Translation, gathered, written_form
from semel.views.exchange import View, ViewExchange

__all__ = [
    "AsyncView",
    "AsyncViewExchange",
    "Taken",
    "Translation",
    "View",
    "ViewExchange",
    "gathered",
    "written_form",
]
