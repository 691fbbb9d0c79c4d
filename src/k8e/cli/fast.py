"""``k8e sandbox run``, importing as little as possible.

The bar is twice the time of ``python3 -c pass`` for the whole process, and ``json`` or ``argparse``
alone would break it. Flags that are not understood here are left to the full parser, which ends
up in :func:`execute` too.
"""

from __future__ import annotations

try:
    import posix
except ImportError:  # not a system that can run sandboxes, so speed does not matter
    from k8e.client import portable as posix
from _json import encode_basestring

from k8e.client import local
from k8e.guest import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Connection(Protocol):
        """A connection as a run uses it, local or remote."""

        def begin(self) -> None: ...
        def send(self, kind: int, body: bytes | memoryview) -> None: ...
        def receive(self) -> tuple[int, bytes]: ...
        def close(self) -> None: ...


OUTPUT_LIMIT = 1 << 20  # bytes of each stream that JSON output keeps, as K8E does
CREDIT_STEP = 256 << 10
CLOSED_PIPE = 141  # 128 + SIGPIPE: what a program gets that writes to a closed pipe
INTERRUPTED = 130
DEFAULT_TIMEOUT = 30.0

_VALUES = {
    "--lang": "language",
    "--timeout": "timeout",
    "--session-id": "session_id",
    "--tenant": "tenant",
    "--runtime": "runtime",
    "--template": "template",
    "--cwd": "cwd",
}
_REPEATED = ("--env", "--allowed-hosts")


class ClosedOutput(BrokenPipeError):
    """The reader of our output is gone; a broken pipe in a sandbox is another error."""


def defaults() -> dict[str, Any]:
    """The options of a run, before any flag."""
    environ = posix.environ
    return {
        "language": "bash",
        "timeout": DEFAULT_TIMEOUT,
        "session_id": _text(environ.get(b"K8E_SANDBOX_SESSION_ID", b"")),
        "tenant": _text(environ.get(b"K8E_SANDBOX_TENANT", b"")),
        "runtime": "",
        "template": "",
        "cwd": "",
        "raw": False,
        "stdin": False,
        "env": {},
        "allowed_hosts": None,
        "code": b"",
    }


def run(arguments: list[str]) -> int | None:
    """Run the command, or return None if the full parser has to."""
    if _is_elsewhere():
        return None
    options = parse(arguments)
    return None if options is None else execute(options)


def _is_elsewhere() -> bool:
    """Whether the gateway may be a remote one; the full parser finds out which."""
    environ = posix.environ
    if environ.get(b"K8E_SANDBOX_ENDPOINT") or environ.get(b"K8E_SANDBOX_PROFILE"):
        return True
    home = environ.get(b"HOME")
    if not home:
        return True
    given = environ.get(b"K8E_SANDBOX_CONFIG")
    usual = (home + b"/.k8e/sandbox/profiles.yaml", home + b"/.k8e/config.yaml")
    for path in (given,) if given else usual:
        try:
            fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError:
            return True
        try:
            return b"current_profile" in posix.read(fd, 1 << 20)
        finally:
            posix.close(fd)
    return False


def parse(arguments: list[str]) -> dict[str, Any] | None:
    """The options, or None if the full parser has to look at them."""
    options = defaults()
    codes: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            codes.extend(rest)
        elif argument == "--raw":
            options["raw"] = True
        elif not argument.startswith("-"):
            codes.append(argument)
        elif not _parse_value(argument, rest, options):
            return None
    if len(codes) != 1:
        return None
    options["code"] = codes[0].encode("utf-8", "surrogateescape")
    try:
        options["timeout"] = float(options["timeout"])
    except ValueError:
        return None
    return options


def _parse_value(argument: str, rest: Any, options: dict[str, Any]) -> bool:
    """Take a flag that has a value, in either spelling."""
    name, equals, value = argument.partition("=")
    if name not in _VALUES and name not in _REPEATED:
        return False
    if not equals:
        value = next(rest, None)
        if value is None:
            return False
    if name in _VALUES:
        options[_VALUES[name]] = value
        return True
    if name == "--allowed-hosts":
        options["allowed_hosts"] = split_hosts([value], options["allowed_hosts"])
        return True
    key, equals, value = value.partition("=")
    options["env"][key] = value
    return bool(key and equals)


def split_hosts(values: list[str], before: list[str] | None = None) -> list[str]:
    """The words of a policy in comma lists; those of ``before`` come first."""
    words = list(before or ())
    for value in values:
        for part in value.split(","):
            word = part.strip()
            if word.isdigit() and words and ":" in words[-1]:  # another port of the same host
                word = words[-1].rpartition(":")[0] + ":" + word
            if word:
                words.append(word)
    return words


def execute(options: dict[str, Any], connect: Callable[[], Connection] | None = None) -> int:
    """Run the code and print its result; the exit code."""
    try:
        check(options)
        return _run(options, connect or _connect)
    except ClosedOutput:
        return CLOSED_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED  # closing the connection has killed the command
    except Exception as error:
        from k8e.cli import output

        return output.failure(error, raw=options["raw"])


def _run(options: dict[str, Any], connect: Callable[[], Connection]) -> int:
    """Run the code once; meeting a dying gateway that never read the call does not count."""
    delays = (0.0, 0.1, 0.5)
    while True:
        connection = connect()
        try:
            return _Run(connection, options).finish()
        except Exception as error:
            if not getattr(error, "unread", False) or not delays:
                raise
            import time

            time.sleep(delays[0])
            delays = delays[1:]
        finally:
            connection.close()


def _connect() -> Connection:
    try:
        return local.Connection(local.dial(local.default_socket()))
    except local.NoGateway:
        from k8e.client import autostart

        return local.Connection(autostart.dial())


def check(options: dict[str, Any]) -> None:
    """Refuse mistakes that can be found without a gateway."""
    session_id = options["session_id"]
    if len(options["code"]) > wire.MAX_CODE:
        from k8e import errors

        raise errors.LimitExceeded(
            f"the code is longer than the limit of {wire.MAX_CODE} bytes",
            hint="write it to a file with k8e sandbox write, and run that file",
        )
    if session_id and options["allowed_hosts"] is not None:
        from k8e import errors

        raise errors.InvalidRequest(
            "--allowed-hosts is for a session that is made for the run, and session "
            f"{session_id[:80]} was named (--session-id, K8E_SANDBOX_SESSION_ID)",
            hint=f"k8e sandbox allow-hosts {session_id[:80]} HOST... changes what it may reach",
        )
    if session_id and options["template"]:
        from k8e import errors

        raise errors.InvalidRequest(
            "--template is for a session that is made for the run, and session "
            f"{session_id[:80]} was named (--session-id, K8E_SANDBOX_SESSION_ID)",
            hint="k8e sandbox create --template NAME makes another session",
        )


def fields(options: dict[str, Any], exec_id: str) -> dict[str, Any]:
    """The call for the gateway."""
    session: dict[str, Any] = {"id": options["session_id"]}
    if not options["session_id"]:
        spec: dict[str, Any] = {"runtime": options["runtime"]} if options["runtime"] else {}
        if options["template"]:
            spec["template"] = options["template"]
        if options["allowed_hosts"] is not None:
            spec["allowed_hosts"] = options["allowed_hosts"]
        session = {"auto": options["tenant"] or "default", "spec": spec}
    return {
        "op": "exec",
        "session": session,
        "id": exec_id,
        "code": options["code"],
        "language": options["language"],
        "timeout": options["timeout"],
        "cwd": options["cwd"],
        "env": options["env"],
        "stdin": options["stdin"],
        "limit": 0 if options["raw"] else OUTPUT_LIMIT,
        "kill_on_disconnect": True,
    }


def call(options: dict[str, Any], exec_id: str) -> bytes:
    """The request, packed."""
    return wire.pack(fields(options, exec_id))


class _Run:
    """One run, from the call to the exit."""

    def __init__(self, connection: Connection, options: dict[str, Any]) -> None:
        self._connection = connection
        self._options = options
        self._exec_id = posix.urandom(8).hex()
        self._session_id = ""
        self._send = connection.send
        self._grant: Callable[[int], None] | None = None
        self._output: dict[int, list[bytes]] = {wire.OUT: [], wire.ERR: []}
        self._consumed = 0

    def finish(self) -> int:
        self._connection.begin()
        self._connection.send(wire.CALL, call(self._options, self._exec_id))
        while True:
            kind, body = self._receive()
            if kind in self._output:
                self._take(kind, body)
            elif kind == wire.EXIT:
                return self._exit(wire.unpack_dict(body))
            elif kind == wire.RESULT:
                self._begun(wire.unpack_dict(body))
            elif kind == wire.ERROR:
                from k8e import errors

                raise errors.from_wire(wire.unpack_dict(body))
            elif kind == wire.CREDIT and self._grant is not None:
                self._grant(wire.CREDIT_BODY.unpack(body)[0])

    def _receive(self) -> tuple[int, bytes]:
        try:
            return self._connection.receive()
        except Exception as error:
            if not self._session_id:
                raise
            from k8e.client import operations

            raise operations.lost_exec(error, self._session_id, self._exec_id) from None

    def _begun(self, result: dict[str, Any]) -> None:
        self._session_id = str(result["session_id"])
        if result.get("warning"):  # a weaker runtime than usual is never silent
            write(2, f"k8e: warning: {result['warning']}\n".encode("utf-8", "replace"))
        if not self._options["session_id"]:
            note_session(self._options["tenant"] or "default", self._session_id)
        if self._options["stdin"]:
            from k8e.cli import run as cli_run

            feeder = cli_run.Feeder(self._connection)
            self._send, self._grant = feeder.send, feeder.grant

    def _take(self, kind: int, body: bytes) -> None:
        if self._options["raw"]:
            write(1 if kind == wire.OUT else 2, memoryview(body)[wire.SEQ.size :])
        else:
            self._output[kind].append(body[wire.SEQ.size :])
        self._consumed += len(body) - wire.SEQ.size
        if self._consumed >= CREDIT_STEP:
            self._send(wire.CREDIT, wire.CREDIT_BODY.pack(self._consumed))
            self._consumed = 0

    def _exit(self, exit: dict[str, Any]) -> int:  # noqa: A002 - it is what an EXIT frame says
        denials = exit.get("denials")
        if not self._options["raw"]:
            line = (
                f'{{"denials":{_denials(denials) if denials else "[]"},'
                f'"duration_ms":{exit["duration_ms"]:d},"exit_code":{exit["code"]:d},'
                f'"language":{quote(self._options["language"])},{_limits(exit.get("limits"))}'
                f'"session_id":{quote(self._session_id)},"status":{quote(exit["status"])},'
                f'"stderr":{self._text(wire.ERR)},"stdout":{self._text(wire.OUT)},'
                f'"truncated":{"true" if exit["truncated"] else "false"}}}\n'
            )
            write(1, line.encode("utf-8", "replace"))
        elif exit.get("limits"):
            lines = "".join(f"k8e: {item['message']}\n" for item in exit["limits"])
            write(2, lines.encode("utf-8", "replace"))
        if self._options["raw"] and denials:  # after the output, which is the program's own
            from k8e.cli import egress as telling

            write(2, telling.lines(denials, self._session_id).encode("utf-8", "replace"))
        return exit["code"]

    def _text(self, kind: int) -> str:
        return quote(b"".join(self._output[kind]).decode("utf-8", "replace"))


def _limits(met: list[dict[str, Any]] | None) -> str:
    """The limits that a run met, as a part of JSON; most runs meet none, and have no such part."""
    if not met:
        return ""
    told = ",".join(
        f'{{"limit":{quote(item["limit"])},"message":{quote(item["message"])},'
        f'"value":{item["value"]}}}'
        for item in met
    )
    return f'"limits":[{told}],'


def _denials(found: list[dict[str, Any]]) -> str:
    from k8e.cli import egress

    return egress.encode(found)


def quote(text: str) -> str:
    """JSON text as Go writes it: safe inside HTML, everything else as it is."""
    text = encode_basestring(text)
    if "&" in text or "<" in text or ">" in text:
        text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return text


def write(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes, even to a descriptor that another program made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[posix.write(fd, view) :]
        except BlockingIOError:
            import select

            select.select([], [fd], [])
        except BrokenPipeError as error:
            raise ClosedOutput(*error.args) from None


def note_session(tenant: str, session_id: str) -> None:
    """Update K8E's state file; reading it is cheap, and it seldom changes."""
    home = posix.environ.get(b"HOME")
    if not home:
        return
    # The gateway took the tenant's name, so it is a plain label.
    path = home + b"/.k8e/sandbox/" + tenant.encode() + b"/state.json"
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_NONBLOCK | posix.O_CLOEXEC)
        try:
            if b'"session_id":"' + session_id.encode() + b'"' in posix.read(fd, 4096):
                return
        finally:
            posix.close(fd)
    except OSError:
        pass
    from k8e.cli import state

    state.save(tenant, session_id)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")
