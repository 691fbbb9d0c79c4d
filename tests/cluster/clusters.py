"""Clusters for tests: machines on a LAN, with the commands that a user would give."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.cluster.machine import COMPONENTS, Lan, Machine, end

T = TypeVar("T")
POD_SECONDS = 180
BUSYBOX = "k8e.internal/busybox:1.35"


class Cluster:
    """A server, and the agents that have joined it."""

    def __init__(self, *flags: str, cni: str) -> None:
        self.lan = Lan()
        self.machines: list[Machine] = []
        self.flags = ("--cni", cni, *flags)
        self.cni = cni
        self.said = ""
        try:
            self.server = self.add_machine()
        except BaseException:
            self.lan.close()
            raise

    def add_machine(self, name: str = "") -> Machine:
        machine = Machine(self.lan, len(self.machines) + 1, name=name)
        self.machines.append(machine)
        return machine

    @property
    def url(self) -> str:
        return f"https://{self.server.address}:6443"

    def start(self) -> None:
        """Start the server; what it says meanwhile is in ``said``."""
        self.said = self.server.k8e("server", *self.flags, "--detach", seconds=400).stderr

    def token(self) -> str:
        return self.server.path("/var/lib/k8e/server/node-token").read_text("ascii").strip()

    def join(self, machine: Machine) -> None:
        machine.k8e("agent", "--server", self.url, "--token", self.token(), "-d", seconds=400)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.lan.close)
            for machine in self.machines:
                stack.callback(machine.close)

    # Pods.

    def kubectl(self, *arguments: str, check: bool = True, seconds: float = 60) -> str:
        return self.server.kubectl(*arguments, check=check, seconds=seconds)

    def get(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply objects as the administrator."""
        done = self.try_to_apply(*objects)
        assert not done, done

    def try_to_apply(self, *objects: dict[str, Any]) -> str:
        """Why objects were refused; empty if they were not."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        folder = self.server.path("/tmp")
        file = folder / f"apply-{time.monotonic_ns()}.json"
        file.write_text(text, "utf-8")
        program = str(Path("/tmp") / file.name)
        done = self.server.run(
            *("kubectl", "apply", "--request-timeout=30s", "-f", program),
            check=False,
            KUBECONFIG="/etc/k8e/k8e.yaml",
        )
        file.unlink()
        return done.stderr if done.returncode else ""

    def pod(self, name: str, *, start: bool = True, **spec: Any) -> dict[str, Any]:
        """A pod with a shell and a web server that tells its name; Ready if it was started."""
        made = pod(name, **spec)
        if start:
            self.apply(made)
            self.wait_for_pods(name, namespace=made["metadata"]["namespace"])
        return made

    def wait_for_pods(self, *names: str, namespace: str = "default") -> None:
        wanted = [f"pod/{name}" for name in names]
        flags = ("--for=condition=Ready", f"--timeout={POD_SECONDS}s", "-n", namespace)
        try:
            self.kubectl("wait", *flags, *wanted, seconds=POD_SECONDS + 30)
        except AssertionError as error:
            told = self.kubectl("describe", "-n", namespace, *wanted, check=False)
            raise AssertionError(f"{error}\n{told[-4000:]}") from None

    def address(self, name: str) -> str:
        return str(self.get("pod", name)["status"]["podIP"])

    def shell(
        self, name: str, command: str, *, check: bool = True, namespace: str = "default"
    ) -> str:
        """Run a shell command in a pod. It must end by itself: whatever waits has its own bound."""
        flags = ("exec", "-n", namespace, name, "--request-timeout=60s", "--")
        return self.kubectl(*flags, "sh", "-c", command, check=check, seconds=90)

    def fetch(self, name: str, url: str) -> str:
        """What a pod gets from a web server within five seconds; empty if nothing."""
        return self.fetch_all((name, url))[0]

    def fetch_all(self, *tries: tuple[str, str]) -> list[str]:
        """The same for pods and URLs, all at once: what is not reached takes its whole time."""
        started: list[subprocess.Popen[str]] = []
        try:
            for name, url in tries:
                command = f"timeout 5 wget -q -O - '{url}' 2>/dev/null || true"
                flags = ("exec", "-n", "default", name, "--request-timeout=60s", "--")
                words = (str(COMPONENTS / "bin/kubectl"), *flags, "sh", "-c", command)
                started.append(self.server.start(*words, KUBECONFIG="/etc/k8e/k8e.yaml"))
            return [process.communicate(timeout=90)[0].strip() for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    end(process)


def pod(
    name: str,
    *,
    node: str = "",
    runtime: str = "",
    labels: dict[str, str] | None = None,
    namespace: str = "default",
    **spec: Any,
) -> dict[str, Any]:
    serve = f"mkdir -p /tmp/w && echo {name} > /tmp/w/index.html && exec httpd -f -p 8080 -h /tmp/w"
    container = {
        "name": "main",
        "image": BUSYBOX,
        "command": ["sh", "-c", serve],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 60},
    }
    wanted: dict[str, Any] = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        **spec,
    }
    if node:
        wanted["nodeName"] = node
    if runtime:
        wanted["runtimeClassName"] = runtime
    metadata = {"name": name, "namespace": namespace, "labels": {"app": name, **(labels or {})}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": wanted}


def service(name: str, *, port: int = 80) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"app": name}, "ports": [{"port": port, "targetPort": 8080}]},
    }


def eventually(what: str, check: Callable[[], T], *, seconds: float = 90.0) -> T:
    """Ask again until the answer is true, for what nobody reports."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)
    return found
