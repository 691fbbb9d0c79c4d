"""Where a server and an agent keep their files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from k8e import errors

CONFIGURATION = Path("/etc/k8e/config.yaml")
KUBECONFIG = Path("/etc/k8e/k8e.yaml")
INSTALLED = Path("/etc/k8e/installed.json")
"""Where the last start put what it was told to put elsewhere: later commands are not told again."""
DATA = Path("/var/lib/k8e")
RUN = Path("/run/k8e")
KUBELET = Path("/var/lib/kubelet")
"""Not below our own folder: storage drivers of other vendors mount this very path."""
VOLUME_PLUGINS = KUBELET / "volume-plugins"
COMMANDS = Path("/usr/local/bin")
"""Where ``kubectl`` and ``ctr`` are put if there are none."""
ONLY_OWNER = 0o600


@dataclass(frozen=True)
class Layout:
    """All paths, by the data folder and the run folder."""

    data: Path = DATA
    run: Path = RUN

    @property
    def server(self) -> Path:
        return self.data / "server"

    @property
    def agent(self) -> Path:
        return self.data / "agent"

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def gateway(self) -> Path:
        return self.data / "gateway"

    # The server.

    @property
    def tls(self) -> Path:
        """Certificate authorities, and what they sign for the control plane."""
        return self.server / "tls"

    @property
    def credentials(self) -> Path:
        """Kubeconfigs of components, and the key with which secrets are encrypted."""
        return self.server / "cred"

    @property
    def policies(self) -> Path:
        """Files that the API server reads: audit, admission, encryption."""
        return self.server / "etc"

    @property
    def etcd(self) -> Path:
        return self.server / "db/etcd"

    @property
    def manifests(self) -> Path:
        """Whose ``*.yaml`` the server applies and prunes."""
        return self.server / "manifests"

    @property
    def applied(self) -> Path:
        """Which objects came from which manifest, so that they can be pruned."""
        return self.server / "applied.json"

    @property
    def made(self) -> Path:
        """With which networks this cluster was made."""
        return self.server / "cluster.json"

    @property
    def skills(self) -> Path:
        return self.server / "skills"

    @property
    def node_token(self) -> Path:
        return self.server / "node-token"

    # The node.

    @property
    def pki(self) -> Path:
        """Certificates of the node; kubelet renews its own there."""
        return self.agent / "pki"

    @property
    def containerd_config(self) -> Path:
        return self.agent / "etc/containerd/config.toml"

    @property
    def cni(self) -> Path:
        return self.agent / "etc/cni/net.d"

    @property
    def cluster(self) -> Path:
        """What an agent was told about its cluster when it joined."""
        return self.agent / "cluster.json"

    @property
    def release(self) -> Path:
        """Which release of k8e wrote this folder last."""
        return self.data / "release.json"

    @property
    def before(self) -> Path:
        """Kernel settings as they were before the first component ran."""
        return self.data / "kernel-settings.json"

    # What does not outlive a reboot.

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd/containerd.sock"

    @property
    def components(self) -> Path:
        """One file for each component that runs, and its notification socket."""
        return self.run / "components"

    @property
    def lock(self) -> Path:
        """Held by the one supervisor of this machine."""
        return self.run / "supervisor.lock"

    def make(self) -> None:
        """Make the folders that every role needs, for root alone."""
        for folder in (self.data, self.run):  # the uids of sandboxes pass through these
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        for folder in (self.agent, self.logs, self.components):
            _make_private(folder)
        for folder in (self.pki, self.cni, self.containerd_config.parent):
            _make_private(folder)

    def make_server(self) -> None:
        # K8E's clients, of whatever user, look for the gateway's CA in the folder of certificates.
        for folder in (self.server, self.tls):
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
            folder.chmod(0o711)
        for folder in (self.credentials, self.policies, self.etcd, self.manifests):
            _make_private(folder)


def _make_private(folder: Path) -> None:
    """A folder for root alone, also where one with other rights was copied or restored."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def own_identity(layout: Layout) -> Path:
    """The kubeconfig with which the server itself works; only root can read it."""
    path = layout.credentials / "supervisor.kubeconfig"
    if not os.access(path, os.R_OK):
        raise errors.InvalidRequest(
            f"there is no server here, or it is not yours: {path} cannot be read",
            hint="run this as root, on the machine of k8e server",
        )
    return path


def write_private(path: Path, data: bytes | str) -> bool:
    """Replace a file that only root may read, as a whole; False if it had this content already."""
    content = data.encode() if isinstance(data, str) else data
    try:
        if path.read_bytes() == content:
            path.chmod(ONLY_OWNER)
            return False
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(scratch, flags, ONLY_OWNER), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    return True
