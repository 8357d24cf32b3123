"""A small app of the project's own."""

from pathlib import Path

from django.apps import AppConfig


class ShopConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    name = "tests.django.shop"
    label = "shop"
    path = str(Path(__file__).parent)
