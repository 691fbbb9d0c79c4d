"""What needs no server: lines, arguments, hosts, the door, the token, and the data of tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from k8e import access, errors
from k8e.access import HostPolicy
from k8e.mcp import approval_tools, catalog, http_server, resources, stdio, tools
from k8e.mcp.stdio import MessageLines, TooLong

TOKEN = "a-token-that-is-long-enough"
DOOR = HostPolicy.of(TOKEN, "127.0.0.1", ["agents.example"])
K8E_TOOLS = {
    "sandbox_run": ("code", "language", "timeout"),
    "sandbox_status": (),
    "sandbox_create_session": ("session_id", "tenant_id", "runtime_class", "allowed_hosts"),
    "sandbox_destroy_session": ("session_id",),
    "sandbox_exec": ("session_id", "command", "timeout", "workdir"),
    "sandbox_exec_stream": ("session_id", "command", "timeout", "workdir"),
    "sandbox_write_file": ("session_id", "path", "content", "mode"),
    "sandbox_read_file": ("session_id", "path"),
    "sandbox_list_files": ("session_id", "since"),
    "sandbox_pip_install": ("session_id", "packages"),
    "sandbox_run_subagent": ("parent_session_id", "agent_type", "workspace_path"),
    "sandbox_confirm_action": ("session_id", "action", "approval_id"),
}


def test_every_tool_of_k8e_is_there_with_its_arguments() -> None:
    assert list(catalog.K8E_TOOLS) == list(K8E_TOOLS)
    for name, arguments in K8E_TOOLS.items():
        assert set(arguments) <= set(catalog.TOOLS[name]["inputSchema"]["properties"])


def test_every_tool_has_a_handler_and_no_handler_is_left_over() -> None:
    assert set(tools.HANDLERS) == set(catalog.TOOLS)


@pytest.mark.timeout(20)
def test_names_of_megabytes_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def near(word: str, *_: Any) -> list[str]:
        compared.append(len(word))
        return []

    monkeypatch.setattr("difflib.get_close_matches", near)
    long = "x" * (8 << 20)
    given: list[tuple[str, dict[str, Any]]] = [(long, {}), ("sandbox_run", {long: 1})]
    for name, arguments in given:
        with pytest.raises(errors.InvalidRequest) as refused:
            tools.check_arguments(name, arguments)
        assert len(str(refused.value)) < 1000
    assert max(compared) < 100


def test_versions_are_those_of_the_sdk() -> None:
    assert tuple(HANDSHAKE_PROTOCOL_VERSIONS) == stdio.HANDSHAKE_VERSIONS
    assert tuple(MODERN_PROTOCOL_VERSIONS) == stdio.MODERN_VERSIONS


def test_greeting_imports_neither_the_sdk_nor_asyncio() -> None:
    code = (
        "import sys; from k8e.mcp import stdio; "
        "print(sorted({'mcp', 'pydantic', 'asyncio', 'anyio', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line)), st.data())
def test_lines_are_the_same_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    reader, found = MessageLines(20), list[bytes | TooLong]()
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += reader.feed(whole[start:end])
    wanted = [TooLong if len(line) > 20 else line for line in lines if line.strip()]
    assert [TooLong if isinstance(item, TooLong) else item for item in found] == wanted


def test_line_without_end_takes_no_memory() -> None:
    reader = MessageLines(1000)
    found = [item for _ in range(100) for item in reader.feed(b"x" * 500)]
    assert len(found) == 1
    assert reader.feed(b"\nnext\n") == [b"next"]


def test_arguments_have_their_defaults() -> None:
    found = tools.check_arguments("sandbox_run", {"code": "x", "timeout": 5.0, "language": None})
    assert found == {"code": "x", "timeout": 5, "language": "bash"}
    empty = {"code": "", "timeout": 0, "language": "", "session_id": ""}
    assert tools.check_arguments("sandbox_run", empty) == {
        **tools.check_arguments("sandbox_run", {"code": ""})
    }
    assert (
        tools.check_arguments("sandbox_write_file", {"path": "a", "content": ""})["content"] == ""
    )


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("sandbox_run", {"code": 1}, "not of type string"),
        ("sandbox_run", {"code": "x", "timeout": -1}, "at least 1"),
        ("sandbox_run", {"code": "x", "tmeout": ""}, "did you mean 'timeout'"),
        ("sandbox_run", {"code": "x", "timeout": True}, "not of type integer"),
        ("sandbox_write_file", {"path": "a", "content": "b", "mode": "x"}, "'w' or 'a'"),
        ("sandbox_pip_install", {"packages": []}, "is empty"),
        ("sandbox_pip_install", {"packages": "requests"}, "not of type array"),
        ("sandbox_pip_install", {"packages": [1]}, "not of type string"),
        ("sandbox_create_session", {"env": {"A": 1}}, "not of type string"),
        ("sandbox_status", {"x": 1}, "its arguments: none"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        tools.check_arguments(name, arguments)
    assert words in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("asked", "free", "later"),
    [
        (["a.example"], ["a.example"], []),
        (["A.Example."], ["a.example"], []),
        (["a.example:443"], ["a.example"], []),
        (["a.example"], ["a.example:443"], []),
        (["a.example"], ["b.example:443"], ["a.example"]),
        (["a.example:443,80"], ["a.example:443"], ["a.example:80"]),
        (["a.example:443, 80"], ["a.example:80", "a.example:443"], []),
        (["a.example:0443"], ["a.example:443"], []),
        (["a.example:8443"], ["a.example:443"], ["a.example:8443"]),
        (["*.a.example"], ["*.a.example:443"], []),
        (["*.b.a.example:443"], ["*.a.example:443"], []),
        (["*.a.example:443"], ["*.b.a.example"], ["*.a.example:443"]),
        (["b.a.example"], ["*.a.example:443"], []),
        (["a.example"], ["*.a.example:443"], ["a.example"]),
        (["b\u00fccher.example"], ["xn--bcher-kva.example"], []),
        (["a.example"], ["open"], []),
        (["192.0.2.1"], ["open"], ["192.0.2.1/32"]),
        (["198.51.100.7:443"], ["198.51.100.0/24"], []),
        (["198.51.100.7"], ["198.51.100.0/24:443"], []),
        (["[2001:db8::1]:443"], ["2001:db8::/32"], []),
        (["[2001:db8::1]x"], ["2001:db8::/32"], ["[2001:db8::1]x"]),
        (["a.example:x"], ["a.example"], ["a.example:x"]),
        (["default."], ["default"], ["default."]),
        (["open:443"], ["open.", "default"], []),
        (["open"], ["open.", "default"], ["open"]),
        (["a.example,b.example"], ["a.example"], ["a.example,b.example"]),
        (["xa.example"], ["*.a.example", "a.example"], ["xa.example"]),
        (["b.a.example"], ["*.a.example"], []),
        (["a.example"], ["*.a.example"], ["a.example"]),
        (["b.a.example:443"], ["*.a.example:443"], []),
        (["b.a.example:80"], ["*.a.example:443"], ["b.a.example:80"]),
        (["*.a.example"], ["b.a.example"], ["*.a.example"]),
        (["open"], ["default", "a.example"], ["open"]),
        (["none", "strict"], [], []),
        (["default"], [], ["default"]),
        (["192.0.2.0/24"], ["192.0.2.0/25"], ["192.0.2.0/24"]),
        (["evil.example"], ["example"], ["evil.example"]),
    ],
    ids=str,
)
def test_what_is_not_surely_covered_is_asked(
    asked: list[str], free: list[str], later: list[str]
) -> None:
    assert approval_tools.split_hosts(asked, free)[1] == later


@pytest.mark.parametrize(
    ("asked", "free", "now"),
    [
        (["a.example"], ["a.example:443", "a.example:80"], ["a.example:80", "a.example:443"]),
        (["a.example"], ["a.example", "a.example:80"], ["a.example"]),
        (["a.example:443,8080"], ["a.example:443"], ["a.example:443"]),
        (["*.a.example", "b.a.example"], ["*.a.example:1"], ["*.a.example:1", "b.a.example:1"]),
        (["default", "strict"], ["default"], ["default", "strict"]),
        (["other.example"], ["a.example:443"], []),
        (["open."], ["open.", "default"], ["open."]),
    ],
    ids=str,
)
def test_what_is_free_is_given_with_no_port_more(
    asked: list[str], free: list[str], now: list[str]
) -> None:
    assert approval_tools.split_hosts(asked, free)[0] == now


def test_strict_is_not_the_agents_to_drop() -> None:
    assert approval_tools.kept_strict(["default"], ["default", "strict"]) == ["default", "strict"]
    assert approval_tools.kept_strict(["Strict"], ["strict"]) == ["Strict"]
    assert approval_tools.kept_strict([], ["default"]) == []
    assert approval_tools.loosening(["a.example", "STRICT"]) == ["STRICT"]


def headers(**changed: str) -> list[tuple[bytes, bytes]]:
    given = {"host": "127.0.0.1:8811", "authorization": f"Bearer {TOKEN}"} | changed
    return [(name.encode(), value.encode()) for name, value in given.items() if value]


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, 0),
        ({"host": "LOCALHOST"}, 0),
        ({"host": "[::1]:8811"}, 0),
        ({"host": "agents.example"}, 0),
        ({"host": ""}, 421),
        ({"host": "10.0.0.1"}, 421),
        ({"host": "localhost:port"}, 421),
        ({"host": "localhost:80@evil.example"}, 421),
        ({"host": "[::1]evil.example"}, 421),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 0),
        ({"sec-fetch-site": "same-origin", "origin": "null"}, 0),
        ({"origin": "null"}, 403),
        ({"host": "agents.example", "origin": "https://agents.example"}, 0),
        ({"host": "localhost:8811", "origin": "http://LOCALHOST:8811"}, 0),
        ({"host": "localhost:8811", "origin": "http://localhost:3000"}, 403),
        ({"host": "localhost:8811", "origin": "http://localhost"}, 403),
        ({"origin": "file://localhost"}, 403),
        ({"origin": "http://127.0.0.1.evil.example"}, 403),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"authorization": f"bearer {TOKEN}"}, 0),
    ],
    ids=str,
)
def test_door_judges(changed: dict[str, str], status: int) -> None:
    found = access.judge(DOOR, headers(**changed))
    assert (found.status if found else 0) == status


def test_two_hosts_or_two_tokens_are_none() -> None:
    for double in (b"host", b"authorization"):
        twice = [*headers(), *(item for item in headers() if item[0] == double)]
        assert access.judge(DOOR, twice) is not None


def test_server_on_all_addresses_has_addresses_but_no_foreign_name() -> None:
    door = HostPolicy.of(TOKEN, "0.0.0.0")
    assert access.judge(door, headers(host="10.0.0.1:8811")) is None
    assert access.judge(door, headers(host="rebound.example")) is not None


def test_address_without_a_host_is_this_machine_alone() -> None:
    assert http_server.parse(":8811") == ("127.0.0.1", 8811)
    assert http_server.parse("[::1]:1") == ("::1", 1)
    with pytest.raises(errors.InvalidRequest):
        http_server.parse("8811")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "agents.example"])
def test_other_machines_are_served_in_clear_text_only_if_somebody_says_so(
    host: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(errors.Denied, match="clear text") as caught:
        http_server.check(host, insecure=False)
    assert "--http-insecure" in caught.value.hint
    http_server.check(host, insecure=True)
    assert "warning" in capfd.readouterr().err
    for own in ("127.0.0.1", "::1", "localhost"):
        http_server.check(own, insecure=False)


def test_errors_own_hints_are_kept_but_for_those_that_agents_cannot_follow() -> None:
    told = tools.describe(errors.Denied("no", hint="do that"))
    assert told == "no. What to do: do that"
    assert "a person can" in tools.describe(errors.Denied("no"))
    assert "k8e doctor" in tools.describe(errors.GatewayUnreachable("no", hint="start it"))
    assert tools.describe(errors.SessionNotFound("session \ud83d")).isprintable()


def test_a_defect_is_told_without_what_it_says_of_this_machine() -> None:
    for error in (OSError(2, "No such file", "/srv/k8e/keys.db"), ValueError("/srv/k8e/keys.db")):
        assert "/srv" not in tools.describe(error)


def test_token_is_kept_and_must_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(access.VARIABLE, raising=False)
    path = tmp_path / "below" / "token"
    made = access.token(path)
    assert access.token(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["token"]
    path.chmod(0o644)
    with pytest.raises(errors.Denied):
        access.token(path)
    path.chmod(0o600)
    path.write_text("short", "ascii")
    with pytest.raises(errors.InvalidRequest):
        access.token(path)


@pytest.mark.parametrize("path", ["/workspace/a b.txt", "/workspace/é%/#?.x", "/w/\udcff"])
def test_path_survives_its_uri(path: str) -> None:
    assert resources.parse(resources.uri("sess-1", path)) == ("sess-1", path)


@pytest.mark.parametrize("uri", ["file:///etc/passwd", "sandbox://", "sandbox://x", "sandbox:///a"])
def test_what_is_no_file_of_a_sandbox_is_refused(uri: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        resources.parse(uri)


def test_token_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.InvalidRequest, match="cannot be read"):
        access.token(link)
