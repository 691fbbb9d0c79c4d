"""Uninstalling takes what is ours, and nothing of others who use the same folders."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from k8e.distro import cleanup

UNMOUNT = (
    "import sys; from pathlib import Path; from k8e.distro import cleanup, layout; "
    "cleanup.unmount(layout.Layout(Path(sys.argv[1])))"
)


def test_named_networks_and_disks_of_others_stay_mounted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts of its own need root")
    data, other = tmp_path / "k8e", tmp_path / "k8e-backup"
    for folder in (data / "agent/a b", other):
        folder.mkdir(parents=True)
    script = (
        "mount -t tmpfs none /run && mkdir /run/netns && touch /run/netns/vpn /run/netns/cni-1 && "
        "for name in vpn cni-1; do mount --bind /proc/self/ns/net /run/netns/$name; done && "
        'mount -t tmpfs none "$1/agent/a b" && mount -t tmpfs none "$2" && '
        'shift 2 && "$@" && cat /proc/self/mounts'
    )
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-ec", script, "sh", str(data), str(other)),
            *(sys.executable, "-c", UNMOUNT, str(data)),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    left = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"/run/netns/vpn", str(other)} <= left
    assert "/run/netns/cni-1" not in left
    assert not any(path.startswith(f"{data}/") for path in left)


@pytest.mark.parametrize("docker", [True, False])
def test_sockets_and_notes_of_anothers_containers_stay(tmp_path: Path, docker: bool) -> None:
    containerd, cni = tmp_path / "containerd", tmp_path / "cni"
    for folder in (containerd / "s", containerd / "fifo/1", cni / "results"):
        folder.mkdir(parents=True)
    for name in ("k8e-1-eth0", "cilium-1-eth0", "cni-loopback-1-lo"):
        (cni / "results" / name).touch()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as served,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead,
    ):
        dead.bind(str(containerd / "s/dead"))
        if docker:
            (containerd / "containerd.sock").touch()
            (cni / "results/podman-1-eth0").touch()
            served.bind(str(containerd / "s/served"))
            served.listen()
        cleanup.remove_shared(containerd, cni)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    if docker:
        assert left == {
            "containerd/containerd.sock",
            "containerd/s/served",
            "cni/results/podman-1-eth0",
        }
        assert (containerd / "fifo/1").is_dir()
    else:
        assert not left
        assert not containerd.exists()
        assert not cni.exists()
