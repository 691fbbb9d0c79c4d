"""``k8e sandbox run``: runs in the background, and our own stdin for a run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from k8e import errors
from k8e.cli import fast, output, sessions, state
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands
from k8e.client import attachment, driver, operations, requests
from k8e.client.blocking import SandboxClient
from k8e.client.results import ExecEvent, ExecInfo, Exit, Stdout
from k8e.guest import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8e.cli.fast import Connection


def run(options: argparse.Namespace) -> int:
    chosen = fast.defaults()
    chosen.update(
        language=options.lang or chosen["language"],
        timeout=_timeout(options),
        runtime=options.runtime,
        template=options.template,
        cwd=options.cwd,
        raw=options.raw,
        stdin=options.stdin,
        env=cli_parser.pairs(options.env, "--env"),
        session_id=options.session_id or chosen["session_id"],
        tenant=options.tenant or chosen["tenant"],
        allowed_hosts=cli_parser.hosts(options.allowed_hosts),
    )
    chosen["code"] = _code(options)
    if sessions.asks_for_content(options):
        _prepare(options, chosen)
    if options.context:
        from k8e.cli import contexts

        return contexts.run(options, chosen, language=options.lang)
    target = sessions.endpoint(options)
    if options.background:
        return start(options, chosen)
    if not target.target and not target.socket:
        return fast.execute(chosen)
    return fast.execute(chosen, driver.connector(target).connect)


def _prepare(options: argparse.Namespace, chosen: dict[str, Any]) -> None:
    """Make the tenant's standing session with the content that is asked for."""
    sessions.refuse_named_session(chosen["session_id"])
    fast.check(chosen)
    tenant = chosen["tenant"] or state.DEFAULT_TENANT
    session = fast.fields(chosen, "")["session"]
    session["spec"]["manifest"] = sessions.manifest_entries(options, stdin=False)
    told = sessions.ask(options, operations.call({"op": "ping", "session": session}))
    chosen.update(session_id=str(told["session_id"]), allowed_hosts=None, template="")
    fast.note_session(tenant, chosen["session_id"])


def _timeout(options: argparse.Namespace) -> float:
    if options.timeout is not None:
        return options.timeout
    return 0 if options.background else fast.DEFAULT_TIMEOUT


def _code(options: argparse.Namespace) -> bytes:
    """The code from the argument, a file or stdin; if it is too long, just enough to show that."""
    if options.code not in (None, "-"):
        if options.file:
            raise errors.InvalidRequest("the code is given both as an argument and with --file")
        return options.code.encode("utf-8", "surrogateescape")
    if options.file:
        with open(options.file, "rb") as file:
            return file.read(wire.MAX_CODE + 1)
    if options.stdin:
        raise errors.InvalidRequest(
            "stdin cannot be both the code and the input of the code",
            hint="with --stdin, pass the code as argument or with --file",
        )
    if options.code is None and os.isatty(0):
        raise errors.InvalidRequest(
            "no code is given", hint='pass it as argument: k8e sandbox run "echo hello"'
        )
    return sys.stdin.buffer.read(wire.MAX_CODE + 1)


def add_run(commands: Commands) -> None:
    parser = commands.add(
        "run",
        "run code and print its output, exit code and session as JSON",
        "k8e sandbox run --lang python \"print('hello')\"\n"
        "         echo 'echo hello' | k8e sandbox run --raw -",
        run,
        remote=True,
    )
    parser.add_argument("code", nargs="?", help="the code; '-' or nothing: read it from stdin")
    parser.add_argument("--file", metavar="PATH", help="read the code from a file")
    parser.add_argument("--lang", help="bash (default), python, node or ts")
    parser.add_argument(
        "--context",
        metavar="NAME",
        help="run in a program that keeps its variables between runs, made at its first use "
        "(python, bash or node)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="kill it after this long (default 30, with --background none; 0: never)",
    )
    parser.add_argument("--session-id", metavar="ID", help="where to run [K8E_SANDBOX_SESSION_ID]")
    parser.add_argument(
        "--tenant", metavar="NAME", help="whose standing session to use [K8E_SANDBOX_TENANT]"
    )
    parser.add_argument(
        "--runtime", default="", help="runtime of a session that is made for this run"
    )
    parser.add_argument(
        "--template",
        default="",
        metavar="NAME",
        help="template of a session that is made for this run",
    )
    parser.add_argument(
        "--cwd", default="", metavar="PATH", help="start in this folder (/workspace)"
    )
    parser.add_argument("--env", action="append", metavar="K=V", help="set a variable; repeatable")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="pass output on unchanged, as it comes; our errors to stderr",
    )
    parser.add_argument("-i", "--stdin", action="store_true", help="pass our stdin on to the code")
    cli_parser.add_allowed_hosts(parser, "what a session that is made for this run may reach")
    sessions.add_content_flags(parser, stdin=False)
    parser.add_argument(
        "--background",
        action="store_true",
        help="start it in the background, and print its id for poll, log and kill",
    )


# Runs in the background.


def start(options: argparse.Namespace, chosen: dict[str, Any]) -> int:
    """Start a run in the background, and return."""
    for flag in ("raw", "stdin"):
        if chosen[flag]:
            raise errors.InvalidRequest(
                f"--background and --{flag} exclude each other", hint="k8e sandbox log RUN --follow"
            )
    fast.check(chosen)
    call = requests.in_background(fast.fields(chosen, requests.new_exec_id()))
    told = sessions.ask(options, attachment.start_run(call))
    session_id, exec_id = str(told["session_id"]), str(told["id"])
    if not chosen["session_id"]:
        fast.note_session(chosen["tenant"] or "default", session_id)
    run_id = requests.run_id(session_id, exec_id)
    output.answer({"run_id": run_id, "session_id": session_id, "status": "started"})
    return 0


def poll(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        state = client.get_run(options.run).poll()
    told = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    del told["stdout_bytes"], told["stderr_bytes"], told["exec_id"]
    output.answer({**told, "stdout": state.stdout, "stderr": state.stderr})
    return 0


def log(options: argparse.Namespace) -> int:
    """Print output; without ``--follow`` the output so far, and the exit code is 0."""
    with sessions.connect(options) as client:
        at = options.offset
        for event in _output(client, options.run, at, follow=options.follow):
            if isinstance(event, Exit):
                return event.exit_code if options.follow else 0
            if event.seq > at:
                fast.write(2, b"k8e: warning: %d bytes are no longer kept\n" % (event.seq - at))
            at = event.seq + len(event.data)
            fast.write(1 if isinstance(event, Stdout) else 2, event.data)
    return 0


def _output(client: SandboxClient, name: str, start: int, *, follow: bool) -> Generator[ExecEvent]:
    """The output of a run, or of all runs of a session if its id is given."""
    if "." in name:
        yield from client.get_run(name).output(start, follow=follow)
        return
    try:
        yield from client.transcript(name, start, follow=follow)
    except errors.ExecNotFound:  # the sandbox was started by an earlier release
        runs = [item for item in client.execs(name) if item.background]
        if not runs:
            raise
        run = client.get_run(requests.run_id(name, runs[-1].exec_id))
        yield from run.output(start, follow=follow)


def kill(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        run = client.get_run(options.run)
        if options.signal:
            run.signal(options.signal)
        else:
            run.kill()
    output.answer({"ok": True, "run_id": options.run})
    return 0


def ps(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.processes(options.session_id)
        runs = client.execs(options.session_id)
    output.answer(
        {
            "processes": [dataclasses.asdict(item) for item in found],
            "runs": [_run(options.session_id, item) for item in runs],
            "session_id": options.session_id,
        }
    )
    return 0


def _run(session_id: str, item: ExecInfo) -> dict[str, Any]:
    told = dataclasses.asdict(item)
    del told["exec_id"], told["pid"]
    return {**told, "run_id": requests.run_id(session_id, item.exec_id)}


def add_poll(commands: Commands) -> None:
    parser = commands.add(
        "poll",
        "print the state of a background run, and its output so far, as JSON",
        "k8e sandbox poll RUN",
        poll,
        remote=True,
    )
    _add_run_id(parser)


def add_log(commands: Commands) -> None:
    parser = commands.add(
        "log",
        "print the output of a background run as it is, stdout and stderr apart",
        "k8e sandbox log RUN\n         k8e sandbox log --follow ID",
        log,
        remote=True,
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run's id, or a session's: its newest background run"
    )
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="follow the output until the run ends, and exit with its code",
    )
    parser.add_argument(
        "--offset", type=int, default=0, metavar="N", help="begin at this byte of its output"
    )


def add_kill(commands: Commands) -> None:
    parser = commands.add(
        "kill",
        "end a background run and everything that it started",
        "k8e sandbox kill RUN\n         k8e sandbox kill --signal 2 RUN",
        kill,
        remote=True,
        answers_ok=True,
    )
    _add_run_id(parser)
    parser.add_argument(
        "--signal", type=int, default=0, metavar="N", help="send this signal to it instead"
    )


def _add_run_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's id, as run --background printed it")


def add_ps(commands: Commands) -> None:
    parser = commands.add(
        "ps",
        "list the processes of a session, and its runs",
        "k8e sandbox ps ID",
        ps,
        remote=True,
    )
    parser.add_argument("session_id", metavar="ID")


class Feeder:
    """A thread that sends stdin, never more than the gateway has granted."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()  # one frame at a time: two threads send
        self._granted = threading.Condition()  # protects _credit
        self._credit = wire.WINDOW
        threading.Thread(target=self._feed, daemon=True).start()

    def send(self, kind: int, body: bytes | memoryview) -> None:
        with self._sending:
            self._connection.send(kind, body)

    def grant(self, count: int) -> None:
        with self._granted:
            self._credit += count
            self._granted.notify()

    def move(self, connect: Callable[[], Connection]) -> None:
        """Go on with another connection, with full credit; input waits in the meantime."""
        with self._sending:
            self._connection = connect()
            with self._granted:
                self._credit = wire.WINDOW
                self._granted.notify()

    def _spend(self, count: int) -> None:
        """Wait until ``count`` bytes may be sent."""
        with self._granted:
            self._granted.wait_for(lambda: self._credit >= count)
            self._credit -= count

    def _feed(self) -> None:
        try:
            while data := os.read(0, wire.CHUNK):
                self._spend(len(data))
                self.send(wire.STDIN, data)
            self.send(wire.STDIN_END, b"")
        except OSError:
            return  # the run has ended and its connection with it
