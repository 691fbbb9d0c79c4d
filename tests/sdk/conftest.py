"""What tests of the TypeScript SDK need: its packages, and places where gateways run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from k8e.conformance.lab.ports import free_port
from tests.places import Place

SDK = Path(__file__).parents[2] / "sdk/typescript"
Npm = Callable[..., str]


@pytest.fixture(scope="session")
def packages() -> Path:
    """The folder with the locked packages of npm."""
    modules = SDK / "node_modules"
    if not (modules / ".stamp").exists():
        pytest.skip("the packages of npm are not there: sh sdk/typescript/setup.sh")
    return modules


@pytest.fixture(scope="session")
def clean_environ() -> dict[str, str]:
    """This environment without what would lead to a gateway, or npm elsewhere."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("K8E_", "npm_", "NODE_", "FORCE_COLOR"))
    } | {"NO_COLOR": "1", "npm_config_update_notifier": "false"}


@pytest.fixture(scope="session")
def gateways(packages: Path, clean_environ: dict[str, str]) -> Generator[dict[str, str]]:
    """The variables for tests in TypeScript: a gateway that runs, and a place for another."""
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    shared = Place(K8E_LISTEN=f"127.0.0.1:{free_port()}", PYTHONWARNINGS="default")
    own = Place(K8E_LISTEN=f"127.0.0.1:{free_port()}", PYTHONWARNINGS="default")
    try:
        shared.json("sandbox", "status")
        listens = shared.wait_for_grpc()
        names = [*(key for key in own.environ if key.startswith("K8E_")), "HOME"]
        yield clean_environ | {
            "K8E_TEST_ENDPOINT": shared.endpoint,
            "K8E_TEST_GRPC": listens,
            "K8E_TEST_CA": str(shared.data / "tls/ca.crt"),
            "K8E_TEST_PYTHON": sys.executable,
            "K8E_TEST_PLACE": json.dumps({name: own.environ[name] for name in names}),
        }
    finally:
        own.close()
        shared.close()


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    """Runs a program that must succeed; what it prints."""

    def run(
        argv: list[str | Path], *, cwd: Path, environ: dict[str, str], seconds: float = 100
    ) -> str:
        done = subprocess.run(
            argv, cwd=cwd, env=environ, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{argv} failed:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def npm() -> str:
    found = shutil.which("npm")
    if found is None:
        pytest.skip("there is no npm")
    return found
