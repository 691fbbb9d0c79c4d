"""References, manifests and configurations of images, as data. All of it is hostile."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, cast

from k8e import errors

DEFAULT_TAG = "latest"
MOST = 512  # characters
_HOST = re.compile(
    r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*"
    r"|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?"
)
_NAME = re.compile(
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """The registry and name of an image, and its tag or digest."""

    host: str
    """With its port, if there is one."""
    name: str
    tag: str
    digest: str = ""
    """What the image must be, whatever the tag says by now."""

    def __str__(self) -> str:
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.host}/{self.name}:{self.tag}{digest}"

    @property
    def wanted(self) -> str:
        """The tag or digest to ask the registry for."""
        return self.digest or self.tag


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def parse_reference(text: str, default_registry: str = "") -> Reference:
    """The image that ``text`` names; InvalidRequest says what is wrong with it."""
    if len(text) > MOST:
        raise _malformed(text, "it is too long")
    rest, _, digest = text.partition("@")
    if digest and not is_digest(digest):
        raise _malformed(text, "a digest is sha256: and 64 of 0-9a-f")
    host, slash, name = rest.partition("/")
    # As everywhere: the first part is a host if it looks like one, else of the name.
    if not slash or not (set(host) & set(".:[") or host == "localhost"):
        host, name = default_registry, rest
    if not host:
        raise errors.InvalidRequest(
            f"image {text[:80]!r} does not say in which registry it is",
            hint="write it as host/name:tag, or set K8E_DEFAULT_REGISTRY to a host",
        )
    name, colon, tag = name.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise _malformed(text, "a tag has up to 128 letters, digits, dots, hyphens and underscores")
    if not _NAME.fullmatch(name):
        raise _malformed(text, "a name has lower-case letters, digits and single separators")
    if not _is_host(host):
        raise _malformed(text, f"{host[:80]!r} is not a host name")
    return Reference(host.lower(), name, tag or DEFAULT_TAG, digest)


def _is_host(host: str) -> bool:
    if not _HOST.fullmatch(host):
        return False
    port = host.rpartition(":")[2] if not host.endswith("]") and ":" in host else ""
    return not port or 0 < int(port) < 65536


def _malformed(text: str, why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"{text[:80]!r} is not the reference of an image: {why}",
        hint="an example is registry.example.com:5000/team/tools:1.2",
    )


INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ACCEPTED = (*INDEXES, *MANIFESTS)
_LAYER = re.compile(
    r"application/vnd\.(oci\.image\.layer\.v1\.tar(\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.diff\.tar(\.gzip)?)"
)
MOST_LAYERS = 127
MOST_SIZE = 1 << 40
MOST_VARIABLES, MOST_ENV = 256, 32 << 10
_MACHINES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "riscv64": "riscv64",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
}
NOT_OURS = ("HOME", "USER", "LOGNAME", "HOSTNAME", "PWD", "SHELL", "TERM")
"""Variables of an image that tell of another user, or of a place that is not there."""


@dataclass(frozen=True)
class Blob:
    """A piece of content, with its digest and size."""

    digest: str
    size: int


@dataclass(frozen=True)
class ImageManifest:
    """The parts of an image."""

    config: Blob
    layers: tuple[Blob, ...]
    """The lowest first; compressed."""


@dataclass(frozen=True)
class Config:
    """The parts of an image's configuration that matter here."""

    diff_ids: tuple[str, ...]
    """The lowest layer first: what each must be when it is unpacked."""
    env: dict[str, str]
    workdir: str
    platform: str


def architecture() -> str:
    machine = os.uname().machine
    return _MACHINES.get(machine, machine)


def parse(body: bytes, what: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise _wrong(f"{what} is not JSON") from None
    if not isinstance(found, dict):
        raise _wrong(f"{what} is not a JSON object")
    return cast("dict[str, Any]", found)


def refuse_ambiguous(document: dict[str, Any]) -> None:
    """Refuse both an index and a manifest in one: it would be two images under one digest."""
    if "manifests" in document and not document.keys().isdisjoint(("layers", "config")):
        raise _wrong("it is both a list of images and an image")


def is_index(document: dict[str, Any], media_type: str) -> bool:
    return document.get("mediaType", media_type) in INDEXES


def choose(index: dict[str, Any], wanted: str) -> Blob:
    """The manifest for this machine's kind of processor."""
    offered: set[str] = set()
    for item in map(_mapping, _list(index, "manifests")):
        platform = _mapping(item.get("platform"))
        found = f"{platform.get('os')}/{platform.get('architecture')}"
        if found == f"linux/{wanted}":
            return _blob(item, "manifest")
        offered.add(found[:80])
    offered.discard("unknown/unknown")  # attestations
    names = ", ".join(sorted(offered)) or "nothing"
    raise errors.ImageUnusable(
        f"the image is not made for linux/{wanted}, only for {names}",
        hint=f"use another image, or build this one for linux/{wanted}",
    )


def manifest(document: dict[str, Any], media_type: str) -> ImageManifest:
    kind = document.get("mediaType", media_type)
    if kind not in MANIFESTS:
        raise _wrong(f"its manifest is of the kind {str(kind)[:80]!r}, which k8e does not know")
    layers = [_mapping(item) for item in _list(document, "layers")]
    if len(layers) > MOST_LAYERS:
        raise _wrong(f"it has more than {MOST_LAYERS} layers")
    for layer in layers:
        found = str(layer.get("mediaType"))
        if not _LAYER.fullmatch(found):
            raise _wrong(f"a layer is of the kind {found[:80]!r}, which k8e does not know")
    config = _blob(_mapping(document.get("config")), "config")
    return ImageManifest(config, tuple(_blob(layer, "layer") for layer in layers))


def config(document: dict[str, Any], layers: int) -> Config:
    """The configuration of an image with ``layers`` layers."""
    diff_ids = _list(_mapping(document.get("rootfs")), "diff_ids")
    if len(diff_ids) != layers or not all(is_digest(item) for item in diff_ids):
        raise _wrong("its configuration does not fit its layers")
    inner = _mapping(document.get("config"))
    workdir: object = inner.get("WorkingDir")
    return Config(
        diff_ids=tuple(diff_ids),
        env=_env(_list(inner, "Env")),
        workdir=workdir[:4096] if isinstance(workdir, str) else "",
        platform=f"{document.get('os')}/{document.get('architecture')}"[:80],
    )


def _env(words: list[Any]) -> dict[str, str]:
    env: dict[str, str] = {}
    for word in words:
        name, equals, value = str(word).partition("=")
        if name and equals and "\0" not in name + value and name not in NOT_OURS:
            env[name] = value
    size = sum(len(name) + len(value) for name, value in env.items())
    if len(env) > MOST_VARIABLES or size > MOST_ENV:
        raise _wrong("its environment is too large")
    return env


def _blob(found: dict[str, Any], what: str) -> Blob:
    digest, size = found.get("digest"), found.get("size")
    if not is_digest(digest):
        raise _wrong(f"a {what} has no sha256 digest")
    if not isinstance(size, int) or not 0 <= size <= MOST_SIZE:
        raise _wrong(f"a {what} has no size")
    return Blob(str(digest), size)


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(document: dict[str, Any], key: str) -> list[Any]:
    found: object = document.get(key)
    return cast("list[Any]", found) if isinstance(found, list) else []


def _wrong(why: str) -> errors.ImageUnusable:
    return errors.ImageUnusable(
        f"the image cannot be used: {why}", hint="build the image again, or use another one"
    )
