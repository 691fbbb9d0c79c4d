"""``k8e sandbox-install-skill``: bring k8e to agents."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.cli import fast, output
from k8e.cli.parser import Commands
from k8e.skills import agents, install
from k8e.skills.agents import Scope, SupportedAgent
from k8e.skills.install import InstallOutcome

AGENTS = ("claude", "kiro", "gemini", "codex", "cursor", "vscode", "all")


def add_sandbox_install_skill(commands: Commands) -> None:
    _add(commands, "sandbox-install-skill")


def add_install_skill(commands: Commands) -> None:
    """The same command under K8E's later name."""
    _add(commands, "sandbox install-skill")


def _add(commands: Commands, path: str) -> None:
    parser = commands.add(
        path.split()[-1],
        "install the MCP server and the skill for agents",
        f"k8e {path} claude\n"
        f"         k8e {path} all --dry-run\n"
        f"         k8e {path} cursor vscode --project\n"
        f"         k8e {path} all --uninstall",
        install_skill,
    )
    parser.add_argument(
        "agents",
        nargs="*",
        metavar="AGENT",
        help=f"{', '.join(AGENTS[:-1])} or all (default): the agents that are used here",
    )
    parser.add_argument(
        "--project",
        action="store_true",
        help="for everyone who works on the project in this folder, not for this user",
    )
    parser.add_argument(
        "--uninstall", action="store_true", help="remove what was installed, and nothing else"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would change, and change nothing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


_DONE = {
    "installed": "installed",
    "updated": "updated",
    "unchanged": "nothing to do",
    "removed": "removed",
    "absent": "was not installed",
}
_WOULD = {
    "installed": "would be installed",
    "updated": "would be updated",
    "removed": "would be removed",
}


def install_skill(options: argparse.Namespace) -> int:
    scope = _scope(options)
    chosen = _choose(options, scope)
    if not chosen:
        return _report_none(options, scope)
    outcomes: list[InstallOutcome] = []
    failures: list[tuple[str, BaseException]] = []
    for agent in chosen:
        try:
            act = install.uninstall if options.uninstall else install.install
            outcomes.append(act(agent, scope, dry=options.dry_run))
        except (errors.K8eError, OSError) as error:
            if len(chosen) == 1:
                raise
            failures.append((agent.name, error))
    if options.json:
        _print_json(outcomes, failures)
    else:
        _print_text(outcomes, failures, dry=options.dry_run)
    return 1 if failures else 0


def _scope(options: argparse.Namespace) -> Scope:
    project = Path.cwd() if options.project else None
    return Scope(Path.home(), project, os.environ)


def _choose(options: argparse.Namespace, scope: Scope) -> list[SupportedAgent]:
    unknown = [name for name in options.agents if name not in AGENTS]
    if unknown:
        raise errors.InvalidRequest(
            f"there is no agent {unknown[0]!r}",
            hint=f"name some of {', '.join(AGENTS)}",
        )
    return install.choose(options.agents, scope, everything=options.uninstall)


def _report_none(options: argparse.Namespace, scope: Scope) -> int:
    """Print which folders were searched: a machine without agents is not an error."""
    places = {
        agent.name: [str(place) for place in agent.places(scope)]
        for agent in agents.AGENTS.values()
    }
    if options.json:
        output.answer({"agents": [], "looked_for": places})
        return 0
    lines = ["No agent is used here, so nothing was installed. Looked for:"]
    lines += [f"  {name:<8}{', '.join(found)}" for name, found in places.items()]
    lines.append("Name an agent to install it nevertheless: k8e sandbox-install-skill claude")
    fast.write(1, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    return 0


def _print_json(outcomes: list[InstallOutcome], failures: list[tuple[str, BaseException]]) -> None:
    found: list[dict[str, Any]] = []
    for item in outcomes:
        shown = {**item._asdict(), "notes": list(item.notes)}
        found.append({key: value for key, value in shown.items() if value or key == "notes"})
    for name, error in failures:
        message, hint = output.describe(error)
        found.append({"action": "failed", "agent": name, "detail": hint, "error": message})
    output.answer({"agents": found})


def _print_text(
    outcomes: list[InstallOutcome], failures: list[tuple[str, BaseException]], *, dry: bool
) -> None:
    lines: list[str] = []
    words = {**_DONE, **_WOULD} if dry else _DONE
    for item in outcomes:
        lines.append(f"{item.agent}: {words[item.action]}")
        if item.action != "absent":
            lines += [f"  config  {item.config}", f"  skill   {item.skill}"]
        if item.backup:
            lines.append(f"  backup  {item.backup}")
        lines += [f"  note    {note}" for note in item.notes]
        lines += item.diff.splitlines()
    for name, error in failures:
        message, hint = output.describe(error)
        lines += [f"{name}: failed, and nothing of it was changed", f"  error   {message}"]
        lines.append(f"  advice  {hint}")
    if not dry and any(item.action in ("installed", "updated", "removed") for item in outcomes):
        lines.append("Restart running agents, so that they see it.")
    fast.write(1, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
