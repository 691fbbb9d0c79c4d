"""Installs k8e for agents: an MCP server in their configuration, and a skill for its use.

``jsonc`` and ``toml`` change other programs' files without touching a byte that is not ours,
``agents`` knows where each agent keeps what, ``install`` plans and does it, ``files`` writes.
"""
