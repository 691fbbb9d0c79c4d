"""Results of the SDK's methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k8e.client.records import Record, field


class Stdout(Record):
    """Bytes that a command wrote to its standard output."""

    data: bytes
    seq: int
    """Number of the first byte, counted over both streams of the command."""


class Stderr(Record):
    """Bytes that a command wrote to its standard error."""

    data: bytes
    seq: int


class Denial(Record):
    """A destination that a sandbox's policy refused. Not an outage."""

    name: str
    """The host name, if it is known; empty for a bare address, ``*`` for every host."""
    address: str
    """Empty for a name that was not resolved."""
    port: int
    protocol: str
    """``tcp``, ``udp``, ``icmp`` or ``dns``; ``any`` where there is no network at all."""
    rule: str
    """Why, in words."""
    count: int = 1
    """How often, in a row or in the run."""
    at: float = 0.0
    """Unix time of the last one; 0 in the result of a run, which was just now."""


def no_denials() -> list[Denial]:
    return []


class ReachedLimit(Record):
    """A limit that a command met, and may have failed for."""

    limit: str
    """``memory``, ``pids``, ``disk``, ``inodes``, ``open_files`` or ``output`` of the session, or
    ``timeout`` of the run."""
    value: float
    """How much the session may have; the seconds of a run, 0 if they are not known."""
    message: str
    """What it means, and how to have more, in words."""


def no_limits() -> list[ReachedLimit]:
    return []


def reached(told: Any) -> list[ReachedLimit]:
    """The limits that the end of a command names."""
    return [ReachedLimit(item["limit"], item["value"], item["message"]) for item in told or ()]


class Exit(Record):
    """The end of a command."""

    exit_code: int
    """What it returned; 128 + n if signal n ended it."""
    status: str
    """``completed``, ``timed_out`` or ``killed``."""
    signal: int
    duration_ms: int
    truncated: bool
    """Whether output above the limit was dropped."""
    session_id: str
    exec_id: str
    denials: list[Denial] = field(default_factory=no_denials)
    """What the session's policy refused while the command ran."""
    limits: list[ReachedLimit] = field(default_factory=no_limits)
    """The limits of the session that it met, if it failed."""


ExecEvent = Stdout | Stderr | Exit


class Chunk(Record):
    """Bytes of a file."""

    data: bytes


class Output(Record):
    """Output that was collected."""

    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)

    @property
    def stdout(self) -> str:
        """The output as text; invalid UTF-8 is replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """The bundle for a notebook: the output, as a terminal would show it."""
        return {"text/plain": self.stdout + self.stderr}

    def _shown(self) -> dict[str, Any]:
        return {"stdout": self.stdout, "stderr": self.stderr, **super()._shown()}


class ExecResult(Output):
    """The result of a command that has ended. A failing command is a result, not an exception."""

    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    exit_code: int
    session_id: str
    duration_ms: int
    truncated: bool
    """Whether output above the limit was dropped."""
    status: str
    """``completed``, ``timed_out`` or ``killed``."""
    exec_id: str
    denials: list[Denial] = field(default_factory=no_denials)
    """What the session's policy refused while the command ran; usually nothing."""
    limits: list[ReachedLimit] = field(default_factory=no_limits)
    """The limits of the session that it met, if it failed; usually none."""


class FileEntry(Record):
    """A file of the sandbox."""

    path: str
    type: str
    """``file``, ``dir``, ``link``, ``fifo``, ``socket``, ``char``, ``block`` or ``other``."""
    size: int
    mode: int
    modified_ns: int
    target: str = ""
    """Where a link points to (only :meth:`stat` tells)."""

    @property
    def modified(self) -> int:
        """Seconds since 1970."""
        return self.modified_ns // 1_000_000_000


class ExecInfo(Record):
    """A command that runs or ran in a session."""

    exec_id: str
    pid: int
    argv: list[str]
    status: str
    exit_code: int | None
    duration_ms: int
    background: bool = False
    """Whether it was started to run on without its caller."""


class RunState(Output):
    """A background run at one moment."""

    run_id: str
    session_id: str
    exec_id: str
    status: str
    """``running``, ``completed``, ``timed_out`` or ``killed``."""
    exit_code: int | None
    """None while it runs."""
    duration_ms: int
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    truncated: bool
    """Whether older output is no longer kept."""


class ProcessInfo(Record):
    """A process in a sandbox, with ids as the programs in there see them."""

    pid: int
    ppid: int
    comm: str
    """The name of its program, at most 15 bytes."""
    state: str
    """A letter of ``ps``: ``R`` runs, ``S`` sleeps, ``Z`` has ended."""


class Foreground(Record):
    """The foreground process group of a terminal."""

    process_group_id: int
    """As programs in the sandbox see it; -1 if it is not known, which on gVisor is often so."""
    input_waiting: bool
    """Whether that group is known, all of it sleeps, and there is no input that it could read."""


class SessionInfo(Record):
    """A session as its owner sees it."""

    session_id: str
    tenant_id: str
    runtime: str
    phase: str
    """``creating``, ``active``, ``paused`` or ``ended``."""
    created_at: float
    expires_at: float
    """Unix time; 0 means never."""
    idle_timeout: float
    labels: Mapping[str, str]
    env_keys: list[str]
    limits: Mapping[str, float]
    ended_reason: str = ""
    allowed_hosts: list[str] = field(default_factory=list[str])
    """What it may reach, in the words that were asked for."""
    parent_id: str = ""
    """The session whose sub-agent it is; empty for most."""
    background_runs: int | None = None
    """How many background programs run in it; only :meth:`get_session` asks."""
    auto: bool = False
    """Whether it is its tenant's standing session: where commands run that name none."""
    template: str = ""
    """What it was made from."""
    secret_env_vars: list[str] = field(default_factory=list[str])
    """The variables that are secrets."""


class Egress(Record):
    """What a session may reach, and what it was refused."""

    session_id: str
    allowed_hosts: list[str]
    """The policy in the words that were asked for."""
    rules: list[str]
    """The policy in effect: ``default`` is spelled out."""
    network: bool
    """Whether this session has a network at all; :attr:`reason` says why not."""
    reason: str
    denied: int
    """How often something was refused in all."""
    denials: list[Denial]
    """The newest refusals, newest last."""


_SESSION_FIELDS = frozenset(SessionInfo.__match_args__)
_DENIAL_FIELDS = frozenset(Denial.__match_args__)
_ENTRY_FIELDS = frozenset(FileEntry.__match_args__)


def session(data: Mapping[str, Any]) -> SessionInfo:
    """A session from the wire; a newer gateway may send more than this client knows."""
    return SessionInfo(**{key: value for key, value in data.items() if key in _SESSION_FIELDS})


def denial(data: Mapping[str, Any]) -> Denial:
    return Denial(**{key: value for key, value in data.items() if key in _DENIAL_FIELDS})


def egress(data: Mapping[str, Any]) -> Egress:
    return Egress(
        session_id=data["session_id"],
        allowed_hosts=data["allowed_hosts"],
        rules=data["rules"],
        network=data["network"],
        reason=data.get("reason", ""),
        denied=data["denied"],
        denials=[denial(item) for item in data["denials"]],
    )


def entry(data: Mapping[str, Any]) -> FileEntry:
    return FileEntry(**{key: value for key, value in data.items() if key in _ENTRY_FIELDS})


def exec_info(data: Mapping[str, Any]) -> ExecInfo:
    return ExecInfo(
        exec_id=data["id"],
        pid=data["pid"],
        argv=data["argv"],
        status=data["status"],
        exit_code=data["code"],
        duration_ms=data["duration_ms"],
        background=bool(data.get("background")),
    )


def process(data: Mapping[str, Any]) -> ProcessInfo:
    return ProcessInfo(
        pid=int(data["pid"]),
        ppid=int(data["ppid"]),
        comm=str(data["comm"]),
        state=str(data["state"]),
    )


def foreground(data: Mapping[str, Any]) -> Foreground:
    return Foreground(
        process_group_id=int(data["process_group_id"]), input_waiting=bool(data["input_waiting"])
    )
