"""What a server or an agent is told: flags, ``K8E_*``, ``/etc/k8e/config.yaml``, defaults."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.distro import layout

CNIS = ("cilium", "basic", "none")
ADDONS = ("coredns", "metrics-server", "local-path")
POD_SECURITY = ("privileged", "baseline", "restricted")
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DOMAIN = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_NODE_NAME_LENGTH = 63
_TAINT = re.compile(r"[^=:,\s]+(=[^=:,\s]*)?:(NoSchedule|PreferNoSchedule|NoExecute)")
_NODE_LABEL = re.compile(r"[^=:,\s]+=[^=:,\s]*")
_SOMEWHERE = ("198.51.100.1", 9)  # nothing is sent: connect() only chooses a route


@dataclass(frozen=True)
class Configuration:
    """All options. Names are those of the flags, with ``_`` for ``-``."""

    # Of both roles.
    data_dir: Path = layout.DATA
    node_name: str = ""
    node_ip: str = ""
    node_label: tuple[str, ...] = ()
    node_taint: tuple[str, ...] = ()
    components_dir: Path | None = None
    """A folder of binaries to use instead of those that were installed."""
    allow_swap: bool = False
    token: str = ""

    # Of a server.
    cni: str = "cilium"
    cluster_cidr: str = "10.42.0.0/16"
    service_cidr: str = "10.43.0.0/16"
    cluster_domain: str = "cluster.local"
    https_listen_port: int = 6443
    tls_san: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    disable_sandbox_matrix: bool = False
    pod_security: str = "baseline"
    write_kubeconfig: Path = layout.KUBECONFIG
    certificate_days: int = 365

    # Of an agent.
    server: str = ""

    # Where what does not outlive a reboot goes; only tests of single parts change it.
    run_dir: Path = field(default=layout.RUN)

    @property
    def layout(self) -> layout.Layout:
        return layout.Layout(self.data_dir, self.run_dir)

    @property
    def cluster_dns(self) -> str:
        return str(ipaddress.ip_network(self.service_cidr)[10])

    @property
    def service_address(self) -> str:
        """The address of the service ``kubernetes``."""
        return str(ipaddress.ip_network(self.service_cidr)[1])

    @property
    def api_address(self) -> str:
        """Where components of this server reach its API."""
        return f"https://127.0.0.1:{self.https_listen_port}"


_VARIABLES = {
    "server": "K8E_URL",
    "token": "K8E_TOKEN",
    "write_kubeconfig": "K8E_KUBECONFIG_OUTPUT",
    "node_name": "K8E_NODE_NAME",
}
_ONLY_SERVER = frozenset(
    "cni cluster_cidr service_cidr cluster_domain https_listen_port tls_san disable "
    "disable_sandbox_matrix pod_security write_kubeconfig certificate_days".split()
)


def load(
    flags: dict[str, Any],
    *,
    role: str,
    path: Path | None = None,
    environ: dict[str, str] | None = None,
    again: bool = False,
) -> Configuration:
    """The configuration of a role from flags (None: not given), variables, the file, defaults.

    ``again`` is for what ends or removes it: that needs what the last start was told, and neither
    a network nor a file that may be wrong since.
    """
    environ = dict(os.environ) if environ is None else environ
    values = last_start() if again else {}
    if not values:
        values = _read_file(path or layout.CONFIGURATION, required=path is not None)
        told = {name: environ.get(variable) for name, variable in _VARIABLES.items()}
        values |= {name: text for name, text in told.items() if text}
    values |= {name: value for name, value in flags.items() if value not in (None, [], ())}
    if role == "agent":
        values = {name: value for name, value in values.items() if name not in _ONLY_SERVER}
    elif not again:
        values = _as_made(values)
    found = replace(Configuration(), **{name: _parse(name, values[name]) for name in values})
    return found if again else _complete(found, role)


_FOR_GOOD = ("cni", "cluster_cidr", "service_cidr", "cluster_domain")
"""Options with which a cluster is made: what runs on it rests on them."""


def note_made(config: Configuration) -> None:
    """Write down with which networks this cluster was made."""
    values = {name: getattr(config, name) for name in _FOR_GOOD}
    layout.write_private(config.layout.made, json.dumps(values) + "\n")


def _as_made(values: dict[str, Any]) -> dict[str, Any]:
    """A server's options with those of its cluster, which need not be told twice nor can differ."""
    made: dict[str, Any] = {}
    folder = Path(str(values.get("data_dir", layout.DATA)))
    with contextlib.suppress(*errors.UNREADABLE):
        read = json.loads(layout.Layout(folder).made.read_bytes())
        made = {name: str(read[name]) for name in _FOR_GOOD if name in read}
    for name, text in made.items():
        if name in values and str(values[name]) != text:
            flag = name.replace("_", "-")
            raise errors.Conflict(
                f"the cluster in {folder} was made with --{flag}={text}, not {values[name]}",
                hint=f"leave --{flag} away, and it starts as it was made; for another one: k8e "
                "server uninstall first, which removes the cluster",
            )
    return values | made


_REMEMBERED = ("data_dir", "write_kubeconfig", "cluster_cidr")


def remember(config: Configuration) -> None:
    """Write down what whoever stops, removes or looks at it later must know of this start."""
    values = {name: str(getattr(config, name)) for name in _REMEMBERED}
    layout.write_private(layout.INSTALLED, json.dumps(values) + "\n")


def last_start() -> dict[str, Any]:
    """What was remembered of the last start of this machine; empty if there was none."""
    with contextlib.suppress(*errors.UNREADABLE):
        read = json.loads(layout.INSTALLED.read_bytes())
        return {name: str(read[name]) for name in _REMEMBERED if name in read}
    return {}


def last_layout() -> layout.Layout:
    """The folders of the server or agent of this machine."""
    return layout.Layout(Path(last_start().get("data_dir", layout.DATA)))


def _read_file(path: Path, *, required: bool) -> dict[str, Any]:
    import yaml

    try:
        read: Any = yaml.safe_load(path.read_bytes())
    except FileNotFoundError:
        if required:
            raise errors.InvalidRequest(
                f"there is no configuration {path}", hint="write it, or leave --config away"
            ) from None
        return {}
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise errors.InvalidRequest(
            f"cannot read the configuration {path}: {error}",
            hint="it is YAML: flags without their dashes, such as 'cni: basic'",
        ) from None
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise errors.InvalidRequest(
            f"the configuration {path} is no mapping", hint="write flags as 'name: value'"
        )
    known = {item.name for item in fields(Configuration)} - {"run_dir"}
    values: dict[str, Any] = {}
    for key, value in read.items():  # pyright: ignore[reportUnknownVariableType]
        name = str(key).replace("-", "_")  # pyright: ignore[reportUnknownArgumentType]
        if name not in known:
            raise errors.InvalidRequest(
                f"unknown option {key!r} in {path}", hint="k8e server --help lists the options"
            )
        values[name] = value
    return values


def _parse(name: str, value: Any) -> Any:
    default: Any = getattr(Configuration(), name)
    if name == "components_dir" or isinstance(default, Path):
        return Path(str(value)).absolute()
    if isinstance(default, tuple):
        listed: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]  # pyright: ignore[reportUnknownArgumentType]
        return tuple(part for item in listed for part in str(item).split(",") if part)
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise _wrong(name, value, "true or false")
    if isinstance(default, int):
        try:
            return int(value)
        except (ValueError, TypeError):
            raise _wrong(name, value, "a number") from None
    return str(value)


def _wrong(name: str, value: Any, expected: str) -> errors.InvalidRequest:
    flag = name.replace("_", "-")
    return errors.InvalidRequest(
        f"{flag} is {value!r}, not {expected}", hint="k8e server --help explains the options"
    )


def _complete(found: Configuration, role: str) -> Configuration:
    """Fill in what the machine tells, and check everything that can be wrong by itself."""
    if found.cni not in CNIS:
        raise _wrong("cni", found.cni, "one of " + ", ".join(CNIS))
    if found.pod_security not in POD_SECURITY:
        raise _wrong("pod_security", found.pod_security, "one of " + ", ".join(POD_SECURITY))
    for name in found.disable:
        if name not in ADDONS:
            raise _wrong("disable", name, "one of " + ", ".join(ADDONS))
    if not 0 < found.https_listen_port < 1 << 16:
        raise _wrong("https_listen_port", found.https_listen_port, "a port")
    if not 0 < found.certificate_days <= 3650:
        raise _wrong("certificate_days", found.certificate_days, "between 1 and 3650")
    _check_networks(found)
    _check_names(found)
    name = found.node_name or socket.gethostname().lower()
    if not _DOMAIN.fullmatch(name) or len(name) > _NODE_NAME_LENGTH:
        raise errors.InvalidRequest(
            f"{name!r} cannot be the name of a node: small letters, digits, '-' and '.' only",
            hint="choose one with --node-name",
        )
    address = found.node_ip or default_address()
    _check_address(address)
    if role == "agent":
        _check_agent(found)
    else:
        _check_own_network(found, address)
    return replace(found, node_name=name, node_ip=address)


def _check_names(found: Configuration) -> None:
    for name in found.tls_san:
        if not _DOMAIN.fullmatch(name.lower().removeprefix("*.")) and not _is_address(name):
            raise _wrong("tls_san", name, "a name of a host or an address")
    if not _DOMAIN.fullmatch(found.cluster_domain):
        raise _wrong("cluster_domain", found.cluster_domain, "a domain such as cluster.local")
    for text in found.node_taint:
        if not _TAINT.fullmatch(text):
            raise _wrong("node_taint", text, "KEY=VALUE:NoSchedule, or with another effect")
    for text in found.node_label:
        if not _NODE_LABEL.fullmatch(text):
            raise _wrong("node_label", text, "KEY=VALUE")


def _check_networks(found: Configuration) -> None:
    networks: list[ipaddress.IPv4Network] = []
    for name in ("cluster_cidr", "service_cidr"):
        text = getattr(found, name)
        try:
            network = ipaddress.IPv4Network(text)
        except ValueError:
            raise _wrong(name, text, "an IPv4 network such as 10.42.0.0/16") from None
        if network.prefixlen > 24:
            raise _wrong(name, text, "large enough: /24 at least")
        networks.append(network)
    if networks[0].overlaps(networks[1]):
        raise errors.InvalidRequest(
            f"the networks of pods {networks[0]} and of services {networks[1]} overlap",
            hint="choose others with --cluster-cidr and --service-cidr",
        )


def _check_address(address: str) -> None:
    try:
        parsed = ipaddress.IPv4Address(address)
    except ValueError:
        raise _wrong("node_ip", address, "an IPv4 address") from None
    if parsed.is_loopback or parsed.is_unspecified:
        raise errors.InvalidRequest(
            f"the address of the node is {address}, which no other machine can reach",
            hint="choose one of this machine's addresses with --node-ip",
        )


def _check_own_network(found: Configuration, address: str) -> None:
    for name in ("cluster_cidr", "service_cidr"):
        if ipaddress.ip_address(address) in ipaddress.ip_network(getattr(found, name)):
            flag = name.replace("_", "-")
            raise errors.InvalidRequest(
                f"the address of this machine, {address}, is in the network that pods or services "
                f"would get ({getattr(found, name)})",
                hint=f"choose another network with --{flag}",
            )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_agent(found: Configuration) -> None:
    parts = re.fullmatch(r"https://[^/\s:@?#]+(?::(\d{1,5}))?/?", found.server)
    if parts is None or not 0 < int(parts[1] or 6443) < 1 << 16:
        what = f"{found.server!r} is no address of a server" if found.server else "no server given"
        raise errors.InvalidRequest(
            what, hint="k8e agent --server https://SERVER:6443 --token TOKEN, or K8E_URL"
        )


def default_address() -> str:
    """The address of this machine on the way to the world."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_SOMEWHERE)
        except OSError as error:
            raise errors.InvalidRequest(
                f"this machine has no network: no route leads to the world ({error.strerror})",
                hint="give it a default route, or name its address with --node-ip",
            ) from None
        return str(probe.getsockname()[0])
