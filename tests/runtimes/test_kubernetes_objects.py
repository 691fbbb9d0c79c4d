"""What a cluster is told of sandboxes, and what is read in what it says of pods."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8e import errors, settings
from k8e.guest.pod import image_env
from k8e.guest.spawn import TOOLS
from k8e.model import MIB, Limits, Rootfs, SandboxSpec
from k8e.runtimes.host import Host
from k8e.runtimes.kubernetes import objects
from k8e.runtimes.kubernetes.authority import LinkAuthority
from k8e.runtimes.kubernetes.records import PodRecord, Records
from k8e.runtimes.registry import Runtimes

RECIPE = objects.Recipe(
    namespace="sandboxes",
    image="registry.example/python:3",
    guest_image="registry.example/guest:1",
    runtime_class="gvisor",
    limits=Limits(cpus=0.5, memory=256 * MIB, disk=64 * MIB),
    authority="PEM",
    fingerprint="abcd",
)


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec["initContainers"], *spec["containers"]]


def test_only_the_guest_has_rights_and_these_are_five() -> None:
    spec = objects.pod_spec(RECIPE)
    copier, sandbox = containers(spec)
    assert copier["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    held = sandbox["securityContext"]["capabilities"]
    assert held["drop"] == ["ALL"]
    assert sorted(held["add"]) == ["CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID"]
    for item in containers(spec):
        rights = item["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        assert not rights["privileged"]
        # A token belongs to the one user that all containers have; of two, it would be open to all.
        assert rights["runAsUser"] == 0
    assert not spec["automountServiceAccountToken"]
    assert not any(name in spec for name in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in item for item in spec["volumes"])


def test_every_container_has_limits_since_otherwise_the_pod_has_none() -> None:
    for item in containers(objects.pod_spec(RECIPE)):
        assert item["resources"]["limits"] == {"cpu": "500m", "memory": str(320 * MIB)}
    volumes = {item["name"]: item for item in objects.pod_spec(RECIPE)["volumes"]}
    assert volumes["workspace"]["emptyDir"] == {"sizeLimit": str(64 * MIB)}
    assert volumes["tmp"]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(64 * MIB)}


def test_the_token_is_for_links_alone_and_only_the_guest_mounts_it() -> None:
    spec = objects.pod_spec(RECIPE)
    volume = next(item for item in spec["volumes"] if item["name"] == "identity")["projected"]
    assert volume["defaultMode"] == 0o400
    (source,) = volume["sources"]
    assert source["serviceAccountToken"]["audience"] == "k8e-link"
    copier, sandbox = containers(spec)
    assert "identity" not in {item["name"] for item in copier["volumeMounts"]}
    mounted = next(item for item in sandbox["volumeMounts"] if item["name"] == "identity")
    assert mounted["readOnly"]


def test_an_image_says_nothing_to_the_loader_and_the_libraries_of_the_guest() -> None:
    _, sandbox = containers(objects.pod_spec(RECIPE))
    env = {item["name"]: item.get("value") for item in sandbox["env"]}
    assert env["LD_PRELOAD"] == env["LD_AUDIT"] == ""
    assert env["OPENSSL_CONF"] == "/dev/null", "its providers are libraries of the image"
    (over,) = (item for item in sandbox["volumeMounts"] if item["mountPath"].startswith("/etc"))
    assert over == {
        "name": "guest",
        "subPath": "empty",
        "readOnly": True,
        "mountPath": "/etc/ld.so.preload",
    }
    assert image_env({**env, "PATH": "/bin", "OWN": "1"}) == {"PATH": f"/bin:{TOOLS}", "OWN": "1"}


def test_a_pod_is_born_with_the_labels_that_the_policy_selects() -> None:
    template = objects.template(RECIPE)["spec"]
    born = template["podTemplate"]["metadata"]["labels"]
    policy = objects.network_policy("sandboxes")["spec"]
    wanted = policy["podSelector"]["matchLabels"]
    assert {name: born[name] for name in wanted} == wanted
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    assert template["networkPolicyManagement"] == "Unmanaged", "a later policy cannot add to it"
    assert objects.claim(RECIPE, "sb-1")["spec"] == {
        "warmPoolRef": {"name": objects.pool(RECIPE)["metadata"]["name"]}
    }


def test_what_differs_has_another_template_and_what_is_the_same_has_one() -> None:
    changes: list[dict[str, Any]] = [
        {"image": "registry.example/node:1"},
        {"runtime_class": "kata"},
        {"limits": Limits()},
        {"authority": "OTHER"},
        {"guest_image": "registry.example/guest:2"},
    ]
    names = {objects.name_of(replace(RECIPE, **change)) for change in changes}
    assert len(names | {objects.name_of(RECIPE)}) == len(changes) + 1
    assert objects.name_of(replace(RECIPE)) == objects.name_of(RECIPE)


def a_pod(phase: str = "Running", *, going: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": "p", "uid": "u", **({"deletionTimestamp": "now"} if going else {})}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def ended(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "sandbox", "state": {"terminated": state}}]


DISRUPTED = [
    {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
    }
]


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (a_pod(), ""),
        (a_pod("Pending"), ""),
        (a_pod(going=True), "its pod was deleted"),
        (a_pod(going=True, conditions=DISRUPTED), "(EvictionByEvictionAPI): Eviction API"),
        (a_pod("Failed", reason="Evicted", message="low on disk"), "(Evicted): low on disk"),
        (
            a_pod("Failed", containerStatuses=ended(reason="OOMKilled", exitCode=137)),
            "ran out of memory",
        ),
        (a_pod("Failed", containerStatuses=ended(reason="Error", exitCode=3)), "exit code 3"),
    ],
)
def test_the_end_of_a_pod_is_told_in_words(pod: dict[str, Any], reason: str) -> None:
    said = objects.end_of(pod)
    assert reason in said if reason else not said


def test_a_pod_that_cannot_start_is_given_up_with_the_reason() -> None:
    waiting = {"reason": "ErrImagePull", "message": "no such image"}
    status: dict[str, Any] = {
        "containerStatuses": [{"name": "sandbox", "state": {"waiting": waiting}}]
    }
    assert objects.fault_of(a_pod("Pending", **status)) == "ErrImagePull: no such image"
    waiting["reason"] = "ContainerCreating"
    assert objects.fault_of(a_pod("Pending", **status)) == ""
    assert objects.address_of(a_pod("Pending", podIP="10.0.0.1", **status)) == ""
    running: list[dict[str, Any]] = [{"name": "sandbox", "state": {"running": {}}}]
    assert objects.address_of(a_pod(podIP="10.0.0.1", containerStatuses=running)) == "10.0.0.1"


def test_records_are_for_the_owner_alone_and_come_back(tmp_path: Path) -> None:
    records = Records(tmp_path / "pods")
    record = PodRecord("sb-1", "gvisor", RECIPE.limits, "ab" * 32, "k8e-1", "claim", "pod", "uid")
    records.save(record)
    assert records.load("sb-1") == record
    assert records.names() == {"sb-1"}
    assert records.templates() == Records(tmp_path / "pods").templates() == {"k8e-1"}
    file = tmp_path / "pods/sb-1/pod.json"
    assert file.stat().st_mode & 0o077 == 0
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(errors.StateUnusable, match="newer"):
        records.load("sb-1")
    file.write_text("{")
    assert records.load("sb-1") is None
    records.remove("sb-1")
    assert records.names() == records.templates() == set()


def test_an_authority_is_made_once_and_kept(tmp_path: Path) -> None:
    first, again = LinkAuthority(tmp_path / "a"), LinkAuthority(tmp_path / "a")
    assert (first.pem, first.fingerprint) == (again.pem, again.fingerprint)
    assert first.context() is first.context()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["link.crt", "link.key"]
    assert (tmp_path / "a/link.key").stat().st_mode & 0o077 == 0
    (tmp_path / "a/link.key").write_text("damaged")
    with pytest.raises(errors.StateUnusable, match="damaged"):
        LinkAuthority(tmp_path / "a")


# A gateway that was given a cluster.


@pytest.fixture
def runtimes(tmp_path: Path) -> Generator[Runtimes]:
    environ = {"K8E_DATA_DIR": str(tmp_path / "d"), "K8E_RUN_DIR": str(tmp_path / "r")}
    environ |= {"K8E_KUBECONFIG": str(tmp_path / "missing"), "K8E_RUNTIME_CLASSES": "kata, gvisor"}
    (tmp_path / "d").mkdir()
    host = Host(settings.load(environ))
    yield Runtimes(host)
    host.close()


@pytest.mark.anyio
async def test_the_runtimes_of_a_cluster_are_its_classes_and_none_stands_in_for_another(
    runtimes: Runtimes,
) -> None:
    assert set(runtimes.all) == {"kata", "gvisor"}
    assert runtimes.resolve("kubernetes") == "kata", "the first is the usual one"
    with pytest.raises(errors.InvalidRequest, match="unknown runtime 'container'"):
        runtimes.resolve("container")
    for asked in ("", "gvisor", "kata"):
        with pytest.raises(errors.RuntimeUnusable, match="cannot be used"):
            await runtimes.choose(asked)
    assert "no network" in runtimes.network_fault
    assert runtimes.warning() == ""


@pytest.mark.anyio
async def test_what_pods_cannot_do_is_refused_before_anything_is_made(runtimes: Runtimes) -> None:
    gvisor = runtimes.all["gvisor"]
    kin = SandboxSpec("sb-2", Limits(), "gvisor", workspace_of="sb-1")
    with pytest.raises(errors.RuntimeUnusable, match="sub-agents"):
        await gvisor.launch(kin)
    with pytest.raises(errors.InvalidRequest, match="'tar'"):
        await gvisor.fetch(Rootfs("tar", "/root.tar"))
    with pytest.raises(errors.RuntimeUnusable, match="no image") as caught:
        await gvisor.fetch(Rootfs())
    assert "K8E_SANDBOX_IMAGE" in caught.value.hint
    await gvisor.fetch(Rootfs("image", "registry.example/python:3"))
    assert gvisor.remains() == set()
    assert gvisor.can_change(Limits(), Limits(pids=20, output=5000))
    assert not gvisor.can_change(Limits(), Limits(memory=64 * MIB))
    assert "inodes" in gvisor.excess(Limits(inodes=50))


def test_a_kubeconfig_that_was_replaced_has_the_cluster_tried_anew(
    runtimes: Runtimes, tmp_path: Path
) -> None:
    before = runtimes.all["gvisor"].facts()
    assert runtimes.all["gvisor"].facts() == before
    (tmp_path / "missing").write_text("of another cluster")
    assert runtimes.all["gvisor"].facts() != before
