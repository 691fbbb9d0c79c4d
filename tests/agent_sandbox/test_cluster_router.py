"""``k8e router`` on a real API server, with the rights that its manifests give it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8e.controller import definitions, deployment, resources, router_deployment
from k8e.controller.store import MERGE
from k8e.kubernetes.api import ApiError, by_kubeconfig
from tests.agent_sandbox import python_runtime, serving, upstream
from tests.agent_sandbox.upstream import Upstream
from tests.cluster.machine import COMPONENTS
from tests.controller.clusters import eventually
from tests.controller.control_planes import ControlPlane, control_plane, free_port

pytestmark = pytest.mark.timeout(300)
PATIENCE = 60.0
Object = dict[str, Any]


GATEWAYS: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "gateways.gateway.networking.k8s.io",
        # Without this the API server keeps such groups for their owners.
        "annotations": {"api-approved.kubernetes.io": "unapproved, a test's"},
    },
    "spec": {
        "group": "gateway.networking.k8s.io",
        "names": {"kind": "Gateway", "plural": "gateways"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


class Handler(BaseHTTPRequestHandler):
    """A pod's server: says which pod it is."""

    def do_GET(self) -> None:
        body = json.dumps({"pod": self.connection.getsockname()[0], "path": self.path}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass


@contextlib.contextmanager
def pod(port: int = 8888) -> Generator[str]:
    """A server in the place of a pod's; its address."""
    server = ThreadingHTTPServer((serving.address(), port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield str(server.server_address[0])
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()


class Stage:
    """A control plane, and a router with the rights that it ships."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.access = plane.folder / "access.yaml"
        self.key = self.make_key("somebody", "default", "space")
        found = yaml.safe_load(self.access.read_bytes())
        here = {"name": "tunnel", "addresses": ["127.0.0.1/32"], "namespaces": ["default"]}
        self.access.write_text(yaml.safe_dump({"principals": [*found["principals"], here]}))
        self.kubeconfig = plane.account(resources.SYSTEM_NAMESPACE, router_deployment.NAME)
        self.port = free_port()
        self.log = plane.folder / "router.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "k8e", "router"),
                    *("--access", str(self.access), "--kubeconfig", str(self.kubeconfig)),
                    *("--bind-address", f"127.0.0.1:{self.port}", "--hold-seconds", "20"),
                    *("--health-probe-bind-address", "0", "--pod-network", "127.64.0.0/10"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def make_key(self, name: str, *namespaces: str) -> str:
        flags = [part for item in namespaces for part in ("--namespace", item)]
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "k8e", "router-key", name, *flags),
                *("--access", str(self.access)),
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
        return done.stdout.strip()

    def ask(
        self, name: str, namespace: str = "default", path: str = "/", key: str = "", **more: str
    ) -> tuple[int, Object]:
        headers = {"Authorization": f"Bearer {key or self.key}", "X-Sandbox-ID": name, **more}
        headers["X-Sandbox-Namespace"] = namespace
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def wait_status(self, code: int, name: str, **more: Any) -> Object:
        """Ask until the answer has this status."""

        def look() -> tuple[Object] | None:
            found, body = self.ask(name, **more)
            return (body,) if found == code else None

        return eventually(f"{name}: {code}", look, seconds=PATIENCE)[0]

    # Objects.

    def add(self, name: str, namespace: str = "default", **annotations: str) -> None:
        marks = {f"sandbox.k8e.io/{key}": value for key, value in annotations.items()}
        spec = {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "a:1"}]}}}
        self.plane.apply(
            {
                "apiVersion": resources.CORE_VERSION,
                "kind": "Sandbox",
                "metadata": {"name": name, "namespace": namespace, "annotations": marks},
                "spec": spec,
            }
        )

    def report(self, name: str, *addresses: str, namespace: str = "default") -> None:
        """Set the status of a sandbox, as the controller does."""
        reason = "DependenciesReady" if addresses else "SandboxSuspended"
        ready = {
            "type": "Ready",
            "status": str(bool(addresses)),
            "reason": reason,
            "message": "",
            "lastTransitionTime": "2030-01-01T00:00:00Z",
        }
        status = {"status": {"podIPs": list(addresses) or None, "conditions": [ready]}}
        self.patch(name, status, "--subresource=status", namespace=namespace)

    def patch(self, name: str, change: Object, *flags: str, namespace: str = "default") -> None:
        self.plane.kubectl(
            *("patch", "sandbox", name, "-n", namespace, "--type=merge"),
            *("-p", json.dumps(change), *flags),
        )

    def get(self, name: str) -> Object:
        return json.loads(self.plane.kubectl("get", "sandbox", name, "-o", "json"))

    def may(self, verb: str, kind: str, *flags: str) -> bool:
        """Whether the router's account has a right, everywhere."""
        done = subprocess.run(
            [
                *(str(COMPONENTS / "bin/kubectl"), f"--kubeconfig={self.kubeconfig}"),
                *("auth", "can-i", verb, kind, "-A", *flags),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            env={"PATH": os.environ["PATH"], "HOME": str(self.plane.folder)},
        )
        answer = done.stdout.split()
        assert answer[:1] in (["yes"], ["no"]), done.stdout + done.stderr
        return answer[0] == "yes"


@pytest.fixture(scope="module")
def stage() -> Generator[Stage]:
    if os.geteuid() != 0:
        pytest.skip("the programs of a cluster are made for root")
    for name in ("etcd", "kube-apiserver", "kubectl"):
        if not (COMPONENTS / "bin" / name).exists():
            pytest.fail(f"{name} is missing: make components")
    with control_plane() as plane:
        plane.apply(*deployment.objects("core"), *router_deployment.objects())
        plane.apply(*definitions.extensions(), GATEWAYS)
        plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "space"}})
        plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
        made = Stage(plane)
        try:
            eventually("it listens", lambda: _listens(made.port), seconds=PATIENCE)
            made.wait_status(404, "nobody")
            yield made
        finally:
            made.process.terminate()
            try:
                assert made.process.wait(30) == 0, made.log.read_text()
            finally:
                made.process.kill()


def _listens(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    return False


def test_a_request_follows_its_sandbox_from_pod_to_pod(stage: Stage) -> None:
    with pod() as first, pod() as second:
        stage.add("moving")
        stage.wait_status(503, "moving")
        stage.report("moving", first)
        assert stage.wait_status(200, "moving", path="/a%2Fb?c") == {
            "pod": first,
            "path": "/a%2Fb?c",
        }
        stage.report("moving", second)
        eventually("the other pod", lambda: stage.ask("moving")[1]["pod"] == second)
        uid = stage.get("moving")["metadata"]["uid"]
        assert stage.ask("moving", **{"X-Sandbox-UID": uid})[0] == 200
        stage.plane.kubectl("delete", "sandbox", "moving")
        stage.wait_status(404, "moving")
        stage.add("moving")
        stage.report("moving", first)
        stage.wait_status(200, "moving")
        assert stage.ask("moving", **{"X-Sandbox-UID": uid})[0] == 404, "another of the same name"


def test_a_key_opens_its_own_namespaces(stage: Stage) -> None:
    with pod() as address:
        for namespace in ("default", "space", "other"):
            stage.add("same", namespace)
            stage.report("same", address, namespace=namespace)
        stage.wait_status(200, "same")
        stage.wait_status(200, "same", namespace="space")
        assert stage.ask("same", "other")[0] == 404
        other = stage.make_key("another", "other")
        stage.wait_status(200, "same", namespace="other", key=other)
        assert stage.ask("same", key=other)[0] == 404


def test_no_request_asks_the_api_server(stage: Stage) -> None:
    with pod() as address:
        stage.add("busy")
        stage.report("busy", address)
        stage.wait_status(200, "busy")
        before = _requests(stage)
        for _ in range(50):
            assert stage.ask("busy")[0] == 200
        assert _requests(stage) == before


def _requests(stage: Stage) -> int:
    """How many requests of the router's account the API server has had."""
    account = f"{resources.SYSTEM_NAMESPACE}:{router_deployment.NAME}"
    return sum(account in line["user"]["username"] for line in stage.plane.audit())


# Sandboxes that sleep.


def asleep(stage: Stage, name: str, *, by: str = "idle") -> None:
    stage.add(name, **{"idle-seconds": "20"})
    marks = {"sandbox.k8e.io/suspended-by": by} if by else {}
    change = {"metadata": {"annotations": marks}, "spec": {"operatingMode": "Suspended"}}
    stage.patch(name, change)
    stage.report(name)


def test_requests_wake_a_sandbox_that_sleeps_once_and_go_on(stage: Stage) -> None:
    with pod() as address, ThreadPoolExecutor(4) as threads:
        asleep(stage, "sleeper")
        waiting = [threads.submit(stage.wait_status, 200, "sleeper") for _ in range(4)]
        eventually(
            "it is resumed", lambda: stage.get("sleeper")["spec"]["operatingMode"] == "Running"
        )
        marks = stage.get("sleeper")["metadata"]["annotations"]
        assert "sandbox.k8e.io/suspended-by" not in marks
        assert marks["sandbox.k8e.io/last-active"]
        assert not any(one.done() for one in waiting), "they are held"
        stage.report("sleeper", address)
        assert {one.result(PATIENCE)["pod"] for one in waiting} == {address}
        woken = [line for line in stage.log.read_text().splitlines() if "woke" in line]
        assert len(woken) == 1


def test_what_a_person_suspended_stays_so(stage: Stage) -> None:
    asleep(stage, "resting", by="")
    stage.wait_status(409, "resting")
    assert stage.get("resting")["spec"]["operatingMode"] == "Suspended"


def test_the_use_of_a_sandbox_is_marked_and_not_each_request(stage: Stage) -> None:
    with pod() as address:
        stage.add("used", **{"idle-seconds": "20"})
        stage.report("used", address)
        stage.wait_status(200, "used")

        def mark() -> str | None:
            return stage.get("used")["metadata"]["annotations"].get("sandbox.k8e.io/last-active")

        eventually("it is marked", mark)
        before = _writes(stage, "used")
        for _ in range(20):
            assert stage.ask("used")[0] == 200
        assert _writes(stage, "used") - before <= 1
        eventually("it is marked again", lambda: _writes(stage, "used") > before)


def _writes(stage: Stage, name: str) -> int:
    account = f"{resources.SYSTEM_NAMESPACE}:{router_deployment.NAME}"
    return sum(
        account in line["user"]["username"] and line["objectRef"].get("name") == name
        for line in stage.plane.audit()
    )


# Rights.

FORBIDDEN: dict[str, tuple[Object, str]] = {
    "another image": (
        {"spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "evil:1"}]}}}},
        "no other field",
    ),
    "suspension": ({"spec": {"operatingMode": "Suspended"}}, "may only resume"),
    "an end": ({"spec": {"shutdownTime": "2020-01-01T00:00:00Z"}}, "no other field"),
    "another annotation": ({"metadata": {"annotations": {"a": "b"}}}, "annotations"),
    "who suspended it": (
        {"metadata": {"annotations": {"sandbox.k8e.io/suspended-by": "idle"}}},
        "annotations",
    ),
    "a label": ({"metadata": {"labels": {"a": "b"}}}, "labels"),
    "a finalizer": ({"metadata": {"finalizers": ["a/b"]}}, "finalizers"),
}


def test_the_routers_account_may_do_nothing_else(stage: Stage) -> None:
    stage.add("guarded")
    asleep(stage, "guarded-too", by="")

    def patch(name: str, change: Object, version: str = resources.VERSION) -> str:
        return asyncio.run(_patch(stage.kubeconfig, name, change, version))

    resumed = {"spec": {"operatingMode": "Running"}}
    assert "may only resume" in patch("guarded-too", resumed)
    for change, told in FORBIDDEN.values():
        assert told in patch("guarded", change)
    mark = {"metadata": {"annotations": {"sandbox.k8e.io/last-active": "2030-01-01T00:00:00Z"}}}
    assert patch("guarded", mark) == ""
    # v1alpha1 has no operatingMode: a write of it would lose that of a suspended sandbox.
    assert "only uses v1beta1" in patch("guarded-too", mark, "v1alpha1")
    assert stage.get("guarded-too")["spec"]["operatingMode"] == "Suspended"
    for verb in ("get", "create", "delete", "update"):
        assert not stage.may(verb, "sandboxes.agents.x-k8s.io")
    for kind in ("pods", "secrets"):
        assert not stage.may("patch", kind)
        assert not stage.may("list", kind)
    assert not stage.may("patch", "sandboxes.agents.x-k8s.io", "--subresource=status")
    assert stage.may("list", "sandboxes.agents.x-k8s.io")


async def _patch(kubeconfig: Path, name: str, change: Object, version: str) -> str:
    """Patch a sandbox as the router; why it is refused, if it is."""
    api = by_kubeconfig(kubeconfig)
    try:
        path = resources.path_of(resources.SANDBOX, ("default", name))
        path = path.replace(resources.VERSION, version)
        await api.call("PATCH", path, change, kind=MERGE)
    except ApiError as error:
        return str(error)
    finally:
        api.close()
    return ""


# Upstream's client, unmodified.

CONFIGS = """
from kubernetes import config as kubernetes_config
from k8s_agent_sandbox import AsyncSandboxClient, SandboxClient
from k8s_agent_sandbox.models import *

bearer = {"Authorization": f"Bearer {key}"}
configs = {
    "direct": SandboxDirectConnectionConfig(api_url=router, extra_headers=bearer),
    "tunnel": SandboxLocalTunnelConnectionConfig(),
    "gateway": SandboxGatewayConnectionConfig(gateway_name="way"),
    "in the cluster": SandboxInClusterConnectionConfig(),
}
"""
SYNC = """
api = kubernetes_config.new_client_from_config(kubeconfig)
with SandboxClient(configs[mode], api_client=api) as boxes:
    box = boxes.get_sandbox(claim)
    run = box.commands.run("echo out; echo err >&2; exit 3")
    box.files.write("data.bin", bytes(range(256)))
    result = [
        run.stdout, run.stderr, run.exit_code,
        box.files.read("data.bin") == bytes(range(256)),
        [entry.name for entry in box.files.list(".")],
        box.files.exists("none"),
    ]
    box.close_connection()
"""
ASYNC = """
import asyncio
from kubernetes_asyncio import config as async_config

async def main():
    api = await async_config.new_client_from_config(kubeconfig)
    async with AsyncSandboxClient(
        connection_config=configs[mode], cleanup=False, api_client=api
    ) as boxes:
        box = await boxes.get_sandbox(claim)
        run = await box.commands.run("echo out; echo err >&2; exit 3")
        await box.files.write("data.bin", bytes(range(256)))
        return [
            run.stdout, run.stderr, run.exit_code,
            await box.files.read("data.bin") == bytes(range(256)),
            [entry.name for entry in await box.files.list(".")],
            await box.files.exists("none"),
        ]

result = asyncio.run(main())
"""
MODES = [
    *((SYNC, mode) for mode in ("direct", "tunnel", "gateway", "in the cluster")),
    *((ASYNC, mode) for mode in ("direct", "gateway", "in the cluster")),
]


@pytest.fixture(scope="module")
def client(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Generator[Upstream]:
    """The client, and a sandbox of its own with a claim on it."""
    folder = tmp_path_factory.mktemp("pod")
    programs = tmp_path_factory.mktemp("bin")
    shim = programs / "kubectl"
    command = (sys.executable, str(KUBECTL), str(stage.port), str(COMPONENTS / "bin/kubectl"))
    shim.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
    shim.chmod(0o755)
    way = serving.address()
    carrying = subprocess.Popen(
        [sys.executable, "-P", "-c", CARRY, str(KUBECTL.parent), way, str(stage.port)]
    )
    try:
        with python_runtime.pod(folder) as address:
            stage.add("box")
            stage.report("box", address)
            stage.wait_status(200, "box", path="/exists/a")
            gateway(stage, "way", way)
            environ = {"PATH": f"{programs}:{os.environ['PATH']}"}
            names = {
                "router": f"http://127.0.0.1:{stage.port}",
                "key": stage.key,
                "kubeconfig": str(stage.plane.admin),
            }
            with upstream.started(environ, **names) as running:
                yield running
    finally:
        carrying.kill()
        carrying.wait(PATIENCE)


_claims = itertools.count(1)
KUBECTL = Path(__file__).parent / "kubectl.py"
CARRY = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
import kubectl
asyncio.run(kubectl.forward(80, int(sys.argv[3]), sys.argv[2]))
"""


def claim(stage: Stage, name: str, sandbox: str) -> None:
    """A claim that is bound, as the controller leaves it."""
    stage.plane.apply(
        {
            "apiVersion": resources.EXTENSIONS_VERSION,
            "kind": "SandboxClaim",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"warmPoolRef": {"name": "pool"}},
        }
    )
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "DependenciesReady",
        "message": "",
        "lastTransitionTime": "2030-01-01T00:00:00Z",
    }
    status = {"status": {"sandbox": {"name": sandbox}, "conditions": [ready]}}
    stage.plane.kubectl(
        *("patch", "sandboxclaim", name, "-n", "default", "--type=merge"),
        *("-p", json.dumps(status), "--subresource=status"),
    )


def gateway(stage: Stage, name: str, address: str) -> None:
    """A Gateway that has its address."""
    made = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": name, "namespace": "default"},
        "status": {"addresses": [{"type": "IPAddress", "value": address}]},
    }

    def served() -> bool:
        return "No resources" in stage.plane.kubectl("get", "gateways", check=False)

    eventually("gateways are served", served)
    stage.plane.apply(made)


@pytest.mark.parametrize(("code", "mode"), MODES)
def test_upstreams_client_works_in_each_of_its_ways(
    stage: Stage, client: Upstream, code: str, mode: str
) -> None:
    name = f"mine-{next(_claims)}"  # a client deletes the claims that it has used
    claim(stage, name, "box")
    found = client.run(CONFIGS + code, mode=mode, claim=name)
    assert found == ["out\n", "err\n", 3, True, ["data.bin"], False]


def test_the_program_has_no_sandbox_runtime_in_it() -> None:
    code = "import sys, k8e.agent_sandbox.cluster_router; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    loaded = set(done.stdout.split())
    for name in ("runtimes", "sessions", "gateway", "egress", "images", "link", "database"):
        assert f"k8e.{name}" not in loaded


def test_the_manifests_are_those_in_the_folder() -> None:
    file = Path("deploy/agent-sandbox/router.yaml")
    assert file.read_text("utf-8") == router_deployment.render()
