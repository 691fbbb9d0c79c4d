"""The domain: what sessions, sandboxes and callers are. Frozen data, no behaviour beyond checks."""

from __future__ import annotations

import base64
import dataclasses
import enum
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from k8e import errors, manifests
from k8e.manifests import Manifest

MIB = 1 << 20
GIB = 1 << 30
_LABEL_CHARS = frozenset(string.ascii_lowercase + string.digits + "-")
_TENANT_CHARS = frozenset(string.ascii_letters + string.digits + "-._")
MAX_ID = 50
MAX_ENV_BYTES = 32 << 10
MAX_ENV_KEYS = 64
_ENV_HINT = "put what is large into a file: k8e sandbox write"
MAX_ENV_NAME = 256  # bytes
MAX_SECRET_REFS = 32
SOLE_KEY = "value"
"""The key of a secret that has one value."""
MAX_LABELS = 64
MAX_PACKAGES = 200
_OF_TEMPLATES = frozenset(("rootfs", "warm"))
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

Warm = tuple[tuple[str, tuple[str, ...]], ...]
"""Languages whose interpreters wait for code, each with the modules that it has loaded."""

DEFAULT_TENANT = "default"
DEFAULT_TEMPLATE = "default"
"""What a session is made from that names no template; there always is one."""
PIP_SECONDS = 120.0
"""How long an installation may take, unless the caller says otherwise."""
DNS_ADDRESS = "198.19.255.1"
"""Where sandboxes ask for names: an address of nobody's, which egress answers."""


def new_id(prefix: str) -> str:
    """A random id of 100 bits that can name a host or a Kubernetes object; fixed length."""
    # Base 32 has the letters that Kubernetes allows, once they are small.
    return f"{prefix}-" + base64.b32encode(secrets.token_bytes(15))[:20].decode().lower()


# No slash: they name folders and objects of a storage, too.
CONVERSATION_NAME = "[A-Za-z0-9][A-Za-z0-9._:@+=~-]*"
"""Ids of conversations and of their users."""
MAX_CONVERSATION_NAME = 128


def check_id(value: str, what: str) -> str:
    """Return ``value`` if it is a lowercase DNS label of at most 50 characters."""
    fits = 0 < len(value) <= MAX_ID and set(value) <= _LABEL_CHARS
    if not fits or value.startswith("-") or value.endswith("-"):
        raise errors.InvalidRequest(
            f"{what} {value[:80]!r} is not a valid name",
            hint=f"use at most {MAX_ID} lowercase letters, digits and inner hyphens",
        )
    return value


def check_tenant(value: str) -> str:
    """Return ``value`` if it can be a label of Kubernetes and a folder's name."""
    fits = 0 < len(value) <= 63 and set(value) <= _TENANT_CHARS
    if not fits or not value[0].isalnum() or not value[-1].isalnum():
        raise errors.InvalidRequest(
            f"tenant {value[:80]!r} is not a valid name",
            hint="use at most 63 letters, digits and inner hyphens, dots and underscores",
        )
    return value


def check_snapshot_name(value: str) -> str:
    """Return ``value`` if it can name a snapshot."""
    if not 0 < len(value) <= 63 or not set(value) <= _TENANT_CHARS:
        raise errors.InvalidRequest(
            f"snapshot name {value[:80]!r} is not a valid name",
            hint="use 1 to 63 letters, digits, hyphens, dots and underscores",
        )
    return value


def check_secret_name(value: str, what: str) -> str:
    """Return ``value`` if it can name a secret, or one of its values."""
    if not 0 < len(value) <= 63 or not set(value) <= _TENANT_CHARS or set(value) <= {"."}:
        raise errors.InvalidRequest(
            f"the {what} {value[:80]!r} has no valid name",
            hint="use 1 to 63 letters, digits, hyphens, dots and underscores",
        )
    return value


class SecretRef(NamedTuple):
    """A variable of a session whose value is a secret that its owner has set before."""

    secret_name: str
    key: str
    env_var: str


class Role(enum.StrEnum):
    """The permissions of a principal; roles are independent: no agent may approve by being one."""

    AGENT = "agent"
    APPROVER = "approver"
    ADMIN = "admin"


class Scope(NamedTuple):
    """What a caller with a token may do: some operations, on one session."""

    session_id: str
    operations: frozenset[str]
    """Names of operations of the gateway and of guests."""


@dataclass(frozen=True)
class Principal:
    """A caller of the gateway."""

    name: str
    """Whose things are theirs; no two principals ever have the same one, not even years apart."""
    roles: frozenset[Role] = frozenset({Role.AGENT})
    label: str = ""
    """What people call it, if that is something else; somebody else may be called so later."""
    rate: float = 0
    """Calls per second, if this one has a limit of its own."""
    scope: Scope | None = None
    """All that it may do, where it came with a token; None for everything that its roles allow."""

    @property
    def shown(self) -> str:
        """The name for people: in messages and logs."""
        return self.label or self.name


@dataclass(frozen=True)
class Limits:
    """The limits of one session."""

    cpus: float = 2.0
    """CPU time per second of wall time, in CPUs."""
    memory: int = 1 * GIB
    """Bytes of memory of all its processes, /tmp and /home included."""
    pids: int = 256
    """Processes and threads."""
    disk: int = 1 * GIB
    """Bytes in /workspace."""
    inodes: int = 0
    """Files and folders in /workspace; 0 means one for every 8 KiB of ``disk``."""
    open_files: int = 65_536
    """Open files of one process."""
    output: int = 1 * GIB
    """Bytes that one run may print; then it is stopped."""

    def __post_init__(self) -> None:
        checks = (
            ("cpus", 0.05 <= self.cpus <= 1024, "0.05 to 1024"),
            ("memory", 32 * MIB <= self.memory <= 1024 * GIB, "32 MiB to 1 TiB"),
            ("pids", 8 <= self.pids <= 100_000, "8 to 100,000"),
            ("disk", 4 * MIB <= self.disk <= 1024 * GIB, "4 MiB to 1 TiB"),
            ("inodes", self.inodes == 0 or 16 <= self.inodes < 1 << 31, "16 to 2,147,483,647"),
            # The guest has it too, and needs some for itself.
            ("open_files", 1024 <= self.open_files <= 1 << 20, "1,024 to 1,048,576"),
            ("output", 1024 <= self.output <= 1 << 50, "1 KiB to 1 PiB"),
        )
        for name, fits, span in checks:
            if not fits:
                raise errors.InvalidRequest(f"limit {name} must be {span}")


class Phase(enum.StrEnum):
    """The phase of a session's life."""

    CREATING = "creating"
    ACTIVE = "active"
    PAUSED = "paused"
    """Frozen: its programs do not run, and its idle time does not count."""
    ENDED = "ended"


def _no_strings() -> dict[str, str]:
    return {}


def _host_rootfs() -> Rootfs:
    return Rootfs()


@dataclass(frozen=True)
class SessionSpec:
    """A client's request for a new session."""

    tenant: str = "default"
    runtime: str = ""
    """Empty means the best usable one; a name never falls back."""
    session_id: str = ""
    request_id: str = ""
    """Two creations with the same request id are one."""
    env: dict[str, str] = field(default_factory=_no_strings)
    labels: dict[str, str] = field(default_factory=_no_strings)
    limits: Limits = field(default_factory=Limits)
    lifetime: float = 0
    """Seconds until the session is destroyed whatever happens; 0 means the gateway's default."""
    idle_timeout: float = 0
    """Seconds without a running or new operation; 0 means the gateway's default."""
    allowed_hosts: tuple[str, ...] | None = None
    """What may be reached, in the words of the policy language; None is the gateway's default."""
    snapshot: str = ""
    """The snapshot that /workspace begins with."""
    manifest: Manifest = field(default_factory=Manifest)
    """What is put into /workspace before the session is handed over."""
    template: str = ""
    """What it is made from; empty means ``default``."""
    rootfs: Rootfs = field(default_factory=_host_rootfs)
    """As the template has it: no client may choose a path of the host."""
    warm: Warm = (("python", ()),)
    """As the template has it."""
    secret_refs: tuple[SecretRef, ...] = ()
    """Which variables are secrets; their values are never part of a specification."""

    def __post_init__(self) -> None:
        check_tenant(self.tenant)
        if self.snapshot:
            check_snapshot_name(self.snapshot)
        if self.template:
            check_id(self.template, "template")
        if self.session_id:
            check_id(self.session_id, "session id")
        if len(self.request_id) > 200 or not self.request_id.isprintable():
            raise errors.InvalidRequest("a request id has at most 200 printable characters")
        if not (self.lifetime >= 0 and self.idle_timeout >= 0):  # so that NaN is refused too
            raise errors.InvalidRequest("lifetime and idle time-out cannot be negative")
        check_env(self.env)
        check_secret_refs(self.secret_refs)
        if len(self.labels) > MAX_LABELS or sum(map(len, self.labels.values())) > 16 << 10:
            raise errors.LimitExceeded(f"more than {MAX_LABELS} labels or 16 KiB of them")

    def to_json(self) -> dict[str, Any]:
        # Of a manifest only the digest: a spec is read for every run in a standing session.
        # Not dataclasses.asdict, which copies all that it finds, and takes ten times as long.
        parts = {"limits": dict(vars(self.limits)), "rootfs": dict(vars(self.rootfs))}
        return {**vars(self), **parts, "manifest": self.manifest.digest}

    @classmethod
    def from_json(cls, data: dict[str, Any], *, stored: bool = False, **chosen: Any) -> SessionSpec:
        """Build from untrusted or stored data; unknown keys are refused.

        What only templates decide is taken from what is ``stored``, or ``chosen`` by the caller.
        """
        known = {item.name: item for item in dataclasses.fields(cls)}
        unknown = set(data) - (set(known) if stored else set(known) - _OF_TEMPLATES)
        if unknown:
            raise errors.InvalidRequest(f"unknown session field {sorted(unknown)[0]!r}")
        values = {key: value for key, value in data.items() if value is not None}
        try:
            if "limits" in values:
                values["limits"] = limits_from_json(values["limits"])
            for key in ("env", "labels"):
                values[key] = {str(k): str(v) for k, v in dict(values.get(key) or {}).items()}
            for key in ("tenant", "runtime", "session_id", "request_id", "snapshot", "template"):
                values[key] = str(values.get(key) or known[key].default)
            for key in ("lifetime", "idle_timeout"):
                values[key] = float(values.get(key) or 0)
            if "manifest" in values:
                values["manifest"] = manifests.from_json(values["manifest"])
            if "allowed_hosts" in values:
                values["allowed_hosts"] = words_from_json(values["allowed_hosts"])
            if "secret_refs" in values:
                values["secret_refs"] = secret_refs_from_json(values["secret_refs"])
            if "rootfs" in values:
                values["rootfs"] = Rootfs(**values["rootfs"])
            if "warm" in values:
                values["warm"] = tuple((str(k), tuple(map(str, v))) for k, v in values["warm"])
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise errors.InvalidRequest(f"malformed session: {error}") from None
        return cls(**values, **chosen)


def pip_command(packages: Sequence[str]) -> list[str]:
    """The command that installs packages. They are data: no shell sees them; none is an option."""
    if isinstance(packages, str) or not packages or len(packages) > MAX_PACKAGES:
        raise errors.InvalidRequest(
            f"packages must be a list of 1 to {MAX_PACKAGES} requirements, like ['requests>=2.28']"
        )
    for item in packages:
        if not item.strip() or item.lstrip().startswith("-") or "\0" in item or len(item) > 1000:
            raise errors.InvalidRequest(f"{item[:80]!r} is not a package")
    return ["python3", "-m", "pip", "install", "--no-input", "--", *packages]


def words_from_json(value: Any) -> tuple[str, ...]:
    """The words of an egress policy; egress interprets them."""
    if isinstance(value, str) or not all(isinstance(word, str) for word in value):
        raise errors.InvalidRequest("allowed_hosts must be a list of texts")
    return tuple(value)


def secret_refs_from_json(value: Any) -> tuple[SecretRef, ...]:
    """References as ``{"VARIABLE": "name:key"}``, or as lists of name, key and variable."""
    if isinstance(value, dict):
        named = cast("dict[object, object]", value)
        return tuple(parse_secret_ref(str(name), str(text)) for name, text in named.items())
    return tuple(SecretRef(*map(str, item)) for item in value)


def parse_secret_ref(variable: str, text: str) -> SecretRef:
    """``name:key``, or ``name`` for the one value of a secret that has no other."""
    name, colon, key = text.partition(":")
    return SecretRef(name, key if colon else SOLE_KEY, variable)


def limits_from_json(data: dict[str, Any]) -> Limits:
    kinds = {item.name: item.default for item in dataclasses.fields(Limits)}
    unknown = set(data) - set(kinds)
    if unknown:
        raise errors.InvalidRequest(
            f"unknown limit {sorted(unknown)[0]!r}", hint=f"known are {', '.join(kinds)}"
        )
    values: dict[str, Any] = {k: float(v) if k == "cpus" else int(v) for k, v in data.items() if v}
    return Limits(**values)


def parse_limit(name: str, value: float | str) -> float | int:
    """A limit as a number: text may have a unit (``512M``, ``1.5GiB``)."""
    if not isinstance(value, str):
        return value
    text = value.strip().upper().removesuffix("B").removesuffix("I")
    digits = text.rstrip("KMGT")
    try:
        number = float(digits) * _UNITS[text[len(digits) :]]
        return number if name == "cpus" else int(number)
    except (ValueError, KeyError, OverflowError):
        raise errors.InvalidRequest(
            f"limit {name} is {value[:80]!r}, which is not a number",
            hint="sizes are written like 512M or 2G",
        ) from None


def check_env(env: dict[str, str]) -> None:
    """Refuse an environment that exec would refuse, or that is larger than anyone needs."""
    if len(env) > MAX_ENV_KEYS:
        raise errors.InvalidRequest(
            f"{len(env)} environment variables; a session takes {MAX_ENV_KEYS}", hint=_ENV_HINT
        )
    size = 0
    for key, value in env.items():
        if not key or "=" in key or "\0" in key + value:
            raise errors.InvalidRequest(f"environment variable {key[:80]!r} is malformed")
        size += len(key.encode(errors="surrogateescape")) + len(
            value.encode(errors="surrogateescape")
        )
    if size > MAX_ENV_BYTES:
        raise errors.InvalidRequest(
            f"the environment is larger than {MAX_ENV_BYTES} bytes", hint=_ENV_HINT
        )


def check_secret_refs(refs: tuple[SecretRef, ...]) -> None:
    """Refuse references that no session could have."""
    if len(refs) > MAX_SECRET_REFS:
        raise errors.InvalidRequest(f"{len(refs)} secrets; a session takes {MAX_SECRET_REFS}")
    seen: set[str] = set()  # of variables that are both, the secret wins
    for ref in refs:
        check_secret_name(ref.secret_name, "secret")
        check_secret_name(ref.key, "key of a secret")
        check_env({ref.env_var: ""})
        if len(ref.env_var.encode(errors="surrogateescape")) > MAX_ENV_NAME:
            raise errors.InvalidRequest(f"a variable's name has at most {MAX_ENV_NAME} bytes")
        if ref.env_var in seen:
            raise errors.InvalidRequest(f"the variable {ref.env_var[:80]!r} is set twice")
        seen.add(ref.env_var)


@dataclass(frozen=True)
class Rootfs:
    """The root file system of a sandbox, read-only."""

    kind: str = "host"
    """``host`` (its ``/usr`` and a small ``/etc``), ``dir``, ``tar`` or ``image``."""
    source: str = ""
    """An absolute path of the operator's, or the reference of an image; empty for ``host``."""


@dataclass(frozen=True)
class SandboxSpec:
    """Everything that a runtime needs to launch a sandbox. The session's policy comes later."""

    sandbox_id: str
    limits: Limits
    runtime: str
    network: str = ""
    """The path of a network namespace for it; empty for one with nothing but loopback."""
    workspace_of: str = ""
    """The sandbox whose workspace it shares; empty for a workspace of its own."""
    rootfs: Rootfs = field(default_factory=Rootfs)


@dataclass(frozen=True)
class Session:
    """A sandbox handed to a tenant."""

    session_id: str
    owner: str
    spec: SessionSpec
    runtime: str
    sandbox_id: str
    phase: Phase
    created_at: float
    expires_at: float
    """Unix time; 0 means never."""
    auto: bool = False
    """Whether this is what the tenant gets when it names no session."""
    ended_reason: str = ""
    allowed_hosts: tuple[str, ...] = ()
    """What it may reach now; its specification has what was asked for at first."""
    parent: str = ""
    """The session whose workspace it shares and with which it ends; empty for most."""
    deadline: float = 0
    """When it expires, by the clock that nobody sets; 0 in what an older release wrote."""

    def to_json(self) -> dict[str, Any]:
        """The fields that a client may see."""
        return {
            "session_id": self.session_id,
            "tenant_id": self.spec.tenant,
            "runtime": self.runtime,
            "phase": str(self.phase),
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "idle_timeout": self.spec.idle_timeout,
            "labels": self.spec.labels,
            "env_keys": sorted(self.spec.env),
            "secret_env_vars": sorted(ref.env_var for ref in self.spec.secret_refs),
            "limits": dict(vars(self.spec.limits)),
            "allowed_hosts": list(self.allowed_hosts),
            "parent_id": self.parent,
            "ended_reason": self.ended_reason,
            "auto": self.auto,
            "template": self.spec.template or DEFAULT_TEMPLATE,
        }
