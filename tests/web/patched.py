"""Gunicorn's configuration for gevent with --preload: its first line replaces the threads before an app is imported."""

from gevent import monkey  # type: ignore[import-untyped]  # it has no types

monkey.patch_all()
