"""Django's migrations. Each runs one of Semel's own, in ``stores/*/migrations/``."""
