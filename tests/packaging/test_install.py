"""install.sh, run for real into temporary folders.

runsc, runc, Go, npm and apt-get are stand-ins on PATH, so that nothing is built or downloaded;
Python, venv and pip are the real ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = (REPO / "install.sh").read_text()

NEW_RUNSC = "echo 'runsc version release-20991231.0'"
OLD_RUNSC = "echo 'runsc version release-20200101.0'"
NEW_RUNC = 'case "$*" in *--version*) echo "runc version 1.9.0" ;; esac'
OLD_RUNC = 'case "$*" in *--version*) echo "runc version 1.1.5+ds1" ;; esac'
BROKEN_CRUN = """
case "$*" in
    *--version*) echo "crun version 1.8.1" ;;
    *) echo "no such cgroup" >&2; exit 1 ;;
esac"""
NPM = "mkdir -p node_modules/tsx"
NO_APT = "echo 'no such package' >&2; exit 100"


def pinned(name: str) -> str:
    found = re.search(rf"^{name}='?([^'\s]+)'?", SCRIPT, re.MULTILINE)
    assert found, name
    return found[1]


def go(gvisor_sum: str) -> str:
    """A Go that "builds" runsc and runc, and tells the given checksum of gVisor's module."""
    gvisor = f"gvisor.dev/gvisor\\t{pinned('GVISOR_VERSION')}\\t{gvisor_sum}"
    runc = f"github.com/opencontainers/runc\\t{pinned('RUNC_VERSION')}\\t{pinned('RUNC_SUM')}"
    return f"""
case "$*" in
    "env GOVERSION") echo go1.30.1 ;;
    install*runsc@*) mkdir -p "$GOBIN"; printf '#!/bin/sh\\necho built' >"$GOBIN/runsc" ;;
    install*runc@*) mkdir -p "$GOBIN"; printf '#!/bin/sh\\ntrue' >"$GOBIN/runc" ;;
    *runsc) printf '\\tmod\\t{gvisor}\\n' ;;
    *runc) printf '\\tmod\\t{runc}\\n' ;;
esac
case "$*" in install*) chmod 755 "$GOBIN"/* ;; esac"""


class Machine:
    """A clone whose package is three small files, and a machine to install it on."""

    def __init__(self, folder: Path, home: str = "home", **programs: str) -> None:
        self.clone = folder / "clone"
        self.home = folder / home
        self.bin = folder / "command"
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.package = self.clone / "src/k8e"
        self.package.mkdir(parents=True)
        for name in ("pyproject.toml", "hatch_build.py", "LICENSE"):
            shutil.copy(REPO / name, self.clone)
        # What root installed on the machine that runs the tests says nothing about this one.
        self.shared = folder / "shared"
        named = SCRIPT.replace("machine_home=/opt/k8e", f"machine_home='{self.shared}'")
        named = named.replace("machine_owner=0", f"machine_owner={os.geteuid()}")
        (self.clone / "install.sh").write_text(named)
        shutil.copytree(REPO / "requirements", self.clone / "requirements")
        (self.clone / "requirements/gateway.txt").write_text("")
        (self.clone / "README.md").write_text("k8e\n")
        (self.package / "__init__.py").write_text("")
        (self.package / "_version.py").write_text('__version__ = "9.8.7"\n')
        self.write_cli("first")
        default = {"runsc": NEW_RUNSC, "runc": NEW_RUNC, "npm": NPM, "apt_get": NO_APT}
        for name, script in {**default, **programs}.items():
            self.program(name.replace("_", "-"), script)

    def write_cli(self, word: str) -> None:
        (self.package / "cli.py").write_text(
            "import sys\n\n\ndef main():\n"
            f"    modules = [m for m in ('site', 're') if m in sys.modules]\n"
            f"    print({word!r}, sys.argv[1:], modules)\n    return 7\n"
        )

    def share(self, name: str, script: str) -> None:
        """Install a program as root does, for everybody."""
        (self.shared / "bin").mkdir(parents=True, exist_ok=True)
        (self.shared / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.shared / "bin" / name).chmod(0o755)

    def program(self, name: str, script: str) -> None:
        (self.programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.programs / name).chmod(0o755)

    def install(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            **variables,
            "PATH": f"{self.programs}:{self.bin}:{os.environ['PATH']}",
            "K8E_HOME": str(self.home),
            "K8E_BIN_DIR": str(self.bin),
            # gVisor's release server is out of reach, at once.
            "https_proxy": "http://127.0.0.1:1",
        }
        if "--deps-only" not in arguments:
            del environment["https_proxy"]
        command = ["sh", str(self.clone / "install.sh"), *arguments]
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.bin / "k8e", *arguments], capture_output=True, text=True)

    def stamp(self, program: str) -> dict[str, str]:
        lines = (self.home / f"bin/.{program}.stamp").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def snapshot(self) -> dict[str, tuple[int, int, int]]:
        found = [p for top in (self.home, self.bin) if top.exists() for p in (top, *top.rglob("*"))]
        stats = {str(p): p.lstat() for p in found}
        return {name: (s.st_mtime_ns, s.st_size, s.st_mode) for name, s in stats.items()}


def _children_seconds() -> float:
    """What programs that have ended took of the CPUs: it says more than time on a busy machine."""
    told = os.times()
    return told.children_user + told.children_system


def test_installs_updates_and_removes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    first = machine.install()
    assert first.returncode == 0, first.stdout + first.stderr
    steps = re.findall(r"^\[(\d/\d)\]", first.stdout, re.MULTILINE)
    assert steps == ["1/6", "2/6", "3/6", "4/6", "5/6", "6/6"]
    assert "k8e 9.8.7 is installed" in first.stdout
    assert first.stdout.endswith("Next: k8e sandbox run --lang python \"print('hello')\"\n")
    assert (machine.home / "bin/runsc").resolve() == machine.programs / "runsc"
    assert (machine.home / "tools/node_modules/tsx").is_dir()

    launcher = (machine.bin / "k8e").read_text().splitlines()
    assert launcher[0] == f"#!{machine.home}/venv/bin/python -IS"
    assert not any("import re" in line or "import site" in line for line in launcher)
    ran = machine.run("a", "b c")
    assert (ran.returncode, ran.stdout) == (7, "first ['a', 'b c'] []\n"), ran.stderr

    for name in ("k8e-sandbox", "k8e-sandbox-cli"):
        flat = subprocess.run(
            [machine.bin / name, "run", "b c"], capture_output=True, text=True, check=False
        )
        assert flat.stdout == "first ['sandbox', 'run', 'b c'] []\n", flat.stderr

    before = machine.snapshot()
    start = _children_seconds()
    second = machine.install()
    assert _children_seconds() - start < 2
    assert second.returncode == 0
    assert machine.snapshot() == before
    assert machine.install("--quiet").stdout == ""

    machine.write_cli("second")
    third = machine.install("--quiet")
    assert third.returncode == 0, third.stderr
    assert machine.run().stdout == "second [] []\n"

    (machine.home / "mine").write_text("kept")
    removed = machine.install("--uninstall")
    assert removed.returncode == 0, removed.stderr
    assert [p.name for p in machine.home.iterdir()] == ["mine"]
    assert not list(machine.bin.iterdir())


def test_a_path_that_fits_no_shebang_line(tmp_path: Path) -> None:
    machine = Machine(tmp_path, home='my "home" isn\'t short' + "/long" * 20)
    installed = machine.install()
    assert installed.returncode == 0, installed.stderr
    assert (machine.bin / "k8e").read_text().startswith("#!/bin/sh\n")
    assert machine.run("x y").stdout == "first ['x y'] []\n"


def test_a_step_that_fails_says_which_and_why_and_what_to_do(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    lock = machine.clone / "requirements/gateway.txt"
    lock.write_text(
        "nothing @ file:///nonexistent/nothing-1-py3-none-any.whl --hash=sha256:" + "0" * 64 + "\n"
    )
    failed = machine.install("--quiet")
    assert failed.returncode == 1
    assert "step 6/6 failed: k8e: the Python package" in failed.stderr
    assert "why: pip could not install the Python packages" in failed.stderr
    assert "/nonexistent/nothing-1-py3-none-any.whl" in failed.stderr
    assert "what to do: " in failed.stderr
    assert "/nonexistent/nothing-1-py3-none-any.whl" in (machine.home / "install.log").read_text()
    assert not (machine.bin / "k8e").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.home = Path("/proc/k8e")
    failed = machine.install()
    assert failed.returncode == 1
    assert "step 1/6 failed: Checking this machine" in failed.stderr
    assert "what to do: run as a user who may write there, or set K8E_HOME" in failed.stderr


def test_a_command_of_someone_else_is_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.bin.mkdir()
    (machine.bin / "k8e").write_text("another program\n")
    failed = machine.install("--quiet")
    assert failed.returncode == 1
    assert "exists and is not ours" in failed.stderr
    assert machine.install("--uninstall").returncode == 0
    assert (machine.bin / "k8e").read_text() == "another program\n"


def test_deps_only_makes_no_environment_and_no_command(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    done = machine.install("--deps-only")
    assert done.returncode == 0, done.stderr
    assert "[5/5]" in done.stdout
    assert not (machine.home / "venv").exists()
    assert not machine.bin.exists()


def test_a_program_that_changed_behind_its_stamp_is_looked_at_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.install("--deps-only")
    stamp = machine.stamp("runsc")
    assert (stamp["source"], stamp["version"]) == ("system", "release 20991231")
    machine.program("runsc", NEW_RUNSC.replace("20991231", "20981231"))
    machine.install("--deps-only")
    assert machine.stamp("runsc")["version"] == "release 20981231"
    assert machine.stamp("runsc")["sha256"] != stamp["sha256"]


def test_what_is_too_old_or_broken_is_built_instead(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path,
        runsc=OLD_RUNSC,
        runc=OLD_RUNC,
        crun=BROKEN_CRUN,
        go=go(pinned("GVISOR_SUM")),
        gcc="",
        pkg_config="",
    )
    done = machine.install("--deps-only")
    assert done.returncode == 0, done.stderr
    assert "could not be downloaded" in done.stdout
    assert "crun does not work here: no such cgroup" in done.stdout
    assert machine.stamp("runsc")["source"] == "go"
    assert machine.stamp("runc")["source"] == "go"
    assert not (machine.home / "bin/runsc").is_symlink()
    before = machine.snapshot()
    machine.install("--deps-only")
    assert machine.snapshot() == before


def test_a_user_s_install_takes_what_root_installed_and_builds_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, runsc=OLD_RUNSC, runc=OLD_RUNC, go=go("h1:wrong="))
    machine.share("runsc", NEW_RUNSC)
    machine.share("runc", NEW_RUNC)
    for name in ("runsc", "runc"):
        (machine.programs / name).unlink()
    done = machine.install("--deps-only")
    assert done.returncode == 0, done.stderr
    assert "building" not in done.stdout
    for name in ("runsc", "runc"):
        assert (machine.home / "bin" / name).resolve() == machine.shared / "bin" / name
        assert machine.stamp(name)["source"] == "system"


@pytest.mark.parametrize("how", ["old", "writable", "folder"])
def test_what_root_installed_is_not_taken_if_it_is_old_or_others_may_change_it(
    tmp_path: Path, how: str
) -> None:
    machine = Machine(tmp_path, go=go(pinned("GVISOR_SUM")))
    (machine.programs / "runsc").unlink()
    machine.share("runsc", OLD_RUNSC if how == "old" else NEW_RUNSC)
    if how != "old":
        (machine.shared / "bin" / ("runsc" if how == "writable" else "")).chmod(0o777)
    done = machine.install("--deps-only")
    assert done.returncode == 0, done.stderr
    assert machine.stamp("runsc")["source"] == "go"


def test_a_build_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path, runsc=OLD_RUNSC, go=go("h1:wrong="))
    done = machine.install("--deps-only")
    assert done.returncode == 0, done.stderr
    assert f"is not gvisor.dev/gvisor {pinned('GVISOR_VERSION')} with the checksum" in done.stderr
    assert "warning: no gVisor. Sandboxes will run as plain containers" in done.stderr
    assert not (machine.home / "bin/runsc").exists()


def test_a_library_that_is_missing_is_installed_or_named(tmp_path: Path) -> None:
    # Without root or sudo apt-get is not tried, so what it was asked for is not all that counts.
    asked = tmp_path / "asked"
    machine = Machine(tmp_path, apt_get=f'echo "$*" >>{asked}; exit 100')
    hidden = tmp_path / "libraries"
    hidden.mkdir()
    (hidden / "libnftables.so.1").write_text("not a library")
    done = machine.install("--deps-only", "--quiet", LD_LIBRARY_PATH=str(hidden))
    assert done.returncode == 0, done.stderr
    assert re.search(r"warning: (could not install|missing): libnftables1\b", done.stderr)
    assert "no libnftables: k8e cannot give sandboxes a network" in done.stderr
    if asked.exists():
        assert asked.read_text().splitlines()[-1].endswith(" libnftables1")


def test_help_and_unknown_arguments(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    told = machine.install("--help")
    assert told.returncode == 0
    for word in ("--deps-only", "--uninstall", "--quiet", "K8E_HOME", str(machine.home)):
        assert word in told.stdout
    refused = machine.install("--frobnicate")
    assert refused.returncode == 2
    assert "unknown argument: --frobnicate" in refused.stderr
    assert not machine.home.exists()


def test_locks_pin_hashes_and_name_no_address() -> None:
    for path in (REPO / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "://" not in text, path
        packages = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
        assert packages, path
        for package in packages:
            assert re.match(r"[\w.-]+==\S+ (;.*)?\\\n    --hash=sha256:", package), package
    tools = json.loads((REPO / "requirements/tools/package-lock.json").read_text())
    for name, package in tools["packages"].items():
        assert "resolved" not in package
        assert name == "" or package["integrity"].startswith("sha512-")


def test_shell_script_is_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run(["shellcheck", REPO / "install.sh"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
