"""``k8e sandbox subagent``, ``pause`` and ``resume``."""

from __future__ import annotations

import argparse

from k8e.cli import printing
from k8e.cli.sandbox import connect


def subagent(options: argparse.Namespace) -> int:
    with connect(options) as client:
        session_id = client.run_subagent(
            options.session_id, options.agent_type, options.workspace_path
        )
    printing.answer({"session_id": session_id})
    return 0


def pause(options: argparse.Namespace) -> int:
    with connect(options) as client:
        client.pause_session(options.session_id)
    printing.answer({"ok": True})
    return 0


def resume(options: argparse.Namespace) -> int:
    with connect(options) as client:
        client.resume_session(options.session_id)
    printing.answer({"ok": True})
    return 0
