"""The command lines and files of etcd, API server, controller manager and scheduler."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import yaml

from k8e.distro import certificates, kubeconfigs
from k8e.distro.certificates import Authority, Subject
from k8e.distro.configuration import Configuration
from k8e.distro.layout import VOLUME_PLUGINS, Layout, write_private
from k8e.distro.supervisor import Component

ETCD_ADDRESS = "https://127.0.0.1:2379"
ETCD_PEER = "https://127.0.0.1:2380"
EXEMPT_NAMESPACES = ("kube-system", "local-path-storage")
"""Namespaces of our own add-ons, whose pods need what PodSecurity refuses elsewhere."""
_AUDIT_DAYS, _AUDIT_FILES, _AUDIT_MEGABYTES = 30, 10, 50
_API_STOP_SECONDS = 5.0
_SMALL = {"GOGC": "50"}
"""Go's collector runs twice as often, for three quarters of the memory: an idle control plane has
processor time to spare and a small machine no memory."""
_AUTHORITIES = ("server-ca", "client-ca", "request-header-ca", "etcd-ca")

# Who each kubeconfig of the control plane is.
_IDENTITIES = {
    "admin": Subject("system:admin", ("system:masters",)),
    "supervisor": Subject("system:k8e-supervisor", ("system:masters",)),
    "controller-manager": Subject("system:kube-controller-manager"),
    "scheduler": Subject("system:kube-scheduler"),
    "cilium-operator": Subject("k8e:cilium-operator"),
}


def authorities(layout: Layout) -> dict[str, Authority]:
    """The cluster's certificate authorities: of servers, clients, aggregation, etcd."""
    return {name: certificates.authority(layout.tls, name) for name in _AUTHORITIES}


def write_certificates(config: Configuration) -> bool:
    """All certificates and kubeconfigs of the control plane; True if one was made or renewed."""
    layout, days = config.layout, config.certificate_days
    signers = authorities(layout)
    certificates.service_account_key(layout.tls / "service-account.key")
    hosts = (
        *("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"),
        f"kubernetes.default.svc.{config.cluster_domain}",
        *dict.fromkeys((config.node_name, config.node_ip, config.service_address, "127.0.0.1")),
        *config.tls_san,
    )
    local = ("localhost", "127.0.0.1")
    wanted = [
        ("server-ca", "kube-apiserver", Subject("kube-apiserver", hosts=_unique(hosts)), True),
        ("etcd-ca", "etcd", Subject("etcd", hosts=local, both=True), False),
        ("etcd-ca", "etcd-client", Subject("kube-apiserver"), False),
        ("client-ca", "kubelet-client", Subject("kube-apiserver", ("system:masters",)), False),
        ("request-header-ca", "auth-proxy", Subject("system:auth-proxy"), False),
        *(("client-ca", name, subject, False) for name, subject in _IDENTITIES.items()),
    ]
    changed = False
    for signer, name, subject, chain in wanted:
        path = layout.tls / name
        changed |= certificates.leaf(signers[signer], subject, path, days=days, chain=chain)
    for name in _IDENTITIES:
        write_kubeconfig(config, name)
    admin = kubeconfigs.by_content(
        f"https://{config.node_ip}:{config.https_listen_port}", **_files(layout, "admin")
    )
    kubeconfigs.write(config.write_kubeconfig, admin)
    return changed


def _unique(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hosts))


def _files(layout: Layout, name: str) -> dict[str, Path]:
    return {
        "authority": layout.tls / "server-ca.crt",
        "certificate": layout.tls / f"{name}.crt",
        "key": layout.tls / f"{name}.key",
    }


def write_kubeconfig(config: Configuration, name: str) -> None:
    layout = config.layout
    found = kubeconfigs.by_files(config.api_address, **_files(layout, name))
    kubeconfigs.write(layout.credentials / f"{name}.kubeconfig", found)


def write_policies(config: Configuration) -> None:
    """What the API server reads at start: encryption, admission, audit."""
    folder = config.layout.policies
    encryption = folder / "encryption.yaml"
    if not encryption.exists():
        write_private(encryption, yaml.safe_dump(_encryption(os.urandom(32)), sort_keys=False))
    write_private(folder / "audit.yaml", yaml.safe_dump(_AUDIT, sort_keys=False))
    write_private(
        folder / "admission.yaml", yaml.safe_dump(_admission(config.pod_security), sort_keys=False)
    )


def _encryption(key: bytes) -> dict[str, Any]:
    keys = [{"name": "key1", "secret": base64.b64encode(key).decode()}]
    return {
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "EncryptionConfiguration",
        "resources": [
            {
                "resources": ["secrets"],
                "providers": [{"secretbox": {"keys": keys}}, {"identity": {}}],
            }
        ],
    }


def _admission(level: str) -> dict[str, Any]:
    defaults = {
        kind + suffix: value
        for kind in ("enforce", "audit", "warn")
        for suffix, value in (("", level), ("-version", "latest"))
    }
    return {
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "AdmissionConfiguration",
        "plugins": [
            {
                "name": "PodSecurity",
                "configuration": {
                    "apiVersion": "pod-security.admission.config.k8s.io/v1",
                    "kind": "PodSecurityConfiguration",
                    "defaults": defaults,
                    "exemptions": {"namespaces": list(EXEMPT_NAMESPACES)},
                },
            }
        ],
    }


_COMPONENTS = ["system:apiserver", "system:kube-scheduler", "system:kube-controller-manager"]
_AUDIT: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # What components read and renew all the time would bury what people and programs do.
        {"level": "None", "verbs": ["get", "list", "watch"], "users": _COMPONENTS},
        {"level": "None", "verbs": ["get", "list", "watch"], "userGroups": ["system:nodes"]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
        {"level": "None", "resources": [{"group": "", "resources": ["events"]}]},
        {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/version"]},
        # Never a body: it would have secrets in it.
        {"level": "Metadata"},
    ],
}


def components(config: Configuration, programs: Path) -> list[Component]:
    """The control plane; ``programs`` is the folder of the binaries."""
    layout = config.layout
    return [
        _etcd(layout, programs / "etcd"),
        _api_server(config, programs / "kube-apiserver"),
        _controller_manager(config, programs / "kube-controller-manager"),
        _scheduler(config, programs / "kube-scheduler"),
    ]


def _etcd(layout: Layout, program: Path) -> Component:
    tls = layout.tls
    argv = (
        str(program),
        "--name=default",
        f"--data-dir={layout.etcd}",
        f"--listen-client-urls={ETCD_ADDRESS}",
        f"--advertise-client-urls={ETCD_ADDRESS}",
        f"--listen-peer-urls={ETCD_PEER}",
        f"--initial-advertise-peer-urls={ETCD_PEER}",
        f"--initial-cluster=default={ETCD_PEER}",
        f"--cert-file={tls / 'etcd.crt'}",
        f"--key-file={tls / 'etcd.key'}",
        f"--trusted-ca-file={tls / 'etcd-ca.crt'}",
        "--client-cert-auth",
        f"--peer-cert-file={tls / 'etcd.crt'}",
        f"--peer-key-file={tls / 'etcd.key'}",
        f"--peer-trusted-ca-file={tls / 'etcd-ca.crt'}",
        "--peer-client-cert-auth",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=5m",
        "--quota-backend-bytes=4294967296",
        "--log-level=warn",
        "--logger=zap",
    )
    return Component("etcd", argv, _SMALL, notifies=True)


def _api_server(config: Configuration, program: Path) -> Component:
    layout = config.layout
    tls, policies = layout.tls, layout.policies
    key = tls / "service-account.key"
    argv = (
        str(program),
        f"--advertise-address={config.node_ip}",
        "--bind-address=0.0.0.0",
        f"--secure-port={config.https_listen_port}",
        f"--etcd-servers={ETCD_ADDRESS}",
        f"--etcd-cafile={tls / 'etcd-ca.crt'}",
        f"--etcd-certfile={tls / 'etcd-client.crt'}",
        f"--etcd-keyfile={tls / 'etcd-client.key'}",
        f"--client-ca-file={tls / 'client-ca.crt'}",
        f"--tls-cert-file={tls / 'kube-apiserver.crt'}",
        f"--tls-private-key-file={tls / 'kube-apiserver.key'}",
        f"--kubelet-certificate-authority={tls / 'server-ca.crt'}",
        f"--kubelet-client-certificate={tls / 'kubelet-client.crt'}",
        f"--kubelet-client-key={tls / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP,Hostname",
        f"--requestheader-client-ca-file={tls / 'request-header-ca.crt'}",
        "--requestheader-allowed-names=system:auth-proxy",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={tls / 'auth-proxy.crt'}",
        f"--proxy-client-key-file={tls / 'auth-proxy.key'}",
        "--enable-aggregator-routing=true",
        f"--service-account-issuer=https://kubernetes.default.svc.{config.cluster_domain}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--service-cluster-ip-range={config.service_cidr}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--admission-control-config-file={policies / 'admission.yaml'}",
        "--anonymous-auth=false",
        "--enable-bootstrap-token-auth=true",
        f"--encryption-provider-config={policies / 'encryption.yaml'}",
        f"--audit-policy-file={policies / 'audit.yaml'}",
        f"--audit-log-path={layout.logs / 'audit.log'}",
        f"--audit-log-maxage={_AUDIT_DAYS}",
        f"--audit-log-maxbackup={_AUDIT_FILES}",
        f"--audit-log-maxsize={_AUDIT_MEGABYTES}",
        "--allow-privileged=true",
        "--profiling=false",
    )
    files = tuple(policies / name for name in ("admission.yaml", "audit.yaml", "encryption.yaml"))
    return Component(
        "kube-apiserver",
        argv,
        _SMALL,
        needs=("etcd",),
        files=files,
        notifies=True,
        # It would wait a minute for what other nodes watch; whatever it has confirmed is in etcd.
        stop_seconds=_API_STOP_SECONDS,
    )


def _own_access(layout: Layout, name: str) -> tuple[str, ...]:
    path = layout.credentials / f"{name}.kubeconfig"
    return tuple(
        f"--{flag}={path}"
        for flag in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    )


def _controller_manager(config: Configuration, program: Path) -> Component:
    layout = config.layout
    tls = layout.tls
    signing: list[str] = []
    for signer, authority in (
        ("kubelet-client", "client-ca"),
        ("kube-apiserver-client", "client-ca"),
        ("kubelet-serving", "server-ca"),
    ):
        for kind, suffix in (("cert", "crt"), ("key", "key")):
            signing.append(f"--cluster-signing-{signer}-{kind}-file={tls / authority}.{suffix}")
    argv = (
        str(program),
        *_own_access(layout, "controller-manager"),
        "--bind-address=127.0.0.1",
        "--allocate-node-cidrs=true",
        f"--cluster-cidr={config.cluster_cidr}",
        f"--service-cluster-ip-range={config.service_cidr}",
        *signing,
        f"--cluster-signing-duration={config.certificate_days * 24}h",
        f"--root-ca-file={tls / 'server-ca.crt'}",
        f"--service-account-private-key-file={tls / 'service-account.key'}",
        "--use-service-account-credentials=true",
        "--controllers=*,tokencleaner",
        f"--flex-volume-plugin-dir={VOLUME_PLUGINS}",
        # One server has one of them, and an election would only make the start longer.
        "--leader-elect=false",
        # Some forty controllers each ask for an identity first; 20 a second would take them five.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        "--profiling=false",
    )
    return _client(config.layout, "controller-manager", argv)


def _scheduler(config: Configuration, program: Path) -> Component:
    argv = (
        str(program),
        *_own_access(config.layout, "scheduler"),
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--profiling=false",
    )
    return _client(config.layout, "scheduler", argv)


def _client(layout: Layout, name: str, argv: tuple[str, ...]) -> Component:
    files = (layout.credentials / f"{name}.kubeconfig",)
    return Component(f"kube-{name}", argv, _SMALL, needs=("kube-apiserver",), files=files)
