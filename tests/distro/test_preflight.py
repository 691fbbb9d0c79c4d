"""Bad machines get a clear error before anything is started."""

from __future__ import annotations

import datetime
import json
import os
import socket
from pathlib import Path

import pytest

from k8e import errors
from k8e.distro import certificates, components, preflight
from k8e.distro.component_store import ComponentStore
from k8e.distro.components import CILIUM, Component, needed
from k8e.distro.configuration import Configuration
from k8e.distro.layout import Layout
from tests.distro.test_component_store import put


def test_a_port_that_is_taken_is_told_with_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.Conflict, match=rf"port {port}.*\(pid {os.getpid()}\)"):
            preflight.check_free({"etcd": port}, own=set())


def test_a_port_of_a_component_that_is_taken_over_is_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        preflight.check_free({"etcd": taken.getsockname()[1]}, own={os.getpid()})


def test_a_port_of_a_listener_on_all_addresses_is_seen() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        assert taken.getsockname()[1] in preflight.listeners()


def test_swap_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "swaps"
    file.write_text("Filename Type Size Used Priority\n/dev/sda2 partition 100 0 -2\n")
    with pytest.raises(errors.InvalidRequest, match=r"swap is on.*/dev/sda2") as refused:
        preflight.check_swap(file)
    assert "--allow-swap" in refused.value.hint


def test_no_swap_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "swaps"
    file.write_text("Filename Type Size Used Priority\n")
    preflight.check_swap(file)


def test_too_little_memory_is_told_with_what_needs_less(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  1048576 kB\n")
    with pytest.raises(errors.LimitExceeded, match="has 1024 MiB of memory") as refused:
        preflight.check_memory("server", "cilium", file)
    assert "--cni=basic" in refused.value.hint
    preflight.check_memory("agent", "cilium", file)


def test_a_disk_that_is_nearly_full_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "DISK", 1 << 40)
    with pytest.raises(errors.LimitExceeded, match=f"disk of {tmp_path} has"):
        preflight.check_disk(tmp_path / "not/there/yet")


def test_a_folder_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path / "run")
    preflight.note_release(layout)
    preflight.check_release(layout)
    layout.release.write_text(json.dumps({"version": "99.1.0"}))
    with pytest.raises(errors.StateUnusable, match=r"written by k8e 99\.1\.0, which is newer"):
        preflight.check_release(layout)


def test_a_folder_whose_release_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path / "run")
    layout.release.write_text("nonsense")
    with pytest.raises(errors.StateUnusable, match="cannot be read"):
        preflight.check_release(layout)


def test_a_server_is_no_agent_and_an_agent_no_server(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path / "run")
    layout.make()
    layout.cluster.write_text("{}")
    with pytest.raises(errors.Conflict, match="has joined a cluster as an agent"):
        preflight.check_role(layout, "server")
    layout.make_server()
    (layout.tls / "server-ca.crt").touch()
    with pytest.raises(errors.Conflict, match="is the server of a cluster"):
        preflight.check_role(layout, "agent")


def test_a_kernel_without_an_option_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [(True, "CONFIG_NET_NS", "containers"), (False, "CONFIG_CGROUP_BPF", "Cilium")]

    def needed(_cni: str) -> list[tuple[bool, str, str]]:
        return needs

    monkeypatch.setattr(preflight, "_kernel_needs", needed)
    with pytest.raises(errors.RuntimeUnusable, match="lacks CONFIG_CGROUP_BPF, which Cilium") as no:
        preflight.check_kernel("cilium")
    assert "--cni=basic" in no.value.hint


def test_bpf_programs_are_really_tried() -> None:
    if os.geteuid() != 0:
        pytest.skip("loading programs needs root")
    assert preflight.bpf_loads(3)
    assert not preflight.bpf_loads(9999)  # no such kind: what is tried can fail


def test_nobody_but_root_runs_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    config = Configuration(data_dir=Path("/nowhere"))
    with pytest.raises(errors.Denied, match="need root; this is uid 1000"):
        preflight.check(config, "server")


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "data", tmp_path / "run")
    preflight.check_folders(layout)  # none is there yet
    layout.make()
    layout.make_server()
    preflight.check_folders(layout)
    layout.server.chmod(0o775)
    with pytest.raises(errors.Denied, match=r"server belongs to uid .* the rights 775") as refused:
        preflight.check_folders(layout)
    assert "--data-dir" in refused.value.hint


def test_private_folders_that_were_restored_with_other_rights_are_private_again(
    tmp_path: Path,
) -> None:
    layout = Layout(tmp_path / "data", tmp_path / "run")
    for folder in (layout.credentials, layout.etcd, layout.pki, layout.logs):
        folder.mkdir(mode=0o755, parents=True)
    layout.make()
    layout.make_server()
    for folder in (layout.credentials, layout.etcd, layout.pki, layout.logs):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


def test_a_clock_that_lies_before_the_clusters_beginning_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(tmp_path / "data", tmp_path / "run")
    preflight.check_clock(layout)  # there is no cluster yet
    now = datetime.datetime.now(datetime.UTC)
    later = now + datetime.timedelta(days=365)
    monkeypatch.setattr(certificates, "_now", lambda: later)
    certificates.authority(layout.tls, "server-ca")
    with pytest.raises(errors.InvalidRequest, match=f"clock of this machine says {now.year}"):
        preflight.check_clock(layout)


def test_programs_of_a_network_that_are_wrong_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent learns only when it joins which network its cluster has."""
    store = ComponentStore(tmp_path / "components")
    config = Configuration(data_dir=tmp_path / "data")

    def built(cni: str) -> list[Component]:  # what the distribution has is another test's
        return [component for component in needed(cni) if not component.programs]

    monkeypatch.setattr(components, "needed", built)
    for component in built("cilium"):
        put(store, component)
    preflight.check_components(config, "agent", store, "none")
    program = store.folder / CILIUM.files[0]
    program.write_bytes(b"another")
    preflight.check_components(config, "agent", store, "none")
    with pytest.raises(errors.ToolFailed, match=r"component cilium .* has the checksum") as refused:
        preflight.check_components(config, "agent", store, "cilium")
    assert refused.value.hint == "k8e components install cilium"
