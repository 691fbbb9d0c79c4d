"""Names of images: ``host[:port]/name[:tag][@digest]``, parsed once and never guessed at."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    """Where an image is, and which of those with its name."""

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
        """What to ask the registry for."""
        return self.digest or self.tag


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def parse(text: str, default_registry: str = "") -> Reference:
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
        raise _malformed(text, f"{host[:80]!r} is no host name")
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
