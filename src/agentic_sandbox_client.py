"""The Python client of the Kubernetes project agent-sandbox, on k8e.

Programs that follow its public write-ups run as they are:

    from agentic_sandbox_client import SandboxClient

    sandbox = SandboxClient().create_sandbox(name="one", image="python:3.12")
    print(sandbox.execute("python3 -c 'print(1)'").stdout)
    sandbox.delete()
"""

from __future__ import annotations

from typing import Any

import k8e

__all__ = ["Sandbox", "SandboxClient"]
EXECUTE_SECONDS = 60.0


class Sandbox:
    """A sandbox that lives until it is deleted."""

    def __init__(self, name: str, sandbox: k8e.Sandbox) -> None:
        self.name = name
        self.sandbox = sandbox
        """The same as a :class:`k8e.Sandbox`, for whatever else that can do."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def execute(self, command: str, timeout: float = EXECUTE_SECONDS) -> k8e.ExecResult:
        """Run a command by the shell; what it printed, and its exit code."""
        return self.sandbox.exec(command, timeout)

    def delete(self) -> None:
        """End it and everything in it; nothing happens if it has ended."""
        self.sandbox.close()


class SandboxClient:
    """Makes sandboxes on the gateway that a :class:`k8e.SandboxClient` would use."""

    def create_sandbox(
        self, name: str = "", image: str = "", template: str = "", **options: Any
    ) -> Sandbox:
        """Make a sandbox.

        Args:
            name: becomes its session id; by default one is made.
            image: the image that its root file system comes from (needs the role ``admin``).
            template: what it is made from instead.
            options: those of :class:`k8e.Sandbox`.
        """
        if name:
            options["session_id"] = name
        sandbox = k8e.Sandbox(template, image=image, **options)
        try:
            made = sandbox.info().session_id
        except BaseException:
            sandbox.close()
            raise
        return Sandbox(made, sandbox)
