"""The official TypeScript client and the MCP inspector's command line."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.connecting import HttpServer
from tests.places import COMMAND, Place

pytestmark = pytest.mark.timeout(120)
CLIENTS = Path(sys.prefix) / "mcp-clients"
SERVER = [*COMMAND, "sandbox-mcp"]


@pytest.fixture(scope="module", autouse=True)
def clients() -> Path:
    if shutil.which("node") is None:
        pytest.skip("Node.js is not there, which the TypeScript client and the inspector need")
    if not (CLIENTS / "node_modules").is_dir():
        pytest.skip("the MCP clients are not there: sh tests/mcp/clients.sh .venv/mcp-clients")
    return CLIENTS


def node(place: Place, *arguments: str) -> Any:
    done = subprocess.run(
        ["node", *arguments],
        cwd=CLIENTS,
        env=place.environ | {"NO_UPDATE_NOTIFIER": "1"},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_typescript_client_works(way: str, place: Place, http: HttpServer, tmp_path: Path) -> None:
    # Node looks for packages from where a module is.
    script = tmp_path / "client.mjs"
    shutil.copy(Path(__file__).parent / "client.mjs", script)
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node_modules")
    target = SERVER if way == "stdio" else [http.url, http.token]
    found = node(place, str(script), way, *target)
    assert (found["server"], found["tools"]) == ("k8e-sandbox", 23)
    assert (found["run"]["stdout"], found["run"]["exit_code"]) == ("42\n", 0)
    assert (found["unknown"], found["resource"]) == (True, "héllo")
    assert (found["approval"]["approved"], found["approval"]["reason"]) == (True, "typed")
    assert (found["cancelled"], found["heard"], found["left"]) == (True, "begun\n", 7)


def inspector(place: Place, *arguments: str) -> Any:
    return node(place, str(CLIENTS / "node_modules" / ".bin" / "mcp-inspector"), *arguments)


def script(place: Place, path: Path) -> str:
    """Our command as a program: the inspector takes arguments for its own, and hands on little."""
    wanted = {"HOME", "PYTHONPATH", *(name for name in place.environ if name.startswith("K8E_"))}
    lines = [f"export {name}={shlex.quote(place.environ.get(name, ''))}" for name in sorted(wanted)]
    path.write_text("\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(SERVER)}", ""]), "utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_inspector_works(way: str, place: Place, http: HttpServer, tmp_path: Path) -> None:
    bearer = f"Authorization: Bearer {http.token}"
    over = [script(place, tmp_path / "server")]
    if way == "http":
        over = [http.url, "--transport", "http", "--header", bearer]
    found = inspector(place, "--cli", *over, "--method", "tools/list")
    assert len(found["tools"]) == 23
    call = ["--method", "tools/call", "--tool-name", "sandbox_run", "--tool-arg", "code=echo hi"]
    found = inspector(place, "--cli", *over, *call)
    assert found["structuredContent"]["stdout"] == "hi\n"
