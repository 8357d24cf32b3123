"""Semel's commands of ``manage.py``."""
