"""Images that are made of files: always the same bytes, and containerd runs them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import tarfile
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e import errors, settings
from k8e.distro import images
from k8e.distro.component_store import ComponentStore, architecture
from k8e.distro.components import BUSYBOX, COMPONENTS, KUBERNETES, Component, Image

TINY = Image(
    "tiny",
    {"usr/bin/tool": "bin/tool"},
    entrypoint=("/usr/bin/tool",),
    user="65532:65532",
    links={"bin/other": "../usr/bin/tool"},
)
OWNER = Component("tools", "v1.2", "BSD", "a test", images=(TINY,))


def write(folder: Path, content: bytes = b"program") -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/tool").write_bytes(content)
    return images.write(OWNER, TINY, folder, architecture())


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    os.utime(tmp_path / "b/bin/tool", (1, 1))
    assert first.read_bytes() == second.read_bytes()
    assert write(tmp_path / "c", b"another").read_bytes() != first.read_bytes()


def test_an_archive_is_an_oci_layout_whose_digests_are_right(tmp_path: Path) -> None:
    with tarfile.open(write(tmp_path)) as archive:
        files = {item.name: archive.extractfile(item) for item in archive.getmembers()}
        contents = {name: file.read() for name, file in files.items() if file}
    assert json.loads(contents["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    blobs = {name[6:]: data for name, data in contents.items() if name.startswith("blobs/")}
    for name, data in blobs.items():
        assert name == f"sha256/{hashlib.sha256(data).hexdigest()}"
    (entry,) = json.loads(contents["index.json"])["manifests"]
    named = entry["annotations"]
    assert named["io.containerd.image.name"] == OWNER.reference(TINY) == "k8e.internal/tiny:v1.2"
    manifest = json.loads(blobs[entry["digest"].replace(":", "/")])
    config = json.loads(blobs[manifest["config"]["digest"].replace(":", "/")])
    assert config["config"]["User"] == "65532:65532"
    (layer,) = manifest["layers"]
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]


# With containerd itself.


@pytest.fixture(scope="module")
def store() -> ComponentStore:
    """The components of this machine."""
    if os.geteuid() != 0:
        pytest.skip("containerd needs root")
    found = ComponentStore(settings.load({}).components_dir)
    try:
        for name in ("containerd", "ctr", "runc", "busybox"):
            found.program(name)
    except errors.ToolFailed as error:
        pytest.skip(f"{error}; make components gets them")
    return found


class Containerd:
    """A containerd in folders of its own, without the part that serves kubelet."""

    def __init__(self, store: ComponentStore, folder: Path) -> None:
        self.socket = folder / "s"
        self.environ = {"PATH": f"{store.folder / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin"}
        config = folder / "config.toml"
        config.write_text(
            f"""
version = 3
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
    "io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri"]
[grpc]
address = "{self.socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
"""
        )
        # Its shims have their sockets in /run, whatever the configuration says.
        private = "mount -t tmpfs run /run && exec containerd --config "
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", private + str(config)],
            env=self.environ,
            stderr=subprocess.PIPE,
        )
        self._await_ready()
        inside = ["nsenter", f"--mount=/proc/{self.process.pid}/ns/mnt", store.program("ctr")]
        self._ctr = [*inside, "--address", self.socket, "--namespace", "test"]

    def _await_ready(self) -> None:
        assert self.process.stderr
        said = b""
        deadline = time.monotonic() + 30
        while b"containerd successfully booted" not in said:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stderr], [], [], max(left, 0))
            data = os.read(self.process.stderr.fileno(), 1 << 16) if ready else b""
            assert data, said[-2000:]
            said += data

    def ctr(self, *arguments: str | Path) -> str:
        done = subprocess.run(
            [*self._ctr, *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def close(self) -> None:
        self.process.terminate()
        assert self.process.stderr
        with contextlib.suppress(OSError):
            while self.process.stderr.read(1 << 16):
                pass
        self.process.wait(20)
        self.process.stderr.close()


@pytest.fixture(scope="module")
def containerd(
    store: ComponentStore, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Containerd]:
    found = Containerd(store, tmp_path_factory.mktemp("containerd"))
    yield found
    found.close()


def test_the_shell_image_runs(containerd: Containerd, store: ComponentStore) -> None:
    (image,) = BUSYBOX.images
    containerd.ctr("images", "import", store.file(image.file))
    reference = BUSYBOX.reference(image)
    assert reference in containerd.ctr("images", "list", "-q").split()
    script = "id -u; ls /bin/sh; mkdir /tmp/a && echo made | tee /tmp/a/b"
    arguments = ["run", "--rm", "--snapshotter", "native", "--runc-binary", store.program("runc")]
    said = containerd.ctr(*arguments, reference, "test-shell", "sh", "-c", script)
    assert said.split() == ["0", "/bin/sh", "made"]


def test_every_image_that_is_there_can_be_imported(
    containerd: Containerd, store: ComponentStore
) -> None:
    tried = 0
    for component in COMPONENTS:
        for image in component.images:
            with contextlib.suppress(errors.ToolFailed):
                containerd.ctr("images", "import", store.file(image.file))
                assert component.reference(image) in containerd.ctr("images", "list", "-q").split()
                tried += 1
    assert tried >= 1


def test_the_pause_program_is_upstream_s_of_this_version(store: ComponentStore) -> None:
    said = subprocess.check_output([store.program("pause"), "-v"], text=True)
    assert said.strip() == f"pause.c {KUBERNETES.version}"
