"""What a server is told, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.distro import configuration, layout

ADDRESS = {"node_ip": "192.0.2.7"}


def load(path: Path | None = None, role: str = "server", **flags: Any) -> Any:
    return configuration.load(ADDRESS | flags, role=role, path=path, environ={})


def test_flags_win_over_variables_and_these_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("cni: basic\ntoken: from-file\nnode-name: from-file\ntls-san: [a, b]\n")
    found = configuration.load(
        ADDRESS | {"node_name": "from-flag", "tls_san": None},
        role="server",
        path=file,
        environ={"K8E_TOKEN": "from-variable", "K8E_NODE_NAME": "from-variable"},
    )
    assert (found.cni, found.token, found.node_name) == ("basic", "from-variable", "from-flag")
    assert found.tls_san == ("a", "b")


def test_the_addresses_of_services_follow_from_their_network() -> None:
    found = load(service_cidr="10.99.0.0/16")
    assert (found.service_address, found.cluster_dns) == ("10.99.0.1", "10.99.0.10")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"cni": "flannel"}, "one of cilium, basic, none"),
        ({"cluster_cidr": "10.43.0.0/20"}, "overlap"),
        ({"cluster_cidr": "10.42.0.0/25"}, "/24 at least"),
        ({"service_cidr": "fd00::/64"}, "an IPv4 network"),
        ({"node_ip": "127.0.0.1"}, "no other machine can reach"),
        ({"node_ip": "nowhere"}, "an IPv4 address"),
        ({"node_name": "Node_1"}, "cannot be the name of a node"),
        ({"disable": ["traefik"]}, "coredns, metrics-server, local-path"),
        ({"https_listen_port": 70000}, "a port"),
        ({"pod_security": "strict"}, "privileged, baseline, restricted"),
        ({"certificate_days": 0}, "between 1 and 3650"),
        ({"node_name": "a..b"}, "cannot be the name of a node"),
        ({"tls_san": ["cluster.example", "no host"]}, "'no host', not a name of a host"),
        ({"cluster_domain": "a b"}, "a domain such as cluster.local"),
        ({"node_taint": ["key=value"]}, "KEY=VALUE:NoSchedule"),
        ({"node_label": ["rack"]}, "'rack', not KEY=VALUE"),
        ({"cluster_cidr": "192.0.0.0/16"}, "192.0.2.7, is in the network that pods"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=words) as refused:
        load(**flags)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cni: [", "cannot read the configuration"),
        ("- cni", "is no mapping"),
        ("sni: basic", "unknown option 'sni'"),
        ("run-dir: /tmp/x", "unknown option 'run-dir'"),
        ("allow-swap: perhaps", "not true or false"),
        ("https-listen-port: many", "not a number"),
    ],
)
def test_a_file_that_says_something_else_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(errors.InvalidRequest, match=words):
        load(file)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="there is no configuration"):
        load(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    "server",
    [
        *("", "http://10.0.0.1:6443", "https://", "10.0.0.1"),
        *("https://10.0.0.1:99999", "https://name:secret@10.0.0.1"),
    ],
)
def test_an_agent_needs_the_address_of_a_server(server: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        load(role="agent", server=server)
    assert "--server https://SERVER:6443" in refused.value.hint


def test_an_agent_passes_over_what_is_a_servers_in_a_shared_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("cni: nonsense\nserver: https://10.0.0.1:6443\n")
    assert load(file, role="agent").server == "https://10.0.0.1:6443"


def test_a_machine_without_a_network_is_told_so() -> None:
    if os.geteuid() != 0:
        pytest.skip("an empty network needs root")
    program = "from k8e.distro import configuration; configuration.default_address()"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "this machine has no network" in done.stderr


def test_a_machine_is_removed_from_where_its_last_start_put_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "INSTALLED", tmp_path / "installed.json")
    assert configuration.last_layout() == layout.Layout()
    data, admin = tmp_path / "data", tmp_path / "admin.yaml"
    configuration.remember(load(data_dir=data, write_kubeconfig=admin))
    file = tmp_path / "config.yaml"
    file.write_text("data-dir: /changed/since\nnode-ip: of no use\n")
    found = configuration.load({}, role="server", path=file, environ={}, again=True)
    assert (found.data_dir, found.write_kubeconfig) == (data, admin)
    assert configuration.last_layout().data == tmp_path / "data"
    anew = configuration.load(ADDRESS, role="server", path=file, environ={})
    assert anew.data_dir == Path("/changed/since"), "a start is told by its own configuration"
    (tmp_path / "installed.json").write_text("[]")
    assert configuration.last_layout() == layout.Layout()


def test_a_cluster_starts_again_with_the_networks_that_it_was_made_with(tmp_path: Path) -> None:
    made = load(data_dir=tmp_path, cni="basic", cluster_cidr="10.50.0.0/16")
    made.layout.make_server()
    configuration.note_made(made)
    again = load(data_dir=tmp_path)
    assert (again.cni, again.cluster_cidr) == ("basic", "10.50.0.0/16")
    assert load(data_dir=tmp_path, cni="basic").cni == "basic"
    with pytest.raises(errors.Conflict, match="was made with --cni=basic, not cilium") as refused:
        load(data_dir=tmp_path, cni="cilium")
    assert "k8e server uninstall" in refused.value.hint
    ended = configuration.load(
        ADDRESS | {"data_dir": tmp_path, "cni": "none"}, role="server", environ={}, again=True
    )
    assert ended.cni == "none", "it can be removed whatever was told"
