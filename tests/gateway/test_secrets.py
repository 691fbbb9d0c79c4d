"""Secrets stay where they belong: nothing else that a busy gateway writes or says has one.

Each secret is planted once and unmistakable. Then everything is searched: every file below the
gateway's folders, its terminal, all command lines of the machine while it worked, and every answer
that is not the one in which the secret is told to its owner.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.gateway import serving
from tests.gateway.devices import Metadata, bearer, log_in
from tests.gateway.serving import Frames, Running

LIVES_IN = {
    "session env": ("sessions.db",),
    "template env": ("templates.db", "sessions.db"),
    "token": ("exposures.db",),
}
"""Where a secret is kept, because it is needed again; all files of the data folder are closed."""


DISKS = (".img", ".ext4")
"""What workspaces are in: theirs is what users write, and most of it is zeros."""


class Watched(NamedTuple):
    """What a busy gateway left behind."""

    planted: dict[str, str]
    said: list[str]
    """Answers and errors."""
    commands: set[str]
    folder: Path


class Registry(BaseHTTPRequestHandler):
    """Wants a password, takes it, and has nothing."""

    shown: list[str] = []  # noqa: RUF012 - of the one registry here

    def do_GET(self) -> None:
        self.shown.append(self.headers.get("authorization", ""))
        self.send_response(404 if self.shown[-1] else 401)
        self.send_header("WWW-Authenticate", 'Basic realm="here"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - its name there

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Nothing: a test is quiet."""


@contextlib.contextmanager
def registry() -> Generator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def watching_commands() -> Generator[set[str]]:
    """The command lines of all processes while the block runs."""
    found: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    found.add(path.read_bytes().decode(errors="replace"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


class Busy:
    """Somebody who tries everything that a secret goes into, right and wrong."""

    def __init__(self, running: Running, planted: dict[str, str], said: list[str]) -> None:
        self.running = running
        self.planted = planted
        self.said = said

    def tell(self, metadata: Metadata = (), **call: Any) -> dict[str, Any]:
        """What an operation answers; errors are answers too."""
        with self.running.channel() as channel, Frames(channel, metadata) as frames:
            try:
                frames.ask(1, **call)
                last = frames.until(wire.RESULT, wire.ERROR)[-1]
            except grpc.RpcError as error:
                self.said.append(str(error))
                return {}
        return wire.unpack_dict(last.body)

    def hear(self, metadata: Metadata = (), **call: Any) -> dict[str, Any]:
        """The same, where no secret belongs into the answer."""
        told = self.tell(metadata, **call)
        self.said.append(repr(told))
        return told

    def call(self, work: Any, message: Any, metadata: Metadata = ()) -> Any:
        try:
            answer = work(message, metadata=metadata, timeout=50)
        except grpc.RpcError as error:
            self.said.append(str(error))
            return None
        self.said.append(repr(answer))
        return answer

    def everything(self, registry: str) -> None:
        agent = self.keys()
        self.approver(agent)
        session = self.environment(agent)
        self.expose(agent, session)
        self.hear(op="pull_image", reference=f"{registry}/nothing:latest")
        self.hear(agent, op="events", session_id=session)
        self.hear(agent, op="get_session", session_id=session)
        self.command_line(session)
        self.hear(agent, op="list_sessions", ended=True)
        for name in ("status", "metrics", "doctor", "list_api_keys", "list_templates"):
            asked = self.hear if name != "list_templates" else self.tell
            asked(op=name)

    def keys(self) -> Metadata:
        made = self.tell(op="create_api_key", name="agent")
        self.planted["key"] = made["key"].removeprefix("k8e-")
        rotated = self.tell(op="rotate_api_key", name="agent")
        self.planted["rotated key"] = rotated["key"].removeprefix("k8e-")
        self.hear(bearer(made["key"]), op="status")
        good = bearer(rotated["key"])
        wrong = self.planted["wrong key"]
        for metadata in (bearer(f"k8e-{wrong}"), bearer(wrong), (("authorization", wrong),)):
            self.hear(metadata, op="status")
        self.hear(op="create_api_key", name=["x"], secret=self.planted["approver"])
        with self.running.channel() as channel:
            log_in(pb_grpc.SandboxServiceStub(channel), good)
        return good

    def approver(self, agent: Metadata) -> None:
        secret = self.planted["approver"]
        self.hear(op="set_approver", secret=secret)
        self.hear(op="set_approver", secret=secret[:5], current=secret)
        self.hear(op="create_api_key", name="boss", roles=["approver"], secret=secret + "x")
        self.hear(op="approve_action", approval_id="x", approved=True, secret=secret)
        self.hear(op="approve_action", approval_id="x", approved=True, secret=[secret])
        self.hear(op="approve_action", approval_id="x", approved="yes", secret=secret)

    def environment(self, agent: Metadata) -> str:
        of_template, of_session = self.planted["template env"], self.planted["session env"]
        recipe = {"name": "secretive", "env": {"OF_TEMPLATE": of_template}, "runtime": "container"}
        self.tell(op="apply_template", template=recipe)
        self.hear(op="apply_template", template={**recipe, "env": {"A": [of_template]}})
        spec = {"template": "secretive", "env": {"OF_SESSION": of_session}}
        for bad in ({"A": [of_session]}, {"A": of_session + "\0"}, {"A": of_session * 5000}):
            self.hear(agent, op="create_session", spec={**spec, "env": bad})
        session: str = self.hear(agent, op="create_session", spec=spec)["session"]["session_id"]
        of_exec = {"OF_EXEC": self.planted["exec env"]}
        where: dict[str, Any] = {"session": {"id": session}, "argv": ["true"]}
        self.hear(agent, op="exec", env=of_exec, **where)
        self.hear(agent, op="exec", env={"A": [self.planted["exec env"]]}, **where)
        self.hear(agent, op="exec", env=self.planted["exec env"], **where)
        with self.running.channel() as channel:
            stub = pb_grpc.SandboxServiceStub(channel)
            asked = pb.CreateTerminalRequest(
                session_id=session, argv=["sleep", "1"], env=of_exec, rows=24, cols=80
            )
            self.call(stub.CreateTerminal, asked, agent)
            command = 'test "$OF_SESSION" && test "$OF_TEMPLATE" && echo both'
            done = stub.Exec(
                pb.ExecRequest(session_id=session, command=command), metadata=agent, timeout=50
            )
        assert done.stdout == "both\n", "nothing was planted"
        return session

    def expose(self, agent: Metadata, session: str) -> None:
        told = self.tell(agent, op="expose", session_id=session, port=8123)
        self.planted["token"] = told["token"]
        address = urlsplit(str(told["url"]))
        for path in (f"/?{address.query}", f"/?{address.query}x", f"/{told['token']}", "/"):
            for headers in ({}, {"Cookie": told["token"]}, {"Referer": told["url"]}):
                connection = http.client.HTTPConnection(address.netloc, timeout=20)
                connection.request("GET", path, headers=headers)
                self.said.append(connection.getresponse().read().decode(errors="replace"))
                connection.close()
        self.tell(agent, op="list_exposed", session_id=session)

    def command_line(self, session: str) -> None:
        """The same from another machine's command line: as a file, on stdin, in a profile."""
        made = self.tell(op="create_api_key", name="typed")
        self.planted["typed key"] = made["key"].removeprefix("k8e-")
        with tempfile.TemporaryDirectory(prefix="k8e-typing-") as home:
            file = Path(home, "key.txt")
            file.write_text(made["key"])
            environ = {"PATH": os.environ["PATH"], "HOME": home, "K8E_DATA_DIR": f"{home}/d"}
            environ |= {"K8E_RUN_DIR": f"{home}/r", "K8E_SANDBOX_CERT": str(self.running.ca)}
            target = ["--endpoint", self.running.address]
            from_file, from_stdin = ["--apikey-file", str(file)], ["--apikey-file", "-"]
            for command, code in (
                (["login", *target, *from_file, "--profile", "work"], 0),
                (["login", *target, *from_stdin, "--profile", "kept", "--key-only"], 0),
                (["sessions", *target, *from_stdin], 0),
                (["get", session, *target, *from_file], 1),  # which is another key's
                (["sessions", "--profile", "work"], 0),
                (["sessions", "--profile", "kept"], 0),
            ):
                argv = [sys.executable, "-m", "k8e", "sandbox", *command]
                done = subprocess.run(
                    argv,
                    env=environ,
                    input=made["key"].encode(),
                    capture_output=True,
                    timeout=50,
                    check=False,
                )
                said = (done.stdout + done.stderr).decode(errors="replace")
                assert done.returncode == code, said
                self.said.append(said)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    names = ("wrong key", "approver", "template env", "session env", "exec env", "registry")
    planted = {name: secrets.token_hex(32) for name in names}
    passwords = tmp_path_factory.mktemp("registry") / "config.json"
    said: list[str] = []
    with registry() as host:
        auth = base64.b64encode(f"user:{planted['registry']}".encode()).decode()
        planted["registry, encoded"] = auth
        passwords.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        with serving.gateway(K8E_REGISTRY_CREDENTIALS=str(passwords)) as running:
            with watching_commands() as commands:
                Busy(running, planted, said).everything(host)
            assert f"Basic {auth}" in Registry.shown, "the password was not used"
            yield Watched(planted, said, commands, running.folder)


def written(folder: Path) -> dict[str, bytes]:
    """Every file that the gateway has; sockets and what is in sandboxes are none."""
    found: dict[str, bytes] = {}
    for top, below, names in os.walk(folder):
        below[:] = [name for name in below if not os.path.ismount(Path(top, name))]
        for path in (Path(top, name) for name in names):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink() and path.suffix not in DISKS:
                    found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def test_no_file_has_a_secret_but_the_one_that_keeps_it(watched: Watched) -> None:
    files = written(watched.folder)
    assert {"d/gateway.log", "d/keys.db", "d/sessions.db", serving.SAID} <= set(files)
    found = [
        (what, name)
        for what, secret in watched.planted.items()
        for name, data in files.items()
        if secret.encode() in data
        and not name.startswith(tuple(f"d/{place}" for place in LIVES_IN.get(what, ())))
    ]
    assert not found


def test_what_is_kept_is_for_its_owner_only(watched: Watched) -> None:
    places = {place for found in LIVES_IN.values() for place in found}
    kept = [path for place in places for path in (watched.folder / "d").glob(f"{place}*")]
    assert len(kept) >= len(places)
    assert {path.stat().st_mode & 0o077 for path in kept} == {0}


def test_no_answer_has_a_secret(watched: Watched) -> None:
    assert len(watched.said) > 40
    found = [
        (what, text[:300])
        for what, secret in watched.planted.items()
        for text in watched.said
        if secret in text
    ]
    assert not found


def test_no_command_line_has_a_secret(watched: Watched) -> None:
    assert any("sleep" in line for line in watched.commands), "nothing was watched"
    assert any("--apikey-file" in line for line in watched.commands), "nobody typed anything"
    found = [
        (what, line)
        for what, secret in watched.planted.items()
        for line in watched.commands
        if secret in line
    ]
    assert not found
