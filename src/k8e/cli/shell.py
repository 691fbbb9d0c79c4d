"""``k8e sandbox shell``: a terminal in a session."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

from k8e import errors
from k8e.cli import fast, run, sessions
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands
from k8e.client import driver, operations, requests
from k8e.client.blocking import SandboxClient
from k8e.guest import wire

_SIZE = (24, 80)  # of a terminal that does not know its own
_RESIZE_SECONDS = 2.0  # for the last one under way
_PROMPT = r"sandbox:\w\$ "
# Colours, cursor, pasting, the mouse and the other screen: modes that a killed program leaves on.
_RESET = b"\x1b[0m\x1b[?25h\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1049l"


def shell(options: argparse.Namespace) -> int:
    """Connect this terminal with a program in a session; the program's exit code."""
    _need_posix()
    if not os.isatty(0):
        raise errors.InvalidRequest(
            "stdin is not a terminal",
            hint='k8e sandbox run -i "CODE" runs code with any other input',
        )
    with sessions.connect(options) as client, contextlib.ExitStack() as stack:
        connector = driver.connector(sessions.endpoint(options))
        stack.callback(connector.close)
        return _Shell(connector, client, options).finish()


def _need_posix() -> None:
    try:
        importlib.import_module("termios")
    except ImportError:
        raise errors.InvalidRequest(
            "a shell needs a POSIX terminal, which this system has not got",
            hint='k8e sandbox run "CODE" works everywhere; WSL has such a terminal',
        ) from None


class _Shell:
    """One program on our terminal, from the call to the exit."""

    def __init__(
        self, connector: driver.Connector, client: SandboxClient, options: argparse.Namespace
    ) -> None:
        self._connector = connector
        self._client = client
        self._options = options
        self._exec_id = requests.new_exec_id()
        self._session_id = ""
        self._connection = connector.connect()
        self._feeder: run.Feeder | None = None
        self._stack = contextlib.ExitStack()
        self._at = 0  # number of the next byte of output
        self._consumed = 0
        self._delays = iter(operations.RETRY_DELAYS)

    def finish(self) -> int:
        clean = False
        try:
            with self._stack:
                self._call(_fields(self._options, self._exec_id))
                code = self._follow()
            clean = True
            return code
        finally:
            if self._session_id and not clean:
                fast.write(1, _RESET)
                with contextlib.suppress(errors.K8eError):
                    self._client.kill(self._session_id, self._exec_id)
            self._connection.close()

    def _call(self, fields: dict[str, Any]) -> None:
        self._connection.begin()
        self._connection.send(wire.CALL, wire.pack(fields))

    def _follow(self) -> int:
        while True:
            try:
                kind, body = self._connection.receive()
            except errors.GatewayUnreachable as error:
                self._come_back(error)
                continue
            if kind in (wire.OUT, wire.ERR):
                self._take(body)
            elif kind == wire.CREDIT and self._feeder is not None:
                self._feeder.grant(wire.CREDIT_BODY.unpack(body)[0])
            elif kind == wire.RESULT and not self._session_id:
                self._begun(wire.unpack_dict(body))
            elif kind == wire.EXIT:
                return int(wire.unpack_dict(body)["code"])
            elif kind == wire.ERROR:
                raise errors.from_wire(wire.unpack_dict(body))

    def _begun(self, result: dict[str, Any]) -> None:
        self._session_id = str(result["session_id"])
        if result.get("warning"):  # a weaker runtime than usual is never silent
            fast.write(2, f"k8e: warning: {result['warning']}\n".encode("utf-8", "replace"))
        if not _session_id(self._options):
            tenant = cli_parser.tenant(self._options) or "default"
            fast.note_session(tenant, self._session_id)
        resize = self._stack.enter_context(_resizing(self._resize))
        self._stack.enter_context(_raw_terminal(resize))
        self._feeder = run.Feeder(self._connection)

    def _resize(self, rows: int, columns: int) -> None:
        self._client.resize(self._session_id, self._exec_id, rows, columns)

    def _take(self, body: bytes) -> None:
        data = memoryview(body)[wire.SEQ.size :]
        self._at = wire.SEQ.unpack_from(body)[0] + len(data)
        self._delays = iter(operations.RETRY_DELAYS)
        fast.write(1, data)
        self._consumed += len(data)
        if self._consumed >= fast.CREDIT_STEP and self._feeder is not None:
            self._feeder.send(wire.CREDIT, wire.CREDIT_BODY.pack(self._consumed))
            self._consumed = 0

    def _come_back(self, error: errors.GatewayUnreachable) -> None:
        """Continue with the next gateway: this one went away, the program did not."""
        delay = next(self._delays, None)
        if self._feeder is None or delay is None:
            raise error
        time.sleep(delay)
        self._consumed = 0
        self._connection.close()
        self._feeder.move(self._attach)

    def _attach(self) -> driver.Connection:
        self._connection = self._connector.connect()
        run_id = requests.run_id(self._session_id, self._exec_id)
        self._call(requests.run_call("attach", run_id, seq=self._at))
        return self._connection


def _session_id(options: argparse.Namespace) -> str:
    return options.session or os.environ.get("K8E_SANDBOX_SESSION_ID") or ""


def _fields(options: argparse.Namespace, exec_id: str) -> dict[str, Any]:
    session_id = _session_id(options)
    env = cli_parser.pairs(options.env, "--env")
    terminal = os.environ.get("TERM", "")
    if 0 < len(terminal) <= 64 and terminal.isprintable():
        env.setdefault("TERM", terminal)
    if not options.program:
        env.setdefault("PS1", _PROMPT)
    return {
        "op": "exec",
        "session": {"id": session_id}
        if session_id
        else {"auto": cli_parser.tenant(options) or "default"},
        "id": exec_id,
        "argv": options.program or ["/bin/bash"],
        "tty": list(_size()),
        "stdin": True,
        "cwd": options.cwd,
        "env": env,
        "kill_on_disconnect": True,
    }


def _size() -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(0)
    except OSError:
        return _SIZE
    return (rows, columns) if rows and columns else _SIZE


@contextlib.contextmanager
def _resizing(resize: Callable[[int, int], None]) -> Generator[Callable[[], None]]:
    """A function for signal handlers that makes a thread send the terminal's size."""
    sizes: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()

    def tell() -> None:
        while (size := sizes.get()) is not None:
            with contextlib.suppress(errors.K8eError, OSError):  # the program may have ended
                resize(*size)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield lambda: sizes.put(_size())
    finally:
        sizes.put(None)
        teller.join(_RESIZE_SECONDS)


@contextlib.contextmanager
def _raw_terminal(resized: Callable[[], None]) -> Generator[None]:
    """Put our terminal into raw mode; afterwards it is as it was, however we end."""
    import termios
    import tty

    before = termios.tcgetattr(0)

    def restore() -> None:
        with contextlib.suppress(termios.error):  # the terminal itself may be gone
            termios.tcsetattr(0, termios.TCSANOW, before)

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def stop(*_: object) -> None:
        restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        tty.setraw(0, termios.TCSANOW)
        resized()

    def resize(*_: object) -> None:
        resized()

    handlers: dict[int, Callable[[int, FrameType | None], object]] = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGTSTP: stop,
        signal.SIGWINCH: resize,
    }
    kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        tty.setraw(0, termios.TCSANOW)
        resized()  # it may have changed while the program was started
        yield
    finally:
        restore()
        for number, handler in kept.items():
            signal.signal(number, handler)


def add_shell(commands: Commands) -> None:
    parser = commands.add(
        "shell",
        "use a program in a session on this terminal, bash unless another is named; ends with "
        "the program's exit code",
        "k8e sandbox shell\n"
        "         k8e sandbox shell ID -- python3 -q\n"
        "         k8e sandbox shell -- top",
        shell,
        remote=True,
    )
    parser.add_argument(
        "session",
        nargs="?",
        default="",
        metavar="ID",
        help="the session [K8E_SANDBOX_SESSION_ID]; by default the tenant's standing one",
    )
    parser.add_argument(
        "program", nargs="*", metavar="-- PROGRAM", help="the program to run, and its arguments"
    )
    parser.add_argument(
        "--tenant", metavar="NAME", help="whose standing session to use [K8E_SANDBOX_TENANT]"
    )
    parser.add_argument("--cwd", default="", metavar="PATH", help="start in this folder")
    parser.add_argument("--env", action="append", metavar="K=V", help="set a variable; repeatable")
