"""``k8e sandbox-install-skill`` as a command: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8e.cli import agents, completion, parser
from k8e.skills import agents as skills_agents
from tests.places import COMMAND

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    home = tmp_path / "home"
    home.mkdir()

    def call(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        import os

        ours = {key: value for key, value in os.environ.items() if not key.startswith("K8E_")}
        return subprocess.run(
            [*COMMAND, "sandbox-install-skill", *arguments],
            env={**ours, "HOME": str(home), **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return call


def told(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {item["agent"]: item for item in json.loads(done.stdout)["agents"]}


def test_life_of_an_installation(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".cursor").mkdir()
    before = sorted(home.rglob("*"))
    dry = run("all", "--dry-run")
    assert dry.returncode == 0
    assert "cursor: would be installed" in dry.stdout
    assert '+    "k8e-sandbox": {' in dry.stdout
    assert sorted(home.rglob("*")) == before
    assert "cursor: installed" in run().stdout
    assert told(run("cursor", "--json"))["cursor"]["action"] == "unchanged"
    gone = told(run("--uninstall", "--json"))
    assert set(gone) == set(skills_agents.AGENTS)
    assert gone["cursor"]["action"] == "removed"
    assert sorted(path for path in home.rglob("*") if ".k8e" not in path.parts) == before


def test_one_broken_file_does_not_stop_the_others(run: Run, tmp_path: Path) -> None:
    broken = tmp_path / "home" / ".kiro" / "settings" / "mcp.json"
    broken.parent.mkdir(parents=True)
    broken.write_text('{\n "mcpServers": nonsense\n}')
    done = run("kiro", "gemini", "--json")
    assert done.returncode == 1
    found = told(done)
    assert found["kiro"]["action"] == "failed"
    assert "line 2" in found["kiro"]["error"]
    assert found["kiro"]["detail"]
    assert found["gemini"]["action"] == "installed"
    assert not (tmp_path / "home" / ".kiro" / "skills").exists()
    alone = run("kiro")
    assert alone.returncode == 1
    assert "line 2" in json.loads(alone.stdout)["error"]


def test_project_gets_files_of_its_own(run: Run, tmp_path: Path) -> None:
    assert run("vscode", "--project").returncode == 0
    entry = json.loads((tmp_path / ".vscode" / "mcp.json").read_text())["servers"]["k8e-sandbox"]
    assert entry == {"type": "stdio", "command": "k8e", "args": ["sandbox-mcp"]}
    assert (tmp_path / ".github" / "skills" / "k8e-sandbox-skill" / "SKILL.md").is_file()


def test_mistakes_are_told(run: Run) -> None:
    done = run("emacs")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert "no agent 'emacs'" in found["error"]
    assert "claude" in found["detail"]


@pytest.mark.parametrize("arguments", [[], ["all"]])
def test_where_there_is_no_agent_it_says_what_it_looked_for(
    run: Run, tmp_path: Path, arguments: list[str]
) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    home = str(tmp_path / "home")
    for name, place in (("claude", ".claude.json"), ("codex", ".codex"), ("kiro", ".kiro")):
        assert any(
            line.split()[:1] == [name] and f"{home}/{place}" in line
            for line in done.stdout.splitlines()
        ), done.stdout
    found = json.loads(run(*arguments, "--json").stdout)
    assert found["agents"] == []
    assert f"{home}/.cursor" in found["looked_for"]["cursor"]


def test_url_of_a_server_that_has_not_run_yet_is_installed(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert run("all", K8E_SANDBOX_MCP_ADDR=":8811").returncode == 0
    (home / ".cursor").mkdir()
    done = run("all", K8E_SANDBOX_MCP_ADDR=":8811")
    assert done.returncode == 0, done
    token = (home / ".k8e" / "sandbox" / "mcp-token").read_text().strip()
    entry = json.loads((home / ".cursor" / "mcp.json").read_text())["mcpServers"]["k8e-sandbox"]
    assert entry["url"] == "http://127.0.0.1:8811/mcp"
    assert entry["headers"] == {"Authorization": f"Bearer {token}"}
    assert len(token) >= 40


def test_help_and_completion_know_every_agent() -> None:
    assert set(agents.AGENTS) == {*skills_agents.AGENTS, skills_agents.ALL}
    known = {item.path: item for item in completion.walk_parser(parser.build(), "k8e")}
    for path in ("k8e sandbox-install-skill", "k8e sandbox install-skill"):
        (places,) = set(known[path].places)
        assert set(places.split()[1:]) == set(agents.AGENTS)
        assert {"--project", "--uninstall", "--dry-run", "--json"} <= set(known[path].flags)
