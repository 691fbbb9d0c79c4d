"""agent-sandbox's interface for its clients: claims, sandboxes, the router, both runtime protocols.

A dialect of the gateway's HTTP endpoint, and a client of the gateway like any other: whatever it
does is an operation of its caller, with that caller's roles, limits and audit rows.
"""
