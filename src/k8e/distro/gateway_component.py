"""The gateway as a component of the server, and the state of an earlier gateway."""

from __future__ import annotations

import os
import subprocess
import sys

from k8e import errors
from k8e.distro.configuration import Configuration
from k8e.distro.layout import Layout
from k8e.distro.supervisor import Component

_STATE = "sessions.db"
_OURS = frozenset("server agent logs gateway storage release.json kernel-settings.json".split())
_STOP_SECONDS = 90
_NOT_ITS_OWN = ("K8E_TOKEN", "K8E_URL", "K8E_KUBECONFIG_OUTPUT", "K8E_NODE_NAME")


def component(config: Configuration) -> Component:
    """The gateway with the local runtimes, which keeps its state below the server's folder."""
    # A server is started from anywhere; -P keeps that folder out of the path of modules.
    argv = (sys.executable, "-P", "-m", "k8e", "gateway")
    return Component("gateway", argv, environment(config.layout))


def environment(layout: Layout) -> dict[str, str]:
    """The variables of the server's gateway: the server's own settings for it, and its folders."""
    told = {name: value for name, value in os.environ.items() if name.startswith("K8E_")}
    for name in _NOT_ITS_OWN:
        told.pop(name, None)
    return told | {"K8E_DATA_DIR": str(layout.gateway), "K8E_RUN_DIR": str(layout.run)}


def move_state(layout: Layout) -> bool:
    """Move the state of a gateway in the server's folder to the folder of the server's gateway.

    Sandboxes go on: what they have mounted moves with its folder.
    """
    if not (layout.data / _STATE).exists():
        return False
    if (layout.gateway / _STATE).exists():
        raise errors.StateUnusable(
            f"two gateways have left their state: in {layout.data} and in {layout.gateway}",
            hint=f"move what you need of {layout.data}/*.db away, and start the server again",
        )
    _stop(layout)
    layout.gateway.mkdir(mode=0o711, exist_ok=True)
    # The database last: a move that was interrupted goes on at the next start.
    names = sorted(
        (path.name for path in layout.data.iterdir() if path.name not in _OURS),
        key=lambda name: (name.startswith(_STATE), name == _STATE),
    )
    for name in names:
        (layout.data / name).rename(layout.gateway / name)
    return True


def _stop(layout: Layout) -> None:
    """End a running gateway; its sandboxes live on."""
    environ = {**os.environ, "K8E_DATA_DIR": str(layout.data), "K8E_RUN_DIR": str(layout.run)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "k8e", "gateway", "stop"],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=_STOP_SECONDS,
    )
    if done.returncode:
        said = done.stdout.decode("utf-8", "replace").strip()
        raise errors.Conflict(
            f"the gateway of this machine could not be stopped to move its state: {said}",
            hint="k8e gateway stop, then start the server again",
        )
