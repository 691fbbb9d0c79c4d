"""The mixed work of a soak: what people do in sessions, also what goes wrong there."""

from __future__ import annotations

import contextlib
import random
import urllib.error
import urllib.request
from collections.abc import Callable

from k8e import SandboxClient, errors
from k8e.client import local
from k8e.guest import wire

Work = Callable[[SandboxClient, str], None]
SECONDS = 60.0
SERVE = "python3 -m http.server --bind 127.0.0.1 8000"


class WrongAnswer(Exception):
    """A session did not do what it was told."""


def _expect(what: object, wanted: object) -> None:
    if what != wanted:
        raise WrongAnswer(f"{what!r} instead of {wanted!r}")


def run_code(client: SandboxClient, session_id: str) -> None:
    done = client.run("print(6 * 7)", "python", SECONDS, session_id=session_id)
    _expect((done.stdout, done.exit_code), ("42\n", 0))


def run_command(client: SandboxClient, session_id: str) -> None:
    done = client.exec(session_id, "seq 2000 | tail -1; exit 3", SECONDS)
    _expect((done.stdout, done.exit_code), ("2000\n", 3))


def use_files(client: SandboxClient, session_id: str) -> None:
    data = random.randbytes(random.choice((10, 100_000, 1 << 20)))
    client.write_file(session_id, "a/data", data)
    _expect(client.read_bytes(session_id, "a/data") == data, wanted=True)
    client.rename(session_id, "a/data", "a/other")
    _expect([item.path for item in client.list_files(session_id, path="/workspace/a")] != [], True)
    client.remove(session_id, "a", recursive=True)


def use_background(client: SandboxClient, session_id: str) -> None:
    """One that ends by itself, one that is killed, and one that is left to its session's end."""
    ended = client.start(session_id, "echo done")
    _expect(ended.wait().stdout, "done\n")
    killed = client.start(session_id, "sleep 300")
    killed.kill()
    _expect(killed.wait().status, "killed")
    client.start(session_id, "sleep 300")


def use_context(client: SandboxClient, session_id: str) -> None:
    context = client.create_context(session_id)
    context.run("x = 20")
    _expect(context.run("x + 1").text, "21")
    if random.random() < 0.5:
        context.close()


def time_out(client: SandboxClient, session_id: str) -> None:
    _expect(client.exec(session_id, "sleep 300", 0.2).status, "timed_out")


def expose(client: SandboxClient, session_id: str) -> None:
    """A server that answers a visitor, or nobody where it is still starting."""
    client.start(session_id, SERVE)
    exposed = client.expose(session_id, 8000)
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        urllib.request.urlopen(exposed.url, timeout=10).read()
    if random.random() < 0.5:
        client.unexpose(session_id, 8000)


def be_refused(client: SandboxClient, session_id: str) -> None:
    """Mistakes that a client makes, and a name that is not allowed."""
    for mistake in (
        lambda: client.read_bytes(session_id, "nothing/here"),
        lambda: client.get_session("sess-of-nobody"),
    ):
        try:
            mistake()
        except (errors.K8eError, OSError):
            continue
        raise WrongAnswer("a mistake was not refused")
    code = "import socket\ntry: socket.getaddrinfo('not.allowed', 80)\nexcept OSError: print('no')"
    _expect(client.run(code, "python", SECONDS, session_id=session_id).stdout, "no\n")


def leave(endpoint: str) -> Work:
    """A client that goes away in the middle of a run, with and without what it ran."""

    def work(_: SandboxClient, session_id: str) -> None:
        connection = local.Connection(local.dial(endpoint.removeprefix("unix:")))
        connection.begin()
        argv = ["/bin/sh", "-c", "echo begun; yes"]
        call = {"op": "exec", "session": {"id": session_id}, "argv": argv, "timeout": 5}
        call["kill_on_disconnect"] = random.random() < 0.7
        connection.send(wire.CALL, wire.pack(call))
        connection.receive()
        connection.close()

    return work


def everything(endpoint: str) -> list[Work]:
    return [
        run_code,
        run_command,
        use_files,
        use_background,
        use_context,
        time_out,
        expose,
        be_refused,
        leave(endpoint),
    ]
