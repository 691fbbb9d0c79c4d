"""What a node's components are told."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from k8e.distro import node, runtime_classes
from k8e.distro.layout import Layout
from k8e.distro.node import Node
from k8e.distro.runtime_classes import Runtime

PROGRAMS = Path("/components/bin")


def make(cni: str = "basic") -> Node:
    return Node(
        layout=Layout(Path("/data"), Path("/run/k8e")),
        name="one",
        address="192.0.2.1",
        server="https://192.0.2.1:6443",
        cni=cni,
        cluster_cidr="10.42.0.0/16",
        service_cidr="10.43.0.0/16",
        cluster_dns="10.43.0.10",
        cluster_domain="cluster.local",
    )


FIRECRACKER = Runtime(
    "firecracker",
    "firecracker",
    {"runtime_type": "aws.firecracker", "snapshotter": "devmapper"},
    snapshotters={"devmapper": {"pool_name": "pool"}},
    toleration="sandbox.k8e.io/kvm",
)


def config(cni: str = "basic", *runtimes: Runtime, capable: bool = True) -> dict[str, Any]:
    text = node.containerd_config(make(cni), PROGRAMS, list(runtimes), own_oom_score=capable)
    return tomllib.loads(text)


def plugin(found: dict[str, Any], name: str) -> dict[str, Any]:
    return found["plugins"][name]


def test_containerd_has_a_stanza_for_each_runtime_that_was_found_and_no_other() -> None:
    gvisor = Runtime("gvisor", "runsc", {"runtime_type": "io.containerd.runsc.v1"})
    for runtimes in ((), (gvisor,), (gvisor, FIRECRACKER)):
        cri = plugin(config("basic", *runtimes), "io.containerd.cri.v1.runtime")
        stanzas = cri["containerd"]["runtimes"]
        assert set(stanzas) == {"runc", *(runtime.handler for runtime in runtimes)}


def test_a_runtime_brings_its_snapshotter() -> None:
    found = plugin(config("basic", FIRECRACKER), "io.containerd.snapshotter.v1.devmapper")
    assert found["pool_name"] == "pool"


def test_a_network_of_ones_own_is_looked_for_where_everybody_puts_it() -> None:
    own = plugin(config("none"), "io.containerd.cri.v1.runtime")["cni"]
    ours = plugin(config("basic"), "io.containerd.cri.v1.runtime")["cni"]
    assert own["conf_dir"] == "/etc/cni/net.d"
    assert ours["conf_dir"] == "/data/agent/etc/cni/net.d"


def test_containerd_reaches_registries_through_the_proxy_of_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    containerd, kubelet, *_ = node.components(make(), PROGRAMS)
    assert containerd.environ["HTTPS_PROXY"] == "http://proxy.example:3128"
    assert containerd.environ["NO_PROXY"] == "10.0.0.0/8"
    assert "HTTPS_PROXY" not in kubelet.environ, "it talks to the API server alone"


@pytest.mark.parametrize("capable", [True, False])
def test_scores_are_only_lowered_where_that_is_allowed(capable: bool) -> None:
    found = config("basic", capable=capable)
    runtime = plugin(found, "io.containerd.cri.v1.runtime")
    assert runtime["restrict_oom_score_adj"] is not capable
    assert (found["oom_score"] == 0) is not capable


def test_a_runtime_class_tolerates_what_its_nodes_are_tainted_with() -> None:
    found = runtime_classes.runtime_class(FIRECRACKER)
    assert found["handler"] == "firecracker"
    assert found["scheduling"]["tolerations"][0]["key"] == "sandbox.k8e.io/kvm"


def which(*names: str) -> runtime_classes.Find:
    return lambda name: f"/bin/{name}" if name in names else None


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ((), set[str]()),
        (("runsc",), set[str]()),
        (("containerd-shim-runsc-v1",), set[str]()),
        (("runsc", "containerd-shim-runsc-v1"), {"gvisor"}),
        (("kata-runtime",), set[str]()),
    ],
)
def test_a_runtime_without_its_shim_is_not_offered(
    present: tuple[str, ...], found: set[str]
) -> None:
    runtimes, missing = runtime_classes.detect(which(*present))
    assert {runtime.name for runtime in runtimes} == found
    assert {item.name for item in missing} == {"gvisor", "kata", "firecracker"} - found
    assert all(item.why for item in missing)


def test_kata_needs_virtual_machines_that_really_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shim = which("containerd-shim-kata-v2")
    monkeypatch.setattr(runtime_classes, "kvm_fault", lambda: "")
    assert [runtime.handler for runtime in runtime_classes.detect(shim)[0]] == ["kata-qemu"]
    monkeypatch.setattr(runtime_classes, "kvm_fault", lambda: "it is broken")
    runtimes, missing = runtime_classes.detect(shim)
    assert not runtimes
    assert "it is broken" in [item.why for item in missing]


def test_a_device_that_is_only_there_is_no_kvm(tmp_path: Path) -> None:
    assert "No such file" in runtime_classes.kvm_fault(tmp_path / "kvm")
    assert runtime_classes.kvm_fault(Path("/dev/null"))


def test_kvm_is_tried_where_it_is() -> None:
    if not os.access(runtime_classes.KVM, os.R_OK | os.W_OK):
        pytest.skip("this machine has no /dev/kvm")
    fault = runtime_classes.kvm_fault()
    assert not fault or "starts no virtual machine" in fault or "version" in fault


@pytest.mark.parametrize(
    ("text", "taint"),
    [
        ("a=b:NoSchedule", {"key": "a", "value": "b", "effect": "NoSchedule"}),
        ("a:NoExecute", {"key": "a", "value": "", "effect": "NoExecute"}),
        ("x.io/a=:NoSchedule", {"key": "x.io/a", "value": "", "effect": "NoSchedule"}),
    ],
)
def test_taints_are_read_as_kubectl_writes_them(text: str, taint: dict[str, str]) -> None:
    assert node.taint(text) == taint
