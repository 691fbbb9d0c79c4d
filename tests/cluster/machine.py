"""Machines to try a cluster on: namespaces with everything that a cluster changes.

A machine has a network, mounts, processes, a host name and control groups of its own. Its root is
an overlay of the computer's, so that it can write wherever a host is written to; what is large is
on a disk. Machines and an "internet" hang on one bridge, in a namespace of their own. Nothing of
this touches the computer's own network, mounts, control groups and kernel settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NETWORK = "10.89.0"
GATEWAY = f"{NETWORK}.1"
PATIENCE = 120.0
START_SECONDS = 30.0
COMPONENTS = Path(os.environ.get("K8E_COMPONENTS_DIR", "/var/cache/k8e/components"))
_INTERNET = Path(__file__).with_name("internet.py")
_INIT = Path(__file__).with_name("machine_init.py")
_CGROUPS = Path("/sys/fs/cgroup")
_PREFIX = "k8e-machine-"


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, check=check, capture_output=True, timeout=PATIENCE)


class Lan:
    """A bridge in a network namespace, which is also the internet of the machines on it."""

    def __init__(self) -> None:
        self._holder = _hold(["unshare", "--net"])
        self.pid = self._holder.pid
        for command in (
            "ip link set lo up",
            "ip link add lan type bridge",
            f"ip address add {GATEWAY}/24 dev lan",
            "ip link set lan up",
            "ip address add 203.0.113.10/32 dev lo",
            "ip address add 203.0.113.11/32 dev lo",
        ):
            self.run(*command.split())
        self._internet = self._start(sys.executable, "-P", str(_INTERNET), GATEWAY)
        assert self._internet.stdout is not None
        assert select.select([self._internet.stdout], [], [], START_SECONDS)[0]
        assert self._internet.stdout.readline() == b"ready\n", "the internet serves"

    def run(self, *command: str) -> subprocess.CompletedProcess[bytes]:
        return _run("nsenter", "-t", str(self.pid), "-n", *command)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["nsenter", "-t", str(self.pid), "-n", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        _end(self._internet)
        assert self._internet.stdout is not None
        self._internet.stdout.close()
        _end(self._holder)


def _hold(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that does nothing but keep its namespaces, and says when it has them."""
    program = "import os,signal,sys;os.write(1,b'.');os.close(1);signal.pause()"
    holder = subprocess.Popen(
        [*command, sys.executable, "-Ic", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    with holder.stdout as said:
        assert said.read(1) == b".", "the namespaces were made"
    return holder


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(30)


class Machine:
    """One machine on a LAN."""

    def __init__(self, lan: Lan, number: int, *, name: str = "") -> None:
        self.name = name or f"node-{number}"
        self.address = f"{NETWORK}.{10 + number}"
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/var/tmp"))
        self.groups = _make_groups(self.folder.name)
        self._lan = lan
        self._link = f"m{number}"
        ready, said = os.pipe()
        self._init = subprocess.Popen(
            [
                *(sys.executable, "-I", str(_INIT)),
                *(str(self.folder), self.name, str(COMPONENTS), str(said)),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=(said,),
            preexec_fn=self._enter_groups,
            env={"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"},
        )
        os.close(said)
        try:
            self.pid = _read_pid(ready)
        finally:
            os.close(ready)
        self.plug_in()

    def _enter_groups(self) -> None:
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(os.getpid()), "ascii")

    # The network.

    def plug_in(self) -> None:
        """Connect it to the LAN."""
        lan, link = self._lan, self._link
        lan.run("ip", "link", "add", link, "type", "veth", "peer", "eth0", "netns", str(self.pid))
        lan.run("ip", "link", "set", link, "master", "lan", "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", GATEWAY)

    def cut_off(self) -> None:
        """Take its link down at the other end, as a pulled cable does."""
        self._lan.run("ip", "link", "set", self._link, "nomaster")

    def reconnect(self) -> None:
        self._lan.run("ip", "link", "set", self._link, "master", "lan", "up")

    # Programs in it.

    def command(self, *command: str) -> list[str]:
        """A command that runs in this machine."""
        namespaces = ("-m", "-n", "-p", "-u", "-i", "-C")
        return ["nsenter", "-t", str(self.pid), *namespaces, *command]

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        """Start a command; :func:`end` ends it."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*command),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=self._enter_groups,
            env=_environ() | environ,
        )

    def run(
        self, *command: str, check: bool = True, seconds: float = PATIENCE, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, which comes in time."""
        process = self.start(*command, **environ)
        try:
            said, complained = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            said, complained = end(process)
            raise AssertionError(
                f"{command}: not within {seconds} s\n{said}\n{complained}"
            ) from None
        except BaseException:
            end(process)
            raise
        if check and process.returncode:
            raise AssertionError(f"{command}: {process.returncode}\n{said}\n{complained}")
        return subprocess.CompletedProcess(command, process.returncode, said, complained)

    def k8e(
        self, *arguments: str, check: bool = True, seconds: float = PATIENCE, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-P", "-m", "k8e", *arguments)
        return self.run(*command, check=check, seconds=seconds, **environ)

    def kubectl(self, *arguments: str, check: bool = True, seconds: float = PATIENCE) -> str:
        """Run kubectl as the administrator; what it prints."""
        program = str(COMPONENTS / "bin/kubectl")
        environ = {"KUBECONFIG": "/etc/k8e/k8e.yaml"}
        return self.run(program, *arguments, check=check, seconds=seconds, **environ).stdout

    def json(self, *arguments: str) -> dict[str, object]:
        return json.loads(self.kubectl(*arguments, "-o", "json"))

    def path(self, path: str) -> Path:
        """A file of this machine, as seen from the computer."""
        return Path(f"/proc/{self.pid}/root{path}")

    def close(self) -> None:
        """End everything in it, and leave nothing of it."""
        self._init.kill()  # all its processes end with it
        self._init.wait(60)
        with contextlib.suppress(subprocess.CalledProcessError):
            self._lan.run("ip", "link", "delete", self._link)
        for group in reversed(self.groups):
            _remove_group(group)
        shutil.rmtree(self.folder)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a command that was started in a machine; what it said.

    What enters the machine's processes has a child there, which goes on when its parent is killed.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=30)


def _environ() -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "K8E_COMPONENTS_DIR": str(COMPONENTS),
    }


def _read_pid(ready: int) -> int:
    """The pid of the machine's first process, once it is set up."""
    assert select.select([ready], [], [], START_SECONDS)[0], "the machine starts"
    said = os.read(ready, 1000).decode()
    assert said.isdigit(), said
    return int(said)


# Control groups.


def _hierarchies() -> Iterator[Path]:
    """Every hierarchy of the computer: of version 1 one for each controller, and version 2."""
    if (_CGROUPS / "cgroup.procs").exists():
        yield _CGROUPS
        return
    for path in sorted(_CGROUPS.iterdir()):
        if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists():
            yield path


def _make_groups(name: str) -> list[Path]:
    groups: list[Path] = []
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):  # empty ones admit nobody
            if (group / file).exists() and hierarchy.name == "cpuset":
                (group / file).write_text((hierarchy / file).read_text("ascii"), "ascii")
        groups.append(group)
    return groups


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + 30
    for folder, _, _ in os.walk(group, topdown=False):
        while True:
            try:
                Path(folder).rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:  # what was killed in it has not quite ended
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
