"""A reverse proxy that guards a server in any language. The guard itself is ``semel.asgi``'s.

semel proxy --upstream http://127.0.0.1:3000 --scope header:X-User --store postgresql://…
"""
