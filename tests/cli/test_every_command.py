"""Every command of K8E's table works against a real gateway, on each runtime, with its own keys.

Each command has tests of its own elsewhere; here is the proof that none is missing.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from k8e.cli import completion, parser
from tests.cli.terminals import Terminal
from tests.places import Place, eventually


class Scene(NamedTuple):
    """A live session, and the command."""

    place: Place
    runtime: str
    session: str

    def json(self, *arguments: str, stdin: bytes = b"") -> dict[str, Any]:
        return self.place.json("sandbox", *arguments, stdin=stdin)

    def text(self, *arguments: str, stdin: bytes = b"") -> str:
        done = self.place.cli("sandbox", *arguments, stdin=stdin)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout.decode()

    def run(self, code: str, *flags: str) -> dict[str, Any]:
        return self.json("run", "--session-id", self.session, *flags, code)


@pytest.fixture
def scene(place: Place, runtime: str, session_id: str) -> Scene:
    return Scene(place, runtime, session_id)


def keys(found: dict[str, Any]) -> set[str]:
    return set(found)


def run(scene: Scene) -> None:
    done = scene.run("print(6 * 7)", "--lang", "python")
    assert {"exit_code", "session_id", "stderr", "stdout"} <= keys(done)
    assert {"duration_ms", "language", "status", "truncated"} <= keys(done)
    assert (done["stdout"], done["exit_code"]) == ("42\n", 0)
    raw = scene.place.cli("sandbox", "run", "--raw", "--session-id", scene.session, "exit 7")
    assert raw.returncode == 7


def background(scene: Scene) -> None:
    """``run --background``, ``poll`` and ``log``, in the life of one run."""
    started = scene.run("echo begun; exit 5", "--background")
    assert {"run_id", "session_id", "status"} <= keys(started)
    run_id = started["run_id"]
    done = eventually(lambda: _ended(scene, run_id))
    assert (done["stdout"], done["exit_code"]) == ("begun\n", 5)
    logged = scene.place.cli("sandbox", "log", "--follow", run_id)
    assert (logged.stdout, logged.returncode) == (b"begun\n", 5)


def _ended(scene: Scene, run_id: str) -> dict[str, Any] | None:
    found = scene.json("poll", run_id)
    return found if found["status"] == "completed" else None


def kill(scene: Scene) -> None:
    run_id = scene.run("sleep 40", "--background")["run_id"]
    assert "sleep" in scene.text("ps", scene.session)
    scene.json("kill", run_id)
    assert eventually(lambda: scene.json("poll", run_id)["status"] == "killed")


def status(scene: Scene) -> None:
    found = scene.json("status")
    assert {"available", "session_id", "tenant_id"} <= keys(found)
    assert found["available"] is True


def create_and_destroy(scene: Scene) -> None:
    made = scene.json("create", "--runtime", scene.runtime, "--tenant", "rows", "--env", "A=1")
    assert keys(made) == {"entries_materialized", "pod_ip", "session_id"}
    assert scene.json("get", made["session_id"])["tenant_id"] == "rows"
    listed = scene.json("sessions", "--tenant", "rows")["sessions"]
    assert [item["session_id"] for item in listed] == [made["session_id"]]
    longer = scene.json("extend", made["session_id"], "--lifetime", "3000")
    assert longer["session_id"] == made["session_id"]
    assert scene.json("destroy", made["session_id"]) == {"ok": True}


def files(scene: Scene) -> None:
    content = "text & <more>\n"
    wrote = scene.json("write", scene.session, "rows.txt", stdin=content.encode())
    assert wrote == {"ok": True, "path": "rows.txt"}
    read = scene.json("read", scene.session, "rows.txt")
    assert read == {"content": content, "path": "rows.txt"}
    assert scene.text("read", "--raw", scene.session, "rows.txt") == content
    listed = scene.json("list", scene.session)["files"]
    found = [item for item in listed if item["path"] == "/workspace/rows.txt"]
    assert [keys(item) for item in found] == [{"modified", "path"}]


def copy(scene: Scene) -> None:
    folder = scene.place.folder / f"rows-{scene.runtime}"
    folder.mkdir()
    (folder / "data").write_bytes(bytes(range(256)))
    scene.text("cp", str(folder), f"{scene.session}:copied")
    scene.text("cp", f"{scene.session}:copied", str(folder / "back"))
    assert (folder / "back" / "data").read_bytes() == bytes(range(256))


def subagent(scene: Scene) -> None:
    made = scene.json("subagent", scene.session)
    assert keys(made) == {"session_id"}
    child = made["session_id"]
    scene.json("run", "--session-id", child, "echo child > from-child")
    assert scene.run("cat from-child")["stdout"] == "child\n"
    scene.json("destroy", child)


def approvals(scene: Scene) -> None:
    done = scene.place.cli("sandbox", "confirm", "--no-wait", scene.session, "delete it")
    asked = json.loads(done.stdout)
    assert {"approval_id", "approved"} <= keys(asked)
    assert b"[k8e-sandbox]" in done.stderr
    pending = scene.json("approvals")["approvals"]
    assert asked["approval_id"] in [item["approval_id"] for item in pending]
    decided = scene.text("approve", asked["approval_id"], "--reason", "fine")
    assert json.loads(decided)["ok"] is True


def snapshots(scene: Scene) -> None:
    made = scene.json("create", "--runtime", scene.runtime)["session_id"]
    scene = scene._replace(session=made)
    scene.run("mkdir -p empty; printf '\\0\\377' > binary; ln -sf binary link; chmod 751 binary")
    name = f"rows-{scene.runtime}"
    saved = scene.json("snapshot", "save", scene.session, name)
    assert keys(saved) == {"file_count", "name", "ok", "size_bytes"}
    listed = scene.json("snapshot", "list")["snapshots"]
    found = [item for item in listed if item["name"] == name]
    assert [keys(item) for item in found] == [{"created_at", "file_count", "name", "size_bytes"}]
    restored = scene.json("snapshot", "restore", name, "--runtime", scene.runtime)
    assert keys(restored) == {"pod_ip", "restored_from", "session_id", "tenant_id"}
    check = "stat -c '%a %F' binary empty link; od -An -tx1 binary"
    told = scene.json("run", "--session-id", restored["session_id"], check)["stdout"]
    assert told == scene.run(check)["stdout"]
    assert "751 regular file" in told
    assert scene.json("snapshot", "delete", name)["ok"] is True
    scene.json("destroy", restored["session_id"])
    scene.json("destroy", made)


def api_keys(scene: Scene) -> None:
    name = f"rows-{scene.runtime}"
    made = scene.json("api-key", "create", name)
    assert made["name"] == name
    assert len(made["key"]) == len("k8e-") + 64
    listed = scene.text("api-key", "list")
    assert name in listed
    assert made["key"] not in listed
    assert scene.json("api-key", "delete", name) == {"name": name, "ok": True}


def events(scene: Scene) -> None:
    scene.run("true")
    lines = scene.text("events", "--limit", "3", scene.session).splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1])["kind"] == "exec.finished"


def pause_and_resume(scene: Scene) -> None:
    assert scene.json("pause", scene.session) == {"ok": True}
    assert scene.json("get", scene.session)["phase"] == "paused"
    assert scene.json("resume", scene.session) == {"ok": True}
    assert scene.run("echo awake")["stdout"] == "awake\n"


def exposing(scene: Scene) -> None:
    scene.run("mkdir -p site; echo hello > site/index.html")
    scene.run("python3 -m http.server 18124 --directory site", "--background")
    made = scene.json("expose", "18124", "--session-id", scene.session)
    assert {"port", "session_id", "url"} <= keys(made)

    def served() -> bytes:
        try:
            with urllib.request.urlopen(made["url"], timeout=20) as answer:
                return answer.read()
        except OSError:
            return b""  # the server is still starting

    assert eventually(served) == b"hello\n"
    listed = scene.json("exposed", "--session-id", scene.session)["services"]
    assert [item["url"] for item in listed] == [made["url"]]
    scene.json("unexpose", "18124", "--session-id", scene.session)
    assert scene.json("exposed", "--session-id", scene.session)["services"] == []


def egress(scene: Scene) -> None:
    told = scene.text("egress", scene.session)
    assert json.loads(told)["session_id"] == scene.session
    scene.json("allow-hosts", scene.session, "--clear")


def shell(scene: Scene) -> None:
    command = ["sandbox", "shell", scene.session, "--", "sh", "-c", "exit 6"]
    with Terminal(scene.place, *command) as terminal:
        assert terminal.end() == 6


def catalog(scene: Scene) -> None:
    told = scene.json("catalog")
    assert told["catalog_version"] == 1
    assert {"flags", "name", "usage"} <= keys(told["commands"][0])


def benchmark(scene: Scene) -> None:
    done = scene.place.cli("sandbox", "benchmark", "--iterations", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def doctor(scene: Scene) -> None:
    assert "gvisor" in scene.text("doctor", "--json")


def contexts(scene: Scene) -> None:
    """``run --context``, and what looks after contexts."""
    where = ("--session-id", scene.session)
    made = scene.run("x = 40", "--context", "rows", "--lang", "python")
    assert {"context_id", "context_state", "error", "execution_count", "results"} <= keys(made)
    code = "print('<out>'); display({'image/png': b'abc'}, raw=True); x + 2"
    done = scene.run(code, "--context", "rows")
    assert (done["stdout"], done["execution_count"], done["error"]) == ("<out>\n", 2, None)
    assert [item["data"] for item in done["results"]] == [
        {"image/png": "YWJj"},
        {"text/plain": "42"},
    ]
    raw = ("sandbox", "run", "--raw", *where, "--context", "rows")
    shown = scene.place.cli(*raw, "print('printed'); x")
    assert (shown.stdout, shown.returncode) == (b"printed\n40\n", 0)
    failed = scene.place.cli(*raw, "1 / 0")
    assert failed.returncode == 1
    assert b"ZeroDivisionError" in failed.stderr
    listed = scene.json("context", "list", *where)["contexts"]
    assert [(item["context_id"], item["state"]) for item in listed] == [("rows", "ready")]
    assert scene.json("context", "interrupt", "rows", *where)["stopped"] is True
    assert scene.json("context", "restart", "rows", *where)["execution_count"] == 0
    assert scene.json("context", "delete", "rows", *where) == {"ok": True}
    assert "rows" in scene.place.error("sandbox", "context", "restart", "rows", *where)
    assert scene.run("x=7", "--context", "shell")["exit_code"] == 0
    assert scene.run("echo $x", "--context", "shell")["stdout"] == "7\n"
    both = scene.place.error("sandbox", "run", *where, "--context", "a", "--background", "true")
    assert "exclude" in both


ROWS: dict[str, Callable[[Scene], None]] = {
    "run": run,
    "context": contexts,
    "poll log": background,
    "kill ps": kill,
    "status": status,
    "create destroy get sessions extend": create_and_destroy,
    "write read list": files,
    "cp": copy,
    "subagent": subagent,
    "confirm approve approvals": approvals,
    "snapshot": snapshots,
    "api-key": api_keys,
    "events": events,
    "pause resume": pause_and_resume,
    "expose unexpose exposed": exposing,
    "egress allow-hosts": egress,
    "shell": shell,
    "catalog": catalog,
    "benchmark": benchmark,
    "doctor": doctor,
}
OTHERWISE = {"install-skill", "login", "profiles"}
"""For no gateway, or one elsewhere: test_agents.py and test_login.py have tests of these."""


def test_no_command_is_without_a_row() -> None:
    named = {name for names in ROWS for name in names.split()}
    found = {item.path: item for item in completion.walk_parser(parser.build(), "k8e")}
    assert set(found["k8e sandbox"].below) == named | OTHERWISE


@pytest.mark.parametrize("names", ROWS, ids=lambda names: names.split()[0])
def test_the_commands_work_on_a_real_gateway(scene: Scene, names: str) -> None:
    ROWS[names](scene)
