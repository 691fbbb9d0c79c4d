"""The command lines and files of a node: containerd, kubelet, kube-proxy and the basic network."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from k8e.distro.layout import KUBELET, VOLUME_PLUGINS, Layout, write_private
from k8e.distro.runtime_classes import Runtime
from k8e.distro.supervisor import Component

PAUSE_IMAGE = "k8e.internal/pause:v1.36.3"
_PODS = 110
_PROCESSES = 4096  # of one pod: a fork bomb ends there
_OTHERS_CNI = (Path("/etc/cni/net.d"), Path("/opt/cni/bin"))
_CAP_SYS_RESOURCE = 24
_PR_CAPBSET_READ = 23


@dataclass(frozen=True)
class Node:
    """A node of a cluster, as its own components see it."""

    layout: Layout
    name: str
    address: str
    server: str
    """Where this node reaches the API."""
    cni: str
    cluster_cidr: str
    service_cidr: str
    cluster_dns: str
    cluster_domain: str
    labels: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()
    allow_swap: bool = False

    @property
    def authority(self) -> Path:
        """The certificate of the cluster's server authority."""
        return self.layout.pki / "server-ca.crt"

    @property
    def client_authority(self) -> Path:
        return self.layout.pki / "client-ca.crt"

    @property
    def kubeconfig(self) -> Path:
        """Of the kubelet."""
        return self.layout.agent / "kubelet.kubeconfig"

    def kubeconfig_of(self, component: str) -> Path:
        return self.layout.agent / f"{component}.kubeconfig"


def components(node: Node, programs: Path) -> list[Component]:
    """containerd, kubelet and, with the basic network, kube-proxy."""
    found = [_containerd(node, programs / "containerd"), _kubelet(node, programs / "kubelet")]
    if node.cni == "basic":
        found.append(_kube_proxy(node, programs / "kube-proxy"))
    return found


def write_files(node: Node, programs: Path, runtimes: Iterable[Runtime]) -> None:
    config = containerd_config(node, programs, list(runtimes), own_oom_score=may_raise_limits())
    write_private(node.layout.containerd_config, config)
    gvisor = {"root": str(node.layout.run / "runsc"), "binary_name": str(programs / "runsc")}
    write_private(gvisor_file(node.layout), "\n".join(_toml(gvisor)) + "\n")
    write_private(_kubelet_file(node), yaml.safe_dump(_kubelet_config(node), sort_keys=False))
    if node.cni == "basic":
        write_private(_proxy_file(node), yaml.safe_dump(_proxy_config(node), sort_keys=False))
    registries = node.layout.containerd_config.parent / "certs.d"
    registries.mkdir(mode=0o700, exist_ok=True)


# containerd.


def search_path(programs: Path) -> dict[str, str]:
    """Where shims and runtimes are found: our own first."""
    # gVisor's shim lowers its OOM score, which not every root may; there is one that need not.
    own = [programs] if may_raise_limits() else [programs / "no-sys-resource", programs]
    return {"PATH": ":".join([*map(str, own), os.environ.get("PATH", "")])}


def _containerd(node: Node, program: Path) -> Component:
    layout = node.layout
    argv = (str(program), "--config", str(layout.containerd_config))
    return Component(
        "containerd",
        argv,
        search_path(program.parent) | _proxies(),
        files=(layout.containerd_config, gvisor_file(layout)),
        notifies=True,
    )


def _proxies() -> dict[str, str]:
    """How registries are reached where that takes a proxy."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    both = (*names, *(name.lower() for name in names))
    return {name: os.environ[name] for name in both if os.environ.get(name)}


def containerd_config(
    node: Node, programs: Path, runtimes: list[Runtime], *, own_oom_score: bool
) -> str:
    """``config.toml``: runc, and each runtime that was found."""
    layout = node.layout
    confs, binaries = layout.cni, [str(programs / "cni")]
    if node.cni == "none":  # whoever brings a network puts it where everybody does
        confs = _OTHERS_CNI[0]
        binaries.insert(0, str(_OTHERS_CNI[1]))
    runc = {
        "runtime_type": "io.containerd.runc.v2",
        "options": {
            "BinaryName": str(programs / "runc"),
            "Root": str(layout.run / "runc"),
            "SystemdCgroup": False,
        },
    }
    handlers = {"runc": runc} | {runtime.handler: runtime.stanza for runtime in runtimes}
    if "runsc" in handlers:
        options = {
            "TypeUrl": "io.containerd.runsc.v1.options",
            "ConfigPath": str(gvisor_file(layout)),
        }
        handlers["runsc"] = {**handlers["runsc"], "options": options}
    plugins: dict[str, Any] = {
        "io.containerd.cri.v1.images": {
            "snapshotter": "overlayfs",
            "pinned_images": {"sandbox": PAUSE_IMAGE},
            "registry": {"config_path": str(layout.containerd_config.parent / "certs.d")},
        },
        "io.containerd.nri.v1.nri": {"disable": True},
        "io.containerd.internal.v1.opt": {"path": str(layout.agent / "containerd/opt")},
        "io.containerd.cri.v1.runtime": {
            "restrict_oom_score_adj": not own_oom_score,
            "enable_unprivileged_ports": True,
            "enable_unprivileged_icmp": True,
            "containerd": {"default_runtime_name": "runc", "runtimes": handlers},
            "cni": {"conf_dir": str(confs), "bin_dirs": binaries},
        },
    }
    for runtime in runtimes:
        for name, options in runtime.snapshotters.items():
            root = {"root_path": str(layout.agent / "containerd" / name)}
            plugins[f"io.containerd.snapshotter.v1.{name}"] = root | options
    config: dict[str, Any] = {
        "version": 3,
        "root": str(layout.agent / "containerd"),
        "state": str(layout.containerd_socket.parent),
        "oom_score": -999 if own_oom_score else 0,
        "grpc": {"address": str(layout.containerd_socket)},
        "plugins": plugins,
    }
    return "# Written by k8e at each start.\n" + "\n".join(_toml(config)) + "\n"


def gvisor_file(layout: Layout) -> Path:
    """What gVisor's shim reads."""
    return layout.containerd_config.with_name("runsc.toml")


def _toml(table: dict[str, Any], path: str = "") -> Iterable[str]:
    """A table as TOML: its values, then the tables in it."""
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{key} = {json.dumps(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            quoted = key if key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)
            below = f"{path}.{quoted}" if path else quoted
            yield f"\n[{below}]"
            yield from _toml(value, below)  # pyright: ignore[reportUnknownArgumentType]


def may_raise_limits() -> bool:
    """Whether we have CAP_SYS_RESOURCE, without which nobody may lower an oom_score_adj."""
    return ctypes.CDLL(None).prctl(_PR_CAPBSET_READ, _CAP_SYS_RESOURCE, 0, 0, 0) == 1


# kubelet.


def _kubelet_file(node: Node) -> Path:
    return node.layout.agent / "etc/kubelet.yaml"


def _kubelet(node: Node, program: Path) -> Component:
    argv = [
        str(program),
        f"--config={_kubelet_file(node)}",
        f"--kubeconfig={node.kubeconfig}",
        f"--root-dir={KUBELET}",
        f"--cert-dir={node.layout.pki}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    ]
    if node.labels:
        argv.append(f"--node-labels={','.join(node.labels)}")
    return Component(
        "kubelet",
        tuple(argv),
        search_path(program.parent),
        needs=("containerd",),  # it exits if there is no socket yet
        files=(_kubelet_file(node), node.kubeconfig),
        notifies=True,
    )


def _kubelet_config(node: Node) -> dict[str, Any]:
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(node.client_authority)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": not node.allow_swap,
        "clusterDNS": [node.cluster_dns],
        "clusterDomain": node.cluster_domain,
        "containerRuntimeEndpoint": f"unix://{node.layout.containerd_socket}",
        "resolvConf": resolver_file(),
        "rotateCertificates": True,
        "serverTLSBootstrap": True,
        "seccompDefault": True,
        "readOnlyPort": 0,
        "maxPods": _PODS,
        "podPidsLimit": _PROCESSES,
        "makeIPTablesUtilChains": False,
        "volumePluginDir": str(VOLUME_PLUGINS),
        "healthzBindAddress": "127.0.0.1",
    }
    if node.taints:
        config["registerWithTaints"] = [taint(text) for text in node.taints]
    return config


def taint(text: str) -> dict[str, str]:
    key, _, rest = text.partition("=") if "=" in text else text.partition(":")
    value, _, effect = rest.rpartition(":")
    return {"key": key, "value": value, "effect": effect or rest}


def resolver_file() -> str:
    """The resolvers that pods of the host's DNS policy get.

    Where systemd-resolved listens on loopback, pods could not reach it; it has another file.
    """
    behind = Path("/run/systemd/resolve/resolv.conf")
    try:
        text = Path("/etc/resolv.conf").read_text("utf-8", "replace")
    except OSError:
        return ""
    return (
        str(behind) if "nameserver 127.0.0.53" in text and behind.exists() else "/etc/resolv.conf"
    )


# The basic network: kube-proxy, point-to-point links, and routes between nodes.


def _proxy_file(node: Node) -> Path:
    return node.layout.agent / "etc/kube-proxy.yaml"


def _kube_proxy(node: Node, program: Path) -> Component:
    argv = (
        str(program),
        f"--config={_proxy_file(node)}",
        f"--hostname-override={node.name}",
    )
    files = (_proxy_file(node), node.kubeconfig_of("kube-proxy"))
    return Component("kube-proxy", argv, files=files)


def _proxy_config(node: Node) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "bindAddress": node.address,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "clientConnection": {"kubeconfig": str(node.kubeconfig_of("kube-proxy"))},
        "clusterCIDR": node.cluster_cidr,
        "mode": "nftables",
        "nodePortAddresses": ["primary"],
        # Zero leaves these settings of the kernel as they are.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def write_basic_network(node: Node, subnet: str, mtu: int) -> None:
    """The network of pods on this node, whose addresses are of ``subnet``."""
    ipam = {
        "type": "host-local",
        "dataDir": str(node.layout.run / "cni"),
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    config = {
        "cniVersion": "1.0.0",
        "name": "k8e",
        "plugins": [
            {"type": "ptp", "mtu": mtu, "ipam": ipam},
            {
                "type": "portmap",
                "capabilities": {"portMappings": True},
                "backend": "nftables",
                "snat": True,
            },
        ],
    }
    write_private(node.layout.cni / "10-k8e.conflist", json.dumps(config, indent=2))


MASQUERADE_TABLE = "k8e-basic"


def masquerade_rules(cluster_cidr: str) -> str:
    """nftables: what pods send out of the cluster has the node's address."""
    table = f"table ip {MASQUERADE_TABLE}"
    return (
        f"{table}\ndelete {table}\n{table} {{\n"
        "  chain leave {\n"
        "    type nat hook postrouting priority srcnat;\n"
        f"    ip saddr {cluster_cidr} ip daddr != {cluster_cidr} "
        "ip daddr != 224.0.0.0/4 masquerade\n"
        "  }\n}\n"
    )


def load_rules(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules.encode(), check=True, timeout=30)
