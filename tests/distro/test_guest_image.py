"""The image from which pods copy the guest."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from k8e._version import __version__
from k8e.distro import guest_image
from k8e.runtimes.kubernetes import objects
from k8e.runtimes.kubernetes.runtime import GUEST_IMAGE


def layer(archive: Path) -> tarfile.TarFile:
    """The files of an image with one layer."""
    with tarfile.open(archive) as whole:

        def read(digest: str) -> bytes:
            found = whole.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
            assert found is not None
            return found.read()

        index = whole.extractfile("index.json")
        assert index is not None
        (entry,) = json.loads(index.read())["manifests"]
        assert entry["annotations"]["io.containerd.image.name"] == GUEST_IMAGE
        manifest = json.loads(read(entry["digest"]))
        return tarfile.open(fileobj=io.BytesIO(read(manifest["layers"][0]["digest"])))


def test_the_image_is_made_once_and_has_what_pods_are_told_to_start(tmp_path: Path) -> None:
    first = guest_image.write(tmp_path / "a")
    marked = first.stat().st_mtime_ns
    assert guest_image.write(tmp_path / "a").stat().st_mtime_ns == marked, "nothing has changed"
    (tmp_path / "a/guest.stamp").write_text("of another release")
    assert guest_image.write(tmp_path / "a").stat().st_mtime_ns != marked
    assert GUEST_IMAGE.endswith(f":{__version__}")
    with layer(first) as files:
        names = set(files.getnames())
        files.extractall(tmp_path / "image")
    for path in (objects.PYTHON[0], f"{objects.GUEST_FOLDER}/{objects.GUEST_FILE}"):
        assert path.lstrip("/") in names
    root = tmp_path / "image"
    argv = [word.replace("/run/k8e", f"{root}/run/k8e") for word in objects.PYTHON]
    copied = tmp_path / "volume"
    copied.mkdir()
    copier = f"{root}{objects.GUEST_FOLDER}/copy.py"
    subprocess.run([*argv, copier, f"{root}/run/k8e", str(copied)], check=True, timeout=60)
    assert sorted(path.name for path in copied.iterdir()) == ["empty", "guest", "python"]
    assert (copied / "empty").read_bytes() == b""
    for path in (root / "run/k8e").rglob("*"):
        if path.is_file():
            same = copied / path.relative_to(root / "run/k8e")
            assert same.read_bytes() == path.read_bytes()
            assert same.stat().st_mode & 0o222 == 0o200
    done = subprocess.run(
        [*argv, "-c", "import ssl, sys; print(sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == f"{root}/run/k8e/python"
    assert sys.prefix not in done.stdout
