"""Whether an HTTP API in any language honours idempotency keys, seen from outside. It needs no access to the code of
the API, and uses nothing of Semel's own guard.

``semel verify URL --request FILE`` is the way to use it.
"""
