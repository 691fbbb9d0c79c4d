"""Makes agents know k8e: an entry in their MCP configuration, and a skill that says when to use it.

``jsonc`` and ``toml`` change files of others without touching a byte that is not ours, ``agents``
knows where each agent keeps what, ``installing`` plans and does it, ``files`` writes.
"""
