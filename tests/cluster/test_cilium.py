"""A server and an agent with Cilium: policies, names, and what a node's Cilium may not do.

Tests share the cluster, in the order of this file; those that cut and remove it come last.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from tests.cluster import traces
from tests.cluster.clusters import Cluster, eventually, pod, service
from tests.cluster.machine import COMPONENTS, Machine

pytestmark = pytest.mark.timeout(600)
CNI = "cilium"
SOURCES = ("plain-node-1", "gvisor-node-1", "plain-node-2", "gvisor-node-2")
TARGET = "web"
ALLOWED, OTHER = "203.0.113.10", "203.0.113.11"


@pytest.fixture(scope="module")
def before() -> dict[str, dict[str, set[str]]]:
    """The traces of each machine before anything was started on it."""
    return {}


@pytest.fixture(scope="module")
def cluster(before: dict[str, Any]) -> Generator[Cluster]:
    found = Cluster("--disable-sandbox-matrix", "--disable", "metrics-server", cni=CNI)
    try:
        before["node-1"] = snapshot(found.server)
        found.start()
        agent = found.add_machine()
        before["node-2"] = snapshot(agent)
        found.join(agent)
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Machine:
    return cluster.machines[1]


@pytest.fixture(scope="module")
def pods(cluster: Cluster) -> dict[str, str]:
    """A gVisor and a plain pod on each node, and a web server, with their addresses."""
    wanted = {
        name: pod(name, node=name.partition("-")[2], runtime=name.partition("-")[0])
        for name in SOURCES
    }
    for name, found in wanted.items():
        if name.startswith("plain"):
            del found["spec"]["runtimeClassName"]
    wanted[TARGET] = pod(TARGET, node="node-1")
    cluster.apply(*wanted.values(), service(TARGET))
    cluster.wait_for_pods(*wanted)
    rollout = ("rollout", "status", "-n", "kube-system", "deploy/coredns", "--timeout=180s")
    cluster.kubectl(*rollout, seconds=200)
    return {name: cluster.address(name) for name in wanted}


def snapshot(machine: Machine) -> dict[str, set[str]]:
    return traces.of_machine(lambda *command: machine.run(*command).stdout)


def policy(name: str, kind: str = "CiliumNetworkPolicy", **spec: Any) -> dict[str, Any]:
    version = "cilium.io/v2" if kind.startswith("Cilium") else "networking.k8s.io/v1"
    metadata = {"name": name} | ({} if "wide" in kind else {"namespace": "default"})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def reaches(cluster: Cluster, name: str, url: str) -> None:
    assert eventually(f"{name} reaches {url}", lambda: cluster.fetch(name, url))


def none_reaches(cluster: Cluster, *tries: tuple[str, str]) -> None:
    """That no pod reaches its URL. All try at once, for each tries for seconds."""
    eventually(f"none of {tries} reaches", lambda: not any(cluster.fetch_all(*tries)))


def test_pods_reach_each_other_by_address_service_and_name(
    cluster: Cluster, pods: dict[str, str]
) -> None:
    address = str(cluster.get("service", TARGET)["spec"]["clusterIP"])
    for name in SOURCES:
        for host in (f"{pods[TARGET]}:8080", address, f"{TARGET}.default.svc.cluster.local"):
            reaches(cluster, name, f"http://{host}/")


def test_without_the_sandbox_matrix_no_gateway_starts(cluster: Cluster) -> None:
    told = json.loads(cluster.server.k8e("status", check=False).stdout)
    assert told["running"] is False
    assert "gateway" not in [item["name"] for item in told["cluster"]["components"]]


def test_a_network_policy_admits_whom_it_names_on_every_node_and_runtime(
    cluster: Cluster, pods: dict[str, str]
) -> None:
    url = f"http://{pods[TARGET]}:8080/"
    admitted = {"podSelector": {"matchLabels": {"app": "gvisor-node-2"}}}
    wanted = policy(
        "admit-one",
        "NetworkPolicy",
        podSelector={"matchLabels": {"app": TARGET}},
        policyTypes=["Ingress"],
        ingress=[{"from": [admitted]}],
    )
    cluster.apply(wanted)
    others = ("plain-node-1", "gvisor-node-1", "plain-node-2")
    none_reaches(cluster, *((name, url) for name in others))
    reaches(cluster, "gvisor-node-2", url)
    cluster.kubectl("delete", "networkpolicy", "admit-one")
    reaches(cluster, "plain-node-2", url)


def test_a_pod_reaches_the_names_that_its_policy_allows_and_nothing_else(
    cluster: Cluster, pods: dict[str, str]
) -> None:
    names = {"app": "plain-node-1"}, {"app": "gvisor-node-2"}
    dns = {
        "toEndpoints": [
            {
                "matchLabels": {
                    "k8s:io.kubernetes.pod.namespace": "kube-system",
                    "k8s:k8s-app": "kube-dns",
                }
            }
        ],
        "toPorts": [
            {
                "ports": [{"port": "53", "protocol": "ANY"}],
                "rules": {"dns": [{"matchPattern": "*"}]},
            }
        ],
    }
    for labels in names:
        name = labels["app"]
        cluster.apply(
            policy(
                f"names-{name}",
                endpointSelector={"matchLabels": labels},
                egress=[dns, {"toFQDNs": [{"matchName": "allowed.example"}]}],
            )
        )
    for labels in names:
        reaches(cluster, labels["app"], "http://allowed.example/")
    refused = ("other.example", OTHER, f"{pods[TARGET]}:8080")
    none_reaches(cluster, *((item["app"], f"http://{host}/") for item in names for host in refused))
    reaches(cluster, "gvisor-node-1", f"http://{OTHER}/")  # which has no policy


def test_what_was_refused_is_seen_by_hubble(cluster: Cluster) -> None:
    program = str(COMPONENTS / "bin/hubble")

    def dropped() -> bool:
        cluster.fetch("plain-node-1", f"http://{OTHER}/")
        done = cluster.server.run(
            *(program, "observe", "--server", "unix:///var/run/cilium/hubble.sock"),
            *("--verdict", "DROPPED", "--last", "100", "-o", "json"),
            check=False,
        )
        rows = [json.loads(line)["flow"] for line in done.stdout.splitlines()]
        return any(
            row["IP"]["destination"] == OTHER and row["source"]["pod_name"] == "plain-node-1"
            for row in rows
            if "IP" in row and row.get("source", {}).get("pod_name")
        )

    eventually("a denial", dropped)


PORT = {"port": "80", "protocol": "TCP"}
ENVOY: dict[str, dict[str, Any]] = {
    "http": {"ports": [PORT], "rules": {"http": [{"method": "GET"}]}},
    "empty": {"ports": [PORT], "rules": {"http": [{}]}},
    "server-names": {"ports": [PORT], "serverNames": ["web.example"]},
    "listener": {"ports": [PORT], "listener": {"envoyConfig": {"name": "x"}, "name": "y"}},
}


@pytest.mark.parametrize("kind", list(ENVOY))
@pytest.mark.parametrize("place", ["egress", "ingress", "specs", "clusterwide"])
def test_rules_that_need_envoy_are_refused(cluster: Cluster, kind: str, place: str) -> None:
    rule = [{"toPorts": [ENVOY[kind]]}]
    wanted = policy("layer-7", endpointSelector={}, egress=rule)
    if place == "ingress":
        wanted = policy("layer-7", endpointSelector={}, ingress=rule)
    elif place == "clusterwide":
        wide = "CiliumClusterwideNetworkPolicy"
        wanted = policy("layer-7", wide, endpointSelector={}, egress=rule)
    elif place == "specs":
        plain: dict[str, Any] = {
            "endpointSelector": {},
            "egress": [{"toPorts": [{"ports": [PORT]}]}],
        }
        del wanted["spec"]
        wanted["specs"] = [plain, {"endpointSelector": {}, "egress": rule}]
    assert "need Envoy, which this cluster does not run" in cluster.try_to_apply(wanted)


def as_cilium(machine: Machine, *arguments: str) -> str:
    """What kubectl prints and complains about with the rights of a node's Cilium."""
    program = ("kubectl", "--kubeconfig", "/var/lib/k8e/agent/cilium.kubeconfig")
    done = machine.run(*program, "--request-timeout=30s", *arguments, check=False)
    return done.stdout + done.stderr


def test_a_nodes_cilium_may_do_no_more_than_it_needs(cluster: Cluster, agent: Machine) -> None:
    assert "node-1" in as_cilium(agent, "get", "ciliumnodes")
    for arguments in (
        ("get", "secrets", "-A"),
        ("get", "configmaps", "-A"),
        ("delete", "ciliumnetworkpolicy", "names-plain-node-1"),
        ("label", "node", "node-1", "stolen=true"),
        ("delete", "ciliumnode", "node-1"),
        ("create", "token", "default"),
    ):
        assert "forbidden" in as_cilium(agent, *arguments).lower(), arguments
    # Its role lets it update CiliumNodes; the admission policy only its own.
    for name, refused in (("node-1", True), ("node-2", False)):
        found = cluster.get("ciliumnode", name)
        found["metadata"].setdefault("annotations", {})["test"] = "x"
        file = agent.path("/tmp/ciliumnode.json")
        file.write_text(json.dumps(found), "utf-8")
        said = as_cilium(agent, "replace", "--dry-run=server", "-f", "/tmp/ciliumnode.json")
        assert ("may change its own CiliumNode alone" in said) is refused, said


def test_status_alarms_when_the_network_of_a_pod_is_not_ready(cluster: Cluster) -> None:
    def alarms() -> list[str]:
        done = cluster.server.k8e("status", check=False)
        return [
            alarm
            for alarm in json.loads(done.stdout)["cluster"]["alarms"]
            if "default/web" in alarm
        ]

    eventually("all is well", lambda: not alarms())
    patch = json.dumps({"status": {"state": "not-ready"}})
    cluster.kubectl("patch", "ciliumendpoint", TARGET, "--type=merge", "-p", patch)
    assert "is 'not-ready', not ready: its policies may not be in force" in alarms()[0]


def test_policies_hold_while_cilium_is_killed_and_after(cluster: Cluster) -> None:
    server = cluster.server
    pid = server.run("pgrep", "-x", "cilium-agent").stdout.split()[0]
    server.run("kill", "-9", pid)
    assert not cluster.fetch("plain-node-1", f"http://{OTHER}/")
    reaches(cluster, "plain-node-1", "http://allowed.example/")
    assert server.run("pgrep", "-x", "cilium-agent").stdout.split()[0] != pid
    assert not cluster.fetch("plain-node-1", f"http://{OTHER}/")


def test_a_node_that_was_cut_off_comes_back_with_its_pods(
    cluster: Cluster, agent: Machine, pods: dict[str, str]
) -> None:
    wait = ("wait", "node/node-2", "--timeout=180s")
    agent.cut_off()
    cluster.kubectl(*wait, "--for=condition=Ready=unknown", seconds=200)
    assert agent.run("pgrep", "-f", "httpd -f -p 8080", check=False).returncode == 0
    agent.reconnect()
    cluster.kubectl(*wait, "--for=condition=Ready", seconds=200)
    reaches(cluster, "plain-node-2", f"http://{pods[TARGET]}:8080/")


@pytest.mark.parametrize(("number", "role"), [(1, "agent"), (0, "server")])
def test_uninstalling_leaves_nothing(
    cluster: Cluster, before: dict[str, dict[str, set[str]]], number: int, role: str
) -> None:
    machine = cluster.machines[number]
    machine.k8e(role, "uninstall", seconds=200)
    left = traces.left(before[machine.name], snapshot(machine))
    assert not left, "\n".join(left)
