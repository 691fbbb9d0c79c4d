"""Archives and images as tests want them, hostile ones included; and how to push an image."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OCI = "application/vnd.oci.image."
DOCKER = "application/vnd.docker."
AMD, OTHER = {"os": "linux", "architecture": "amd64"}, {"os": "linux", "architecture": "none"}


class Archive:
    """A tar that is being written, in whatever order and with whatever names."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)

    def file(self, name: str, data: bytes = b"", **fields: Any) -> Archive:
        return self._add(name, data, **fields)

    def folder(self, name: str, **fields: Any) -> Archive:
        fields.setdefault("mode", 0o755)
        return self._add(name, type=tarfile.DIRTYPE, **fields)

    def link(self, name: str, target: str) -> Archive:
        return self._add(name, type=tarfile.SYMTYPE, linkname=target)

    def hard_link(self, name: str, target: str) -> Archive:
        return self._add(name, type=tarfile.LNKTYPE, linkname=target)

    def device(self, name: str, major: int, minor: int) -> Archive:
        return self._add(name, type=tarfile.CHRTYPE, devmajor=major, devminor=minor)

    def fifo(self, name: str) -> Archive:
        return self._add(name, type=tarfile.FIFOTYPE)

    def program(self, source: Path, name: str) -> Archive:
        return self.file(name, source.read_bytes(), mode=0o755)

    def _add(self, name: str, data: bytes = b"", **fields: Any) -> Archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        info.mtime = 1_000_000_000
        for key, value in fields.items():
            setattr(info, key, value)
        self._tar.addfile(info, io.BytesIO(data))
        return self

    def plain(self) -> bytes:
        self._tar.close()
        return self._buffer.getvalue()

    def gzipped(self) -> bytes:
        return gzip.compress(self.plain(), 1, mtime=0)


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class Built:
    """An image: what to push, and what it should be."""

    layers: list[Archive]
    env: list[str] = field(default_factory=lambda: ["PATH=/usr/local/bin:/usr/bin:/bin"])
    workdir: str = ""
    kind: str = "oci"
    indexed: bool = False
    """Whether its name leads to a list of platforms."""

    def parts(self) -> tuple[dict[str, bytes], list[tuple[str, bytes]]]:
        """Its blobs by digest, and its manifests with their kinds, the one with the name last."""
        plain = [layer.plain() for layer in self.layers]
        packed = [gzip.compress(data, 1, mtime=0) for data in plain]
        config = json.dumps(
            {
                **AMD,
                "config": {"Env": self.env, "WorkingDir": self.workdir},
                "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in plain]},
            }
        ).encode()
        layer, configs, kind, index = (
            (
                OCI + "layer.v1.tar+gzip",
                OCI + "config.v1+json",
                OCI + "manifest.v1+json",
                OCI + "index.v1+json",
            )
            if self.kind == "oci"
            else (
                DOCKER + "image.rootfs.diff.tar.gzip",
                DOCKER + "container.image.v1+json",
                DOCKER + "distribution.manifest.v2+json",
                DOCKER + "distribution.manifest.list.v2+json",
            )
        )
        body = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": kind,
                "config": {"mediaType": configs, "digest": digest(config), "size": len(config)},
                "layers": [
                    {"mediaType": layer, "digest": digest(data), "size": len(data)}
                    for data in packed
                ],
            }
        ).encode()
        manifests = [(kind, body)]
        if self.indexed:
            one = {"mediaType": kind, "digest": digest(body), "size": len(body)}
            items = [{**one, "platform": AMD}]
            listed = {"schemaVersion": 2, "mediaType": index, "manifests": items}
            manifests.append((index, json.dumps(listed).encode()))
        return {digest(data): data for data in [config, *packed]}, manifests

    def push(self, host: str, name: str, tag: str, auth: str = "") -> str:
        """Put it into a registry; its digest there."""
        blobs, manifests = self.parts()
        for key, data in blobs.items():
            started = send("POST", f"http://{host}/v2/{name}/blobs/uploads/", b"", auth)
            where = started.headers["Location"]
            joint = "&" if "?" in where else "?"
            send("PUT", f"{where}{joint}digest={key}", data, auth)
        for at, (kind, body) in enumerate(manifests):
            wanted = tag if at == len(manifests) - 1 else digest(body)
            send("PUT", f"http://{host}/v2/{name}/manifests/{wanted}", body, auth, kind)
        return digest(manifests[-1][1])


def send(
    method: str, url: str, data: bytes, auth: str = "", kind: str = "application/octet-stream"
) -> Any:
    headers = {"Content-Type": kind} | ({"Authorization": auth} if auth else {})
    request = urllib.request.Request(url, data, headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as response:
        response.read()
        return response


def busybox(program: Path) -> Archive:
    """A layer with a shell and a few programs, all of them one static file."""
    made = Archive().folder("bin").program(program, "bin/busybox")
    for name in "sh ls cat id echo env sleep true uname".split():
        made.link(f"bin/{name}", "busybox")
    return made
