"""Where benchmarks play: a gateway of their own, in folders of their own, removed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bare import Bare
from benchmarks.serving import SOURCE, Gateway
from k8e import SandboxClient, settings
from k8e.runtimes import mounts
from k8e.runtimes.container import Container
from k8e.runtimes.gvisor import GVisor
from k8e.runtimes.host import Host
from k8e.runtimes.oci import OciRuntime
from k8e.runtimes.registry import Runtimes

MODEL_SECONDS = 24 * 3600.0
RUNTIMES: dict[str, type[OciRuntime]] = {"gvisor": GVisor, "container": Container}


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    runtimes: Sequence[str] = tuple(RUNTIMES)
    quick: bool = False
    """Two repetitions, and few of everything: does it work at all."""
    scale: float = 1.0
    """Of bursts and crowds; 1 means a hundred."""
    cycles: int = 100
    """Sessions made and destroyed in the search for leaks."""


class Stage:
    """Folders and settings of one benchmark run, and the gateway that uses them."""

    def __init__(self, folder: Path, amount: Amount) -> None:
        self.folder = folder
        self.runtimes = list(amount.runtimes)
        self.quick = amount.quick
        self.cycles = amount.cycles
        self._scale = amount.scale
        self.settings = make_settings(folder / "g")
        self.host = Host(self.settings)
        self.launcher = write_launcher(folder / "k8e.py")
        self._gateway: Gateway | None = None
        self._bare: dict[str, Bare] = {}
        self._closing = contextlib.ExitStack()

    def rounds(self, full: int) -> int:
        """How often to repeat something that ``full`` times would be enough for."""
        return 2 if self.quick else full

    def many(self, full: int) -> int:
        """How many things to have at once where ``full`` is what we want to know about."""
        return max(2, round(full * (0.03 if self.quick else self._scale)))

    def environment(self, **extra: str) -> dict[str, str]:
        """The environment of programs that talk to this stage's gateway."""
        return environment(self.settings, HOME=str(self.folder), **extra)

    def gateway(self) -> Gateway:
        """The gateway; started at first use."""
        if self._gateway is None:
            self._gateway = Gateway(self.settings, self.environment())
            self._closing.callback(self._gateway.stop)
        return self._gateway

    def local_client(self) -> SandboxClient:
        """A client on the gateway's unix socket."""
        self.gateway()
        return self._closing.enter_context(SandboxClient(self.local_endpoint))

    def remote_client(self) -> SandboxClient:
        """A client of the gateway's gRPC endpoint, with TLS."""
        self.gateway()
        # Where the SDK looks for the certificate that a gateway of this host made for itself.
        os.environ["K8E_DATA_DIR"] = str(self.settings.data_dir)
        return self._closing.enter_context(SandboxClient(self.settings.listen))

    @property
    def local_endpoint(self) -> str:
        return f"unix:{self.settings.socket}"

    def sandbox_of(self, session_id: str) -> str:
        """The sandbox behind a session."""
        return self.gateway().sandbox_of(session_id)

    def runtime(self, name: str) -> OciRuntime:
        """A runtime on this stage's folders, for the command lines that it would use."""
        return RUNTIMES[name](self.host)

    def endpoint(self, name: str) -> str:
        """Where the gateway ``name`` of :meth:`serving` listens."""
        return f"unix:{self.folder / name / 'run' / 'gateway.sock'}"

    @contextlib.contextmanager
    def serving(self, name: str, **extra: str) -> Generator[SandboxClient]:
        """A client of another gateway, with settings of its own."""
        config = make_settings(self.folder / name)
        gateway = Gateway(config, environment(config, HOME=str(self.folder), **extra))
        try:
            with SandboxClient(self.endpoint(name)) as client:
                yield client
        finally:
            gateway.stop()

    def bare(self, name: str) -> Bare:
        """Sandboxes by hand, with the spec of a session of this stage that is kept as the model."""
        if name not in self._bare:
            model = self.local_client().create_session(
                name, lifetime=MODEL_SECONDS, idle_timeout=MODEL_SECONDS
            )
            folder = self.host.folder(self.sandbox_of(model))
            self._bare[name] = Bare(self.runtime(name), folder, self.folder / f"bare-{name}")
        return self._bare[name]

    def close(self) -> None:
        self._closing.close()


@contextlib.contextmanager
def staged(amount: Amount) -> Generator[Stage]:
    """A stage for as long as the block runs; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="k8e-b-"))
    folder.chmod(0o711)  # sandboxes have uids of their own and must get through
    stage = Stage(folder, amount)
    try:
        yield stage
    finally:
        try:
            stage.close()
        finally:
            _purge(stage.host)
            for point in mounts.mounts_below(folder):
                mounts.unmount(point)
            shutil.rmtree(folder)


def _purge(host: Host) -> None:
    """Remove the sandboxes of a gateway that did not do so itself."""
    for folder in host.sandboxes.glob("sb-*"):
        asyncio.run(Runtimes(host).purge(folder.name))


def make_settings(folder: Path) -> settings.Settings:
    """Settings of a gateway that shares nothing with the user's own."""
    folder.mkdir()
    folder.chmod(0o711)  # whatever our umask is
    # No configuration of the user: numbers must mean the same everywhere.
    environ = {"K8E_CONFIG": str(folder / "none.toml")}
    if "K8E_HOME" in os.environ:
        environ["K8E_HOME"] = os.environ["K8E_HOME"]
    return settings.load(
        environ,
        data_dir=str(folder / "data"),
        run_dir=str(folder / "run"),
        listen=f"127.0.0.1:{free_port()}",
    )


def environment(config: settings.Settings, **extra: str) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        "K8E_HOME": str(config.home),
        "K8E_DATA_DIR": str(config.data_dir),
        "K8E_RUN_DIR": str(config.run_dir),
        "K8E_LISTEN": config.listen,
        "K8E_ALLOWED_HOSTS": "none",  # so that nothing of the machine's network is touched
        "K8E_CONFIG": str(config.data_dir / "none.toml"),
        # Sessions are made anew, unless a benchmark is about the warm pool.
        "K8E_POOL_MIN": "0",
        "K8E_POOL_MAX": "0",
        **extra,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_launcher(path: Path) -> Path:
    """The command ``k8e`` as install.sh writes it, for this source tree; run it with -IS."""
    packages = sysconfig.get_paths()["purelib"]
    path.write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(SOURCE)!r}, {packages!r}]\n"
        "from k8e.cli import main\n"
        "\n"
        "sys.exit(main())\n",
        "utf-8",
    )
    return path
