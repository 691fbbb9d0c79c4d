"""Cilium as the network: its command lines, rights and definitions.

Its agent runs on each node as a process like any other, with a certificate of its own; so nothing
of the network waits for a pod that waits for the network.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from k8e.distro import approval, manifests
from k8e.distro.configuration import Configuration
from k8e.distro.node import Node
from k8e.distro.supervisor import Component
from k8e.kubernetes.api import Object

_RBAC = "rbac.authorization.k8s.io"
_UNIFIED = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_OWN_CGROUP = Path("/run/cilium/cgroupv2")
_MAP_RATIO = "0.0025"
"""How much of the memory BPF maps may have; upstream's ratio, which large clusters need, is larger
only from 4 GB of maps on."""


def agent(node: Node, components: Path) -> Component:
    """Cilium's agent of a node."""
    layout = node.layout
    library, scratch = layout.agent / "cilium", layout.run / "cilium-tmp"
    copy_programs(components / "share/cilium/bpf", library / "bpf")
    # Not on the file system of the CNI folder: containerd does not notice a file that is renamed.
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    kubeconfig = node.kubeconfig_of("cilium")
    argv = (
        str(components / "bin/cilium-agent"),
        f"--k8s-kubeconfig-path={kubeconfig}",
        f"--lib-dir={library}",
        f"--cgroup-root={cgroup_root()}",
        f"--write-cni-conf-when-ready={layout.cni / '05-cilium.conflist'}",
        "--cni-exclusive=true",
        "--ipam=kubernetes",
        "--identity-allocation-mode=crd",
        "--enable-ipv4=true",
        "--enable-ipv6=false",
        "--routing-mode=native",
        f"--ipv4-native-routing-cidr={node.cluster_cidr}",
        "--auto-direct-node-routes=true",
        "--kube-proxy-replacement=true",
        # gVisor's programs connect in a network stack of their own, which no cgroup hook sees.
        "--bpf-lb-sock-hostns-only=true",
        "--enable-l7-proxy=true",
        "--external-envoy-proxy=true",
        "--disable-envoy-version-check=true",
        "--dnsproxy-enable-transparent-mode=true",
        "--enable-health-checking=false",
        "--enable-health-check-nodeport=false",
        "--enable-gops=false",
        # It would read its settings from the API too, for which it would need more rights.
        "--enable-dynamic-config=false",
        "--enable-drift-checker=false",
        "--enable-hubble=true",
        "--hubble-listen-address=",
        f"--bpf-map-dynamic-size-ratio={_MAP_RATIO}",
        "--cluster-name=default",
    )
    own_path = f"{components / 'bin/bpf'}:{components / 'bin'}:{os.environ.get('PATH', '')}"
    environ = {
        "PATH": own_path,
        "TMPDIR": str(scratch),
        "K8S_NODE_NAME": node.name,
        "CILIUM_K8S_NAMESPACE": "kube-system",
        "GOGC": "50",
    }
    return Component("cilium-agent", argv, environ, files=(kubeconfig,), stop_seconds=10.0)


def operator(config: Configuration, components: Path) -> Component:
    """Cilium's operator: collects identities and endpoints that nobody uses any more."""
    kubeconfig = config.layout.credentials / "cilium-operator.kubeconfig"
    argv = (
        str(components / "bin/cilium-operator"),
        f"--k8s-kubeconfig-path={kubeconfig}",
        "--ipam=kubernetes",
        "--identity-allocation-mode=crd",
        "--enable-ipv4=true",
        "--enable-ipv6=false",
        "--skip-crd-creation=true",
        "--unmanaged-pod-watcher-interval=0",
        "--set-cilium-node-taints=false",
        "--set-cilium-is-up-condition=false",
        "--remove-cilium-node-taints=false",
        "--operator-api-serve-addr=127.0.0.1:9234",
        "--enable-gops=false",
        "--enable-metrics=false",
        "--cluster-name=default",
    )
    environ = {"CILIUM_K8S_NAMESPACE": "kube-system", "K8S_NODE_NAME": config.node_name}
    environ["GOGC"] = "50"
    needs, files = ("kube-apiserver",), (kubeconfig,)
    return Component("cilium-operator", argv, environ, needs=needs, files=files)


def copy_programs(source: Path, target: Path) -> None:
    """The sources of BPF programs, where the agent may write beside them."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def cgroup_root() -> Path:
    """A folder of control groups version 2, in which the machine's processes are."""
    for path in _UNIFIED:
        if (path / "cgroup.procs").exists() and not (path / "tasks").exists():
            return path
    return _OWN_CGROUP


# What the cluster has.

_QUICK: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""It takes a tenth of the time, and a cluster starts meanwhile. Only for what comes with the
components: a file that is nested deeply on purpose crashes it."""


def cluster_objects(components: Path) -> list[Object]:
    """Definitions, all at once, for which its operator would take ten seconds; and rights."""
    found: list[Object] = []
    for path in sorted((components / "share/cilium/crds").rglob("*.yaml")):
        found += manifests.objects(path.read_bytes(), str(path), loader=_QUICK)
    agents = [_subject("Group", approval.component_group("cilium"))]
    return [
        *found,
        *_role("k8e:cilium", _AGENT_RULES, agents),
        *_role("k8e:cilium-operator", _OPERATOR_RULES, [_subject("User", "k8e:cilium-operator")]),
    ]


def _subject(kind: str, name: str) -> Object:
    return {"apiGroup": _RBAC, "kind": kind, "name": name}


def _role(name: str, rules: list[Object], subjects: list[Object]) -> list[Object]:
    version, metadata = f"{_RBAC}/v1", {"name": name}
    reference = _subject("ClusterRole", name)
    return [
        {"apiVersion": version, "kind": "ClusterRole", "metadata": metadata, "rules": rules},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": subjects,
        },
    ]


def _rule(group: str, resources: str, verbs: str, names: str = "") -> Object:
    rule: dict[str, Any] = {
        "apiGroups": [group],
        "resources": resources.split(),
        "verbs": verbs.split(),
    }
    return rule | ({"resourceNames": names.split()} if names else {})


_CILIUM = "cilium.io"
_READ = "get list watch"
_KINDS = (
    "ciliumloadbalancerippools ciliumbgpnodeconfigs ciliumbgpadvertisements ciliumbgppeerconfigs "
    "ciliumclusterwideenvoyconfigs ciliumclusterwidenetworkpolicies ciliumegressgatewaypolicies "
    "ciliumendpoints ciliumendpointslices ciliumenvoyconfigs ciliumidentities "
    "ciliumlocalredirectpolicies ciliumnetworkpolicies ciliumnodes ciliumnodeconfigs "
    "ciliumcidrgroups ciliuml2announcementpolicies ciliumpodippools ciliumdatapathplugins"
)

_AGENT_RULES = [
    _rule("networking.k8s.io", "networkpolicies", _READ),
    _rule("discovery.k8s.io", "endpointslices", _READ),
    # No secrets: nothing that we use of Cilium reads any.
    _rule("", "namespaces services pods nodes", _READ),
    _rule("apiextensions.k8s.io", "customresourcedefinitions", _READ),
    _rule(_CILIUM, _KINDS, "list watch"),
    _rule(_CILIUM, "ciliumidentities ciliumendpoints ciliumnodes", "create"),
    _rule(_CILIUM, "ciliumidentities", "update"),
    _rule(_CILIUM, "ciliumendpoints", "get delete"),
    _rule(_CILIUM, "ciliumnodes ciliumnodes/status", "get update"),
    _rule(_CILIUM, "ciliumendpoints ciliumendpoints/status", "patch"),
]
_OPERATOR_RULES = [
    _rule("", "pods nodes namespaces serviceaccounts services", _READ),
    _rule("discovery.k8s.io", "endpointslices", _READ),
    _rule("", "services/status", "update patch"),
    _rule(_CILIUM, _KINDS, _READ),
    _rule(
        _CILIUM,
        "ciliumnetworkpolicies/status ciliumclusterwidenetworkpolicies/status",
        "patch update",
    ),
    _rule(_CILIUM, "ciliumendpoints ciliumidentities", "delete"),
    _rule(_CILIUM, "ciliumidentities", "update"),
    _rule(_CILIUM, "ciliumnodes", "create update delete"),
    _rule(_CILIUM, "ciliumnodes/status", "update"),
    _rule(
        _CILIUM,
        "ciliumendpointslices ciliumenvoyconfigs ciliumcidrgroups",
        "create update delete deletecollection patch",
    ),
    _rule(_CILIUM, "ciliumloadbalancerippools/status", "patch"),
    _rule(_CILIUM, "ciliumpodippools", "create"),
    _rule("apiextensions.k8s.io", "customresourcedefinitions", _READ),
    _rule("coordination.k8s.io", "leases", "create get update"),
]
