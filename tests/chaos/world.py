"""What must be there after a restart: what was acknowledged, and of what was under way either."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import time
from collections.abc import Generator
from typing import Any

from k8e import errors
from k8e.guest import wire
from tests.sessions.gateways import Client

ABSENT, ACTIVE, PAUSED = "absent", "active", "paused"
SMALL = {"memory": 96 << 20, "disk": 16 << 20, "pids": 64}
ALLOWED, FORBIDDEN, PORT = "93.184.216.34", "93.184.216.35", 8080
RUN = "seq 1 3000; sleep 0.2; echo end; exit 7"
RUN_SAYS = "".join(f"{n}\n" for n in range(1, 3001)).encode() + b"end\n"
# It tries from its first moment on, also while no gateway runs; the far end notes who comes.
PROBE = f"while :; do (exec 3<>/dev/tcp/{FORBIDDEN}/{PORT}) 2>/dev/null; sleep 0.3; done"
OVERDUE = 5.0  # seconds after its deadline at which a session must be gone


class Wrong(AssertionError):
    """Something is not as it must be."""


class Aspect:
    """One thing that can be looked at: the values that it may have."""

    def __init__(self, value: Any) -> None:
        self.may = [value]

    @contextlib.contextmanager
    def becoming(self, value: Any) -> Generator[None]:
        """A change is asked for; it is sure when the block ends, and unsure if it fails."""
        self.may.append(value)
        yield
        self.may = [value]

    @property
    def sure(self) -> Any:
        return self.may[0] if len(self.may) == 1 else None

    def seen(self, value: Any, what: str) -> None:
        if value not in self.may:
            raise Wrong(f"{what} is {value!r}, and may only be {self.may}")
        self.may = [value]


class Someone:
    """A session, as far as its owner knows."""

    def __init__(self, session_id: str, *, parent: str = "", deadline: float = 0) -> None:
        self.session_id = session_id
        self.parent = parent
        self.deadline = deadline
        self.phase = Aspect(ABSENT)
        self.words = Aspect((ALLOWED,))
        self.files = {name: Aspect("") for name in ("a", "b")}
        self.variable = Aspect(None)
        self.exposed = Aspect("")
        self.runs: dict[str, Aspect] = {}
        self.approvals: list[str] = []


class World:
    """All that there should be, and looking whether it is there."""

    def __init__(self, seed: int, runtime: str) -> None:
        self.random = random.Random(seed)
        self.runtime = runtime
        self.people: dict[str, Someone] = {}
        self.snapshots: dict[str, Aspect] = {}
        self.contents: dict[str, dict[str, str]] = {}
        """Of each snapshot: the digests of its files."""
        self.templates: dict[str, Aspect] = {}

    # Looking.

    def check(self, client: Client) -> None:
        """Everything that was acknowledged is there, and nothing else."""
        listed = client.call("list_sessions")["sessions"]
        there = {item["session_id"]: item for item in listed if item["phase"] != "ended"}
        for one in list(self.people.values()):
            self._check_one(client, one, there.pop(one.session_id, None))
        for session_id, item in there.items():
            self._check_unknown(client, session_id, item)
        self._check_names(client)

    def _check_one(self, client: Client, one: Someone, told: dict[str, Any] | None) -> None:
        what = f"session {one.session_id}"
        if one.deadline and time.time() > one.deadline:
            if told is not None and not _ends(client, one):
                raise Wrong(f"{what} lives on {time.time() - one.deadline:.1f} s after its end")
            del self.people[one.session_id]
            return
        one.phase.seen(told["phase"] if told else ABSENT, what)
        if told is None:
            del self.people[one.session_id]
        elif one.phase.sure == ACTIVE and not one.deadline:
            self._look_into(client, one)

    def _check_unknown(self, client: Client, session_id: str, told: dict[str, Any]) -> None:
        """A child whose making was not acknowledged may be there all the same."""
        if told["parent_id"] not in self.people:
            raise Wrong(f"nobody made session {session_id}")
        client.call("destroy_session", session_id=session_id)

    def _look_into(self, client: Client, one: Someone) -> None:
        what = f"of session {one.session_id}"
        script = "echo $WHO; for f in a b; do { sha1sum < $f; } 2> /dev/null || echo; done"
        who, *digests = client.shell(one.session_id, script).splitlines()
        if who != one.session_id and not one.parent:
            raise Wrong(f"the environment {what} says {who!r}")
        if not one.parent:
            for (name, aspect), line in zip(one.files.items(), digests, strict=True):
                aspect.seen(line.split(" ")[0], f"file {name} {what}")
        self._look_at_network(client, one, what)
        for exec_id, aspect in list(one.runs.items()):
            aspect.seen(_result(client, one.session_id, exec_id), f"run {exec_id} {what}")
            del one.runs[exec_id]
        if one.variable.may != [None]:
            one.variable.seen(_variable(client, one.session_id), f"the variable {what}")
        self._look_at_doors(client, one, what)
        _no_programs_of_ours(client, one.session_id)

    def _look_at_network(self, client: Client, one: Someone, what: str) -> None:
        told = client.call("egress", session_id=one.session_id)
        one.words.seen(tuple(told["allowed_hosts"]), f"what is allowed {what}")
        allowed = f"{ALLOWED}/32" in told["rules"]
        if allowed is not (one.words.sure == (ALLOWED,)):
            raise Wrong(f"the rules {what} are {told['rules']}, not {one.words.sure}")
        dial = f"timeout 5 bash -c 'exec 3<>/dev/tcp/{ALLOWED}/{PORT} && head -1 <&3' 2>/dev/null"
        reached = client.shell(one.session_id, dial).strip() == ALLOWED
        if reached is not allowed:
            raise Wrong(f"what is allowed {what} is {one.words.sure}, and reached: {reached}")

    def _look_at_doors(self, client: Client, one: Someone, what: str) -> None:
        listed = client.call("list_exposed", session_id=one.session_id)["services"]
        url = listed[0]["url"] if listed else ""
        if "any" in one.exposed.may and url:
            one.exposed = Aspect(url)
        one.exposed.seen(url, f"the exposed port {what}")
        if url:
            host, _, port = url.split("/")[2].rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5):
                pass
        pending = client.call("list_approvals", session_id=one.session_id)["approvals"]
        missing = set(one.approvals) - {item["approval_id"] for item in pending}
        if missing:
            raise Wrong(f"approvals {what} are gone: {missing}")

    def _check_names(self, client: Client) -> None:
        found = {item["name"]: item for item in client.call("list_snapshots")["snapshots"]}
        for name, aspect in list(self.snapshots.items()):
            aspect.seen(name in found, f"that snapshot {name} is there")
        known = {item["name"]: item for item in client.call("list_templates")["templates"]}
        for name, aspect in list(self.templates.items()):
            aspect.seen(known[name]["limits"]["pids"] if name in known else 0, f"template {name}")

    # Choosing.

    def saved(self) -> list[str]:
        """The snapshots that are surely there."""
        return [name for name, aspect in self.snapshots.items() if aspect.sure is True]

    def one(self, phases: tuple[str, ...], *, children: bool, but: set[str]) -> Someone | None:
        """A session that is surely in one of these phases, of a family that is not in ``but``."""
        found = [
            one
            for _, one in sorted(self.people.items())
            if one.phase.sure in phases
            and not one.deadline
            and (children or not one.parent)
            and (one.parent or one.session_id) not in but
        ]
        return self.random.choice(found) if found else None


def content(rng: random.Random) -> tuple[bytes, str]:
    data = rng.randbytes(rng.choice((1, 5_000, 700_000)))
    return data, hashlib.sha1(data).hexdigest()


def _ends(client: Client, one: Someone) -> bool:
    """Whether a session that is overdue is ended now."""
    until = one.deadline + OVERDUE
    while time.time() < until:
        if client.session(one.session_id)["phase"] == "ended":
            return True
        time.sleep(0.05)
    return False


def _result(client: Client, session_id: str, exec_id: str) -> bool:
    """Whether a run is there; if so, all of its output and its exit code are."""
    target = {"id": session_id}
    try:
        said, end = client.output(client.open({"op": "attach", "session": target, "id": exec_id}))
    except (errors.K8eError, LookupError, FileNotFoundError) as error:
        if "no exec" in str(error):
            return False
        raise
    if (said, end["code"]) != (RUN_SAYS, 7):
        raise Wrong(f"run {exec_id} said {len(said)} bytes and ended with {end}")
    return True


def _variable(client: Client, session_id: str) -> int | None:
    call = {"op": "exec", "session": {"id": session_id}, "context": "c", "language": "python"}
    call |= {"code": b"print(globals().get('x'))", "make_context": "python"}
    said, _ = client.output(client.open(call))
    return None if said.strip() == b"None" else int(said)


def _no_programs_of_ours(client: Client, session_id: str) -> None:
    """What a gateway runs for itself ends with it; nobody else would ever read it."""
    until = time.monotonic() + 5
    while True:
        told = client.call("execs", session={"id": session_id})["execs"]
        left = [item for item in told if item["status"] == "running" and "tar" in item["argv"][0]]
        if not left:
            return
        if time.monotonic() > until:
            raise Wrong(f"session {session_id} still runs {left}")
        time.sleep(0.05)


def upload(client: Client, session_id: str, path: str, data: bytes) -> None:
    channel = client.open({"op": "write", "path": path, "session": {"id": session_id}})
    client.receive(channel)
    for start in range(0, len(data), wire.CHUNK):
        client.send(wire.DATA, channel, data[start : start + wire.CHUNK])
    client.send(wire.END, channel)
    while client.receive(channel)[0] != wire.RESULT:
        pass
