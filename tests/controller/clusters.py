"""A control plane with the controller on it, and what a test says to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Self

from k8e.controller import deployment, resources
from k8e.kubernetes.api import section
from tests.controller.control_planes import ControlPlane, free_port

Object = dict[str, Any]
PATIENCE = 120.0
_ROOT = Path(__file__).parent.parent.parent
_numbers = itertools.count(1)
_WRONG_CLOCK = """
import runpy, time
right = time.time
time.time = lambda: right() + {seconds}
runpy.run_module("k8e", run_name="__main__", alter_sys=True)
"""


class SandboxCluster:
    """A control plane, a stand-in for kubelets, and ``k8e controller`` with the rights it ships."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.namespace = ""
        self.metrics_port = 0
        self._kubelet: subprocess.Popen[bytes] | None = None
        self.controllers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.plane.apply(*deployment.objects("core"), *deployment.objects("extensions"))
        self._kubeconfig = self.plane.account(resources.SYSTEM_NAMESPACE, resources.CONTROLLER)
        for kind in ("sandboxes", "sandboxclaims", "sandboxtemplates", "sandboxwarmpools"):
            eventually(
                f"{kind} are served", lambda kind=kind: "No resources" in self.kubectl_raw(kind)
            )
        self.plane.start_manager()  # now, so that it knows these kinds from the start
        self._kubelet = self._start("-m", "tests.controller.kubelets", str(self.plane.admin))
        self.start_controller()
        return self

    def kubectl_raw(self, kind: str) -> str:
        return self.plane.kubectl("get", kind, "-A", check=False)

    def __exit__(self, *_: object) -> None:
        for process in (*self.controllers, self._kubelet):
            if process is not None:
                process.kill()
                process.wait(30)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.plane.folder / "programs.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(_ROOT)},
            )

    def start_controller(self, *flags: str, clock: float = 0.0) -> subprocess.Popen[bytes]:
        """Start one; ``clock`` is by how many seconds its computer's clock is wrong."""
        self.metrics_port = free_port()
        program = ("-c", _WRONG_CLOCK.format(seconds=clock)) if clock else ("-m", "k8e")
        process = self._start(
            *(*program, "controller", "--kubeconfig", str(self._kubeconfig)),
            *("--metrics-bind-address", f"127.0.0.1:{self.metrics_port}"),
            *("--health-probe-bind-address", "0"),
            *("--zap-log-level=info", "--kube-api-qps", "100", *flags),
        )
        self.controllers.append(process)
        return process

    def stop_controller(
        self, process: subprocess.Popen[bytes], number: int = signal.SIGTERM
    ) -> int:
        self.controllers.remove(process)
        process.send_signal(number)
        return process.wait(60)

    @contextlib.contextmanager
    def new_namespace(self) -> Generator[None]:
        self.namespace = f"test-{next(_numbers)}"
        self.plane.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        )
        try:
            yield
        finally:
            self.kubectl(
                *("delete", "sandboxclaims,sandboxwarmpools,sandboxtemplates,sandboxes", "--all"),
                *("--wait=false", "--ignore-not-found"),
            )

    # What a user does.

    def kubectl(self, *arguments: str, check: bool = True, text: str = "") -> str:
        return self.plane.kubectl("-n", self.namespace, *arguments, check=check, text=text)

    def apply(self, *objects: Object) -> None:
        self.plane.apply(*(self._placed(item) for item in objects))

    def _placed(self, item: Object) -> Object:
        metadata = {"namespace": self.namespace, **item["metadata"]}
        return {**item, "metadata": metadata}

    def refusal(self, item: Object) -> str:
        """Why an object is refused; an assertion fails if it is not."""
        said = self.kubectl("apply", "-f", "-", check=False, text=json.dumps(self._placed(item)))
        assert "error" in said.lower() or "invalid" in said.lower(), said
        return said

    def find(self, kind: str, name: str) -> Object | None:
        found = self.kubectl("get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(found) if found.strip() else None

    def get(self, kind: str, name: str) -> Object:
        found = self.find(kind, name)
        assert found is not None, f"there is no {kind} {name}"
        return found

    def list(self, kind: str, *flags: str) -> list[Object]:
        return json.loads(self.kubectl("get", kind, *flags, "-o", "json"))["items"]

    def patch(self, kind: str, name: str, change: Object, *flags: str) -> None:
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change), *flags)

    def wait(self, kind: str, name: str, holds: Callable[[Object], Any], what: str = "") -> Object:
        """Wait until an object is as wanted; the object."""

        def look() -> Object | None:
            found = self.find(kind, name)
            return found if found is not None and holds(found) else None

        try:
            found = eventually(what or f"{kind} {name}", look)
        except AssertionError as error:
            told = self.kubectl("get", kind, name, "-o", "yaml", check=False)
            log = (self.plane.folder / "programs.log").read_text("utf-8", "replace")[-3000:]
            raise AssertionError(f"{error}\n{told}\n{log}") from None
        assert found is not None
        return found

    def wait_ready(self, kind: str, name: str) -> Object:
        return self.wait(kind, name, lambda found: condition(found, "Ready")["status"] == "True")

    def wait_reason(self, kind: str, name: str, reason: str, of: str = "Ready") -> Object:
        return self.wait(
            kind, name, lambda found: condition(found, of)["reason"] == reason, f"{name}: {reason}"
        )

    def wait_gone(self, kind: str, name: str) -> None:
        eventually(f"{kind} {name} goes", lambda: self.find(kind, name) is None)

    def wait_pool(self, name: str, ready: int) -> Object:
        return self.wait(
            "swp",
            name,
            lambda found: (
                section(found, "status").get("readyReplicas") == ready
                and found["status"].get("replicas") == ready
            ),
        )

    def events(self, reason: str) -> list[Object]:
        return self.list("events", f"--field-selector=reason={reason}")


def eventually(what: str, check: Callable[[], Any], *, seconds: float = PATIENCE) -> Any:
    """Ask again until the answer is true."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return found


def condition(item: Object, kind: str) -> Object:
    """A condition of an object; one of empty words where there is none."""
    return resources.condition_of(item, kind) or {"status": "", "reason": "", "message": ""}


def run(work: Any) -> Any:
    """Run a coroutine, not for ever."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


# Objects.

POD = {"containers": [{"name": "main", "image": "example/x:1", "ports": [{"containerPort": 8888}]}]}


def sandbox(name: str, **spec: Any) -> Object:
    return {
        "apiVersion": resources.CORE_VERSION,
        "kind": resources.SANDBOX,
        "metadata": {"name": name},
        "spec": {"podTemplate": {"spec": POD}, **spec},
    }


def behaving(phase: str, **metadata: Any) -> Object:
    """A pod template whose pods become what a word says (:mod:`tests.controller.kubelets`)."""
    return {"metadata": {"annotations": {"test/phase": phase}, **metadata}, "spec": POD}


def _extension(kind: str, name: str, spec: Object) -> Object:
    return {
        "apiVersion": resources.EXTENSIONS_VERSION,
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def template(name: str = "template", **spec: Any) -> Object:
    return _extension(resources.TEMPLATE, name, {"podTemplate": {"spec": POD}, **spec})


def pool(name: str = "pool", replicas: int = 1, template: str = "template", **spec: Any) -> Object:
    wanted = {"replicas": replicas, "sandboxTemplateRef": {"name": template}, **spec}
    return _extension(resources.POOL, name, wanted)


def claim(name: str, pool: str = "pool", **spec: Any) -> Object:
    return _extension(resources.CLAIM, name, {"warmPoolRef": {"name": pool}, **spec})
