"""The commands that bring k8e to agents, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
AGENTS = ("claude", "kiro", "gemini", "codex", "cursor", "vscode", "all")


def add(command: Command, group: Any, path: str) -> None:
    """``k8e sandbox-install-skill``, and K8E's later name ``k8e sandbox install-skill``."""
    words = path.split()
    install = command(
        group,
        words[-1],
        "tell agents of the MCP server, and give them the skill",
        f"k8e {path} claude\n"
        f"         k8e {path} all --dry-run\n"
        f"         k8e {path} cursor vscode --project\n"
        f"         k8e {path} all --uninstall",
        "agents.install_skill",
    )
    install.add_argument(
        "agents",
        nargs="*",
        metavar="AGENT",
        help=f"{', '.join(AGENTS[:-1])} or all (default): those that are used here",
    )
    install.add_argument(
        "--project",
        action="store_true",
        help="for everybody who works on the project in this folder, not for this user",
    )
    install.add_argument(
        "--uninstall", action="store_true", help="remove what was installed, and nothing else"
    )
    install.add_argument(
        "--dry-run", action="store_true", help="show what would change, and change nothing"
    )
    install.add_argument("--json", action="store_true", help="print JSON")
