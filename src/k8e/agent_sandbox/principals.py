"""Who may use which sandboxes through the router: the access file.

Nobody is allowed anything who is not in the file. A caller is known by an API key, of which the
file has the digest, or by the address that the request comes from, for callers that cannot show a
key: upstream's client through ``kubectl port-forward``, which the cluster has let in already, and
through a Gateway, which has to ask its own users.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from k8e import errors

log = logging.getLogger(__name__)

PREFIX = "k8e-"
MAX_FILE = 1 << 20
LOOK_SECONDS = 1.0
"""How often the file is looked at, while there are requests."""
ANY = "*"
_FIELDS = {"name", "keys", "addresses", "namespaces"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,58}[A-Za-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Principal:
    """Somebody who may use the sandboxes of some namespaces."""

    name: str
    namespaces: frozenset[str]
    keys: frozenset[str] = frozenset()
    """Digests of the API keys."""
    addresses: tuple[Network, ...] = ()

    def may_use(self, namespace: str) -> bool:
        return namespace in self.namespaces or ANY in self.namespaces


class Principals:
    """All of them, as one version of the file has them."""

    def __init__(self, listed: list[Principal]) -> None:
        self._by_digest = {digest: item for item in listed for digest in item.keys}
        self._by_address = [(net, item) for item in listed for net in item.addresses]

    def of_key(self, secret: str) -> Principal | None:
        # By the digest, so that the time it takes tells nothing about a key.
        return self._by_digest.get(digest(secret))

    def of_address(self, text: str) -> Principal | None:
        """Whose address this is; that of the narrowest network if there are several."""
        if not self._by_address:
            return None
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        found = [(net.prefixlen, item) for net, item in self._by_address if address in net]
        return max(found, key=lambda pair: pair[0])[1] if found else None


def digest(secret: str) -> str:
    return "sha256:" + hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    return PREFIX + secrets.token_hex(32)


def parse(data: bytes) -> Principals:
    """The principals of an access file.

    Raises:
        InvalidRequest: it is malformed; nothing of it counts then.
    """
    listed = [_principal(item) for item in _entries(data)]
    names = [item.name for item in listed]
    keys = [key for item in listed for key in item.keys]
    if len(set(names)) < len(names) or len(set(keys)) < len(keys):
        raise _wrong("a name or a key is there twice")
    return Principals(listed)


def with_key(data: bytes, name: str, namespaces: list[str], key: str) -> bytes:
    """An access file in which a key is good for these namespaces too; empty for a new file."""
    import yaml

    entries = _entries(data) if data else []
    entry: Any = next((item for item in entries if item.get("name") == name), None)
    if entry is None:
        entry = {"name": name, "keys": [], "namespaces": []}
        entries.append(entry)
    entry["keys"] = [*entry.get("keys", []), digest(key)]
    entry["namespaces"] = list(dict.fromkeys([*entry["namespaces"], *namespaces]))
    if not entry["namespaces"]:
        raise errors.InvalidRequest(
            f"{name} would be allowed nothing", hint="name what it may use: --namespace NAMESPACE"
        )
    made = yaml.safe_dump({"principals": entries}, sort_keys=False).encode()
    parse(made)
    return made


def _entries(data: bytes) -> list[Any]:
    import yaml

    if len(data) > MAX_FILE:
        raise _wrong(f"it has more than {MAX_FILE} bytes")
    try:
        found: Any = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _wrong(f"it is no YAML: {error}") from None
    if not isinstance(found, dict) or set(cast("dict[Any, Any]", found)) != {"principals"}:
        raise _wrong("it must have one field: principals")
    listed = _list(found["principals"], "principals")
    if not all(isinstance(item, dict) for item in listed):
        raise _wrong("a principal is no object")
    return listed


def _principal(item: Any) -> Principal:
    if not set(cast("dict[Any, Any]", item)) <= _FIELDS:
        raise _wrong(f"a principal has the fields {', '.join(sorted(_FIELDS))}")
    fields = cast("dict[str, Any]", item)
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{str(name)[:80]!r} is no name of a principal")
    namespaces = _texts(fields.get("namespaces"), f"namespaces of {name}")
    keys = _texts(fields.get("keys", []), f"keys of {name}")
    for text in namespaces:
        if text != ANY and not _LABEL.fullmatch(text):
            raise _wrong(f"{text[:80]!r} is no namespace")
    if not all(map(_DIGEST.fullmatch, keys)):
        raise _wrong(f"a key of {name} is not the SHA-256 of a key, as sha256:HEX")
    addresses = _texts(fields.get("addresses", []), f"addresses of {name}")
    if not keys and not addresses:
        raise _wrong(f"{name} has neither keys nor addresses")
    return Principal(
        name, frozenset(namespaces), frozenset(keys), tuple(map(parse_network, addresses))
    )


def parse_network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise _wrong(f"{text[:80]!r} is no network: {error}") from None


def _texts(value: Any, what: str) -> list[str]:
    listed = _list(value, what)
    if not all(isinstance(item, str) for item in listed):
        raise _wrong(f"the {what} are not all texts")
    return cast("list[str]", listed)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(f"the {what} are no list")
    return cast("list[Any]", value)


def _wrong(text: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"the access file is malformed: {text}", hint="k8e router-key prints what belongs into it"
    )


class AccessFile:
    """The file, read again when it has changed. While it is malformed, nobody is let in."""

    def __init__(self, path: Path) -> None:
        """Read it for the first time; InvalidRequest if that is not possible."""
        self._path = path
        self._looked_at = time.monotonic()
        self._mark = self._look()
        self._principals: Principals | None = self._read()

    def principals(self) -> Principals | None:
        """Those of the file as it is now; None while it cannot be read."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._refresh()
        return self._principals

    def _refresh(self) -> None:
        try:
            if (mark := self._look()) == self._mark and self._principals is not None:
                return
            self._principals = self._read()
            self._mark = mark
            log.info("the access file is read anew")
        except errors.K8eError as error:
            if self._principals is not None:
                log.error("nobody is let in: %s", error)
            self._principals = None

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> Principals:
        try:
            return parse(self._path.read_bytes())
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> errors.K8eError:
        return errors.InvalidRequest(
            f"the access file {self._path} cannot be read: {error.strerror}",
            hint="k8e router-key NAME --namespace NAMESPACE --access PATH makes one",
        )
