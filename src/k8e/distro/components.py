"""The table of components: every upstream program of a cluster, its version, source and licence.

Data only. ``component_builds`` makes the components, ``component_store`` keeps them, ``images``
packs some of them for pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

GO_VERSION = "1.26.8"
"""The Go that builds everything where the machine's own is older than ``GO_OLDEST``."""
GO_OLDEST = (1, 26, 0)
ARCHITECTURES = ("amd64", "arm64")
REGISTRY = "k8e.internal"
"""The registry in the names of our own images; no such host exists, so none is asked."""


@dataclass(frozen=True)
class Module:
    """A Go module. Its checksum stands in ``build/<component>/go.sum``."""

    path: str
    version: str


@dataclass(frozen=True)
class GoBuild:
    """Programs that one ``go build`` makes, because they share most of their packages."""

    programs: Mapping[str, str]
    """Go package → file below the components folder."""
    tags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Go variables that the linker sets: the version, as upstream's own build does."""
    libraries: tuple[str, ...] = ()
    """C libraries (by their pkg-config names) that are linked statically; none: no C at all."""
    patches: tuple[Patch, ...] = ()
    is_test: bool = False
    """Whether it is a package of tests, which becomes a program too."""


@dataclass(frozen=True)
class Patch:
    """Text of one file of the component's module that is replaced before a build."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class CBuild:
    """One static program that is made from one C file of the module."""

    source: str
    file: str


@dataclass(frozen=True)
class Tree:
    """A folder of the module that is copied unchanged."""

    source: str
    folder: str
    suffix: str = ""
    """Only files whose names end like this; empty means all."""


@dataclass(frozen=True)
class Release:
    """An archive or program that upstream publishes."""

    url: str
    """With ``{arch}`` for the architecture."""
    members: Mapping[str, str]
    """Name in the archive → file below the components folder; ``""`` is what is no archive."""
    sha256: Mapping[str, str]
    """Architecture → checksum. Without one, the component is built."""


@dataclass(frozen=True)
class SystemProgram:
    """A program that the distribution maintains: it is installed by the package manager."""

    names: tuple[str, ...]
    """Under which names it may be found; the first is the one of the package."""
    package: str
    """Debian's package."""
    link: str = ""
    """The file below the components folder that leads to it, for programs that expect a name."""


@dataclass(frozen=True)
class Image:
    """A container image that is made of files of the components folder, without a registry."""

    name: str
    files: Mapping[str, str]
    """Path in the image → file below the components folder."""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = "0:0"
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path in the image → what a symbolic link there leads to."""
    tag: str = ""
    """Empty means the component's version."""

    @property
    def file(self) -> str:
        """The archive, below the components folder."""
        return f"images/{self.name}.tar"


@dataclass(frozen=True)
class Component:
    """One upstream project, and the parts of it that a cluster uses."""

    name: str
    version: str
    licence: str
    use: str
    """What it is for, in a few words."""
    module: Module | None = None
    builds: tuple[GoBuild | CBuild | Tree, ...] = ()
    releases: tuple[Release, ...] = ()
    debian: Mapping[str, str] = field(default_factory=dict[str, str])
    """Debian package/file in it → file below the components folder: unpacked, not installed."""
    programs: tuple[SystemProgram, ...] = ()
    images: tuple[Image, ...] = ()
    networks: tuple[str, ...] = ()
    """For which network (``--cni``) it is needed; empty means for every one."""
    is_for_tests: bool = False
    """Whether no cluster needs it, so that it is got by name alone."""

    @property
    def files(self) -> tuple[str, ...]:
        """The programs and image archives that it yields, below the components folder."""
        found = list(self.debian.values())
        for build in self.builds:
            if isinstance(build, GoBuild):
                found += build.programs.values()
            elif isinstance(build, CBuild):
                found.append(build.file)
        return (*found, *(image.file for image in self.images))

    def reference(self, image: Image) -> str:
        """The name by which pods ask for an image of this component."""
        return f"{REGISTRY}/{image.name}:{image.tag or self.version}"

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of data that it yields."""
        return tuple(build.folder for build in self.builds if isinstance(build, Tree))


_APACHE = "Apache-2.0"
_KUBERNETES = "v1.36.3"
_KUBERNETES_TAGS = ("selinux", "notest")
"""Of the programs and of their tests, which so share what was compiled for the other."""
_GVISOR = "v0.0.0-20260905035102-160fafc42237"
_CILIUM = "v1.20.2"
_CILIUM_VERSION = "github.com/cilium/cilium/pkg/version.ciliumVersion"
_CILIUM_BUILD = f"{_CILIUM[1:]} module 2026-09-15T20:03:11Z"
"""Cilium reads version, commit and date from it; a module of Go does not tell its commit."""
_PLUGINS = "github.com/containernetworking/plugins/plugins"
_SHIM = "containerd-shim-runsc-v1"
_NOBODY = "65532:65532"
_APPLETS = (
    "[ [[ awk basename cat chmod chown cp cut date dd df diff dirname du echo env expr false find "
    "grep gunzip gzip head hostname httpd id ifconfig ip kill ln ls md5sum mkdir mknod mktemp mv "
    "nc netstat nslookup od ping ping6 printf ps pwd readlink rm rmdir route sed seq sh sha256sum "
    "sleep sort stat stty sync tail tar tee telnet test time timeout top touch tr traceroute true "
    "tty umount uname uniq vi wc wget which whoami xargs yes zcat"
)

KUBERNETES = Component(
    name="kubernetes",
    version=_KUBERNETES,
    licence=_APACHE,
    use="control plane, kubelet, kube-proxy, kubectl, and the pause program of pods",
    module=Module("k8s.io/kubernetes", _KUBERNETES),
    builds=(
        GoBuild(
            programs={
                f"k8s.io/kubernetes/cmd/{name}": f"bin/{name}"
                for name in (
                    "kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy "
                    "kubectl"
                ).split()
            },
            tags=_KUBERNETES_TAGS,
            variables={
                "k8s.io/component-base/version.gitVersion": _KUBERNETES,
                "k8s.io/component-base/version.gitMajor": _KUBERNETES[1:].split(".")[0],
                "k8s.io/component-base/version.gitMinor": _KUBERNETES.split(".")[1],
                "k8s.io/component-base/version.gitTreeState": "clean",
            },
        ),
        CBuild(source="build/pause/linux/pause.c", file="bin/pause"),
    ),
    images=(Image("pause", {"pause": "bin/pause"}, entrypoint=("/pause",), user="65535:65535"),),
)

ETCD = Component(
    name="etcd",
    version="v3.7.3",
    licence=_APACHE,
    use="the cluster's database",
    module=Module("go.etcd.io/etcd/server/v3", "v3.7.3"),
    builds=(GoBuild(programs={".": "bin/etcd"}),),
)

CONTAINERD = Component(
    name="containerd",
    version="v2.4.2",
    licence=_APACHE,
    use="runs containers for kubelet; ctr",
    module=Module("github.com/containerd/containerd/v2", "v2.4.2"),
    builds=(
        GoBuild(
            programs={
                f"github.com/containerd/containerd/v2/cmd/{name}": f"bin/{name}"
                for name in ("containerd", "containerd-shim-runc-v2", "ctr")
            },
            variables={"github.com/containerd/containerd/v2/version.Version": "v2.4.2"},
        ),
    ),
)

RUNC = Component(
    name="runc",
    version="v1.5.2",
    licence=_APACHE,
    use="starts containers",
    module=Module("github.com/opencontainers/runc", "v1.5.2"),
    builds=(
        GoBuild(
            programs={"github.com/opencontainers/runc": "bin/runc"},
            tags=("seccomp", "netgo", "osusergo"),
            libraries=("libseccomp",),
        ),
    ),
)

GVISOR = Component(
    name="gvisor",
    version=_GVISOR,
    licence=_APACHE,
    use="runs pods on a kernel of their own",
    module=Module("gvisor.dev/gvisor", _GVISOR),
    builds=(
        GoBuild(
            programs={
                "gvisor.dev/gvisor/runsc": "bin/runsc",
                "gvisor.dev/gvisor/shim": f"bin/{_SHIM}",
            },
            variables={"gvisor.dev/gvisor/runsc/version.version": _GVISOR},
        ),
        # Without CAP_SYS_RESOURCE nobody may lower an OOM score, and the shim would not start.
        GoBuild(
            programs={"gvisor.dev/gvisor/shim": f"bin/no-sys-resource/{_SHIM}"},
            variables={"gvisor.dev/gvisor/runsc/version.version": _GVISOR},
            patches=(
                Patch(
                    file="pkg/shim/v1/manager.go",
                    old="\tif err := sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil {\n",
                    new="\tif err := sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); "
                    "err != nil && !os.IsPermission(err) {\n",
                ),
            ),
        ),
    ),
)

CNI_PLUGINS = Component(
    name="cni-plugins",
    version="v1.9.1",
    licence=_APACHE,
    use="the network of --cni=basic, and every pod's loopback device",
    module=Module("github.com/containernetworking/plugins", "v1.9.1"),
    builds=(
        GoBuild(
            programs={
                f"{_PLUGINS}/{path}": f"bin/cni/{path.rpartition('/')[2]}"
                for path in (
                    "main/bridge main/ptp main/loopback ipam/host-local meta/portmap "
                    "meta/bandwidth meta/firewall"
                ).split()
            },
            variables={f"{_PLUGINS[:-8]}/pkg/utils/buildversion.BuildVersion": "v1.9.1"},
        ),
    ),
)

CILIUM = Component(
    name="cilium",
    version=_CILIUM,
    licence=_APACHE,
    use="the network: policies, names, services",
    module=Module("github.com/cilium/cilium", _CILIUM),
    builds=(
        GoBuild(
            programs={
                "github.com/cilium/cilium/daemon": "bin/cilium-agent",
                "github.com/cilium/cilium/cilium-dbg": "bin/cilium-dbg",
                "github.com/cilium/cilium/hubble": "bin/hubble",
                "github.com/cilium/cilium/plugins/cilium-cni": "bin/cni/cilium-cni",
            },
            tags=("osusergo",),
            variables={
                _CILIUM_VERSION: _CILIUM_BUILD,
                "github.com/cilium/cilium/hubble/pkg.Version": _CILIUM,
            },
        ),
        GoBuild(
            programs={"github.com/cilium/cilium/operator": "bin/cilium-operator"},
            tags=("osusergo", "ipam_provider_operator"),
            variables={_CILIUM_VERSION: _CILIUM_BUILD},
        ),
        Tree(source="bpf", folder="share/cilium/bpf"),
        Tree(
            source="pkg/k8s/apis/cilium.io/client/crds",
            folder="share/cilium/crds",
            suffix=".yaml",
        ),
    ),
    networks=("cilium",),
)

COREDNS = Component(
    name="coredns",
    version="v1.15.0",
    licence=_APACHE,
    use="names in the cluster",
    module=Module("github.com/coredns/coredns", "v1.15.0"),
    builds=(GoBuild(programs={".": "bin/coredns"}),),
    images=(Image("coredns", {"coredns": "bin/coredns"}, entrypoint=("/coredns",), user=_NOBODY),),
)

METRICS_SERVER = Component(
    name="metrics-server",
    version="v0.9.0",
    licence=_APACHE,
    use="what nodes and pods use, for kubectl top and autoscaling",
    module=Module("sigs.k8s.io/metrics-server", "v0.9.0"),
    builds=(
        GoBuild(
            programs={"sigs.k8s.io/metrics-server/cmd/metrics-server": "bin/metrics-server"},
            variables={
                "k8s.io/client-go/pkg/version.gitVersion": "v0.9.0",
                "k8s.io/component-base/version.gitVersion": "v0.9.0",
            },
        ),
    ),
    images=(
        Image(
            "metrics-server",
            {"metrics-server": "bin/metrics-server"},
            entrypoint=("/metrics-server",),
            user=_NOBODY,
        ),
    ),
)

LOCAL_PATH = Component(
    name="local-path-provisioner",
    version="v0.0.30",
    licence=_APACHE,
    use="volumes on the node's own disk",
    module=Module("github.com/rancher/local-path-provisioner", "v0.0.30"),
    builds=(
        GoBuild(
            programs={"github.com/rancher/local-path-provisioner": "bin/local-path-provisioner"},
            variables={"main.VERSION": "v0.0.30"},
        ),
    ),
    images=(
        Image(
            "local-path-provisioner",
            {"usr/bin/local-path-provisioner": "bin/local-path-provisioner"},
            entrypoint=("local-path-provisioner",),
        ),
    ),
)

BUSYBOX = Component(
    name="busybox",
    version="1.35",
    licence="GPL-2.0-only",
    use="the shell of the pods that make and remove local volumes; small pods of tests",
    debian={"busybox-static/bin/busybox": "bin/busybox"},
    images=(
        Image(
            "busybox",
            {"bin/busybox": "bin/busybox"},
            command=("sh",),
            links={f"bin/{name}": "busybox" for name in _APPLETS.split()},
        ),
    ),
)

IPTABLES = Component(
    name="iptables",
    version="1.8",
    licence="GPL-2.0-or-later",
    use="rules of kube-proxy, portmap and Cilium",
    programs=(SystemProgram(("iptables",), "iptables"), SystemProgram(("ipset",), "ipset")),
)

CONNTRACK = Component(
    name="conntrack",
    version="1.4",
    licence="GPL-2.0-or-later",
    use="ends connections of services that are gone, for kube-proxy",
    programs=(SystemProgram(("conntrack",), "conntrack"),),
    networks=("basic",),
)

CLANG = Component(
    name="clang",
    version="19",
    licence="Apache-2.0 WITH LLVM-exception",
    use="compiles Cilium's BPF programs for the node's kernel",
    programs=(SystemProgram(("clang-19",), "clang-19", link="bin/bpf/clang"),),
    networks=("cilium",),
)

KUBERNETES_TESTS = Component(
    name="kubernetes-tests",
    version=_KUBERNETES,
    licence=_APACHE,
    use="Kubernetes' own end-to-end tests, and the image of their pods",
    module=Module("k8s.io/kubernetes", _KUBERNETES),
    builds=(
        GoBuild(
            programs={"k8s.io/kubernetes/test/e2e": "bin/tests/e2e.test"},
            tags=_KUBERNETES_TAGS,
            variables={"k8s.io/component-base/version.gitVersion": _KUBERNETES},
            is_test=True,
        ),
        GoBuild(
            programs={
                "github.com/onsi/ginkgo/v2/ginkgo": "bin/tests/ginkgo",
                "k8s.io/kubernetes/test/images/agnhost": "bin/tests/agnhost",
            },
            tags=_KUBERNETES_TAGS,
        ),
    ),
    images=(
        Image(
            "agnhost",
            {"agnhost": "bin/tests/agnhost", "bin/busybox": "bin/busybox"},
            entrypoint=("/agnhost",),
            command=("pause",),
            links={
                "agnhost-2": "agnhost",
                **{f"bin/{name}": "busybox" for name in _APPLETS.split()},
            },
            tag="2.63.0",
        ),
    ),
    is_for_tests=True,
)

COMPONENTS = (
    ETCD,
    CONTAINERD,
    RUNC,
    CNI_PLUGINS,
    KUBERNETES,
    GVISOR,
    COREDNS,
    METRICS_SERVER,
    LOCAL_PATH,
    CILIUM,
    BUSYBOX,
    IPTABLES,
    CONNTRACK,
    CLANG,
    KUBERNETES_TESTS,
)
"""All of them, in the order in which they are built."""


def by_name(name: str) -> Component:
    """The component of this name; LookupError if there is none."""
    for component in COMPONENTS:
        if component.name == name:
            return component
    raise LookupError(name)


def needed(cni: str) -> Iterable[Component]:
    """The components that a node with this network needs; ``all`` stands for every network."""
    every = (item for item in COMPONENTS if not item.is_for_tests)
    return (item for item in every if not item.networks or cni in (*item.networks, "all"))
