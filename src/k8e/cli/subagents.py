"""``k8e sandbox subagent``, ``pause`` and ``resume``."""

from __future__ import annotations

import argparse

from k8e.cli import output
from k8e.cli.parser import Commands
from k8e.cli.sessions import connect


def subagent(options: argparse.Namespace) -> int:
    with connect(options) as client:
        session_id = client.run_subagent(
            options.session_id, options.agent_type, options.workspace_path
        )
    output.answer({"session_id": session_id})
    return 0


def pause(options: argparse.Namespace) -> int:
    with connect(options) as client:
        client.pause_session(options.session_id)
    output.answer({"ok": True})
    return 0


def resume(options: argparse.Namespace) -> int:
    with connect(options) as client:
        client.resume_session(options.session_id)
    output.answer({"ok": True})
    return 0


def add_subagent(commands: Commands) -> None:
    parser = commands.add(
        "subagent",
        "make a session that shares another one's workspace and ends with it; prints its id",
        "k8e sandbox subagent ID --agent-type reviewer --workspace-path /workspace/review",
        subagent,
        remote=True,
    )
    parser.add_argument("session_id", metavar="PARENT", help="the id of the other session")
    parser.add_argument(
        "--agent-type", default="", metavar="NAME", help="stored as its label agent_type"
    )
    parser.add_argument(
        "--workspace-path",
        default="",
        metavar="PATH",
        help="the folder in which its commands start (/workspace); made if it is missing",
    )


def add_pause(commands: Commands) -> None:
    parser = commands.add(
        "pause",
        "freeze everything in a session, and in its sub-agents, until it is resumed",
        "k8e sandbox pause ID",
        pause,
        remote=True,
        answers_ok=True,
    )
    parser.add_argument("session_id", metavar="ID")


def add_resume(commands: Commands) -> None:
    parser = commands.add(
        "resume",
        "let a paused session go on where it stopped",
        "k8e sandbox resume ID",
        resume,
        remote=True,
        answers_ok=True,
    )
    parser.add_argument("session_id", metavar="ID")
