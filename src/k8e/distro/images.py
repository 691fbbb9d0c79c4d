"""Container images made of files, without a registry: OCI image layouts in a tar archive.

The same files always give the same bytes, so an image's digest identifies its content.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from k8e.distro.components import Component, Image

_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_EPOCH = "1970-01-01T00:00:00Z"
_PATH = "PATH=/usr/local/bin:/usr/bin:/bin"
_PASSWD = b"root:x:0:0:root:/:/bin/sh\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n"
_GROUP = b"root:x:0:\nnonroot:x:65532:\n"


def write(
    component: Component,
    image: Image,
    folder: Path,
    architecture: str,
    *,
    others: Path | None = None,
) -> Path:
    """Write the archive of an image into the folder that has its files; return its path.

    ``others`` is where those of other components are.
    """
    layer = _layer(image, folder, others or folder)
    config = _json(
        {
            "architecture": architecture,
            "config": {
                "Cmd": list(image.command),
                "Entrypoint": list(image.entrypoint),
                "Env": [_PATH],
                "User": image.user,
                "WorkingDir": "/",
            },
            "created": _EPOCH,
            "os": "linux",
            "rootfs": {"diff_ids": [_digest(layer)], "type": "layers"},
        }
    )
    manifest = _json(
        {
            "config": _described(_CONFIG, config),
            "layers": [_described(_LAYER, layer)],
            "mediaType": _MANIFEST,
            "schemaVersion": 2,
        }
    )
    reference = component.reference(image)
    named = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }
    platform = {"architecture": architecture, "os": "linux"}
    entry = {**_described(_MANIFEST, manifest), "annotations": named, "platform": platform}
    index = _json({"manifests": [entry], "mediaType": _INDEX, "schemaVersion": 2})
    path = folder / image.file
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}), mode=0o644)
        _add(archive, "index.json", index, mode=0o644)
        for blob in sorted((layer, config, manifest), key=_digest):
            _add(archive, f"blobs/sha256/{_digest(blob)[7:]}", blob, mode=0o644)
    return path


def _layer(image: Image, folder: Path, others: Path) -> bytes:
    """All files of an image as a layer. They are some tens of megabytes, so they fit in memory."""
    output = io.BytesIO()
    contents: dict[str, bytes] = {}
    for path, file in image.files.items():
        source = folder / file
        contents[path] = (source if source.exists() else others / file).read_bytes()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in _folders([*contents, *image.links, "etc/passwd", "tmp/x"]):
            _add_folder(archive, name)
        _add(archive, "etc/group", _GROUP, mode=0o644)
        _add(archive, "etc/passwd", _PASSWD, mode=0o644)
        for path, data in sorted(contents.items()):
            _add(archive, path, data, mode=0o755)
        for path, target in sorted(image.links.items()):
            link = tarfile.TarInfo(path)
            link.type, link.linkname, link.mode = tarfile.SYMTYPE, target, 0o777
            archive.addfile(link)
    return output.getvalue()


def _folders(paths: list[str]) -> Iterator[str]:
    found = {str(above) for path in paths for above in PurePosixPath(path).parents}
    yield from sorted(found - {"."})


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    folder = tarfile.TarInfo(name)
    folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    archive.addfile(folder)


def _add(archive: tarfile.TarFile, name: str, data: bytes, *, mode: int) -> None:
    file = tarfile.TarInfo(name)
    file.size, file.mode = len(data), mode
    archive.addfile(file, io.BytesIO(data))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _described(media_type: str, data: bytes) -> dict[str, Any]:
    return {"digest": _digest(data), "mediaType": media_type, "size": len(data)}
