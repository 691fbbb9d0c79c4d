"""The MCP server as a part of a larger app, which has checked already who calls."""

from __future__ import annotations

import logging

from k8e.client.async_driving import Dial
from k8e.mcp.clients import Inside
from k8e.mcp.server import World
from k8e.mcp.web import App


def mount(dial: Dial) -> App:
    """An app for one caller, on whose behalf ``dial`` connects to the gateway.

    Each caller has one of its own: so nobody can name a connection of somebody else.
    """
    # The SDK writes down the ids of connections, which are keys to them.
    logging.getLogger("mcp").setLevel(logging.WARNING)
    return App(World(client=Inside(dial)), None)
