"""The Redis store: one hash for each key, that people can read with redis-cli. Needs ``semel[redis]``.

Everything that changes a record is in ``scripts/``. The connections of requests are the store's own, over hiredis: a
pool and a client around each command would cost more than the command. redis-py asks sentinels and listens to hints.
"""

from importlib import import_module

for _package in ("hiredis", "redis"):
    try:
        import_module(_package)
    except ImportError as error:  # pragma: no cover - seen only where the extra is missing
        raise ImportError(f"Redis needs {_package}. Run: pip install 'semel[redis]'") from error
