"""A home folder and a project, with agents in them, for tests of the installer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from k8e.skills import agents, install
from k8e.skills.agents import Scope, SupportedAgent
from k8e.skills.install import InstallOutcome

GOLDEN = Path(__file__).parent / "golden"
ALL = list(agents.AGENTS.values())
TOKEN = "secret-" + "t" * 40
URL = {"K8E_SANDBOX_MCP_ADDR": ":8811", "K8E_SANDBOX_MCP_TOKEN": TOKEN}


class World:
    """Where things are installed; nothing of it is real but the files."""

    def __init__(self, folder: Path) -> None:
        self.home, self.project, tools = (folder / name for name in ("home", "project", "bin"))
        for item in (self.home, self.project, tools):
            item.mkdir(parents=True)
        self.command = tools / "k8e"
        self.command.write_text("#!/bin/sh\n")
        self.command.chmod(0o755)
        self.environ = {"PATH": str(tools)}

    def scope(self, *, project: bool = False, **environ: str) -> Scope:
        return Scope(self.home, self.project if project else None, {**self.environ, **environ})

    def install(self, agent: SupportedAgent, **asked: Any) -> InstallOutcome:
        dry = asked.pop("dry", False)
        return install.install(agent, self.scope(**asked), dry=dry)

    def uninstall(self, agent: SupportedAgent, **asked: Any) -> InstallOutcome:
        dry = asked.pop("dry", False)
        return install.uninstall(agent, self.scope(**asked), dry=dry)

    def config(self, agent: SupportedAgent, *, project: bool = False) -> Path:
        return agent.config(self.scope(project=project))

    def write(self, agent: SupportedAgent, data: bytes, *, project: bool = False) -> Path:
        path = self.config(agent, project=project)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def everything(self) -> dict[str, bytes | str]:
        """All files, links and folders, but for our own backups."""
        found: dict[str, bytes | str] = {}
        for root in (self.home, self.project):
            for path in sorted(root.rglob("*")):
                if ".k8e" in path.parts:
                    continue
                if path.is_symlink():
                    found[str(path)] = f"-> {path.readlink()}"
                else:
                    found[str(path)] = "" if path.is_dir() else path.read_bytes()
        return found


def golden(agent: SupportedAgent, kind: str) -> bytes:
    return (GOLDEN / f"{agent.name}.{kind}").read_bytes()
