"""Which MCP server agents are told of."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from k8e import access, errors
from k8e.skills import servers
from k8e.skills.agents import Scope


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (":8811", "http://127.0.0.1:8811/mcp"),
        ("0.0.0.0:8811", "http://127.0.0.1:8811/mcp"),
        ("localhost:9000", "http://localhost:9000/mcp"),
        ("[::1]:9000", "http://[::1]:9000/mcp"),
        ("http://127.0.0.1:9000/", "http://127.0.0.1:9000/mcp"),
        ("https://agents.example/k8e/mcp", "https://agents.example/k8e/mcp"),
        ("https://agents.example", "https://agents.example/mcp"),
    ],
)
def test_address_becomes_a_url(address: str, url: str) -> None:
    assert servers.url_of(address) == url


@pytest.mark.parametrize(
    "address", ["http://agents.example/mcp", "10.0.0.1:8811", "ftp://x", "x:y", "http://[::1"]
)
def test_address_that_would_leak_the_token_or_is_none_is_refused(address: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        servers.url_of(address)
    assert caught.value.hint


def test_token_comes_from_the_variable_or_the_servers_file(tmp_path: Path) -> None:
    asked = {"K8E_SANDBOX_MCP_ADDR": ":8811"}
    file = tmp_path / ".k8e" / "sandbox" / "mcp-token"
    file.parent.mkdir(parents=True)
    file.write_text("from-the-file\n")
    (tmp_path / "moved").write_text("from-elsewhere\n")
    moved = {**asked, "K8E_SANDBOX_MCP_TOKEN_FILE": str(tmp_path / "moved")}
    assert servers.choose(Scope(tmp_path, None, moved)).token == "from-elsewhere"
    assert servers.choose(Scope(tmp_path, None, asked)).token == "from-the-file"
    given = {**asked, "K8E_SANDBOX_MCP_TOKEN": "given"}
    assert servers.choose(Scope(tmp_path, None, given)).token == "given"


def test_token_is_made_for_a_server_that_has_not_run_yet(tmp_path: Path) -> None:
    scope = Scope(tmp_path, None, {"K8E_SANDBOX_MCP_ADDR": ":8811"})
    file = tmp_path / ".k8e" / "sandbox" / "mcp-token"
    assert servers.choose(scope, dry=True).token
    assert not file.parent.exists()
    made = servers.choose(scope).token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert servers.choose(scope).token == made
    assert access.token(file) == made, "the server takes it at its first start"


def test_token_that_cannot_be_read_or_kept_is_told(tmp_path: Path) -> None:
    where = tmp_path / "token"
    asked = {"K8E_SANDBOX_MCP_ADDR": ":8811", "K8E_SANDBOX_MCP_TOKEN_FILE": str(where)}
    where.mkdir()
    with pytest.raises(errors.InvalidRequest, match="cannot be read"):
        servers.choose(Scope(tmp_path, None, asked))
    asked["K8E_SANDBOX_MCP_TOKEN_FILE"] = "/proc/no/such/folder/token"
    with pytest.raises(errors.InvalidRequest, match="cannot be kept"):
        servers.choose(Scope(tmp_path, None, asked))


def test_token_of_this_machine_is_not_given_to_another_one(tmp_path: Path) -> None:
    file = tmp_path / ".k8e" / "sandbox" / "mcp-token"
    file.parent.mkdir(parents=True)
    file.write_text("from-the-file\n")
    asked = {"K8E_SANDBOX_MCP_ADDR": "https://agents.example"}
    with pytest.raises(errors.InvalidRequest) as caught:
        servers.choose(Scope(tmp_path, None, asked))
    assert "K8E_SANDBOX_MCP_TOKEN" in caught.value.hint
    given = {**asked, "K8E_SANDBOX_MCP_TOKEN": "given"}
    assert servers.choose(Scope(tmp_path, None, given)).token == "given"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("# k8e\naddr: ':9000'  # here\n", "http://127.0.0.1:9000/mcp"),
        ('other: 1\naddr: "localhost:9000"\n', "http://localhost:9000/mcp"),
        ("other: 1\n", ""),
        ("", ""),
    ],
)
def test_address_comes_from_the_machines_settings_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, url: str
) -> None:
    monkeypatch.setattr(servers, "SETTINGS", tmp_path / "sandbox-mcp.yaml")
    servers.SETTINGS.write_text(text)
    found = servers.choose(Scope(tmp_path, None, {"K8E_SANDBOX_MCP_TOKEN": "given"}))
    assert found.url == url


def test_without_the_command_on_the_path_python_starts_it(tmp_path: Path) -> None:
    found = servers.choose(Scope(tmp_path, None, {"PATH": str(tmp_path)}))
    assert found.command == (sys.executable, "-m", "k8e", "sandbox-mcp")
