"""Sandboxes of the controller on a real node, with gVisor, kubelet, scheduler and volumes.

What needs no kubelet is shown by ``tests/controller``, against the API server alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

from k8e.controller import deployment, environment, resources
from tests.cluster.clusters import BUSYBOX, Cluster, eventually, pod
from tests.cluster.machine import COMPONENTS, Machine, end

pytestmark = pytest.mark.timeout(600)
CNI = "basic"
DEFINITION = "CustomResourceDefinition"
READY = ("wait", "--for=condition=Ready", "--timeout=180s")
VOLUME = {
    "metadata": {"name": "work"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "16Mi"}}},
}


@pytest.fixture(scope="module")
def cluster() -> Generator[Cluster]:
    found = Cluster(cni=CNI)
    controller: subprocess.Popen[str] | None = None
    try:
        found.start()
        wanted = (*deployment.objects("core"), *deployment.objects("extensions"))
        found.apply(*(item for item in wanted if item["kind"] != "Deployment"))
        kinds = (item["metadata"]["name"] for item in wanted if item["kind"] == DEFINITION)
        found.kubectl(
            *("wait", "--for=condition=Established", "--timeout=60s"),
            *(f"crd/{name}" for name in kinds),
        )
        # The command itself, not a pod: no image of it has to be made for this.
        controller = found.server.start(
            *(sys.executable, "-P", "-m", "k8e", "controller"),
            *("--kubeconfig", "/etc/k8e/k8e.yaml", "--leader-elect=false"),
            *("--metrics-bind-address", "0", "--health-probe-bind-address", "0"),
        )
        yield found
    finally:
        if controller is not None:
            end(controller)
        found.close()


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Machine:
    return cluster.server


def pod_spec(name: str, **spec: Any) -> dict[str, Any]:
    """A pod that says a word to its log and serves its name, on gVisor."""
    made = pod(name, runtime="gvisor", **spec)["spec"]
    [container] = made["containers"]
    container["command"][2] = f"echo {name} speaks; {container['command'][2]}"
    container["ports"] = [{"containerPort": 8080}]
    return made


def sandbox(name: str, spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": resources.CORE_VERSION,
        "kind": resources.SANDBOX,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"podTemplate": {"spec": spec}, **more},
    }


def extension(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": resources.EXTENSIONS_VERSION, "kind": kind, "metadata": metadata} | {
        "spec": spec
    }


def test_kubectl_works_on_a_sandbox_on_gvisor(cluster: Cluster, server: Machine) -> None:
    cluster.apply(sandbox("one", pod_spec("one"), service=True))
    cluster.kubectl(*READY, "sandbox/one", seconds=200)
    assert "gVisor" in cluster.shell("one", "dmesg | head -1")
    assert cluster.kubectl("exec", "one", "--", "hostname").strip() == "one"
    assert "one speaks" in cluster.kubectl("logs", "one")
    listed = cluster.kubectl("get", "sandbox", "one").splitlines()[1].split()
    assert listed[:3] == ["one", "True", "DependenciesReady"]
    described = cluster.kubectl("describe", "sandbox", "one")
    assert "Pod is Ready; Service Exists" in described
    assert "Container started" in cluster.kubectl("describe", "pod", "one")
    assert cluster.fetch("one", "http://one.default.svc.cluster.local:8080/") == "one"


def test_port_forward_reaches_runc_and_not_gvisor_which_has_a_network_of_its_own(
    cluster: Cluster, server: Machine
) -> None:
    plain = pod_spec("plain")
    del plain["runtimeClassName"]
    cluster.apply(sandbox("plain", plain))
    cluster.kubectl(*READY, "sandbox/plain", "sandbox/one", seconds=200)
    program = str(COMPONENTS / "bin/kubectl")
    answers: dict[str, str] = {}
    for name, port in (("plain", "18080"), ("one", "18081")):
        forward = server.start(
            *(program, "port-forward", f"pod/{name}", f"{port}:8080"),
            KUBECONFIG="/etc/k8e/k8e.yaml",
        )
        try:
            assert forward.stdout is not None
            assert "Forwarding" in forward.stdout.readline()
            url = f"http://127.0.0.1:{port}/index.html"
            answers[name] = server.run("curl", "-s", "-m", "10", url, check=False).stdout.strip()
        finally:
            end(forward)
    # The runtime connects inside of the pod's network namespace, where gVisor does not listen.
    # The router, and the pod's address, reach both: docs/reference/agent-sandbox.md says so.
    assert answers == {"plain": "plain", "one": ""}
    cluster.kubectl("delete", "sandbox", "plain")


def test_a_sandbox_that_was_suspended_finds_its_files_again(cluster: Cluster) -> None:
    mount = {"name": "work", "mountPath": "/kept"}
    spec = pod_spec("files")
    spec["containers"][0]["volumeMounts"] = [mount]
    cluster.apply(sandbox("files", spec, volumeClaimTemplates=[VOLUME]))
    cluster.kubectl(*READY, "sandbox/files", seconds=200)
    cluster.shell("files", "echo kept > /kept/note && sync")
    patch = ("patch", "sandbox", "files", "--type=merge", "-p")
    cluster.kubectl(*patch, '{"spec":{"operatingMode":"Suspended"}}')
    cluster.kubectl(
        "wait", "--for=condition=Suspended", "--timeout=60s", "sandbox/files", seconds=90
    )
    cluster.kubectl(*patch, '{"spec":{"operatingMode":"Running"}}')
    cluster.kubectl(*READY, "sandbox/files", seconds=200)
    assert cluster.shell("files", "cat /kept/note").strip() == "kept"


def test_a_claim_is_given_a_pod_that_runs_on_gvisor_already(cluster: Cluster) -> None:
    cluster.apply(
        extension(
            resources.TEMPLATE,
            "warm",
            podTemplate={"spec": pod_spec("warm")},
            networkPolicyManagement="Unmanaged",
        ),
        extension(resources.POOL, "warm", replicas=2, sandboxTemplateRef={"name": "warm"}),
    )
    cluster.kubectl(
        *("wait", "--for=jsonpath={.status.readyReplicas}=2", "--timeout=180s", "swp/warm"),
        seconds=200,
    )
    pods = {one["metadata"]["uid"] for one in cluster.get("pods")["items"]}
    cluster.apply(extension(resources.CLAIM, "mine", warmPoolRef={"name": "warm"}))
    cluster.kubectl(*READY, "sandboxclaim/mine", seconds=200)
    name = cluster.get("sandboxclaim", "mine")["status"]["sandbox"]["name"]
    assert cluster.get("pod", name)["metadata"]["uid"] in pods
    assert "gVisor" in cluster.shell(name, "dmesg | head -1")
    cluster.kubectl("delete", "sandboxclaim,swp,sandboxtemplate", "--all")


def test_variables_of_a_claim_reach_a_sandbox_that_runs_already(cluster: Cluster) -> None:
    late = extension(
        resources.TEMPLATE,
        "late",
        podTemplate={"spec": pod_spec("late")},
        networkPolicyManagement="Unmanaged",
        envVarsInjectionPolicy="Allowed",
    )
    late["metadata"]["annotations"] = {environment.LATE_ENV: "true"}
    holder = extension(resources.POOL, "late", replicas=1, sandboxTemplateRef={"name": "late"})
    cluster.apply(late, holder)
    cluster.kubectl(
        *("wait", "--for=jsonpath={.status.readyReplicas}=1", "--timeout=180s", "swp/late"),
        seconds=200,
    )
    env = [{"name": "TOKEN", "value": "late but there"}]
    cluster.apply(extension(resources.CLAIM, "bound", warmPoolRef={"name": "late"}, env=env))
    cluster.kubectl(*READY, "sandboxclaim/bound", seconds=200)
    name = cluster.get("sandboxclaim", "bound")["status"]["sandbox"]["name"]
    assert name.startswith("late-"), "a warm one"
    # The kubelet writes the file a moment later; a program that needs it waits for it.
    file = f"{environment.FOLDER}/{environment.FILE}"
    said = cluster.shell(
        name,
        f"for _ in $(seq 200); do grep -q TOKEN {file} && break; sleep 0.1; done; "
        f'. {file}; echo "$TOKEN"',
    )
    assert said.splitlines()[-1] == "late but there"
    cluster.kubectl("delete", "sandboxclaim,swp,sandboxtemplate", "--all")


def test_a_pod_that_cannot_start_says_why(cluster: Cluster) -> None:
    missing = pod_spec("imageless")
    missing["containers"][0]["image"] = "k8e.internal/none:1"
    huge = pod_spec("huge")
    huge["containers"][0]["resources"] = {"requests": {"memory": "900Ti"}}
    cluster.apply(sandbox("imageless", missing), sandbox("huge", huge))
    for name, why in (("imageless", "cannot be pulled"), ("huge", "Insufficient memory")):
        said = eventually(
            f"{name} says why",
            lambda name=name, why=why: next(
                (
                    one
                    for one in cluster.get("sandbox", name).get("status", {}).get("conditions", [])
                    if one["type"] == "Ready" and why in one["message"]
                ),
                None,
            ),
        )
        assert said is not None
        assert said["reason"] == "DependenciesNotReady"
    cluster.kubectl("delete", "sandbox", "imageless", "huge")


def test_a_sandbox_comes_back_after_its_node_was_drained(cluster: Cluster) -> None:
    cluster.kubectl(*READY, "sandbox/one", seconds=200)
    before = cluster.get("pod", "one")["metadata"]["uid"]
    only = f"--pod-selector={resources.NAME_HASH}"
    cluster.kubectl("drain", "node-1", only, "--timeout=90s", seconds=120)
    eventually(
        "it waits for a node",
        lambda: (
            "Unschedulable"
            in str(
                next(
                    one["message"]
                    for one in cluster.get("sandbox", "one")["status"]["conditions"]
                    if one["type"] == "Ready"
                )
            )
        ),
    )
    cluster.kubectl("uncordon", "node-1")
    cluster.kubectl(*READY, "sandbox/one", seconds=200)
    assert cluster.get("pod", "one")["metadata"]["uid"] != before
    assert BUSYBOX in str(cluster.get("pod", "one")["spec"])
