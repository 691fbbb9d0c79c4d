"""The light package: SDK and command against a gateway elsewhere, from any system.

Run from the built wheel, with nothing of the gateway's packages, and with nothing of POSIX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.places import Place

REPO = Path(__file__).resolve().parents[2]
ELSEWHERE = Path(__file__).with_name("elsewhere.py")
HOW = {"foreign": ["foreign"], "light": ["light"], "both": ["foreign", "light"]}
COMMAND = "import sys; from k8e.cli import main; sys.exit(main())"
SDK = """
import asyncio
from k8e import AsyncSandboxClient, SandboxClient, errors

with SandboxClient() as client:
    print(client.run("print(6 * 7)", "python").stdout, end="")
    session_id = client.create_session("container")
    client.write_file(session_id, "a.txt", "text")
    print(client.read_file(session_id, "a.txt"))
    print([entry.path for entry in client.list_files(session_id)])
    print("".join(client.exec_stream(session_id, "echo streamed")), end="")
    run = client.start(session_id, "echo background")
    print(run.wait().exit_code)
    client.download(session_id, "a.txt", "downloaded.txt")
    client.download(session_id, "a.txt", "downloaded.txt")
    client.destroy_session(session_id)
    try:
        client.get_session("nobodys")
    except errors.SessionNotFound as error:
        print(error.code)

async def main():
    async with AsyncSandboxClient() as client:
        print((await client.run("echo async")).stdout, end="")

asyncio.run(main())
"""
EXPECTED = "42\ntext\n['/workspace/a.txt']\nstreamed\n0\nsession_not_found\nasync\n"

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel brings, unpacked."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["-q", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(REPO)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="session")
def key(place: Place) -> str:
    place.json("sandbox", "status")
    place.wait_for_grpc()
    return str(place.json("sandbox", "api-key", "create", "light")["key"])


@pytest.fixture(params=HOW)
def run(
    request: pytest.FixtureRequest, place: Place, installed: Path, key: str, tmp_path: Path
) -> Run:
    """Runs code as if somewhere else, with an API key for the shared gateway."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("K8E_")}
    environ |= {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(installed),
        "PYTHONWARNINGS": "error",
        "K8E_SANDBOX_ENDPOINT": place.environ["K8E_LISTEN"],
        "K8E_SANDBOX_CERT": str(place.data / "tls/ca.crt"),
        "K8E_SANDBOX_APIKEY": key,
    }

    def run(
        code: str, *arguments: str, stdin: bytes = b"", **more: str
    ) -> subprocess.CompletedProcess[bytes]:
        how = HOW[request.param]
        return subprocess.run(
            [sys.executable, "-P", str(ELSEWHERE), *how, "--", code, *arguments],
            env=environ | more,
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            timeout=50,
            check=False,
        )

    return run


def test_the_sdk_works(run: Run, tmp_path: Path) -> None:
    done = run(SDK)
    assert (done.stdout.decode(), done.stderr.decode()) == (EXPECTED, "")
    assert (tmp_path / "downloaded.txt").read_text() == "text"


def test_the_command_works(run: Run) -> None:
    def told(*arguments: str, stdin: bytes = b"") -> dict[str, Any]:
        done = run(COMMAND, *arguments, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, b""), (arguments, done)
        return json.loads(done.stdout)

    assert told("sandbox", "run", "--lang", "python", "print('hi')")["stdout"] == "hi\n"
    assert told("sandbox", "run", "--stdin", "cat", stdin=b"fed")["stdout"] == "fed"
    session_id = told("sandbox", "create", "--runtime", "container")["session_id"]
    assert told("sandbox", "write", session_id, "a.txt", stdin=b"text")["ok"]
    assert told("sandbox", "read", session_id, "a.txt")["content"] == "text"
    (file,) = told("sandbox", "list", session_id)["files"]
    assert file["path"] == "/workspace/a.txt"
    assert session_id in [item["session_id"] for item in told("sandbox", "sessions")["sessions"]]
    assert told("sandbox", "destroy", session_id) == {"ok": True}
    assert run(COMMAND, "sandbox", "run", "exit 7").returncode == 7
    assert run(COMMAND, "sandbox", "run", "--raw", "printf raw").stdout == b"raw"
    assert told("version")["version"]


@pytest.mark.parametrize("run", ["both"], indirect=True)
def test_a_gateway_elsewhere_can_be_measured(run: Run) -> None:
    done = run(COMMAND, "bench", "--quick", "--json", "--rounds", "1", "--runtime", "container")
    assert (done.returncode, done.stderr) == (0, b""), done
    assert {row["runtime"] for row in json.loads(done.stdout)["rows"]} == {"container"}


def test_every_command_s_module_can_be_imported(run: Run) -> None:
    code = (
        "import importlib, pkgutil, k8e.cli, k8e.client\n"
        "for package in (k8e.cli, k8e.client):\n"
        "    for module in pkgutil.iter_modules(package.__path__):\n"
        "        if module.name != 'autostart':  # starts gateways, where they can run\n"
        "            importlib.import_module(f'{package.__name__}.{module.name}')\n"
    )
    done = run(code)
    assert (done.returncode, done.stderr.decode()) == (0, "")


@pytest.mark.parametrize("run", ["foreign"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "error", "advice"),
    [
        (["sandbox", "run", "true"], "this host cannot run sandboxes", "K8E_SANDBOX_ENDPOINT"),
        (["sandbox", "create"], "this host cannot run sandboxes", "k8e sandbox login"),
        (["gateway"], "a gateway needs Linux", "K8E_SANDBOX_ENDPOINT"),
        (["sandbox", "shell"], "a shell needs a POSIX terminal", "k8e sandbox run"),
    ],
)
def test_what_only_a_linux_host_can_do_says_so(
    run: Run, arguments: list[str], error: str, advice: str
) -> None:
    done = run(COMMAND, *arguments, K8E_SANDBOX_ENDPOINT="")
    assert done.returncode, done
    told = json.loads(done.stdout)
    assert error in told["error"]
    assert advice in told["detail"]
    first, second = done.stderr.decode().splitlines()
    assert error in first
    assert advice in second


@pytest.mark.parametrize("run", ["light"], indirect=True)
def test_a_login_without_cryptography_says_what_to_install_or_keeps_the_key(
    run: Run, place: Place, tmp_path: Path
) -> None:
    done = run(COMMAND, "sandbox", "login")
    assert done.returncode == 1
    assert "pip install '.[login]'" in json.loads(done.stdout)["detail"]
    found = place.json("gateway", "fingerprint")["fingerprint"]
    login = ("sandbox", "login", "--key-only", "--ca-fingerprint", found, "--profile", "p")
    done = run(COMMAND, *login, K8E_SANDBOX_CERT="")
    assert done.returncode == 0, done
    nothing = {"K8E_SANDBOX_CERT": "", "K8E_SANDBOX_ENDPOINT": "", "K8E_SANDBOX_APIKEY": ""}
    done = run(COMMAND, "sandbox", "run", "echo kept", **nothing)
    assert json.loads(done.stdout)["stdout"] == "kept\n", done
    assert (tmp_path / ".k8e/sandbox/profiles/p/api_key").stat().st_mode & 0o777 == 0o600


def test_an_installation_can_leave_the_conformance_checks_out(tmp_path: Path) -> None:
    options = ["-q", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(REPO)],
        check=True,
        env=os.environ | {"K8E_WITHOUT_CONFORMANCE": "1"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "k8e/cli/conformance.py" in names
    assert not [name for name in names if name.startswith("k8e/conformance/")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "conformance", "run", "--list"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1, done
    told = json.loads(done.stdout)
    assert told["error"] == "this installation of k8e has no conformance checks"
    assert "K8E_WITHOUT_CONFORMANCE" in told["detail"]
