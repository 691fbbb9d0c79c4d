"""Installing Python packages: by pip in a shell, by the SDK, by K8E's call."""

from __future__ import annotations

from collections.abc import Generator

import grpc
import pytest

from k8e import AsyncSandboxClient, SandboxClient, errors
from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.client.packages import ENVIRONMENT, HOSTS, indexed
from tests.places import Place

IMPORT = "import k8e_demo; print(k8e_demo.version)"
INSTALL_AND_IMPORT = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "pip", "install", "k8e-demo==1.0"], check=True, stdout=2)
import k8e_demo
print(k8e_demo.version)
"""


@pytest.fixture(scope="module")
def index() -> Generator[Place]:
    with indexed() as place:
        yield place


@pytest.fixture(scope="module")
def sdk(index: Place) -> Generator[SandboxClient]:
    with SandboxClient(index.endpoint) as client:
        yield client


@pytest.fixture
def fresh(sdk: SandboxClient, runtime: str) -> Generator[str]:
    """A session that has nothing installed."""
    made = sdk.create_session(runtime, HOSTS, env=ENVIRONMENT)
    yield made
    sdk.destroy_session(made)


def test_plain_pip_install_works_and_the_next_run_imports(sdk: SandboxClient, fresh: str) -> None:
    done = sdk.run("pip install k8e-demo && k8e-demo", session_id=fresh)
    assert done.exit_code == 0, (done.stdout, done.stderr)
    assert done.stdout.endswith("demo 2.0\n"), "its program is on the path"
    assert "warn" not in (done.stdout + done.stderr).lower()
    assert sdk.run(IMPORT, "python", session_id=fresh).stdout == "2.0\n"
    assert sdk.list_files(fresh, directories=True) == [], "the workspace stays the user's"


def test_the_interpreter_that_runs_pip_can_import_at_once(sdk: SandboxClient, fresh: str) -> None:
    done = sdk.run(INSTALL_AND_IMPORT, "python", session_id=fresh)
    assert (done.exit_code, done.stdout) == (0, "1.0\n"), done.stderr


def test_constraints_are_data_and_never_a_shell_line(sdk: SandboxClient, fresh: str) -> None:
    done = sdk.pip_install(fresh, ["k8e-demo>=1,<2"])
    assert done.exit_code == 0, done.stderr
    assert sdk.run(IMPORT, "python", session_id=fresh).stdout == "1.0\n"
    bad = sdk.pip_install(fresh, ["k8e-demo; touch /workspace/x", "$(touch /workspace/y)"])
    assert bad.exit_code != 0
    assert sdk.list_files(fresh) == []
    for packages in ([], ["--index-url=http://evil.test"], [" -r"], [""], ["a\0b"], "k8e-demo"):
        with pytest.raises(errors.InvalidRequest):
            sdk.pip_install(fresh, packages)


def test_a_package_that_is_not_there_is_pips_failure(sdk: SandboxClient, fresh: str) -> None:
    done = sdk.pip_install(fresh, ["no-such-package"])
    assert done.exit_code == 1
    assert "No matching distribution" in done.stderr


def test_k8es_call_installs_too(index: Place, sdk: SandboxClient, fresh: str) -> None:
    index.wait_for_grpc()
    authority = (index.data / "tls" / "ca.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials(authority)
    with grpc.secure_channel(index.environ["K8E_LISTEN"], credentials) as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        request = pb.PipInstallRequest(session_id=fresh, packages=["k8e-demo<2"])
        done = stub.PipInstall(request, timeout=50)
        assert done.exit_code == 0, done.output
        assert "Successfully installed k8e-demo-1.0" in done.output
        with pytest.raises(grpc.RpcError) as caught:
            stub.PipInstall(pb.PipInstallRequest(session_id=fresh, packages=["-h"]), timeout=50)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sdk.run(IMPORT, "python", session_id=fresh).stdout == "1.0\n"


@pytest.mark.anyio
async def test_the_asynchronous_client_installs_too(index: Place, fresh: str) -> None:
    async with AsyncSandboxClient(index.endpoint) as client:
        assert (await client.pip_install(fresh, ["k8e-demo"])).exit_code == 0
        assert (await client.run(IMPORT, "python", session_id=fresh)).stdout == "2.0\n"


def test_a_virtual_environment_keeps_its_own_packages(sdk: SandboxClient, fresh: str) -> None:
    """What makes pip work outside of one must not spoil it there."""
    made = sdk.run("python3 -m venv env", session_id=fresh)
    if made.exit_code:
        pytest.skip(f"this machine's Python makes none: {made.stdout}")
    done = sdk.run("env/bin/pip install k8e-demo && ls env/bin/k8e-demo", session_id=fresh)
    assert done.exit_code == 0, (done.stdout, done.stderr)
    assert sdk.run(IMPORT, "python", session_id=fresh).exit_code == 1
