"""The commands about sub-agents and pauses, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
"""How the parser adds a command: group, name, text, example, handler, flags shared with others."""


def add(group: Any, common: argparse.ArgumentParser, command: Command) -> None:
    subagent = command(
        group,
        "subagent",
        "make a session that shares another one's workspace and ends with it; prints its id",
        "k8e sandbox subagent ID --agent-type reviewer --workspace-path /workspace/review",
        "steering.subagent",
        common,
    )
    subagent.add_argument("session_id", metavar="PARENT", help="the id of the other session")
    subagent.add_argument(
        "--agent-type", default="", metavar="NAME", help="kept as its label agent_type"
    )
    subagent.add_argument(
        "--workspace-path",
        default="",
        metavar="PATH",
        help="the folder in which its commands start (/workspace); made if it is missing",
    )
    pause = command(
        group,
        "pause",
        "stop everything in a session, and in its sub-agents, until it is resumed",
        "k8e sandbox pause ID",
        "steering.pause",
        common,
    )
    resume = command(
        group,
        "resume",
        "let a paused session go on where it stopped",
        "k8e sandbox resume ID",
        "steering.resume",
        common,
    )
    for parser in (pause, resume):
        parser.add_argument("session_id", metavar="ID")
