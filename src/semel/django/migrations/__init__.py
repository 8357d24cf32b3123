"""Django's migrations. Each points at one of Semel's own, in ``stores/*/migrations/``."""
