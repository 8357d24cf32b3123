"""Whether an HTTP API in any language honours idempotency keys, seen from outside. It needs no access to the API's code,
and uses nothing of Semel but its errors and a list of headers.

``semel verify URL --request FILE`` is the way to use it.
"""
