"""Settings, read once at start-up. Order: flag, environment, ``config.toml``, default.

Each field is explained in place; ``docs/reference/settings.md`` lists them all, held by a test.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from k8e import errors

ENV_PREFIX = "K8E_"


def _uid() -> int:
    """Our uid; on systems without uids, a number that is not root's."""
    return os.geteuid() if hasattr(os, "geteuid") else -1


def _is_root() -> bool:
    return _uid() == 0


SYSTEM_HOME = Path("/opt/k8e")
"""Where install.sh puts everything if root runs it."""
SYSTEM_DATA = Path("/var/lib/k8e")
SERVER_GATEWAY = SYSTEM_DATA / "gateway"
"""Where the gateway of ``k8e server`` keeps its state."""
_RUNTIME_TOOLS = ("runsc", "runc", "crun")
_SWITCH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def own_home() -> Path:
    """Where install.sh puts everything if a user other than root runs it."""
    return Path.home() / ".local/share/k8e/home"


def default_home() -> Path:
    """Where install.sh put runsc, runc, the virtual environment and the language tools."""
    if _is_root():
        return SYSTEM_HOME
    own = own_home()
    # What root installed serves everybody who has nothing of their own, or only half of it.
    return SYSTEM_HOME if _has_tools(SYSTEM_HOME) and not _has_tools(own) else own


def tool_homes(home: Path) -> tuple[Path, ...]:
    """The folders of a tool: ``home``, and root's where a user's installation lacks it."""
    return (home, SYSTEM_HOME) if home == own_home() else (home,)


def _has_tools(home: Path) -> bool:
    return any(os.access(home / "bin" / name, os.X_OK) for name in _RUNTIME_TOOLS)


def default_data_dir() -> Path:
    """The folder of a gateway's state; on the machine of a server, below that one's folder."""
    if not _is_root():
        return Path.home() / ".local/share/k8e/data"
    return SERVER_GATEWAY if SERVER_GATEWAY.is_dir() else SYSTEM_DATA


def default_run_dir() -> Path:
    if _is_root():
        return Path("/run/k8e")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/k8e-{_uid()}") / "k8e"  # noqa: S108 - its owner is checked


@dataclass(frozen=True)
class Settings:
    """All settings of a gateway."""

    home: Path
    """K8E_HOME: installed tools (``bin/runsc``, ``bin/runc``, ``tools/``). Read only."""
    data_dir: Path
    """K8E_DATA_DIR: state that outlives a reboot: database, keys, workspaces. Mode 0700."""
    run_dir: Path
    """K8E_RUN_DIR: sockets, pid file. Mode 0700. Sockets need a short path (under 60 bytes)."""
    listen: str = "127.0.0.1:50051"
    """K8E_LISTEN: address of the gRPC endpoint; ``none`` for no TCP listener at all. Callers from
    other machines need an API key or a client certificate."""
    http: str = ""
    """K8E_HTTP: address of the HTTP endpoint (``/sandbox``, ``/mcp``, ``/a2a``, ``/healthz``,
    ``/metrics``); ``none`` for no such. One that other machines can reach is served by TLS, with
    the gateway's certificate. Empty means 127.0.0.1:8811 for a gateway in the foreground whose
    K8E_LISTEN is not ``none``, and ``none`` for any other."""
    http_trust_local: bool = False
    """K8E_HTTP_TRUST_LOCAL: whether programs of the gateway's own user may use ``/sandbox`` on this
    machine without a credential; web pages never may."""
    token_signing_key: str = field(default="", repr=False)
    """K8E_TOKEN_SIGNING_KEY: the secret that signs tokens of conversations by HMAC, of 32 bytes at
    least; empty means Ed25519 keys of k8e's own, which follow each other. A gateway in the
    foreground takes ``TOKEN_SIGNING_KEY`` where this is not set."""
    token_ttl: str = "1h"  # noqa: S105 - a duration
    """K8E_TOKEN_TTL: how long such a token is good, as ``1h``, ``90m`` or ``3600``; a gateway in
    the foreground takes ``TOKEN_TTL`` where this is not set."""
    sandbox_namespace: str = "default"
    """K8E_SANDBOX_NAMESPACE: the tenant of conversations that name none; a gateway in the
    foreground takes ``SANDBOX_NAMESPACE`` where this is not set."""
    advertise_names: str = ""
    """K8E_ADVERTISE_NAMES: further host names and addresses by which clients call this machine,
    separated by commas; the gateway's certificate is made for them too."""
    idle_exit: float = 900.0
    """K8E_IDLE_EXIT: seconds without sessions and clients after which a gateway that was started
    in the background leaves; 0 means never."""
    default_runtime: str = ""
    """K8E_RUNTIME: runtime for sessions that ask for none; empty means gVisor, and the container
    runtime, with a warning, where gVisor does not work."""
    default_lifetime: float = 24 * 3600.0
    """K8E_LIFETIME: seconds that a session lives unless it asks for something else."""
    max_lifetime: float = 7 * 24 * 3600.0
    """K8E_MAX_LIFETIME: the longest lifetime that a client may ask for or extend to, in seconds."""
    default_idle_timeout: float = 1800.0
    """K8E_IDLE_TIMEOUT: seconds without activity after which a session is destroyed."""
    default_allowed_hosts: str = "default"
    """K8E_ALLOWED_HOSTS: what sessions may reach that do not say it, as words separated by commas:
    host names, ``*.wildcards``, networks, ``default``, ``open``, ``none``, ``strict``."""
    trusted_hosts: str = ""
    """K8E_TRUSTED_HOSTS: the operator's own hosts, separated by commas. They are part of
    ``default``, and may resolve to private addresses."""
    resolvers: str = ""
    """K8E_RESOLVERS: addresses of the DNS resolvers to ask for sandboxes, separated by commas,
    each with an optional port; empty means those of ``/etc/resolv.conf``."""
    uplink_namespace: str = ""
    """K8E_UPLINK_NAMESPACE: path of the network namespace through which sandboxes reach the world,
    such as one of a VPN; empty means the gateway's own."""
    call_rate: float = 1000.0
    """K8E_CALL_RATE: calls per second that one API key may make, unless it was made with a rate of
    its own; twice as many at once after a pause. 0 means no limit. The local user has none."""
    database_url: str = field(default="", repr=False)
    """K8E_DATABASE_URL: the PostgreSQL that several gateways share, as
    ``postgresql://USER:PASSWORD@HOST:5432/NAME``; empty means SQLite in the data folder. A gateway
    in the foreground takes ``DATABASE_URL`` where this is not set."""
    gateway_lease: float = 30.0
    """K8E_GATEWAY_LEASE: seconds without a word to that database after which a gateway is taken for
    dead, and the others end its sessions."""
    max_sessions: int = 256
    """K8E_MAX_SESSIONS: how many sessions may live at once on this gateway."""
    max_sessions_per_principal: int = 192
    """K8E_MAX_SESSIONS_PER_PRINCIPAL: how many sessions one principal (a key, or the local user)
    may have at once; 0 means as many as the gateway takes."""
    max_sessions_per_tenant: int = 128
    """K8E_MAX_SESSIONS_PER_TENANT: how many of them one tenant of a principal may have; 0 means as
    many as the principal."""
    max_creations_per_principal: int = 3000
    """K8E_MAX_CREATIONS_PER_PRINCIPAL: how many sessions one principal may make per minute; 0 means
    any number."""
    max_creations_per_tenant: int = 1500
    """K8E_MAX_CREATIONS_PER_TENANT: how many of them for one tenant; 0 means any number."""
    min_free_disk: int = 256 << 20
    """K8E_MIN_FREE_DISK: bytes of the data folder's disk that stay free: below that no session is
    made, no workspace grows, and no snapshot or image is stored; 0 means none."""
    disk_reserve: int = 64 << 20
    """K8E_DISK_RESERVE: bytes of that disk that the gateway holds for itself, so that keys can be
    deleted and sessions ended on a full disk, and the audit trail goes on; 0 means none."""
    max_snapshot_bytes: int = 20 << 30
    """K8E_MAX_SNAPSHOT_BYTES: how much all snapshots of one owner may hold."""
    pool_min: int = 1
    """K8E_POOL_MIN: how many sandboxes of the default template are ready at least, so that a new
    session need not wait for one to start."""
    pool_max: int = 8
    """K8E_POOL_MAX: how many sandboxes of one template and runtime are ready at most; as many as
    were claimed at once of late. 0 means that none are, but for templates that say how many."""
    pool_total: int = 32
    """K8E_POOL_TOTAL: how many sandboxes of all templates and runtimes together are ready at most;
    where they would be more, templates share the number fairly. 0 means that none are."""
    max_children: int = 16
    """K8E_MAX_CHILDREN: how many sub-agents one session may have at once."""
    default_registry: str = ""
    """K8E_DEFAULT_REGISTRY: host of the registry for images whose reference names none; empty means
    that such a reference is refused."""
    insecure_registries: str = ""
    """K8E_INSECURE_REGISTRIES: hosts of registries, separated by commas, that may be talked to
    without TLS; those on the loopback address always may."""
    registry_credentials: str = ""
    """K8E_REGISTRY_CREDENTIALS: a file with passwords for registries, in the form of Docker's
    ``config.json`` (only its ``auths``); empty means ``~/.docker/config.json``, if it is there."""
    max_image_bytes: int = 16 << 30
    """K8E_MAX_IMAGE_BYTES: the most that one image may have, downloaded or unpacked."""
    audit_content: str = "commands"
    """K8E_AUDIT_CONTENT: what the audit trail keeps of what is run: ``commands`` (the text of
    commands, of code a hash), ``hashes`` (of both a hash) or ``all`` (the text of both)."""
    audit_max_bytes: int = 1 << 30
    """K8E_AUDIT_MAX_BYTES: how much the audit trail may hold; then its oldest rows are removed."""
    audit_max_age: int = 90 * 24 * 3600
    """K8E_AUDIT_MAX_AGE: seconds after which audit rows are removed; 0 means never."""

    secrets_key_file: str = ""
    """K8E_SECRETS_KEY_FILE: a file of 32 random bytes, the key with which secrets of users are
    encrypted, such as a credential of systemd; empty means ``secrets.key`` in the data folder,
    which is made with the first secret."""

    kubeconfig: str = ""
    """K8E_KUBECONFIG: kubeconfig of the cluster in whose pods sandboxes run, or ``in-cluster`` for
    a gateway that is a pod there; empty means that they run on this machine."""
    sandbox_namespace: str = "sandbox-matrix"
    """K8E_SANDBOX_NAMESPACE: the namespace of those pods."""
    runtime_classes: str = "gvisor kata firecracker"
    """K8E_RUNTIME_CLASSES: the cluster's RuntimeClasses that sessions may ask for as their runtime,
    separated by spaces or commas; ``kubernetes`` means the first. One that the cluster lacks is an
    error."""
    sandbox_image: str = ""
    """K8E_SANDBOX_IMAGE: the image of sandboxes in pods whose session and template name none."""
    guest_image: str = ""
    """K8E_GUEST_IMAGE: the image with k8e's guest, from which each pod copies it; empty means the
    one that ``k8e server`` and ``k8e agent`` give their nodes."""

    components_dir: Path = Path("/var/cache/k8e/components")
    """K8E_COMPONENTS_DIR: the upstream programs that ``k8e server`` and ``k8e agent`` run; see
    ``k8e components``."""

    templates: str = ""
    """K8E_TEMPLATES: the folder with the files of templates; empty means ``templates`` in the data
    folder."""

    @property
    def template_dir(self) -> Path:
        return Path(self.templates or self.data_dir / "templates").absolute()

    @property
    def socket(self) -> Path:
        return self.run_dir / "gateway.sock"

    @property
    def log_file(self) -> Path:
        return self.data_dir / "gateway.log"


def load(environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    """Settings from flags (None = not given), the environment, the file and the defaults."""
    environ = dict(os.environ) if environ is None else environ
    data_dir = Path(flags.get("data_dir") or environ.get("K8E_DATA_DIR") or default_data_dir())
    base = Settings(home=default_home(), data_dir=data_dir, run_dir=default_run_dir())
    values = _read_file(Path(environ.get("K8E_CONFIG") or data_dir / "config.toml"))
    for item in fields(Settings):
        text = environ.get(_variable(item.name))
        if text is not None:
            values[item.name] = text
        if flags.get(item.name) is not None:
            values[item.name] = flags[item.name]
    return replace(base, **{name: _parse(name, value, base) for name, value in values.items()})


def _variable(name: str) -> str:
    """The environment variable of a field: ``default_`` is left out, but for one field."""
    if name != "default_registry":  # others are allowed, too
        name = name.removeprefix("default_")
    return ENV_PREFIX + name.upper()


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise errors.InvalidRequest(f"cannot read the configuration {path}: {error}") from None
    unknown = set(values) - {item.name for item in fields(Settings)}
    if unknown:
        raise errors.InvalidRequest(f"unknown setting {sorted(unknown)[0]!r} in {path}")
    return values


def _parse(name: str, value: Any, base: Settings) -> Any:
    default: Any = getattr(base, name)
    if isinstance(default, Path):
        return Path(value).absolute()
    if isinstance(default, bool):
        return _parse_switch(name, value)
    try:
        return type(default)(value)
    except ValueError:
        raise errors.InvalidRequest(
            f"setting {_variable(name)} is {value!r}, not a {type(default).__name__}"
        ) from None


def _parse_switch(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in _SWITCH:
        raise errors.InvalidRequest(
            f"setting {_variable(name)} is {value!r}, neither true nor false",
            hint=f"use {' or '.join(_SWITCH)}",
        )
    return _SWITCH[text]
