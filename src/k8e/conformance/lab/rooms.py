"""Sessions of a real gateway on an internet of network namespaces, and their attempts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.client.blocking import SandboxClient
from k8e.client.results import Denial, ExecEvent, Exit, Stdout
from k8e.conformance.lab import inside
from k8e.conformance.lab.far import PUBLIC, Far, Tap
from k8e.conformance.lab.gateways import GatewayHome, eventually
from k8e.conformance.lab.internet import RESOLVER, Internet
from k8e.conformance.lab.ports import free_port
from k8e.conformance.outcomes import BrokenPromise, equal, expect
from k8e.egress import namespaces
from k8e.egress.nftables import Nftables
from k8e.egress.router import Slot

QUICKLY = 2.0  # seconds within which everything is refused
TRIES = 3  # a busy machine can make one refusal slow, hardly the same one each time
QUIET_SECONDS = 0.3
PROGRAM = "inside.py"
EXEC_SECONDS = 40.0
Words = list[Any]


@dataclass(frozen=True)
class Attempt:
    """The outcome of one attempt."""

    words: Words
    said: Any = None
    error: str = ""
    """The name of Python's exception."""
    text: str = ""
    seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether it failed, and quickly."""
        return bool(self.error) and self.error != "TimeoutError" and self.seconds < QUICKLY


@dataclass(frozen=True)
class Attempts:
    """The outcomes of some attempts."""

    outcomes: list[Attempt]
    denials: list[Denial] = field(default_factory=list[Denial])

    def not_refused(self) -> list[Attempt]:
        return [outcome for outcome in self.outcomes if not outcome.refused]

    @property
    def rules(self) -> set[str]:
        """The reasons of the refusals."""
        return {denial.rule for denial in self.denials}


def is_refused(attempt: Callable[[], Attempt]) -> bool:
    """Whether something fails, and quickly; one success means that it is not refused."""
    for _ in range(TRIES):
        outcome = attempt()
        if outcome.refused or not outcome.error:
            return outcome.refused
    return False


class RoomProgram:
    """A program that runs in a sandbox while the check goes on."""

    def __init__(self, events: Generator[ExecEvent]) -> None:
        self._events = events
        self._text = ""
        self.end: Exit | None = None

    def line(self) -> str:
        """The next line that it prints; empty at its end."""
        while "\n" not in self._text and self.end is None:
            event = next(self._events)
            if isinstance(event, Stdout):
                self._text += event.data.decode()
            elif isinstance(event, Exit):
                self.end = event
        line, _, self._text = self._text.partition("\n")
        return line

    def outcome(self) -> Attempt:
        """The outcome, after the last line."""
        return _outcomes([[]], self.line())[0]

    def close(self) -> None:
        with contextlib.suppress(errors.K8eError):  # its gateway may be gone
            self._events.close()


class RemoteProgram:
    """A program in a sandbox that takes commands over its own connection, gateway or not."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rwb")

    def attempt(self, *words: Any) -> Attempt:
        self._stream.write(json.dumps(words).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline()
        expect(line, "the puppet's connection is cut")
        return _outcomes([list(words)], f"[{line.decode()}]")[0]

    def is_refused(self, *words: Any) -> bool:
        """Whether an attempt fails, and quickly."""
        return is_refused(lambda: self.attempt(*words))

    def is_cut(self) -> bool:
        """Whether nothing comes back any more; the far end of a cut connection is not told."""
        self._connection.settimeout(1)
        try:
            self.attempt("address")
        except (OSError, BrokenPromise):
            return True
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()


class Room:
    """A session in which attempts are made."""

    def __init__(self, scene: Scene, runtime: str, *words: str, tenant: str = "") -> None:
        self.scene = scene
        self.runtime = runtime
        self._allowed: tuple[str, ...] = ()
        self.session_id = scene.client.create_session(runtime, words, tenant)
        source = Path(inside.__file__).read_text("utf-8")
        scene.client.write_file(self.session_id, PROGRAM, source)

    def allow(self, *words: str) -> None:
        self.scene.client.update_allowed_hosts(self.session_id, words)

    def attempt(self, *attempts: Words, at_once: bool = False) -> Attempts:
        """Try some things, one after the other or all at once."""
        found = self.scene.client.exec(
            self.session_id, self._command(attempts, at_once=at_once), timeout=EXEC_SECONDS
        )
        equal(found.exit_code, 0, f"exit code of a probe that said {found.stderr[-400:]!r}")
        return Attempts(_outcomes(attempts, found.stdout), found.denials)

    def ask(self, *words: Any) -> Attempt:
        """Try one thing."""
        return self.attempt(list(words)).outcomes[0]

    def refused(self, *attempts: Words, at_once: bool = False) -> Attempts:
        """Try some things, all of which must fail, and quickly."""
        tried = again = self.attempt(*attempts, at_once=at_once)
        denials = tried.denials
        for _ in range(TRIES - 1):
            slow = again.not_refused()
            if not slow or not all(outcome.error for outcome in slow):
                break
            again = self.attempt(*(outcome.words for outcome in slow), at_once=at_once)
            denials = denials or again.denials
        equal(again.not_refused(), [], "attempts that were not refused at once")
        return Attempts(tried.outcomes, denials)

    def is_refused(self, *words: Any) -> bool:
        """Whether one thing fails, and quickly."""
        return is_refused(lambda: self.ask(*words))

    def speak(self, host: str, port: int) -> None:
        """Reach a host where all public ones are allowed.

        Whatever the sandbox had to do with one of them before, its last packets may come later.
        """
        self._allowed = PUBLIC
        equal(self.ask("tcp", host, port).said, host, "a public address under an open policy")
        self.scene.tap.take()

    def silence(self, while_what: str = "") -> None:
        """Check that since the last call only allowed packets have left the router."""
        found = [it for it in self.scene.tap.take() if it.split()[1] not in self._allowed]
        equal(found, [], f"packets that got out {while_what}".strip())

    @contextlib.contextmanager
    def start(self, *words: Any, exec_id: str = "") -> Generator[RoomProgram]:
        """Start a program that lasts and says when it is ready; it ends with the block."""
        command = self._command([list(words)])
        events = self.scene.client.exec_events(
            self.session_id, command, EXEC_SECONDS, exec_id=exec_id
        )
        program = RoomProgram(events)
        try:
            equal(program.line(), "ready", "first line of a probe")
            yield program
        finally:
            program.close()

    def rejoin(self, *words: Any, exec_id: str) -> Attempt:
        """The outcome of a program that was started by an earlier gateway."""
        command = self._command([list(words)])
        found = self.scene.client.exec(self.session_id, command, EXEC_SECONDS, exec_id=exec_id)
        return _outcomes([words], found.stdout.splitlines()[-1])[0]

    @contextlib.contextmanager
    def puppet(self, host: str, port: int) -> Generator[RemoteProgram]:
        """A program that takes commands over a connection to ``host``, far away."""
        with self.start("obey", host, port):
            puppet = RemoteProgram(self.scene.far.caller())
            try:
                yield puppet
            finally:
                puppet.close()

    @staticmethod
    def _command(attempts: Any, *, at_once: bool = False) -> list[str]:
        command = ["python3", "-S", PROGRAM, json.dumps(attempts)]
        return [*command, "at once"] if at_once else command

    @property
    def slot(self) -> Slot:
        """The sandbox's slot at the router."""
        return Slot(json.loads(self.record.read_text("utf-8"))["slot"])

    @property
    def record(self) -> Path:
        """The record of this sandbox's network for the next gateway."""
        query = "SELECT sandbox_id FROM sessions WHERE session_id = ?"
        with contextlib.closing(sqlite3.connect(self.scene.place.data / "sessions.db")) as database:
            (sandbox_id,) = database.execute(query, [self.session_id]).fetchone()
        return self.scene.net / "sandboxes" / f"{sandbox_id}.json"

    def is_alive(self) -> bool:
        try:
            return self.scene.client.exec(self.session_id, ["true"]).exit_code == 0
        except errors.K8eError:
            return False

    def reset(self) -> None:
        """Reset the session, and forget everything that was recorded of it."""
        self.allow()
        self._allowed = ()
        self.scene.internet.craft = None
        self.scene.forget()

    def close(self) -> None:
        self.scene.client.destroy_session(self.session_id)

    @contextlib.contextmanager
    def beside(self, *words: str, tenant: str = "other") -> Generator[Room]:
        """Another tenant's session, for as long as the block runs."""
        room = Room(self.scene, self.runtime, *words, tenant=tenant)
        try:
            yield room
        finally:
            room.close()


class Scene:
    """The internet, a gateway that reaches the world through it, and the far hosts."""

    def __init__(self, *, probe: Path | None = None, **environ: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"k8e-{os.getpid()}-far-", dir="/tmp"))
        self._closing = contextlib.ExitStack()
        try:
            self._open(probe, environ)
        except BaseException:
            self._closing.close()
            raise

    def _open(self, probe: Path | None, environ: dict[str, str]) -> None:
        self._closing.callback(shutil.rmtree, self.folder)
        self.internet = Internet(self.folder)
        self._closing.callback(self.internet.close)
        self.far = Far(self.internet, self.folder)
        self._closing.callback(self.far.close)
        self.tap = Tap(self.internet.world)
        self._closing.callback(self.tap.close)
        named = {"K8E_RESOLVERS": RESOLVER, "K8E_UPLINK_NAMESPACE": str(self.internet.world)}
        named["K8E_HTTP"] = f"127.0.0.1:{free_port()}"
        self.place = GatewayHome(probe=probe, **named, **environ)
        self._closing.callback(self._close_place)
        self.client = self._connected()
        self._former: list[SandboxClient] = []

    def _connected(self) -> SandboxClient:
        self.place.start()
        return SandboxClient(self.place.endpoint)

    @property
    def net(self) -> Path:
        """Where the gateway keeps its network namespaces and records."""
        return self.place.run_dir / "net"

    @property
    def router(self) -> Path:
        return self.net / "router"

    def rules(self) -> str:
        """All rules of the router, with the elements of its sets."""

        def there() -> str:
            nft = Nftables()
            try:
                return nft.run("list ruleset")
            finally:
                nft.close()

        return namespaces.run_in(self.router, there)

    def elements(self) -> str:
        """The rules' elements for sandboxes, except those that only count and expire."""
        counting = re.compile(r"\tset \w+ {[^}]*flags dynamic.*?\n\t}", re.DOTALL)
        return counting.sub("", self.rules())

    def links(self) -> list[str]:
        """The router's links."""
        return [name for _, name in namespaces.run_in(self.router, socket.if_nameindex)]

    def become_quiet(self) -> None:
        """Wait until no packet leaves the router any more: ends of connections may be late."""

        def is_quiet() -> bool:
            self.tap.take()
            time.sleep(QUIET_SECONDS)
            return not self.tap.take()

        eventually(is_quiet)

    def forget(self) -> None:
        """Forget everything that was recorded until now."""
        self.tap.take()
        self.internet.asked.clear()
        self.far.requests.clear()
        self.far.server_names.clear()

    def restart(self) -> None:
        """Start a new gateway, as the next command would, after the old one is gone."""
        self._former.append(self.client)  # programs that it started are still to be ended
        self.client = self._connected()

    def _close_place(self) -> None:
        for client in (getattr(self, "client", None), *getattr(self, "_former", ())):
            if client is not None:
                client.close()
        left = self.place.close()
        links = namespaces.run_in(self.internet.world, socket.if_nameindex)
        left += [f"link {name}" for _, name in links if name.startswith("k8e")]
        equal(left, [], "left of the gateway")

    def close(self) -> None:
        """End everything; it is an error if anything is left."""
        self._closing.close()
        equal(mounts_of(self.folder), [], "mounts of the internet that are left")


def mounts_of(folder: Path) -> list[str]:
    text = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    return [line for line in text.splitlines() if str(folder) in line]


def _outcomes(attempts: Any, text: str) -> list[Attempt]:
    found = json.loads(text)
    equal(len(found), len(attempts), "answers of a probe")
    return [Attempt(list(words), **told) for words, told in zip(attempts, found, strict=True)]
