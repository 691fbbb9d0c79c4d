"""Agents: where each keeps its MCP servers and its skills, and how it writes a server down."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NAME = "k8e-sandbox"
"""Of the MCP server."""
SKILL = "k8e-sandbox-skill"
"""Of the skill and its folder, as in K8E."""
TOKEN_VARIABLE = "K8E_SANDBOX_MCP_TOKEN"  # noqa: S105 - its name, not a token
_SECRET = "Authorization"  # noqa: S105


class ServerEntry(NamedTuple):
    """The MCP server that an agent will use: a program to start, or a URL."""

    command: tuple[str, ...] = ()
    url: str = ""
    token: str = ""
    """Empty: the agent takes it from :data:`TOKEN_VARIABLE` when it starts."""

    def __repr__(self) -> str:
        return f"Server(command={self.command!r}, url={self.url!r})"


class Scope(NamedTuple):
    """The scope of an installation: a user, or everyone who works on a project."""

    home: Path
    project: Path | None
    environ: Mapping[str, str]

    @property
    def root(self) -> Path:
        return self.project or self.home


class SupportedAgent(NamedTuple):
    """One agent."""

    name: str
    config: Callable[[Scope], Path]
    skills: Callable[[Scope], Path]
    holder: tuple[str, ...]
    """The key that its servers stand below."""
    entry: Callable[[ServerEntry], dict[str, Any]]
    marks: tuple[str, ...]
    """Paths that exist if the agent is used, below a home folder or a project."""
    toml: bool = False

    def is_used(self, scope: Scope) -> bool:
        return any(place.exists() for place in self.places(scope))

    def places(self, scope: Scope) -> list[Path]:
        """The paths that exist if the agent is used."""
        roots = dict.fromkeys([scope.home, scope.root])
        found = [root / mark for root in roots for mark in self.marks]
        return list(dict.fromkeys([self.config(scope), *found]))


OURS = ("type", "command", "args", "url", "httpUrl", "headers", "http_headers")
"""The keys of an entry that say how to reach a server; all others are the user's."""
OURS_TOML = (*OURS, "bearer_token_env_var")


def _below(user: str, project: str) -> Callable[[Scope], Path]:
    return lambda scope: scope.root / (user if scope.project is None else project)


def _claude(scope: Scope) -> Path:
    if scope.project is not None:
        return scope.project / ".mcp.json"
    return Path(scope.environ.get("CLAUDE_CONFIG_DIR") or scope.home) / ".claude.json"


def _claude_skills(scope: Scope) -> Path:
    if scope.project is None and (folder := scope.environ.get("CLAUDE_CONFIG_DIR")):
        return Path(folder) / "skills"
    return scope.root / ".claude" / "skills"


def _codex(scope: Scope) -> Path:
    if scope.project is None and (folder := scope.environ.get("CODEX_HOME")):
        return Path(folder) / "config.toml"
    return scope.root / ".codex" / "config.toml"


def _vscode(scope: Scope) -> Path:
    if scope.project is not None:
        return scope.project / ".vscode" / "mcp.json"
    return _vscode_folder(scope) / "User" / "mcp.json"


def _vscode_folder(scope: Scope) -> Path:
    if sys.platform == "darwin":
        return scope.home / "Library" / "Application Support" / "Code"
    if os.name == "nt":
        roaming = scope.environ.get("APPDATA") or scope.home / "AppData" / "Roaming"
        return Path(roaming) / "Code"
    return Path(scope.environ.get("XDG_CONFIG_HOME") or scope.home / ".config") / "Code"


def _writer(
    variable: str, *, types: bool = False, url: str = "url"
) -> Callable[[ServerEntry], dict[str, Any]]:
    """The function that writes a server down; ``variable`` is how the agent names a variable."""

    def entry(server: ServerEntry) -> dict[str, Any]:
        if server.url:
            token = server.token or variable.format(TOKEN_VARIABLE)
            found: dict[str, Any] = {"type": "http"} if types else {}
            return {**found, url: server.url, "headers": {_SECRET: f"Bearer {token}"}}
        found = {"type": "stdio"} if types else {}
        return {**found, "command": server.command[0], "args": list(server.command[1:])}

    return entry


def _codex_entry(server: ServerEntry) -> dict[str, Any]:
    if not server.url:
        return {"command": server.command[0], "args": list(server.command[1:])}
    if not server.token:
        return {"url": server.url, "bearer_token_env_var": TOKEN_VARIABLE}
    return {"url": server.url, "http_headers": {_SECRET: f"Bearer {server.token}"}}


_SERVERS = ("mcpServers",)
AGENTS = {
    agent.name: agent
    for agent in (
        SupportedAgent(
            "claude",
            _claude,
            _claude_skills,
            _SERVERS,
            _writer("${{{}}}", types=True),
            (".claude", ".claude.json"),
        ),
        SupportedAgent(
            "kiro",
            _below(".kiro/settings/mcp.json", ".kiro/settings/mcp.json"),
            _below(".kiro/skills", ".kiro/skills"),
            _SERVERS,
            _writer("${{{}}}"),
            (".kiro",),
        ),
        SupportedAgent(
            "gemini",
            _below(".gemini/settings.json", ".gemini/settings.json"),
            _below(".gemini/skills", ".gemini/skills"),
            _SERVERS,
            _writer("${{{}}}", url="httpUrl"),  # its "url" is the old SSE
            (".gemini",),
        ),
        SupportedAgent(
            "codex",
            _codex,
            _below(".agents/skills", ".agents/skills"),
            ("mcp_servers",),
            _codex_entry,
            (".codex",),
            toml=True,
        ),
        SupportedAgent(
            "cursor",
            _below(".cursor/mcp.json", ".cursor/mcp.json"),
            _below(".cursor/skills", ".cursor/skills"),
            _SERVERS,
            _writer("${{env:{}}}"),
            (".cursor",),
        ),
        SupportedAgent(
            "vscode",
            _vscode,
            _below(".copilot/skills", ".github/skills"),
            ("servers",),
            _writer("${{env:{}}}", types=True),
            (".vscode", ".config/Code", "Library/Application Support/Code", "AppData/Roaming/Code"),
        ),
    )
}
ALL = "all"
