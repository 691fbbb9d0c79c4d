"""A real control plane for tests: etcd, API server and garbage collector as ordinary processes.

They change nothing on this computer: their files are in one folder, their ports are on loopback.
No kubelet runs; :mod:`tests.controller.kubelets` has a stand-in that sets the status of pods.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import yaml

from k8e.distro import certificates, kubeconfigs
from k8e.distro.certificates import Subject
from tests.cluster.machine import COMPONENTS

START_SECONDS = 120.0
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io"}]},
        {"level": "Request"},
    ],
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class ControlPlane:
    """etcd, kube-apiserver and kube-controller-manager, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tls = folder / "tls"
        self._tls.mkdir(parents=True)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments: dict[str, list[str]] = {}
        self._etcd, self._etcd_peer, self.port = free_port(), free_port(), free_port()
        self.server = f"https://127.0.0.1:{self.port}"
        self.audit_log = folder / "audit.log"
        self._write_files()

    def _write_files(self) -> None:
        tls = self._tls
        self._signers = {name: certificates.authority(tls, name) for name in ("server", "client")}
        hosts = Subject("kube-apiserver", hosts=("127.0.0.1", "localhost"))
        certificates.leaf(self._signers["server"], hosts, tls / "apiserver", days=1)
        certificates.service_account_key(tls / "service-account.key")
        (self.folder / "audit.yaml").write_text(yaml.safe_dump(_AUDIT), "utf-8")
        self.kubeconfig("admin", "admin", "system:masters")
        self.kubeconfig("manager", "manager", "system:masters")  # no roles of controllers here

    def kubeconfig(self, name: str, user: str, *groups: str) -> Path:
        """Credentials of a user, as a kubeconfig; where it is."""
        path = self.folder / f"{name}.kubeconfig"
        leaf = self._tls / f"user-{name}"
        certificates.leaf(self._signers["client"], Subject(user, groups), leaf, days=1)
        kubeconfigs.write(
            path,
            kubeconfigs.by_files(
                self.server,
                authority=self._tls / "server.crt",
                certificate=leaf.with_suffix(".crt"),
                key=leaf.with_suffix(".key"),
            ),
        )
        return path

    def account(self, namespace: str, name: str) -> Path:
        """Credentials of a service account, as a kubeconfig; where it is."""
        token = self.kubectl("create", "token", name, "-n", namespace, "--duration=2h").strip()
        path = self.folder / f"{name}.kubeconfig"
        found = yaml.safe_load(self.admin.read_bytes())
        found["users"][0]["user"] = {"token": token}
        kubeconfigs.write(path, found)
        return path

    @property
    def admin(self) -> Path:
        return self.folder / "admin.kubeconfig"

    def start(self) -> None:
        self.start_etcd()
        self.start_api_server()

    def start_manager(self) -> None:
        """Start what collects garbage."""
        self._start("kube-controller-manager", self._manager())

    def start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self._etcd}"
        peer = f"http://127.0.0.1:{self._etcd_peer}"
        self._start(
            "etcd",
            [
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
                "--log-level=error",
            ],
        )

    def start_api_server(self) -> None:
        self._start("kube-apiserver", self._api_server())
        deadline = time.monotonic() + START_SECONDS
        while "ok" not in self.kubectl("get", "--raw", "/readyz", check=False):
            assert time.monotonic() < deadline, self.log("kube-apiserver")
            time.sleep(0.2)

    def _api_server(self) -> list[str]:
        tls = self._tls
        return [
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            f"--cert-dir={self.folder / 'certs'}",
            f"--client-ca-file={tls / 'client.crt'}",
            f"--tls-cert-file={tls / 'apiserver.crt'}",
            f"--tls-private-key-file={tls / 'apiserver.key'}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={tls / 'service-account.key'}",
            f"--service-account-signing-key-file={tls / 'service-account.key'}",
            "--service-cluster-ip-range=10.43.0.0/16",
            "--authorization-mode=RBAC",
            # Nobody makes service accounts here, which pods would need.
            "--disable-admission-plugins=ServiceAccount",
            f"--audit-policy-file={self.folder / 'audit.yaml'}",
            f"--audit-log-path={self.audit_log}",
            "--endpoint-reconciler-type=none",
            "--profiling=false",
        ]

    def _manager(self) -> list[str]:
        path = self.folder / "manager.kubeconfig"
        flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return [
            *(f"--{flag}={path}" for flag in flags),
            "--controllers=garbage-collector-controller,namespace-controller",
            f"--secure-port={free_port()}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        ]

    # Processes.

    def _start(self, name: str, arguments: list[str]) -> None:
        self._arguments[name] = arguments
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(COMPONENTS / "bin" / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "GOGC": "50", "HOME": str(self.folder)},
            )

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)

    def pause(self, name: str, seconds: float) -> None:
        """Stop a program for a while, and let it work as long: as slow as a bad disk makes it."""
        process = self._processes[name]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(number)
            time.sleep(seconds)

    def restart_api_server(self) -> None:
        self.stop("kube-apiserver", signal.SIGKILL)
        self.start_api_server()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")[-3000:]

    def close(self) -> None:
        for name in list(self._processes):
            self.stop(name, signal.SIGKILL)

    # Its user.

    def kubectl(self, *arguments: str, check: bool = True, text: str = "") -> str:
        command = [str(COMPONENTS / "bin/kubectl"), f"--kubeconfig={self.admin}", *arguments]
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )
        if check and done.returncode:
            raise AssertionError(f"{arguments}: {done.stdout}\n{done.stderr}")
        return done.stdout + (done.stderr if not check else "")

    def apply(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", text=json.dumps(listed)
        )

    def audit(self) -> list[dict[str, Any]]:
        """The writes that the API server has done, in order."""
        with self.audit_log.open("rb") as file:
            return [json.loads(line) for line in file if line.endswith(b"\n")]


@contextlib.contextmanager
def control_plane() -> Generator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="k8e-plane-", dir="/var/tmp") as folder:
        plane = ControlPlane(Path(folder) / "plane")
        try:
            plane.start()
            yield plane
        finally:
            plane.close()
