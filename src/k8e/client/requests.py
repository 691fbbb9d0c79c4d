"""Requests: the arguments of the SDK's methods as calls on the wire. Pure functions."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal, TypedDict, cast

from k8e import errors
from k8e.guest import wire

OUTPUT_LIMIT = 1 << 20
"""Bytes of each stream that are kept of a command whose output is collected."""
MAX_ARGUMENTS = wire.MAX_ITEMS - (1 << 10)
"""Of one command; what else a call has must fit beside them."""
DEPTH = 1000  # levels of folders that a listing goes down

Content = str | bytes | bytearray | memoryview | BinaryIO | Iterable[bytes | str]
AsyncContent = Content | AsyncIterable[bytes | str]


Language = Literal["bash", "python", "node", "ts"]
"""What source code can be written in."""
ContextLanguage = Literal["python", "bash", "node"]
"""The languages that contexts have."""


class Limits(TypedDict, total=False):
    """The most that a sandbox may use; sizes are bytes, or text like ``"512M"``."""

    cpus: float | str
    memory: float | str
    pids: float | str
    disk: float | str
    inodes: float | str
    open_files: float | str
    output: float | str


class ExecOptions(TypedDict, total=False):
    """The options that every way of running a command has."""

    env: Mapping[str, str]
    cwd: str
    """Absolute, or relative to /workspace."""
    output_limit: int
    """Bytes kept of each stream; 0 means all."""
    exec_id: str
    """Chosen by the caller to make starting idempotent: a second start joins the first."""
    kill_on_disconnect: bool
    """Kill the command if this client's connection breaks (not only when it gives up)."""
    tty: tuple[int, int] | None
    """Rows and columns: run on a terminal, with both streams in stdout."""
    ring: bool
    """Let the command run on without readers, keeping only the newest output."""


class SandboxOptions(TypedDict, total=False):
    """The options of a new sandbox, beside its template and limits."""

    env: Mapping[str, str]
    labels: Mapping[str, str]
    lifetime: float
    """Seconds until it is destroyed whatever happens."""
    idle_timeout: float
    """Seconds without a running command after which it is destroyed."""
    session_id: str
    request_id: str
    """Two creations with the same request id are one."""
    snapshot: str
    """The name of a snapshot that /workspace begins with."""
    manifest: Sequence[Mapping[str, Any]]
    """Content for /workspace, such as ``{"file": {"path": "a.txt", "content": "hello"}}``,
    ``{"dir": {"path": "b"}}`` and ``{"gitRepo": {"path": "c", "repo": "https://…"}}``."""
    secrets: Mapping[str, str]
    """Variables that are secrets, such as ``{"TOKEN": "github"}`` or ``{"TOKEN": "github:key"}``;
    see ``set_secret``."""


class SessionOptions(SandboxOptions, total=False):
    """The options of a new session."""

    limits: Limits | Mapping[str, float | str]
    """``cpus``, ``memory``, ``pids``, ``disk``, ``inodes``, ``open_files``, ``output``; sizes as
    bytes or text like ``"512M"``."""
    template: str
    """What it is made from; the other options here win over the template's."""


_EXEC_OPTIONS = frozenset(ExecOptions.__annotations__)
_SESSION_OPTIONS = frozenset(SessionOptions.__annotations__)
_LIMITS = tuple(Limits.__annotations__)


def check_exec_options(method: Callable[..., Any], options: Mapping[str, Any]) -> None:
    check_options(method, options, _EXEC_OPTIONS)


def check_session_options(method: Callable[..., Any], options: Mapping[str, Any]) -> None:
    check_options(method, options, _SESSION_OPTIONS)


def check_options(
    method: Callable[..., Any], options: Mapping[str, Any], known: frozenset[str]
) -> None:
    """TypeError for an unknown keyword of ``method``, as Python itself would raise it."""
    if not options.keys() <= known:
        raise _unexpected(method, options, known)


def _unexpected(
    method: Callable[..., Any], options: Mapping[str, Any], known: frozenset[str]
) -> TypeError:
    import difflib
    import inspect

    name = min(options.keys() - known)
    given = [item.name for item in inspect.signature(method).parameters.values()]
    names = sorted({*given, *known} - {"options", "wanted"})
    close = [item for item in names if item.startswith(name) or name.startswith(item)]
    close += difflib.get_close_matches(name, names, 1)
    text = f"{method.__name__}() got an unexpected keyword argument {name!r}"
    if known is _SESSION_OPTIONS and name in _LIMITS:
        return TypeError(f"{text}. Did you mean limits={{{name!r}: …}}?")
    if close:
        return TypeError(f"{text}. Did you mean {close[0]!r}?")
    return TypeError(f"{text}; it takes {', '.join(names)}")


def new_exec_id() -> str:
    return os.urandom(8).hex()


def by_id(session_id: str) -> dict[str, Any]:
    """The session of this id, as operations name it."""
    if not session_id:
        raise errors.InvalidRequest("the session id is empty")
    return {"id": session_id}


def auto(tenant: str, template: str = "") -> dict[str, Any]:
    """The standing session of a tenant."""
    return {"auto": tenant, "spec": {"template": template}} if template else {"auto": tenant}


def check_made_for_run(session_id: str | None, template: str) -> None:
    """A template is for a session that a run makes, not for an existing one."""
    if session_id and template:
        raise errors.InvalidRequest(
            f"the run is in session {session_id[:80]}, so no template can be chosen for it",
            hint="create_session(template=…) makes another session",
        )


def pip_call(session_id: str, packages: Sequence[str], timeout: float) -> dict[str, Any]:
    from k8e import model  # takes time to import, and few install packages

    argv = model.pip_command(packages)
    return command_call(by_id(session_id), argv, timeout=timeout, stdin=False, options={})


def code_call(
    session: Mapping[str, Any],
    code: str | bytes,
    *,
    language: str,
    timeout: float,
    stdin: bool,
    options: ExecOptions,
) -> dict[str, Any]:
    """Run source code."""
    given: Any = code
    if not isinstance(given, (str, bytes, bytearray, memoryview)):
        raise errors.InvalidRequest(
            "the code is neither text nor bytes", hint='write run("print(1)", "python")'
        )
    data = bytes(as_bytes(given))
    if len(data) > wire.MAX_CODE:
        raise errors.LimitExceeded(
            f"the code is {len(data)} bytes long; the limit is {wire.MAX_CODE}",
            hint="write it to a file in the sandbox and run that",
        )
    program = {"code": data, "language": language}
    return {**_exec_call(session, timeout, stdin, options), **program}


def command_call(
    session: Mapping[str, Any],
    command: str | Sequence[str],
    *,
    timeout: float,
    stdin: bool,
    options: ExecOptions,
) -> dict[str, Any]:
    """Run a command: text goes to the shell, a list is started as it is."""
    if isinstance(command, str):
        if not command.strip():
            raise errors.InvalidRequest("the command is empty")
        argv = ["/bin/sh", "-c", command]
    else:
        argv = list(command)
        if len(argv) > MAX_ARGUMENTS:
            raise errors.LimitExceeded(
                f"the command has {len(argv):,} arguments; the limit is {MAX_ARGUMENTS:,}",
                hint="write them to a file in the sandbox, and let xargs read that",
            )
    return {**_exec_call(session, timeout, stdin, options), "argv": argv}


def _exec_call(
    session: Mapping[str, Any], timeout: float, stdin: bool, options: ExecOptions
) -> dict[str, Any]:
    given: Any = timeout
    if not isinstance(given, (int, float)):
        raise errors.InvalidRequest(
            f"the time-out is {given!r:.80}, and no number of seconds",
            hint="a command with arguments is one list: ['ls', '-l']",
        )
    fields: dict[str, Any] = {
        "op": "exec",
        "session": session,
        "id": options.get("exec_id") or new_exec_id(),
        "timeout": timeout,
        "limit": options.get("output_limit", OUTPUT_LIMIT),
        "stdin": stdin,
        "kill_on_disconnect": options.get("kill_on_disconnect", False),
        "output": "ring" if options.get("ring") else "block",
    }
    if env := options.get("env"):
        fields["env"] = dict(env)
    if cwd := options.get("cwd"):
        fields["cwd"] = cwd
    if tty := options.get("tty"):
        fields["tty"] = list(tty)
    return fields


def start_call(
    session_id: str,
    command: str | Sequence[str],
    *,
    language: str,
    timeout: float,
    options: ExecOptions,
) -> dict[str, Any]:
    """Start a command, or source code in ``language``, that runs on without us."""
    session = by_id(session_id)
    if not language:
        call = command_call(session, command, timeout=timeout, stdin=False, options=options)
    elif isinstance(command, str):
        call = code_call(
            session, command, language=language, timeout=timeout, stdin=False, options=options
        )
    else:
        raise errors.InvalidRequest("source code is text, not a list")
    return in_background(call, limit=options.get("output_limit", 0))


def in_background(exec_call: Mapping[str, Any], *, limit: int = 0) -> dict[str, Any]:
    """The same command in the background: without readers, so that it never waits for one."""
    return {
        **exec_call,
        "background": True,
        "kill_on_disconnect": False,
        "limit": limit,
        "output": "ring",
        "window": 1,
    }


def run_id(session_id: str, exec_id: str) -> str:
    """The id of a run: its session and its exec, so that no table is needed."""
    return f"{session_id}.{exec_id}"


def split_run_id(text: str) -> tuple[str, str]:
    """Session and exec of a run."""
    session_id, dot, exec_id = text.partition(".")
    if not session_id or not dot or not exec_id:
        raise errors.InvalidRequest(
            f"{text[:120]!r} is not the id of a run",
            hint="a run id is what k8e sandbox run --background prints, like sess-….…",
        )
    return session_id, exec_id


def run_call(op: str, run: str, **fields: Any) -> dict[str, Any]:
    """An operation on a run."""
    session_id, exec_id = split_run_id(run)
    return {"op": op, "session": by_id(session_id), "id": exec_id, **fields}


def terminate_call(exec_call: Mapping[str, Any]) -> dict[str, Any]:
    """Kill the command that another call started."""
    return {
        "op": "signal",
        "session": exec_call["session"],
        "id": exec_call["id"],
        "terminate": True,
    }


def file_call(op: str, session_id: str, path: str, **fields: Any) -> dict[str, Any]:
    """An operation on a file; fields that are None are left out."""
    given = {key: value for key, value in fields.items() if value is not None}
    return {"op": op, "session": by_id(session_id), "path": path, **given}


def list_call(session_id: str, path: str, since: float, depth: int | None) -> dict[str, Any]:
    since_ns = int(since * 1_000_000_000)
    return file_call("list", session_id, path, depth=depth or DEPTH, since_ns=since_ns)


def create_call(
    runtime_class: str,
    allowed_hosts: Sequence[str] | None,
    tenant_id: str,
    options: SessionOptions,
) -> dict[str, Any]:
    spec: dict[str, Any] = {"tenant": tenant_id, "runtime": runtime_class, **options}
    if limits := options.get("limits"):
        spec["limits"] = {
            key: parse_limit(key, value)
            for key, value in cast("Mapping[str, float | str]", limits).items()
        }
    for key in ("env", "labels"):
        if key in spec:
            spec[key] = dict(spec[key])
    if secrets := spec.pop("secrets", None):
        spec["secret_refs"] = {str(name): str(ref) for name, ref in secrets.items()}
    if "manifest" in spec:
        spec["manifest"] = [_plain(item) for item in spec["manifest"]]
    given = {k: v for k, v in spec.items() if v}
    if allowed_hosts is not None:  # an empty list says something: nothing is allowed
        given["allowed_hosts"] = words(allowed_hosts)
    return {"op": "create_session", "spec": given}


def _plain(value: Any) -> Any:
    """A manifest's entry as it travels; the gateway checks it."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {str(key): _plain(item) for key, item in items.items()}
    return value


def allow_call(session_id: str, hosts: Sequence[str]) -> dict[str, Any]:
    """Replace the policy of a session."""
    return {"op": "update_allowed_hosts", "session_id": session_id, "hosts": words(hosts)}


def change_call(session_id: str, add: Sequence[str], remove: Sequence[str]) -> dict[str, Any]:
    """Add words to the policy of a session, and remove others."""
    changes = {"add": words(add), "remove": words(remove)}
    return {"op": "change_allowed_hosts", "session_id": session_id, **changes}


def words(hosts: Sequence[str]) -> list[str]:
    """The words of a policy. A single text would be taken for a list of its letters."""
    if isinstance(hosts, str):
        raise errors.InvalidRequest(
            f"allowed hosts are a list of texts, not the text {hosts[:80]!r}",
            hint=f"write [{hosts[:80]!r}]",
        )
    return list(hosts)


def parse_limit(name: str, value: float | str) -> float | int:
    """A limit as a number: text may have a unit (``512M``, ``1.5GiB``)."""
    if not isinstance(value, str):
        return value
    from k8e import model  # takes time to import, and few set limits

    return model.parse_limit(name, value)


def not_yet(what: str, why: str = "") -> errors.NotImplementedYet:
    return errors.NotImplementedYet(
        f"{what} is not implemented yet" + (f": {why}" if why else ""),
        hint="leave it out; it comes with a later release",
    )


def chunks(content: Content) -> Iterator[bytes | memoryview]:
    """Cut data to send into pieces that fit a frame, holding one at a time."""
    source: Any = content
    if isinstance(source, (str, bytes, bytearray, memoryview)):
        yield from cut(source)
    elif hasattr(source, "read"):
        while piece := source.read(wire.CHUNK):
            yield from cut(piece)
    else:
        for piece in source:
            yield from cut(piece)


def check_content(content: Any) -> None:
    """Refuse what cannot be sent, before anything is asked of a gateway."""
    kind = type(content).__name__
    known = isinstance(content, (str, bytes, bytearray, memoryview, Iterable, AsyncIterable))
    if not (known or hasattr(content, "read")) or isinstance(content, Mapping):
        raise errors.InvalidRequest(
            f"what is written is neither text nor bytes, but {kind}",
            hint="pass text, bytes, an open binary file, or an iterable of text and bytes; "
            "json.dumps() makes text of a value",
        )


def as_bytes(text: Any) -> Any:
    """Text as it travels; bytes are left as they are."""
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def cut(piece: Any) -> Iterator[bytes | memoryview]:
    """Cut text or bytes; TypeError for anything else."""
    view = memoryview(as_bytes(piece)).cast("B")
    if len(view) <= wire.CHUNK:
        if view:
            yield bytes(view)
        return
    for at in range(0, len(view), wire.CHUNK):
        yield view[at : at + wire.CHUNK]


def size_of(content: Any) -> int | None:
    """How many bytes will be sent, if that is known."""
    if isinstance(content, (str, bytes, bytearray, memoryview)):
        data: Any = as_bytes(content)
        return memoryview(data).nbytes
    try:
        info = os.fstat(content.fileno())
        if stat.S_ISREG(info.st_mode) and "b" in content.mode:
            return max(0, info.st_size - content.tell())
    except (AttributeError, OSError, ValueError, TypeError):
        pass
    return None
