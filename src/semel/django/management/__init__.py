"""What ``manage.py`` can do for Semel."""
