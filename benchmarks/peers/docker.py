"""docker with runc and runsc, by a daemon of our own that touches no network."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from benchmarks import timing
from benchmarks.peers import (
    CGROUP,
    HOW_TO_INSTALL,
    Peer,
    Standing,
    Unavailable,
    environment,
    make_root,
)

START_SECONDS = 30.0
STOP_SECONDS = 30.0
LOOK = 0.1  # seconds between two looks whether it listens
IMAGE = "k8e-bench"
NO_NETWORK = ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]


@contextlib.contextmanager
def found(folder: Path, tools: dict[str, str]) -> Generator[list[Peer]]:
    client, daemon = shutil.which("docker"), shutil.which("dockerd")
    if client is None or daemon is None:
        raise Unavailable(HOW_TO_INSTALL)
    env = environment(folder) | {"DOCKER_HOST": f"unix://{folder}/sock"}
    with _serving(daemon, folder, env, tools):
        timing.output([client, "import", str(_image(folder)), IMAGE], env)
        yield [
            _peer(client, name, kind, env)
            for name, kind in (("runc", "container"), ("runsc", "gvisor"))
            if name in tools
        ]


def _peer(client: str, name: str, kind: str, env: dict[str, str]) -> Peer:
    # Named by us: docker would look for its own runc under that name.
    flags = ["--network=none", f"--cgroup-parent=/{CGROUP}", f"--runtime=bench-{name}"]
    flags += ["--volume=/usr:/usr:ro", IMAGE]

    def wrap(argv: Sequence[str]) -> list[str]:
        return [client, "run", "--rm", *flags, *argv]

    standing = Standing([client], flags)
    return Peer(f"docker run ({name})", kind, wrap, env, standing=standing)


def _image(folder: Path) -> Path:
    """The skeleton as an archive, which docker makes an image of."""
    root = make_root(folder)
    return Path(shutil.make_archive(str(folder / "image"), "tar", root))


@contextlib.contextmanager
def _serving(
    daemon: str, folder: Path, env: dict[str, str], tools: dict[str, str]
) -> Generator[None]:
    config = folder / "daemon.json"
    runtimes = {f"bench-{name}": {"path": path} for name, path in tools.items()}
    config.write_text(json.dumps({"runtimes": runtimes}), "utf-8")
    argv = [daemon, f"--config-file={config}", f"--data-root={folder}/data"]
    argv += [
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/pid",
        f"--host=unix://{folder}/sock",
    ]
    argv += [*NO_NETWORK, "--bridge=none", "--exec-opt=native.cgroupdriver=cgroupfs"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _await(process, folder)
        yield
    finally:
        _stop(process)


def _await(process: subprocess.Popen[bytes], folder: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while not _listens(folder / "sock"):
        if process.poll() is not None or time.monotonic() > until:
            said = (folder / "log").read_text("utf-8", "replace").strip().splitlines()
            raise Unavailable(f"its daemon does not start: {said[-1][:300] if said else ''}")
        time.sleep(LOOK)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(os.fspath(path)) == 0


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Its containers and its containerd end with it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
