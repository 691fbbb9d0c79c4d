"""Sessions that begin with content, on a guest that answers as a test wants it to."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.guest import wire
from k8e.model import Phase, SandboxSpec, SessionSpec
from k8e.runtimes.base import Guest
from k8e.sessions import content, exchange
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, FakeGuest, FakeLink, FakeRuntime, World

pytestmark = pytest.mark.anyio
Frames = list[tuple[int, bytes]]
Script = Callable[[dict[str, Any]], Frames]
REPO = "https://me:secret@git.test/r"
CONTENT = [
    {"file": {"path": "a", "content": "x", "mode": "0600"}},
    {"dir": {"path": "d"}},
    {"gitRepo": {"path": "r", "repo": REPO, "ref": "v1"}},
]
STARTED = (wire.RESULT, wire.pack({"id": "x", "pid": 2}))


def left(code: int, said: bytes = b"", **more: Any) -> Frames:
    """How a program ends."""
    body = {"code": code, "status": "completed", "duration_ms": 1, "truncated": False, **more}
    heard = [(wire.ERR, wire.SEQ.pack(0) + said)] if said else []
    return [STARTED, *heard, (wire.EXIT, wire.pack(body))]


def usual(call: dict[str, Any]) -> Frames:
    return left(0) if call["op"] == "exec" else [(wire.RESULT, wire.pack({}))]


class Answering(FakeLink):
    """A link whose guest answers every call by a script."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def open(
        self, call: dict[str, Any], on_frame: Any, on_lost: Any, body: bytes = b""
    ) -> FakeLink:
        super().open(call, on_frame, on_lost)
        for kind, answer in self._script(call):
            asyncio.get_running_loop().call_soon(on_frame, kind, answer)
        return self

    def send(self, kind: int, body: bytes = b"") -> None:
        super().send(kind, body)
        if kind == wire.END:
            asyncio.get_running_loop().call_soon(self.answer, wire.RESULT, wire.pack({}))


class Runtime(FakeRuntime):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    async def launch(self, spec: SandboxSpec) -> Guest:
        await super().launch(spec)
        self.launched[-1].talk = Answering(self._script)
        return self.launched[-1]


def world_of(folder: Path, script: Script = usual) -> tuple[World, list[FakeGuest]]:
    world = World(folder)
    world.runtime = Runtime(script)
    return world, world.runtime.launched


def spec_of(**fields: Any) -> SessionSpec:
    return SessionSpec.from_json({"manifest": CONTENT, **fields})


async def failing(
    sessions: Sessions, kind: type[errors.K8eError], **fields: Any
) -> errors.K8eError:
    with pytest.raises(kind) as caught:
        await sessions.create(ME, spec_of(session_id="mine", **fields))
    return caught.value


async def test_content_is_there_before_the_session_is(tmp_path: Path) -> None:
    world, launched = world_of(tmp_path)
    async with world.running() as sessions:
        made = await sessions.create(ME, spec_of())
        calls = launched[0].talk.calls
        assert (calls[0]["op"], calls[0]["path"], calls[0]["mode"]) == (
            "write",
            "/workspace/a",
            0o600,
        )
        assert (wire.DATA, b"x") in launched[0].talk.frames
        assert [call["path"] for call in calls[1:3]] == ["/workspace/d", "/workspace/r"]
        assert [call["argv"][:2] for call in calls[3:]] == [
            ["git", "init"],
            ["git", "remote"],
            ["git", "fetch"],
            ["git", "checkout"],
        ]
        fetch = calls[5]
        assert fetch["argv"][-2:] == ["origin", "v1"]
        assert (fetch["cwd"], fetch["env"]["GIT_TERMINAL_PROMPT"]) == ("/workspace/r", "0")
        assert fetch["env"]["GIT_ALLOW_PROTOCOL"] == "http:https"
        assert fetch["timeout"] <= content.GIT_SECONDS
        assert not made.spec.manifest.entries, "only the digest is kept"
        assert sessions.get(ME, made.session_id).spec == made.spec


async def test_a_repeated_request_must_have_the_same_content(tmp_path: Path) -> None:
    world, launched = world_of(tmp_path)
    async with world.running() as sessions:
        first = await sessions.create(ME, spec_of(request_id="r"))
        again = await sessions.create(ME, spec_of(request_id="r"))
        assert again.session_id == first.session_id
        with pytest.raises(errors.Conflict):
            await sessions.create(ME, SessionSpec(request_id="r"))
        assert len(launched) == 1


async def test_a_standing_session_is_shared_by_those_who_ask_for_the_same(tmp_path: Path) -> None:
    world, launched = world_of(tmp_path)
    async with world.running() as sessions:
        both = await asyncio.gather(sessions.auto(ME, spec_of()), sessions.auto(ME, spec_of()))
        assert both[0].session_id == both[1].session_id
        assert (await sessions.auto(ME, SessionSpec())).session_id == both[0].session_id
        other = SessionSpec.from_json({"manifest": CONTENT[:1]})
        with pytest.raises(errors.Conflict, match="other content"):
            await sessions.auto(ME, other)
        assert len(launched) == 1


async def test_a_standing_session_without_content_is_not_what_was_asked_for(
    tmp_path: Path,
) -> None:
    world, _ = world_of(tmp_path)
    async with world.running() as sessions:
        await sessions.auto(ME, SessionSpec())
        with pytest.raises(errors.Conflict, match="other content"):
            await sessions.auto(ME, spec_of())


def git_fails(frames: Frames, at: str = "fetch") -> Script:
    def script(call: dict[str, Any]) -> Frames:
        return frames if call["op"] == "exec" and call["argv"][1] == at else usual(call)

    return script


@pytest.mark.parametrize(
    ("script", "kind", "told"),
    [
        (git_fails(left(128, b"fatal: no such ref")), errors.ToolFailed, "fatal: no such ref"),
        (git_fails(left(1), "checkout"), errors.ToolFailed, "git ended with 1"),
        (
            git_fails(left(143, status="timed_out")),
            errors.ToolFailed,
            "took longer than 120 s",
        ),
        (
            git_fails([(wire.ERROR, wire.pack({"code": "ENOENT", "message": "git"}))], "init"),
            errors.ToolFailed,
            "not installed on the gateway's host",
        ),
        (
            git_fails([(wire.ERROR, wire.pack({"code": "EAGAIN", "message": "fork"}))], "init"),
            errors.ToolFailed,
            "cannot be started",
        ),
        (git_fails([(wire.RESULT, b"nonsense")]), errors.GuestFailed, "nonsense"),
        (git_fails(left(-1)), errors.GuestFailed, "no exit code"),
    ],
)
async def test_git_that_fails_fails_the_creation_and_leaves_nothing(
    tmp_path: Path, script: Script, kind: type[errors.K8eError], told: str
) -> None:
    world, launched = world_of(tmp_path, script)
    async with world.running() as sessions:
        error = await failing(sessions, kind)
        assert told in error.message
        assert error.message.startswith("manifest entry 3 (gitRepo 'r'): ")
        assert "secret" not in error.message
        assert launched[0].killed.is_set()
        assert sessions.count() == 0
        ended = sessions.get(ME, "mine")
        assert ended.phase is Phase.ENDED
        assert ended.ended_reason.startswith("creation failed: manifest entry 3")


async def test_words_of_git_lose_the_password_in_the_address(tmp_path: Path) -> None:
    said = b"fatal: unable to access 'https://me:secret@git.test/r/'"
    world, _ = world_of(tmp_path, git_fails(left(128, said)))
    async with world.running() as sessions:
        error = await failing(sessions, errors.ToolFailed)
        assert "unable to access 'https://git.test/r/'" in error.message
        assert "ref v1 of https://git.test/r could not be fetched" in error.message


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, errors.LimitExceeded), (errno.ENOTDIR, errors.InvalidRequest)],
)
async def test_a_file_that_cannot_be_written_fails_the_creation(
    tmp_path: Path, number: int, kind: type[errors.K8eError]
) -> None:
    frame = (wire.ERROR, wire.pack({"code": errno.errorcode[number], "message": "why"}))
    world, launched = world_of(tmp_path, lambda call: [frame])
    async with world.running() as sessions:
        error = await failing(sessions, kind)
        assert error.message == "manifest entry 1 (file 'a'): why"
        assert launched[0].killed.is_set()


async def test_a_guest_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "GIT_SECONDS", 0.05)
    monkeypatch.setattr(exchange, "GRACE", 0.05)
    world, launched = world_of(tmp_path, git_fails([STARTED]))
    async with world.running() as sessions:
        await failing(sessions, errors.GuestFailed)
        assert launched[0].killed.is_set()


async def test_a_sandbox_that_dies_meanwhile_fails_the_creation(tmp_path: Path) -> None:
    fetching = asyncio.Event()

    def script(call: dict[str, Any]) -> Frames:
        if call["op"] == "exec" and call["argv"][1] == "fetch":
            fetching.set()
            return [STARTED]
        return usual(call)

    world, launched = world_of(tmp_path, script)
    async with world.running() as sessions:
        task = asyncio.create_task(sessions.create(ME, spec_of()))
        await fetching.wait()
        launched[0].talk.break_off()
        with pytest.raises(errors.GuestFailed, match="link"):
            await task
        assert launched[0].killed.is_set()


async def test_what_cannot_be_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    world, launched = world_of(tmp_path)
    async with world.running() as sessions:
        await sessions.snapshots.put("me", "named", ["sha256:a"])
        for snapshot, kind in (("none", errors.SnapshotNotFound), ("named", errors.InvalidRequest)):
            with pytest.raises(kind):
                await sessions.create(ME, SessionSpec(snapshot=snapshot))
        with pytest.raises(errors.InvalidRequest):
            await sessions.create(ME, SessionSpec.from_json({"manifest": "sha256:of-nothing"}))
        assert launched == []
        assert sessions.listing(ME, ended=True) == []
