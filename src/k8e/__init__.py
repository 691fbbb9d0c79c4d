"""k8e runs untrusted, AI-written code in isolated sandboxes.

    from k8e import SandboxClient

    with SandboxClient() as client:
        print(client.run("print('hello')", "python").stdout)

Names are loaded when they are first used: the command line starts in milliseconds because
importing this package costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e import errors
    from k8e._version import __version__
    from k8e.client.approvals import Approval
    from k8e.client.async_contexts import AsyncContext
    from k8e.client.async_oneshot import arun
    from k8e.client.async_processes import AsyncProcess
    from k8e.client.async_runs import AsyncRun
    from k8e.client.async_sandbox import AsyncSandbox
    from k8e.client.asynchronous import AsyncSandboxClient
    from k8e.client.audit import AuditRow
    from k8e.client.blocking import SandboxClient, sandbox_session
    from k8e.client.contexts import Context
    from k8e.client.events import Event
    from k8e.client.executions import ContextInfo, Execution, ExecutionError, Result
    from k8e.client.exposures import Exposed
    from k8e.client.images import Image
    from k8e.client.oneshot import run
    from k8e.client.operations import Copied
    from k8e.client.processes import Process
    from k8e.client.results import (
        Denial,
        Egress,
        ExecEvent,
        ExecInfo,
        ExecResult,
        Exit,
        FileEntry,
        Foreground,
        ProcessInfo,
        ReachedLimit,
        RunState,
        SessionInfo,
        Stderr,
        Stdout,
    )
    from k8e.client.runs import Run
    from k8e.client.sandbox import Sandbox
    from k8e.client.secrets import SecretInfo
    from k8e.client.snapshots import Snapshot
    from k8e.client.templates import Template

_HOMES = {
    "Approval": "k8e.client.approvals",
    "AsyncContext": "k8e.client.async_contexts",
    "AsyncProcess": "k8e.client.async_processes",
    "AsyncRun": "k8e.client.async_runs",
    "AsyncSandbox": "k8e.client.async_sandbox",
    "AsyncSandboxClient": "k8e.client.asynchronous",
    "AuditRow": "k8e.client.audit",
    "Context": "k8e.client.contexts",
    "ContextInfo": "k8e.client.executions",
    "Copied": "k8e.client.operations",
    "Denial": "k8e.client.results",
    "Egress": "k8e.client.results",
    "Event": "k8e.client.events",
    "ExecEvent": "k8e.client.results",
    "ExecInfo": "k8e.client.results",
    "ExecResult": "k8e.client.results",
    "Execution": "k8e.client.executions",
    "ExecutionError": "k8e.client.executions",
    "Exit": "k8e.client.results",
    "Exposed": "k8e.client.exposures",
    "FileEntry": "k8e.client.results",
    "Foreground": "k8e.client.results",
    "Image": "k8e.client.images",
    "Process": "k8e.client.processes",
    "ProcessInfo": "k8e.client.results",
    "ReachedLimit": "k8e.client.results",
    "Result": "k8e.client.executions",
    "Run": "k8e.client.runs",
    "RunState": "k8e.client.results",
    "Sandbox": "k8e.client.sandbox",
    "SandboxClient": "k8e.client.blocking",
    "SecretInfo": "k8e.client.secrets",
    "SessionInfo": "k8e.client.results",
    "Snapshot": "k8e.client.snapshots",
    "Stderr": "k8e.client.results",
    "Stdout": "k8e.client.results",
    "Template": "k8e.client.templates",
    "__version__": "k8e._version",
    "arun": "k8e.client.async_oneshot",
    "errors": "k8e",
    "run": "k8e.client.oneshot",
    "sandbox_session": "k8e.client.blocking",
}

__all__ = [
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
    "SecretInfo",
    "SessionInfo",
    "Snapshot",
    "Stderr",
    "Stdout",
    "Template",
    "__version__",
    "arun",
    "errors",
    "run",
    "sandbox_session",
]


if not TYPE_CHECKING:  # a checker would take this for a promise that any name exists

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'k8e' has no attribute {name!r}")
        from importlib import import_module

        if home == "k8e":
            return import_module(f"k8e.{name}")
        value = globals()[name] = getattr(import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
