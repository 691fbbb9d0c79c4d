"""A client without the gateway's packages, on a machine where install.sh has been run, or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from k8e import errors
from k8e.client import installations
from tests.places import NewPlace, Place

REPO = Path(__file__).resolve().parents[2]
ELSEWHERE = Path(__file__).with_name("elsewhere.py")
VENV = Path(sys.prefix)
SDK = """
import warnings
from k8e import SandboxClient, errors
warnings.simplefilter("error")
try:
    with SandboxClient() as client:
        print(client.run("print(6 * 7)", "python").stdout, end="")
except errors.GatewayUnreachable as error:
    print(error)
    print(error.hint)
"""


def run_light(place: Place, **environ: str) -> str:
    """What the SDK prints in a Python that has nothing of the gateway's packages."""
    done = subprocess.run(
        [sys.executable, "-P", str(ELSEWHERE), "light", "--", SDK],
        env={**place.environ, "PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def install(home: Path, machine: Path = Path("/opt/k8e")) -> Path:
    """An installation like that of install.sh: this Python, which has all packages."""
    (home / "bin").mkdir(parents=True)
    for name in ("runsc", "runc"):
        (home / "bin" / name).symlink_to(machine / "bin" / name)
    (home / "venv").symlink_to(VENV)
    return home


def test_a_light_client_starts_the_gateway_that_install_sh_installed(
    new_place: NewPlace, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    place = new_place(K8E_HOME=str(install(tmp_path / "home")))
    assert run_light(place, PYTHONPATH=str(tmp_path / "nothing")) == "42\n"


def test_a_light_client_without_any_gateway_says_what_to_do(
    new_place: NewPlace, tmp_path: Path
) -> None:
    place = new_place(K8E_HOME=str(tmp_path / "none"))
    told = run_light(place)
    assert "no gateway runs, and none can be started: this Python (" in told
    assert "has the client alone, without cryptography" in told
    assert "run install.sh in a clone of k8e" in told
    assert "K8E_SANDBOX_ENDPOINT" in told


def test_the_parts_are_those_of_the_extra() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    named = [re.split(r"[><=,;]", item)[0] for item in project["optional-dependencies"]["gateway"]]
    modules = {"dnspython": "dns", "pyjwt": "jwt"}
    found = sorted(modules.get(name, name.replace("-", "_")) for name in named)
    assert found == sorted(installations.PARTS)


# What is found, and what is not taken.


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on it, and a Python that has the client alone."""
    tmp_path.chmod(0o755)
    monkeypatch.setattr(installations, "missing_here", lambda: ["prometheus_client"])
    monkeypatch.setattr(installations.settings, "SYSTEM_HOME", tmp_path / "system")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "ours"))
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("K8E_HOME", raising=False)
    (tmp_path / "programs").mkdir()
    return tmp_path


def python_that_says(home: Path, text: str) -> None:
    (home / "venv/bin").mkdir(parents=True)
    (home / "venv/bin/python").write_text(f"#!/bin/sh\n{text}\n")
    (home / "venv/bin/python").chmod(0o755)


WHOLE = f"""echo '{{"version": "{installations.__version__}", "missing": []}}'"""
NOT_TAKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "half": (lambda home: python_that_says(home, "exit 1"), "it is not complete"),
    "no answer": (lambda home: python_that_says(home, "echo hello"), "it is not complete"),
    "lacking": (
        lambda home: python_that_says(home, WHOLE.replace("[]", '["mcp"]')),
        "it has no mcp",
    ),
    "another release": (
        lambda home: python_that_says(home, """echo '{"version": "7.0", "missing": []}'"""),
        "it is k8e 7.0, and this client is",
    ),
    "dangling": (
        lambda home: (
            (home / "venv/bin").mkdir(parents=True),
            (home / "venv/bin/python").symlink_to("/nowhere/python"),
        ),
        "No such file",
    ),
    "writable": (
        lambda home: (python_that_says(home, WHOLE), (home / "venv/bin/python").chmod(0o775)),
        "other users may change",
    ),
    "folder": (
        lambda home: (python_that_says(home, WHOLE), (home / "venv").chmod(0o777)),
        "other users may change",
    ),
}


@pytest.mark.parametrize("how", NOT_TAKEN)
def test_what_is_not_whole_or_not_safe_is_not_taken_but_the_next_one(
    machine: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    make, why = NOT_TAKEN[how]
    make(machine / "first")
    monkeypatch.setenv("K8E_HOME", str(machine / "first"))
    with pytest.raises(errors.GatewayUnreachable, match=why) as raised:
        installations.find()
    assert "install.sh" in raised.value.hint
    python_that_says(machine / "system", WHOLE)
    assert installations.find().python == str(machine / "system/venv/bin/python")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_installation_of_another_user_is_not_taken(machine: Path) -> None:
    python_that_says(machine / "system", WHOLE)
    os.chown(machine / "system/venv", 12345, 12345)
    with pytest.raises(errors.GatewayUnreachable, match="belongs to uid 12345"):
        installations.find()


COMMANDS = {
    "install.sh": '#!{python} -IS\n"""The command k8e, written by install.sh."""\n',
    "install.sh, long": "#!/bin/sh\n# The command k8e, written by install.sh.\nexec '{python}' -IS",
    "pip": "#!{python}\nimport sys\nfrom k8e.cli import main\n",
    "pip, long": "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\nfrom k8e.cli import main",
}


@pytest.mark.parametrize("how", COMMANDS)
def test_the_command_on_path_leads_to_its_installation(machine: Path, how: str) -> None:
    python_that_says(machine / "far away" if "long" in how else machine / "far", WHOLE)
    python = machine / ("far away" if "long" in how else "far") / "venv/bin/python"
    (machine / "programs/k8e").write_text(COMMANDS[how].format(python=python) + " rest\n")
    (machine / "programs/k8e").chmod(0o755)
    assert installations.find().python == str(python)


@pytest.mark.parametrize("text", ["\x7fELF", "#!/bin/sh\nexec /usr/bin/python3 -m other\n", ""])
def test_a_command_of_that_name_which_is_not_ours_is_never_started(
    machine: Path, text: str
) -> None:
    (machine / "programs/k8e").write_text(text)
    (machine / "programs/k8e").chmod(0o755)
    with pytest.raises(errors.GatewayUnreachable, match="nothing was installed"):
        installations.find()


def test_our_own_command_on_path_is_not_asked_again(machine: Path) -> None:
    (machine / "ours/bin").mkdir(parents=True)
    (machine / "ours/bin/python").symlink_to(sys.executable)
    text = COMMANDS["pip"].format(python=machine / "ours/bin/python")
    (machine / "programs/k8e").write_text(text)
    (machine / "programs/k8e").chmod(0o755)
    with pytest.raises(errors.GatewayUnreachable, match="nothing was installed"):
        installations.find()
