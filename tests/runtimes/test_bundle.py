"""OCI bundles as data: what every sandbox gets, and what no sandbox gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k8e import settings
from k8e.model import MIB, Limits
from k8e.runtimes import bundle, rootfs, seccomp
from k8e.runtimes.container import Container
from k8e.runtimes.guest_package import Interpreter
from k8e.runtimes.gvisor import GVisor
from k8e.runtimes.host import Host, SandboxRecord
from k8e.runtimes.uids import FIRST_ID, Uids

LIMITS = Limits(cpus=0.5, memory=128 * MIB, pids=40, disk=8 * MIB)
WRITABLE = {"/tmp", "/var/tmp", "/home", "/dev/shm", "/dev", "/dev/pts", "/proc"}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(settings.load({"K8E_DATA_DIR": str(tmp_path), "K8E_RUN_DIR": str(tmp_path)}))
    host.uids = Uids(host.sandboxes, claims=tmp_path / "claims")
    return host


@pytest.fixture(params=["gvisor", "container"])
def runtime(request: pytest.FixtureRequest, host: Host) -> GVisor | Container:
    return GVisor(host) if request.param == "gvisor" else Container(host)


def make_config(runtime: GVisor | Container, python: Interpreter | None = None) -> dict[str, Any]:
    record = runtime.assign(SandboxRecord("sb-x", runtime.name, LIMITS, None))
    return bundle.make_config("sb-x", host_layout(python), runtime.flavour(record), LIMITS)


def host_layout(python: Interpreter | None = None) -> bundle.BundleLayout:
    return bundle.BundleLayout(
        rootfs=Path("/k8e/rootfs"),
        bound=["/usr"],
        guest=Path("/k8e/guest/guest-1.pyc"),
        link=Path("/k8e/sb-x/link"),
        slot=Path("/k8e/sb-x/slot"),
        tools=Path("/k8e/tools"),
        open_files=1000,
        python=python,
    )


@pytest.fixture
def config(runtime: GVisor | Container) -> dict[str, Any]:
    return make_config(runtime)


def test_a_bundle_is_plain_data(config: dict[str, Any]) -> None:
    assert json.loads(json.dumps(config)) == config


def test_no_process_can_gain_privileges_and_the_guest_has_few(config: dict[str, Any]) -> None:
    process = config["process"]
    assert process["noNewPrivileges"] is True
    allowed = {*bundle.GUEST_CAPABILITIES, "CAP_SYS_ADMIN"}
    for held in process["capabilities"].values():
        assert set(held) <= allowed
    assert not {"inheritable", "ambient"} & set(process["capabilities"])


def test_only_gvisor_lends_its_own_admin_capability(
    config: dict[str, Any], runtime: GVisor | Container
) -> None:
    admin = "CAP_SYS_ADMIN" in config["process"]["capabilities"]["permitted"]
    assert admin == (runtime.name == "gvisor")


def test_the_guests_environment_has_nothing_of_ours(config: dict[str, Any]) -> None:
    names = [item.partition("=")[0] for item in config["process"]["env"]]
    assert names == ["PATH", "LANG", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"]


def test_the_root_is_read_only_and_what_the_host_lends_too(config: dict[str, Any]) -> None:
    assert config["root"] == {"path": "/k8e/rootfs", "readonly": True}
    for mount in config["mounts"]:
        lent = mount["type"] == "bind" and "slot" not in mount["source"]
        if lent:
            assert {"ro", "rro", "nosuid", "nodev"} <= set(mount["options"]), mount
        elif mount["destination"] not in WRITABLE and mount["type"] != "bind":
            assert "ro" in mount["options"], mount


def test_nothing_but_the_known_folders_of_the_host_is_mounted(config: dict[str, Any]) -> None:
    sources = {m["source"] for m in config["mounts"] if m["type"] == "bind"}
    sources.discard(bundle.CPUS)  # instead of a sysfs, which would tell of all of the host
    assert sources == {"/usr", "/k8e/tools", "/k8e/guest", "/k8e/sb-x/link", "/k8e/sb-x/slot"}


def test_every_writable_mount_ignores_setuid_files(config: dict[str, Any]) -> None:
    for mount in config["mounts"]:
        assert "nosuid" in mount["options"], mount


def test_scratch_space_is_bounded_and_leaves_room_for_programs(config: dict[str, Any]) -> None:
    sizes = [
        int(option.removeprefix("size="))
        for mount in config["mounts"]
        for option in mount["options"]
        if mount["type"] == "tmpfs" and option.startswith("size=")
    ]
    assert len(sizes) == 5
    assert sum(sizes) < LIMITS.memory


def test_the_slot_passes_later_mounts_in_but_not_out(config: dict[str, Any]) -> None:
    (slot,) = (m for m in config["mounts"] if m["source"] == "/k8e/sb-x/slot")
    assert "rslave" in slot["options"]
    assert "rshared" not in slot["options"]


def test_each_sandbox_has_namespaces_of_its_own(
    config: dict[str, Any], runtime: GVisor | Container
) -> None:
    kinds = {item["type"] for item in config["linux"]["namespaces"]}
    assert {"pid", "ipc", "uts", "mount", "network", "cgroup"} <= kinds
    assert ("user" in kinds) == (runtime.name == "container")
    assert all("path" not in item for item in config["linux"]["namespaces"])


def test_container_uids_lie_far_from_the_hosts_own(
    config: dict[str, Any], runtime: GVisor | Container
) -> None:
    if runtime.name == "gvisor":
        assert "uidMappings" not in config["linux"]
        return
    mapping = {"containerID": 0, "hostID": FIRST_ID, "size": 65536}
    assert config["linux"]["uidMappings"] == [mapping]
    assert config["linux"]["gidMappings"] == [mapping]


def test_limits_are_those_of_the_session_plus_what_the_runtime_needs(
    config: dict[str, Any], runtime: GVisor | Container
) -> None:
    resources = config["linux"]["resources"]
    overhead = bundle.GVISOR_OVERHEAD if runtime.name == "gvisor" else 0
    assert resources["memory"] == {"limit": 128 * MIB + overhead, "swap": 128 * MIB + overhead}
    assert resources["cpu"] == {"period": 100_000, "quota": 50_000}
    assert resources["pids"]["limit"] == (4096 if runtime.name == "gvisor" else 41)
    assert resources["devices"] == [{"allow": False, "access": "rwm"}]


def test_the_kernels_own_files_are_masked_or_read_only(config: dict[str, Any]) -> None:
    masked, read_only = config["linux"]["maskedPaths"], config["linux"]["readonlyPaths"]
    assert {"/proc/kcore", "/proc/keys", "/sys/firmware", "/proc/timer_list"} <= set(masked)
    assert {"/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"} <= set(read_only)


FORBIDDEN = (
    "mount umount2 pivot_root chroot setns unshare clone3 bpf perf_event_open keyctl add_key "
    "request_key userfaultfd io_uring_setup io_uring_enter io_uring_register init_module "
    "finit_module delete_module kexec_load kexec_file_load open_by_handle_at quotactl swapon "
    "swapoff reboot settimeofday clock_settime sethostname setdomainname fsopen fsmount open_tree "
    "move_mount acct syslog iopl ioperm vhangup lookup_dcookie nfsservctl seccomp memfd_secret"
).split()


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_container_may_not_call(name: str) -> None:
    for rule in seccomp.profile()["syscalls"]:
        if name in rule["names"]:
            assert rule["action"] == "SCMP_ACT_ERRNO"


def test_what_is_not_on_the_list_fails_with_eperm() -> None:
    profile = seccomp.profile()
    assert (profile["defaultAction"], profile["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 1)


def answer_to(name: str, *arguments: int) -> str:
    """What the profile says to a call, as the kernel would find it."""
    profile = seccomp.profile()
    found = {
        f"{rule['action']} {rule.get('errnoRet', '')}".strip()
        for rule in profile["syscalls"]
        if name in rule["names"] and all(_holds(item, arguments) for item in rule.get("args", ()))
    }
    assert len(found) < 2, "no two rules answer the same call"
    return found.pop() if found else f"{profile['defaultAction']} {profile['defaultErrnoRet']}"


def _holds(rule: dict[str, Any], arguments: tuple[int, ...]) -> bool:
    given = arguments[int(rule["index"])]
    if rule["op"] == "SCMP_CMP_MASKED_EQ":
        return bool(given & rule["value"] == rule["valueTwo"])
    return bool(given == rule["value"])


ALLOWED, REFUSED, MISSING = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO 1", "SCMP_ACT_ERRNO 93"
HIGH = 1 << 32  # the kernel does not look at these bits
UNBLOCKED = 0o4000 | 0o2000000


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ((1, 1, 0), ALLOWED),
        ((2, 1 | UNBLOCKED, 6), ALLOWED),
        ((10, 2, 17), ALLOWED),
        ((16, 3 | UNBLOCKED, 0), ALLOWED),
        ((HIGH | 2, HIGH | 1, HIGH), ALLOWED),
        ((2, 1, 262), MISSING),
        ((10, 1, HIGH | 262), MISSING),
        ((2, 2, 136), MISSING),
        ((2, 5, 132), MISSING),
        ((2, 1, 132), MISSING),
        ((2, 6, 33), REFUSED),
        ((2, 2, 115), REFUSED),
        ((2, 2, 1), REFUSED),
        ((10, 2, 58), REFUSED),
        ((2, 3, 255), REFUSED),
        ((2, 1, 256), REFUSED),
        ((2, 10, 0), REFUSED),
        ((16, 3, 9), REFUSED),
        ((17, 3, 0), REFUSED),
        ((40, 1, 0), REFUSED),
        ((HIGH | 40, 1, 0), REFUSED),
    ],
)
def test_sockets_are_allowed_by_family_type_and_protocol(
    arguments: tuple[int, int, int], answer: str
) -> None:
    assert answer_to("socket", *arguments) == answer
    if arguments[0] != 1:
        assert answer_to("socketpair", *arguments) == REFUSED


@pytest.mark.parametrize(
    ("level", "option", "answer"),
    [
        (1, 2, ALLOWED),  # SO_REUSEADDR
        (1, 15, ALLOWED),  # SO_REUSEPORT
        (1, 20, ALLOWED),  # SO_RCVTIMEO
        (1, 66, ALLOWED),  # SO_RCVTIMEO_NEW
        (1, 26, REFUSED),  # SO_ATTACH_FILTER
        (1, 44, REFUSED),  # SO_LOCK_FILTER
        (1, 50, REFUSED),  # SO_ATTACH_BPF
        (1, 51, REFUSED),  # SO_ATTACH_REUSEPORT_CBPF
        (1, 52, REFUSED),  # SO_ATTACH_REUSEPORT_EBPF
        (1, HIGH | 51, REFUSED),
        (HIGH | 1, 26, REFUSED),
        (1, 60, REFUSED),  # SO_ZEROCOPY
        (6, 1, ALLOWED),  # TCP_NODELAY
        (6, 18, ALLOWED),  # TCP_USER_TIMEOUT
        (6, 14, REFUSED),  # TCP_MD5SIG
        (6, 31, REFUSED),  # TCP_ULP
        (0, 2, ALLOWED),  # IP_TTL
        (0, 35, REFUSED),  # IP_ADD_MEMBERSHIP
        (0, 42, REFUSED),  # MCAST_JOIN_GROUP
        (41, 26, ALLOWED),  # IPV6_V6ONLY
        (41, 20, REFUSED),  # IPV6_JOIN_GROUP
        (41, 32, REFUSED),  # IPV6_FLOWLABEL_MGR
        (17, 103, ALLOWED),  # UDP_SEGMENT
        (17, 100, REFUSED),  # UDP_ENCAP
        (282, 1, REFUSED),  # SOL_TLS
        (263, 1, REFUSED),  # SOL_PACKET
        (0, 64, REFUSED),  # iptables
    ],
)
def test_options_of_sockets_are_allowed_one_by_one(level: int, option: int, answer: str) -> None:
    assert answer_to("setsockopt", 3, level, option) == answer


def test_no_program_filters_its_own_calls() -> None:
    assert answer_to("seccomp", 1, 0, 0) == "SCMP_ACT_ERRNO 38"
    assert answer_to("prctl", 22, 2, 0) == "SCMP_ACT_ERRNO 22"
    assert answer_to("prctl", HIGH | 22, 2, 0) == "SCMP_ACT_ERRNO 22"
    assert answer_to("prctl", 62, 0, 0) == REFUSED  # PR_SCHED_CORE
    for option in (1, 4, 15, 16, 23, 36, 38, 47, 0x59616D61, 0x53564D41):
        assert answer_to("prctl", option, 0, 0) == ALLOWED


def test_no_program_leases_files_or_changes_the_discipline_of_a_terminal() -> None:
    for word in (37, 38, 1024, 1040, HIGH | 1024):
        assert answer_to("fcntl", 3, word, 0) == "SCMP_ACT_ERRNO 22"
    assert answer_to("fcntl", 3, 1039, 0) == REFUSED
    for word in (1, 5, 6, 7, 1025, 1030, 1031, 1033, 1038):
        assert answer_to("fcntl", 3, word, 0) == ALLOWED
    assert answer_to("ioctl", 3, 0x5423, 0) == answer_to("ioctl", 3, HIGH | 0x5423, 0) == REFUSED
    for request in (0x5401, 0x5413, 0x5422, 0x5424, 0x541B, 0x80045430, 0x8912, 0x40049409):
        assert answer_to("ioctl", 3, request, 0) == ALLOWED


def test_blocks_are_the_same_numbers() -> None:
    for numbers in ({0}, {1, 2, 3}, set(range(22)), {5, 6, 7, 8, 9, 200}, set(range(3, 97, 2))):
        pairs = seccomp.blocks(numbers)
        assert {n for n in range(256) for value, mask in pairs if n & mask == value} == numbers
        assert len(pairs) <= len(numbers)


def test_what_is_hidden_is_all_that_is_not_known_to_be_needed() -> None:
    paths = bundle.hidden(["1", "4711", "self", "cpuinfo", "pressure", "what-comes-next"])
    assert {"/proc/pressure", "/proc/what-comes-next"} <= set(paths)
    assert not {"/proc/1", "/proc/4711", "/proc/self", "/proc/cpuinfo"} & set(paths)


def test_clone_is_allowed_without_any_namespace_flag() -> None:
    (rule,) = (rule for rule in seccomp.profile()["syscalls"] if "clone" in rule["names"])
    (argument,) = rule["args"]
    namespaces = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
    assert argument["op"] == "SCMP_CMP_MASKED_EQ"
    assert argument["value"] & namespaces == namespaces
    assert argument["valueTwo"] == 0


def test_no_call_is_listed_twice() -> None:
    assert len(seccomp.ALLOWED) == len(set(seccomp.ALLOWED))


def test_the_root_file_system_holds_nothing_private(tmp_path: Path) -> None:
    skeleton = rootfs.make_skeleton(tmp_path)
    assert rootfs.make_skeleton(tmp_path) == skeleton
    assert sorted(p.name for p in (skeleton / "home").iterdir()) == []
    names = {path.name for path in (skeleton / "etc").rglob("*")}
    assert not names & {"shadow", "gshadow", "sudoers", "ssh_host_rsa_key", "machine-id"}
    assert (skeleton / "etc/passwd").read_text().count("\n") == 3
    for path in skeleton.rglob("*"):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o7022 == 0, path


def test_the_guest_in_an_image_reads_neither_its_cache_nor_its_locales_nor_its_zones(
    runtime: GVisor | Container,
) -> None:
    process = make_config(runtime, Interpreter(Path("/k8e/python"), "ld-linux.so.2"))["process"]
    python = process["args"].index("/run/k8e/python/bin/python3")
    assert "--inhibit-cache" in process["args"][:python]
    assert process["args"][python + 1 : python + 3] == ["-X", "utf8"]
    assert {"LC_ALL=C", "TZ=:"} < set(process["env"])
    assert not [item for item in process["env"] if item.startswith("LANG")]
    assert Interpreter(Path("/k8e/python"), "ld-musl-x86_64.so.1").argv[1] == "--library-path"


def test_in_a_user_namespace_of_its_own_the_guest_limits_itself(host: Host) -> None:
    runtime = Container(host)
    record = runtime.assign(SandboxRecord("sb-x", "container", LIMITS, None))
    layout = host_layout()
    config = bundle.make_config("sb-x", layout, runtime.flavour(record), LIMITS, "", "/k8e/userns")
    spaces = {item["type"]: item.get("path", "") for item in config["linux"]["namespaces"]}
    assert spaces["user"] == "/k8e/userns"
    assert config["process"]["rlimits"] == []
    assert "K8E_OPEN_FILES=1000" in config["process"]["env"]


def test_terminals_are_limited_where_all_sandboxes_share_a_kernel(
    runtime: GVisor | Container, config: dict[str, Any]
) -> None:
    (options,) = [item["options"] for item in config["mounts"] if item["type"] == "devpts"]
    limited = any(option.startswith("max=") for option in options)
    assert limited == (runtime.name == "container")


def test_requests_that_all_of_a_host_share_are_not_for_sandboxes() -> None:
    rules = {name: rule for rule in seccomp.profile()["syscalls"] for name in rule["names"]}
    assert rules["io_setup"]["action"] == "SCMP_ACT_ERRNO"
    assert rules["io_setup"]["errnoRet"] == seccomp.ENOSYS
