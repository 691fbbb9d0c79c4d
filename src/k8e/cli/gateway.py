"""``k8e gateway``: be the gateway, start one in the background, or stop the one that runs."""

from __future__ import annotations

import os

from k8e import settings


def serve(config: settings.Settings, *, background: bool, ready_fd: int) -> int:
    """Be the gateway. In the background, a child is, so that whoever started us need not wait."""
    if background and os.fork():
        return 0
    # The one line that reaches down into the gateway; nothing else of the CLI needs it.
    from k8e.gateway import app

    if background:
        os.chdir("/")
    return app.run(config, background=background, ready_fd=ready_fd)
