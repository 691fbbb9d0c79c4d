"""The MCP server: sandboxes as tools for any agent, over stdio and HTTP.

A layer above the SDK, as the command line is: it talks to a gateway with :mod:`k8e.client` and to
agents with the official ``mcp`` package, which is imported when it is first needed.
"""
