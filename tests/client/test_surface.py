"""The shape of the SDK: what is exported, and that both clients offer the same."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import k8e
from k8e import AsyncSandboxClient, SandboxClient

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_exports_exactly_this() -> None:
    assert k8e.__all__ == sorted(k8e.__all__)
    assert set(k8e.__all__) == {
        "Approval",
        "AsyncContext",
        "AsyncProcess",
        "AsyncRun",
        "AsyncSandbox",
        "AsyncSandboxClient",
        "AuditRow",
        "Context",
        "ContextInfo",
        "Copied",
        "Denial",
        "Egress",
        "Event",
        "ExecEvent",
        "ExecInfo",
        "ExecResult",
        "Execution",
        "ExecutionError",
        "Exit",
        "Exposed",
        "FileEntry",
        "Foreground",
        "Image",
        "Process",
        "ProcessInfo",
        "ReachedLimit",
        "Result",
        "Run",
        "RunState",
        "Sandbox",
        "SandboxClient",
        "SessionInfo",
        "SecretInfo",
        "Snapshot",
        "Stderr",
        "Stdout",
        "Template",
        "__version__",
        "arun",
        "errors",
        "run",
        "sandbox_session",
    }
    for name in k8e.__all__:
        assert getattr(k8e, name) is not None
        assert name in dir(k8e)
    with pytest.raises(AttributeError, match="nothing"):
        _ = k8e.nothing  # pyright: ignore[reportAttributeAccessIssue,reportUnknownVariableType,reportUnknownMemberType]


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys; before = set(sys.modules); import k8e; print(set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=10, check=True
    )
    assert set(eval(done.stdout)) <= {"k8e", "__future__"}


def methods(kind: type) -> dict[str, Any]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: item for name, item in found if not name.startswith("_")}


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    blocking, asynchronous = methods(SandboxClient), methods(AsyncSandboxClient)
    assert set(blocking) == set(asynchronous)
    for name, method in blocking.items():
        ours = inspect.signature(method).parameters
        theirs = inspect.signature(asynchronous[name]).parameters
        assert [(item.name, item.kind, item.default) for item in ours.values()] == [
            (item.name, item.kind, item.default) for item in theirs.values()
        ], name


@pytest.mark.parametrize(
    "kinds",
    [
        (k8e.Sandbox, k8e.AsyncSandbox),
        (k8e.Run, k8e.AsyncRun),
        (k8e.Process, k8e.AsyncProcess),
        (k8e.Context, k8e.AsyncContext),
    ],
)
def test_both_handles_have_the_same_methods_with_the_same_arguments(
    kinds: tuple[type, type],
) -> None:
    blocking, asynchronous = map(methods, kinds)
    assert set(blocking) == set(asynchronous)
    for name, method in blocking.items():
        ours, theirs = inspect.signature(method), inspect.signature(asynchronous[name])
        assert list(ours.parameters) == list(theirs.parameters), name


def test_k8e_s_positional_arguments_are_where_its_users_expect_them() -> None:
    expected = {
        "run": ["code", "language", "timeout"],
        "exec": ["session_id", "command", "timeout"],
        "exec_stream": ["session_id", "command", "timeout"],
        "create_session": ["runtime_class", "allowed_hosts", "tenant_id"],
        "destroy_session": ["session_id"],
        "write_file": ["session_id", "path", "content"],
        "read_file": ["session_id", "path"],
        "list_files": ["session_id", "since"],
        "pip_install": ["session_id", "packages"],
        "run_subagent": ["parent_session_id", "agent_type", "workspace_path"],
    }
    for name, arguments in expected.items():
        found = inspect.signature(getattr(SandboxClient, name)).parameters.values()
        positional = [item.name for item in found if item.kind is item.POSITIONAL_OR_KEYWORD]
        assert positional[1:] == arguments
    assert list(inspect.signature(SandboxClient).parameters)[:2] == ["endpoint", "tenant_id"]


def test_a_synchronous_module_that_was_edited_by_hand_is_told(tmp_path: Path) -> None:
    for folder in ("tools", "src/k8e/client"):
        shutil.copytree(ROOT / folder, tmp_path / folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with open(tmp_path / "src/k8e/client/runs.py", "a") as file:
        file.write("MORE = 1\n")
    script = tmp_path / "tools/generate_client.py"
    check = [sys.executable, str(script), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "-MORE = 1" in done.stdout
    assert done.stderr == "runs.py: not what the asynchronous modules give; run `make gen`\n"


@pytest.mark.parametrize(
    "kind", [k8e.AsyncSandboxClient, k8e.AsyncRun, k8e.AsyncProcess, k8e.AsyncContext]
)
def test_asynchronous_methods_are_explained_where_their_twins_are(kind: type) -> None:
    twin = getattr(k8e, kind.__name__.removeprefix("Async"))
    assert {name for name, item in methods(kind).items() if item.__doc__} == {
        name for name, item in methods(twin).items() if item.__doc__
    }
    assert len([name for name, item in methods(kind).items() if item.__doc__]) >= 4
