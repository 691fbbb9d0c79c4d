"""Sandboxes as pods of a real cluster: gVisor, Cilium, agent-sandbox's controller, and a gateway.

The gateway runs on the node, with a kubeconfig. Tests share it, in the order of this file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8e.controller import deployment, resources
from k8e.guest.pod import POD_PORT
from k8e.runtimes.kubernetes import objects
from tests.cluster import sandbox_image
from tests.cluster.clusters import Cluster, eventually
from tests.cluster.machine import COMPONENTS, end

pytestmark = pytest.mark.timeout(900)
CNI = "cilium"
NAMESPACE = "sandbox-matrix"
HOWTO = Path(__file__).parent.parent.parent / "docs/howto/kubernetes.md"
KUBECONFIG = "/etc/k8e/k8e.yaml"
GATEWAY = {
    "K8E_DATA_DIR": "/var/lib/pods-gateway",
    "K8E_RUN_DIR": "/run/pods-gateway",
    "K8E_SANDBOX_IMAGE": sandbox_image.REFERENCE,
    "K8E_LISTEN": "none",
    "K8E_POOL_MIN": "0",
    "K8E_POOL_MAX": "0",
}
GROUPS = ("exec", "output", "files", "life", "limits.memory", "limits.pids", "limits.cpu")
RIGHTS = """
grep -E '^(Cap|Groups|NoNewPrivs)' /proc/self/status
for path in /run/k8e/identity/token /var/run/secrets/kubernetes.io/serviceaccount/token; do
  cat $path 2>/dev/null && echo readable $path
done
cat /etc/ld.so.preload
env | grep -E '^(LD_|OPENSSL)'
for path in / /etc /usr /run/k8e/guest /run/k8e/python; do
  touch $path/x 2>/dev/null && echo writable $path
done
true
"""
CONNECT = """
import socket
for host, port in {targets}:
    made = socket.socket()
    made.settimeout(3)
    print(made.connect_ex((host, port)) == 0)
try:
    socket.getaddrinfo("kubernetes.default.svc.cluster.local", 443)
    print(True)
except OSError:
    print(False)
"""


class Pods:
    """A cluster whose sandboxes are pods, and a gateway of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.environ = {**GATEWAY, "K8E_KUBECONFIG": KUBECONFIG}
        self._controller: subprocess.Popen[str] | None = None

    def install(self) -> None:
        """What a user does once, by the how-to pages."""
        server = self.cluster.server
        for part in ("core", "extensions"):
            text = server.path(f"/tmp/{part}.yaml")
            text.write_text(deployment.render(part), "utf-8")
            flags = ("--server-side", "--force-conflicts", "-f", f"/tmp/{part}.yaml")
            self.cluster.kubectl("apply", *flags)
        name = f"deployment/{resources.CONTROLLER}"
        self.cluster.kubectl("scale", "-n", resources.SYSTEM_NAMESPACE, name, "--replicas=0")
        command = (sys.executable, "-P", "-m", "k8e", "controller", "--kubeconfig", KUBECONFIG)
        self._controller = server.start(*command)
        made = sandbox_image.write(server.path("/tmp/image"))
        archive = f"/tmp/image/images/{made.name}"
        containerd = ("--address", "/run/k8e/containerd/containerd.sock", "-n", "k8s.io")
        server.run(str(COMPONENTS / "bin/ctr"), *containerd, "images", "import", archive)
        guest = "k8e.internal/guest"
        listing = (str(COMPONENTS / "bin/ctr"), *containerd, "images", "ls", "-q")
        eventually("the node has the guest's image", lambda: guest in server.run(*listing).stdout)

    def close(self) -> None:
        self.k8e("gateway", "stop", check=False)
        if self._controller is not None:
            end(self._controller)

    def k8e(self, *arguments: str, check: bool = True, **environ: str) -> Any:
        return self.cluster.server.k8e(
            *arguments, check=check, seconds=300, **{**self.environ, **environ}
        )

    def run(self, code: str, *flags: str, language: str = "bash", check: bool = True) -> str:
        """What code prints in the standing session."""
        done = self.k8e("sandbox", "run", "--raw", "--lang", language, *flags, code, check=check)
        return done.stdout

    def sessions(self) -> list[dict[str, Any]]:
        return json.loads(self.k8e("sandbox", "sessions").stdout)["sessions"]

    def claims(self) -> list[str]:
        found = self.cluster.get("sandboxclaims", "-n", NAMESPACE)["items"]
        return [item["metadata"]["name"] for item in found]

    def pods(self) -> list[dict[str, Any]]:
        return self.cluster.get("pods", "-n", NAMESPACE)["items"]


@pytest.fixture(scope="module")
def pods() -> Generator[Pods]:
    cluster = Cluster(cni=CNI)
    try:
        cluster.start()
        found = Pods(cluster)
        try:
            found.install()
            yield found
        finally:
            found.close()
    finally:
        cluster.close()


def test_an_account_with_the_rights_of_the_how_to_is_enough(pods: Pods) -> None:
    listed = re.search(
        r"```yaml\n# Role\n(.*?)# ClusterRole\n(.*?)```", HOWTO.read_text(), re.DOTALL
    )
    assert listed is not None
    rules, cluster_rules = (yaml.safe_load(text) for text in listed.groups())
    rbac, name = "rbac.authorization.k8s.io", "k8e-gateway"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}
    placed = {"name": name, "namespace": NAMESPACE}

    def bound(kind: str, metadata: dict[str, str]) -> dict[str, Any]:
        role = {"apiGroup": rbac, "kind": kind, "name": name}
        made = {"apiVersion": f"{rbac}/v1", "kind": f"{kind}Binding", "metadata": metadata}
        return {**made, "roleRef": role, "subjects": [subject]}

    pods.cluster.apply(objects.new_namespace(NAMESPACE))
    pods.cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": placed},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": placed, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name},
            "rules": cluster_rules,
        },
        bound("Role", placed),
        bound("ClusterRole", {"name": name}),
    )
    server = pods.cluster.server
    token = pods.cluster.kubectl("create", "token", name, "-n", NAMESPACE, "--duration=2h")
    config = yaml.safe_load(server.path(KUBECONFIG).read_bytes())
    config["users"][0]["user"] = {"token": token.strip()}
    server.path("/tmp/gateway.yaml").write_text(yaml.safe_dump(config), "utf-8")
    pods.environ["K8E_KUBECONFIG"] = "/tmp/gateway.yaml"
    told = json.loads(pods.k8e("doctor", "--json", check=False).stdout)
    found = {item["runtime"]: item for item in told["runtimes"]}
    assert found["gvisor"]["usable"], found
    assert [item["usable"] for item in found["gvisor"]["features"]] == [True]


def test_code_runs_in_a_pod_of_gvisor_with_its_own_exit_code(pods: Pods) -> None:
    assert pods.run("print(6 * 7)", language="python") == "42\n"
    done = pods.k8e("sandbox", "run", "--raw", "--lang", "bash", "uname -r; exit 7", check=False)
    assert (done.returncode, "gvisor" in done.stdout) == (7, True)
    (made,) = pods.pods()
    assert made["spec"]["runtimeClassName"] == "gvisor"


def test_a_class_that_the_cluster_lacks_is_an_error_and_no_weaker_sandbox(pods: Pods) -> None:
    done = pods.k8e(
        *("sandbox", "run", "--tenant", "other", "--runtime", "kata", "--lang", "bash", "true"),
        check=False,
    )
    assert "has no RuntimeClass 'kata'; there is: gvisor" in done.stdout
    assert len(pods.pods()) == 1


def test_programs_have_no_rights_and_see_no_token(pods: Pods) -> None:
    told = dict(line.split(":") for line in pods.run(RIGHTS).splitlines())
    assert "CapBnd" in told, told
    assert {name: value.strip() for name, value in told.items() if name != "CapBnd"} == {
        "Groups": "",
        "NoNewPrivs": "1",
        **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapAmb"), "0" * 16),
    }, "nothing else was printed: nothing could be read or written"
    (made,) = pods.pods()
    flags = ("exec", "-n", NAMESPACE, made["metadata"]["name"], "-c", objects.CONTAINER, "--")
    guests = pods.cluster.kubectl(*flags, "sh", "-c", "grep CapEff /proc/1/status")
    assert guests.split() == ["CapEff:", "00000000000000e3"], "the five of the guest"


def test_a_sandbox_reaches_nobody_and_only_gateways_reach_it(pods: Pods) -> None:
    address = pods.pods()[0]["status"]["podIP"]
    pods.cluster.pod("neighbour")
    neighbour = pods.cluster.address("neighbour")
    service = pods.cluster.get("service", "kubernetes")["spec"]["clusterIP"]
    targets = [(service, 443), (neighbour, 8080), (pods.cluster.server.address, 6443)]
    said = pods.run(CONNECT.format(targets=targets), language="python")
    assert said.split() == ["False"] * 4
    told = pods.cluster.shell("neighbour", f"nc -w 3 {address} {POD_PORT} </dev/null && echo in; :")
    assert told == ""


def test_a_gateway_that_is_started_again_finds_its_sandboxes(pods: Pods) -> None:
    pods.run("echo kept > note; (sleep 300 &)")
    pods.k8e("gateway", "stop")
    assert pods.run("cat note; ps x | grep -c '[s]leep 300'") == "kept\n1\n"
    assert len(pods.pods()) == 1


def test_a_pod_that_is_deleted_ends_its_session_and_says_so(pods: Pods) -> None:
    before = pods.sessions()[0]["session_id"]
    name = pods.pods()[0]["metadata"]["name"]
    pods.cluster.kubectl("delete", "pod", "-n", NAMESPACE, name, "--wait=false")
    eventually("the session ends", lambda: not pods.sessions())
    again = ("sandbox", "run", "--session-id", before, "--lang", "bash", "true")
    done = pods.k8e(*again, check=False)
    assert "its pod was deleted" in done.stdout + done.stderr, done
    eventually("the claim goes", lambda: not pods.claims())


def test_what_is_destroyed_leaves_neither_claim_nor_pod(pods: Pods) -> None:
    pods.run("true", "--tenant", "short")
    (session,) = pods.sessions()
    pods.k8e("sandbox", "destroy", session["session_id"])
    assert (pods.claims(), pods.pods()) == ([], [])


def test_a_session_from_the_pool_is_in_a_pod_that_was_there_before(pods: Pods) -> None:
    pods.k8e("pool", "set", "--min", "1", "--max", "1", "--wait")
    (waiting,) = pods.pods()
    pods.run("echo pooled > note")
    flags = ("exec", "-n", NAMESPACE, waiting["metadata"]["name"], "-c", objects.CONTAINER, "--")
    assert pods.cluster.kubectl(*flags, "cat", "/workspace/note") == "pooled\n"
    pods.k8e("pool", "set", "--min", "0", "--max", "0")
    pods.k8e("sandbox", "destroy", pods.sessions()[0]["session_id"])
    eventually("all pods go", lambda: not pods.pods())


def test_pods_keep_the_promises_of_local_sandboxes(pods: Pods) -> None:
    asked = [word for group in GROUPS for word in ("--only", group)]
    done = pods.k8e("conformance", "run", "--json", "--runtime", "kubernetes", *asked, check=False)
    told = json.loads(done.stdout)
    failed = [(row["id"], row["reason"]) for row in told["results"] if row["verdict"] == "fail"]
    assert not failed
    assert told["passed"] > 55
