"""The Redis store: one hash for each key, readable with redis-cli. Needs ``semel[redis]``.

Everything that changes a record is in ``scripts/``. Requests use the store's own connections, over hiredis: a
pool and a client around each command would cost more than the command. redis-py is used for sentinels and hints.
"""

from importlib import import_module

for _package in ("hiredis", "redis"):
    try:
        import_module(_package)
    except ImportError as error:  # pragma: no cover - seen only where the extra is missing
        raise ImportError(f"Redis needs {_package}. Run: pip install 'semel[redis]'") from error
