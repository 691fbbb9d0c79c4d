"""Upstream's own client, unmodified, in an environment and a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.places import wait_readable

FOLDER = Path(".venv/agent-sandbox-client").absolute()
PYTHON = FOLDER / "bin" / "python"
WORKER = Path(__file__).parent / "worker.py"
PATIENCE = 150.0
SYNC = """
from kubernetes import client as kubernetes, config as kubernetes_config
from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.exceptions import *
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig

def connect(token=token, **more):
    shown = kubernetes.Configuration(host=server)
    shown.api_key = {"authorization": f"Bearer {token}"}
    direct = SandboxDirectConnectionConfig(
        api_url=server + "/router", extra_headers={"Authorization": f"Bearer {token}"}, **more)
    return SandboxClient(direct, api_client=kubernetes.ApiClient(shown))
"""


class Upstream:
    """A process with upstream's client."""

    def __init__(self, process: subprocess.Popen[str], names: Mapping[str, Any]) -> None:
        self._process = process
        self._names = dict(names)

    def run(self, code: str, **names: Any) -> Any:
        """What ``code`` leaves as ``result``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"code": dedent(code), "names": self._names | names}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        assert wait_readable(self._process.stdout.fileno(), PATIENCE), "the client hangs"
        told = json.loads(self._process.stdout.readline())
        assert "error" not in told, told["error"]
        return told["result"]

    def sync(self, code: str, **names: Any) -> Any:
        """The same, with ``connect()`` for a client of the synchronous kind."""
        return self.run(SYNC + dedent(code), **names)


@contextlib.contextmanager
def started(environ: Mapping[str, str] | None = None, **names: Any) -> Generator[Upstream]:
    """A new process, with ``environ`` beside ours and ``names`` in all that it runs."""
    if not (FOLDER / ".stamp").exists():
        pytest.skip("agent-sandbox's client is not installed: make test-packages")
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [PYTHON, "-P", WORKER],
        env={**os.environ, **(environ or {})},
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Upstream(process, names)
    finally:
        process.kill()
        process.communicate()
