"""A server and an agent with the basic network: everything that does not depend on policies.

Tests share the cluster, in the order of this file; those that stop and remove it come last.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator
from typing import Any

import pytest
from cryptography import x509

from tests.cluster import traces
from tests.cluster.clusters import Cluster, eventually, pod, service
from tests.cluster.machine import COMPONENTS, Machine, end

pytestmark = pytest.mark.timeout(600)
CNI = "basic"
GIVEN = "given0.0123456789abcdef"
SECRET = "no-such-word-stands-in-the-database"
PUBLIC = "this-word-stands-in-the-database"
OWN_NETWORK = {
    "cniVersion": "1.0.0",
    "name": "own",
    "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.9.0.0/24"}}],
}
CURL = "curl -sk -m 20 -o /dev/null -w %{http_code}"


@pytest.fixture(scope="module")
def before() -> dict[str, dict[str, set[str]]]:
    """The traces of each machine before anything was started on it."""
    return {}


@pytest.fixture(scope="module")
def cluster(before: dict[str, Any]) -> Generator[Cluster]:
    found = Cluster(cni=CNI)
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
def server(cluster: Cluster) -> Machine:
    return cluster.server


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Machine:
    return cluster.machines[1]


@pytest.fixture(scope="module")
def pods(cluster: Cluster) -> dict[str, str]:
    """A gVisor and a plain pod on each node, with their addresses."""
    wanted = {
        f"{kind}-{node}": pod(f"{kind}-{node}", node=node, runtime=runtime)
        for kind, runtime in (("gvisor", "gvisor"), ("plain", ""))
        for node in ("node-1", "node-2")
    }
    cluster.apply(*wanted.values(), service("plain-node-2"))
    cluster.wait_for_pods(*wanted)
    return {name: cluster.address(name) for name in wanted}


def snapshot(machine: Machine) -> dict[str, set[str]]:
    return traces.of_machine(lambda *command: machine.run(*command).stdout)


def status(machine: Machine) -> dict[str, Any]:
    return json.loads(machine.k8e("status", check=False).stdout)["cluster"]


def containers(machine: Machine) -> set[str]:
    """The ids of all containers of pods."""
    socket = "/run/k8e/containerd/containerd.sock"
    done = machine.run("ctr", "--address", socket, "-n", "k8s.io", "containers", "ls", "-q")
    return set(done.stdout.split())


def refusal(machine: Machine, *arguments: str) -> str:
    """The error and advice of a command that must fail."""
    done = machine.k8e(*arguments, "--detach", check=False)
    assert done.returncode == 1, (done.stdout, done.stderr)
    told = json.loads(done.stdout)
    assert told["detail"], "an error says what to do next"
    return f"{told['error']} | {told['detail']}"


# Pods and their network.


def test_pods_run_on_gvisor_and_on_runc_on_every_node(
    cluster: Cluster, pods: dict[str, str]
) -> None:
    for name in pods:
        kernel = cluster.shell(name, "dmesg 2>/dev/null | head -1; true", check=False)
        assert ("gVisor" in kernel) is name.startswith("gvisor"), (name, kernel)


def test_pods_reach_each_other_by_address_service_and_name(
    cluster: Cluster, pods: dict[str, str]
) -> None:
    cluster.kubectl(
        *("rollout", "status", "-n", "kube-system", "deploy/coredns", "--timeout=180s"), seconds=200
    )
    target = "plain-node-2"
    address = str(cluster.get("service", target)["spec"]["clusterIP"])
    for name in ("gvisor-node-1", "plain-node-1", "gvisor-node-2"):
        for url in (f"{pods[target]}:8080", address, f"{target}.default.svc.cluster.local"):
            found = eventually(url, lambda n=name, u=url: cluster.fetch(n, f"http://{u}/"))
            assert found == target


def test_each_runtime_that_was_found_has_a_class_and_no_other(
    cluster: Cluster, server: Machine
) -> None:
    config = server.path("/var/lib/k8e/agent/etc/containerd/config.toml").read_text("utf-8")
    handlers = set(re.findall(r"runtimes\.([a-z-]+)\]", config)) - {"runc"}
    classes = {
        item["metadata"]["name"]: item["handler"] for item in cluster.get("runtimeclass")["items"]
    }
    assert classes == {"gvisor": "runsc"}
    assert handlers == set(classes.values())


def test_volumes_work(cluster: Cluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "disk", "namespace": "default"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "10Mi"}},
        },
    }
    volume = {"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}}
    user = pod("disk-user", volumes=[volume])
    user["spec"]["containers"][0]["volumeMounts"] = [{"name": "disk", "mountPath": "/disk"}]
    cluster.apply(claim, user)
    cluster.wait_for_pods("disk-user")
    cluster.shell("disk-user", "echo kept > /disk/file")
    cluster.kubectl("delete", "pod/disk-user", "pvc/disk", "--timeout=60s", seconds=90)


# What K8E's documents promise.


def test_a_start_tells_each_step_with_its_time(cluster: Cluster) -> None:
    steps = re.findall(r"^k8e: \[ *[\d.]+ s\] (.+)$", cluster.said, re.MULTILINE)
    told = [
        *("runtime gvisor: found", "etcd, API server and containerd start", "API server is ready"),
        *("kubelet starts", "node node-1 is ready", "the gateway starts"),
    ]
    places = [next(i for i, step in enumerate(steps) if step.startswith(what)) for what in told]
    assert places == sorted(places), cluster.said


def test_files_are_where_they_are_documented_and_for_root_alone(server: Machine) -> None:
    for path in (
        "/etc/k8e/k8e.yaml",
        "/var/lib/k8e/server/node-token",
        "/var/lib/k8e/server/tls/server-ca.key",
        "/var/lib/k8e/server/tls/service-account.key",
        "/var/lib/k8e/server/etc/encryption.yaml",
        "/var/lib/k8e/agent/etc/containerd/config.toml",
        "/var/lib/k8e/agent/kubelet.kubeconfig",
        "/var/lib/k8e/logs/audit.log",
    ):
        assert server.path(path).stat().st_mode & 0o777 == 0o600, path
    assert server.path("/var/lib/k8e/server/skills/k8e-sandbox-skill/SKILL.md").exists()
    token = server.path("/var/lib/k8e/server/node-token").read_text("ascii")
    assert re.fullmatch(r"K10[0-9a-f]{64}::[a-z0-9]{6}\.[a-z0-9]{16}\n", token)


def test_kubectl_and_ctr_work_without_a_word_of_where_the_cluster_is(server: Machine) -> None:
    assert "node-2" in server.run("/usr/local/bin/kubectl", "get", "nodes").stdout
    assert "busybox" in server.run("ctr", "-n", "k8s.io", "images", "ls").stdout


def test_status_shows_the_gateway_beside_the_cluster(server: Machine) -> None:
    found = eventually("it runs", lambda: _running(server))
    assert found["cluster"]["cni"] == CNI
    assert [node["name"] for node in found["cluster"]["nodes"]] == ["node-1", "node-2"]
    assert "enforces no NetworkPolicy" in found["cluster"]["warning"]


def _running(server: Machine) -> dict[str, Any]:
    found = json.loads(server.k8e("status", check=False).stdout)
    return found if found["running"] else {}


def test_the_gateway_serves_sandboxes_with_its_state_below_the_servers(server: Machine) -> None:
    def run() -> dict[str, Any]:
        done = server.k8e("sandbox", "run", "echo hello", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    assert eventually("a sandbox", run)["stdout"] == "hello\n"
    assert server.path("/var/lib/k8e/gateway/sessions.db").exists()
    assert not server.path("/var/lib/k8e/sessions.db").exists()


# Safe by default.


def test_secrets_are_encrypted_in_the_database(cluster: Cluster, server: Machine) -> None:
    metadata = {"name": "word", "namespace": "default"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"w": SECRET}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"w": PUBLIC}},
    )
    folder = server.path("/var/lib/k8e/server/db/etcd")
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert PUBLIC.encode() in content, "the test looks where data is"
    assert SECRET.encode() not in content


def test_callers_without_a_name_are_refused(server: Machine) -> None:
    for port, path in ((6443, "/version"), (6443, "/healthz"), (10250, "/pods")):
        url = f"https://{server.address}:{port}{path}"
        assert server.run(*CURL.split(), url).stdout == "401", url


def test_changes_are_in_the_audit_log_without_their_content(
    cluster: Cluster, server: Machine
) -> None:
    cluster.kubectl("delete", "configmap", "word")
    log = server.path("/var/lib/k8e/logs/audit.log")
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    wanted = {("delete", "configmaps", "word"), ("create", "secrets", "word")}
    found = {
        (row["verb"], row["objectRef"].get("resource"), row["objectRef"].get("name"))
        for row in rows
        if "objectRef" in row
    }
    assert "system:admin" in {row["user"]["username"] for row in rows}
    assert wanted - found in (set(), {("create", "secrets", "word")})
    assert SECRET not in log.read_text("utf-8")


def test_pods_that_could_take_over_their_node_are_refused(cluster: Cluster) -> None:
    strong = pod("strong", hostPID=True)
    assert 'violates PodSecurity "baseline' in cluster.try_to_apply(strong)


# Nodes and tokens.


def as_node(machine: Machine, *arguments: str) -> str:
    """What kubectl prints and complains about with the rights of a node."""
    program = ("kubectl", "--kubeconfig", "/var/lib/k8e/agent/kubelet.kubeconfig")
    done = machine.run(*program, "--request-timeout=30s", *arguments, check=False)
    return done.stdout + done.stderr


def test_a_node_may_do_no_more_than_a_node(agent: Machine) -> None:
    assert "node-2" in as_node(agent, "get", "node", "node-2")
    for arguments in (
        ("get", "secrets", "-A"),
        ("get", "node", "node-1"),
        ("get", "secret", "word"),
        ("label", "node", "node-1", "stolen=true"),
        ("label", "node", "node-2", "node-role.kubernetes.io/control-plane=true"),
        ("create", "token", "default"),
        ("get", "configmap", "kube-root-ca.crt", "-n", "kube-public"),
    ):
        assert "forbidden" in as_node(agent, *arguments).lower(), arguments


def test_a_token_does_not_take_over_the_name_of_a_node(cluster: Cluster) -> None:
    thief = cluster.add_machine(name="node-2")
    said = refusal(thief, "agent", "--server", cluster.url, "--token", cluster.token())
    assert "the node name node-2 is taken" in said
    assert "kubectl delete node node-2" in said


def test_tokens_are_made_listed_deleted_and_expire(cluster: Cluster, server: Machine) -> None:
    stranger = cluster.add_machine()

    def join(token: str) -> str:
        return refusal(stranger, "agent", "--server", cluster.url, "--token", token)

    made = json.loads(server.k8e("token", "create", "--ttl", "1h", "--description", "x").stdout)
    listed = server.k8e("token", "list").stdout
    assert made["id"] in listed
    assert made["token"].partition(".")[2] not in listed
    server.k8e("token", "delete", made["id"])
    assert "wrong, deleted or expired" in join(made["token"])
    short = json.loads(server.k8e("token", "create", "--ttl", "1s").stdout)
    name = f"secret/bootstrap-token-{short['id']}"
    cluster.kubectl("wait", "--for=delete", name, "-n", "kube-system", "--timeout=60s", seconds=90)
    assert "wrong, deleted or expired" in join(short["token"])
    wrong = short["token"].replace("K10", "K10" + "0" * 8, 1)
    assert "is malformed" in join(wrong)
    pin = short["token"].partition("::")[0][3:]
    assert "is not the cluster of this token" in join(short["token"].replace(pin, "0" * 64))


def own_tokens(server: Machine) -> list[str]:
    """The ids of the tokens that the server has made for itself."""
    listed = json.loads(server.k8e("token", "list").stdout)["tokens"]
    return [item["id"] for item in listed if "node-token" in item["description"]]


def test_a_rotated_token_is_the_only_one_that_joins(cluster: Cluster, server: Machine) -> None:
    old = cluster.token()
    new = json.loads(server.k8e("token", "rotate").stdout)["token"]
    assert cluster.token() == new != old
    assert own_tokens(server) == [new.partition("::")[2][:6]]
    machine = cluster.machines[-1]
    name = f"Authorization: Bearer {old.partition('::')[2]}"
    command = (*CURL.split(), "-H", name, f"{cluster.url}/version")
    # The API server believes a token for ten seconds that it has found right.
    eventually("the old one ends", lambda: machine.run(*command).stdout == "401")
    said = refusal(machine, "agent", "--server", cluster.url, "--token", old)
    assert "wrong, deleted or expired" in said
    # What else a join needs stands in a file, of which a server's options are none of an agent's.
    file = machine.path("/etc/k8e/config.yaml")
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"server: {cluster.url}\ncni: cilium\nnode-label: [rack=two]\n", "utf-8")
    machine.k8e("agent", "-d", seconds=400, K8E_TOKEN=new)
    assert machine.name in cluster.kubectl("get", "nodes", "-l", "rack=two")
    machine.k8e("agent", "uninstall", seconds=200)
    assert not file.parent.exists()
    cluster.kubectl("delete", "node", machine.name)


# Manifests.


def test_manifests_are_applied_and_pruned(cluster: Cluster, server: Machine) -> None:
    file = server.path("/var/lib/k8e/server/manifests/own.yaml")

    def write(*names: str) -> None:
        texts = [
            f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: default}}\n"
            for name in names
        ]
        scratch = file.with_name("own.new")
        scratch.write_text("---\n".join(texts), "utf-8")
        scratch.rename(file)

    def there(name: str) -> bool:
        return bool(cluster.kubectl("get", "configmap", name, "--ignore-not-found"))

    write("first", "second")
    eventually("both are applied", lambda: there("first") and there("second"))
    write("second")
    eventually("what stands there no more is deleted", lambda: not there("first"))
    assert there("second")
    file.unlink()
    eventually("a removed file is pruned", lambda: not there("second"))


def test_metrics_are_served(cluster: Cluster) -> None:
    """As late as that: they are collected some time after the start, while other tests run."""
    assert eventually("metrics", lambda: cluster.kubectl("top", "nodes", check=False), seconds=180)


# Life.


def test_a_component_that_dies_is_started_again_and_status_says_why(server: Machine) -> None:
    def component() -> dict[str, Any]:
        listed = status(server)["components"]
        return next(item for item in listed if item["name"] == "kube-scheduler")

    first = component()
    assert first["running"]
    server.run("kill", "-9", str(first["pid"]))
    second = eventually(
        "it runs again",
        lambda: found if (found := component())["restarts"] and found["running"] else {},
    )
    assert second["pid"] != first["pid"]
    assert second["last_end"].startswith("was killed by SIGKILL")


def test_a_server_that_was_killed_leaves_everything_to_the_next(
    cluster: Cluster, server: Machine, pods: dict[str, str]
) -> None:
    def pids() -> dict[str, int]:
        listed = status(server)["components"]
        return {item["name"]: item["pid"] for item in listed if item["name"] != "gateway"}

    ids, components = containers(server), pids()
    assert all(components.values())
    server.run("kill", "-9", str(status(server)["pid"]))
    assert "k8e server does not run" in eventually(
        "an alarm", lambda: list(map(str, status(server)["alarms"]))
    )
    assert cluster.fetch("gvisor-node-1", f"http://{pods['plain-node-1']}:8080/") == "plain-node-1"
    cluster.flags = (*cluster.flags, "--tls-san", "other.example", "--token", GIVEN)
    cluster.start()
    assert pids() == components
    assert own_tokens(server) == [GIVEN[:6]], "the one of before has ended"
    assert ids <= containers(server)
    assert not [alarm for alarm in status(server)["alarms"] if "does not run" in alarm]


def test_a_join_that_was_interrupted_goes_on_where_it_was(
    cluster: Cluster, server: Machine
) -> None:
    """Nobody signs a certificate while the server is away, whose components run on."""
    machine = cluster.machines[-1]
    server.run("kill", "-9", str(status(server)["pid"]))
    flags = ("--server", cluster.url, "--token", cluster.token())
    joining = machine.start(sys.executable, "-P", "-m", "k8e", "agent", *flags)
    try:
        asked = re.compile(rf"^k8e-join-{machine.name}-.* Pending\b", re.MULTILINE)
        eventually("it asks", lambda: asked.search(cluster.kubectl("get", "csr")))
    finally:
        end(joining)
    key = machine.path("/var/lib/k8e/agent/pki/joining.key")
    assert key.exists()
    cluster.start()
    cluster.join(machine)
    assert not key.exists()
    assert machine.name in cluster.kubectl("get", "nodes")
    machine.k8e("agent", "uninstall", seconds=200)
    cluster.kubectl("delete", "node", machine.name)


def test_a_new_certificate_is_served_without_a_restart(server: Machine) -> None:
    # The server of the test before was told another name, and made a certificate for it.
    program = "import ssl; print(ssl.get_server_certificate(('127.0.0.1', 6443)))"

    def names() -> list[str]:
        served = x509.load_pem_x509_certificate(
            server.run("python3", "-c", program).stdout.encode()
        )
        found = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return found.get_values_for_type(x509.DNSName)

    eventually("the API server has seen it", lambda: "other.example" in names(), seconds=150)


def test_a_second_server_is_refused_while_one_runs(server: Machine) -> None:
    said = refusal(server, "server", "--cni", "basic")
    assert "k8e runs on this machine already, as pid" in said


def test_a_server_that_was_stopped_leaves_pods_and_starts_again(
    cluster: Cluster, server: Machine, pods: dict[str, str]
) -> None:
    ids = containers(server)
    server.k8e("server", "stop", seconds=200)
    shim = server.path("/usr/local/bin/containerd-shim-kata-v2")
    shim.touch(0o755)  # runtimes are looked for at each start
    assert server.run("pgrep", "-x", "kube-apiserver", check=False).returncode == 1
    assert server.run("pgrep", "-f", "httpd -f -p 8080", check=False).returncode == 0
    cluster.start()
    shim.unlink()
    assert "containerd-shim-kata" not in cluster.said, "its shim is there now"
    assert ids <= containers(server)
    cluster.wait_for_pods(*pods)


def test_a_port_that_is_taken_is_told_with_who_has_it(cluster: Cluster) -> None:
    machine = cluster.machines[-1]
    holder = machine.start("python3", "-m", "http.server", "2379", "--bind", "127.0.0.1")
    try:
        eventually(
            "somebody listens",
            lambda: "2379" in machine.run("ss", "-ltn", check=False).stdout,
        )
        said = refusal(machine, "server", "--cni", "basic")
        assert "port 2379, which etcd needs, is taken by python3 (pid" in said
    finally:
        end(holder)


def test_a_wrong_program_is_not_started(cluster: Cluster) -> None:
    machine = cluster.machines[-1]
    program = COMPONENTS / "bin/etcd"
    machine.run("mount", "--bind", "/usr/bin/true", str(program))
    try:
        said = refusal(machine, "server", "--cni", "basic")
    finally:
        machine.run("umount", str(program))
    assert f"the component etcd in {COMPONENTS} cannot be used" in said
    assert "has the checksum" in said
    assert "k8e components install etcd" in said


def test_own_networks_are_used_and_what_a_gateway_had_is_kept(
    cluster: Cluster,
) -> None:
    machine = cluster.machines[-1]
    machine.k8e("sandbox", "run", "echo kept > /workspace/file")
    flags = ("--cni", "none", "--disable", "coredns,metrics-server,local-path", "--detach")
    machine.k8e("server", *flags, seconds=400)

    def read() -> str:
        done = machine.k8e("sandbox", "run", "--raw", "cat /workspace/file", check=False)
        return done.stdout

    assert eventually("the gateway serves", read) == "kept\n"
    assert machine.path("/var/lib/k8e/gateway/sessions.db").exists()
    node = ("wait", f"node/{machine.name}", "--for=condition=Ready")
    assert machine.kubectl(*node, "--timeout=0s", check=False) == ""
    confs = machine.path("/etc/cni/net.d")
    confs.mkdir(parents=True, exist_ok=True)
    (confs / "own.conflist").write_text(json.dumps(OWN_NETWORK), "utf-8")
    machine.kubectl(*node, "--timeout=120s", seconds=150)
    (confs / "own.conflist").unlink()
    machine.k8e("server", "uninstall", seconds=200)


# Leaving.


@pytest.mark.parametrize(("number", "role"), [(1, "agent"), (0, "server")])
def test_uninstalling_leaves_nothing(
    cluster: Cluster, before: dict[str, dict[str, set[str]]], number: int, role: str
) -> None:
    machine = cluster.machines[number]
    if role == "agent":  # also what a supervisor that was killed leaves running
        machine.run("kill", "-9", str(status(machine)["pid"]))
    machine.k8e(role, "uninstall", seconds=200)
    left = traces.left(before[machine.name], snapshot(machine))
    assert not left, "\n".join(left)
    machine.k8e(role, "uninstall")  # a second time finds nothing, and is no error
