"""Snapshots through the SDK: what went in comes out, on both runtimes and both ways there."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from k8e import AsyncSandboxClient, SandboxClient, Snapshot, errors
from tests.places import Place

# Everything that a file system can hold and a user can make. The names are bytes, some of no text.
MAKE = r"""
import os, random
os.makedirs("deep/er"), os.mkdir("empty"), os.mkdir("shut")
random.seed(7)
open("data.bin", "wb").write(random.randbytes(3 << 20))
for name in (b"new\nline", b"\xff\xfe", b" ", b"-rf", b"./.hidden", "\u00e9".encode(), b"x" * 255):
    open(name, "w").write("odd")
open("run.sh", "w").write("echo ran")
os.link("run.sh", "deep/hard")
os.chmod("run.sh", 0o4751)
os.symlink("../run.sh", "deep/soft"), os.symlink("/etc/passwd", "out"), os.symlink("gone", "lost")
open("shut/in", "w").write("in")
os.chmod("shut/in", 0o400), os.chmod("shut", 0o555), os.chmod("empty", 0o1777)
os.mkfifo("pipe")
os.utime("data.bin", ns=(1, 981173106123456789))
os.utime("out", ns=(1, 5), follow_symlinks=False)
for folder in ("deep/er", "deep", "empty", "shut", "."):
    os.utime(folder, ns=(1, 981173106987654321))
"""
# One line for each: name, kind and permissions, links, time, content or target.
LOOK = r"""
import hashlib, os, stat
found = []
for folder, folders, files in os.walk(b".", followlinks=False):
    for name in [b"", *files, *(f for f in folders if os.path.islink(os.path.join(folder, f)))]:
        path = os.path.join(folder, name)
        info = os.lstat(path)
        content = ""
        if stat.S_ISREG(info.st_mode):
            content = hashlib.sha256(open(path, "rb").read()).hexdigest()
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(path)
        links = 0 if stat.S_ISDIR(info.st_mode) or stat.S_ISFIFO(info.st_mode) else info.st_nlink
        found.append((path, oct(info.st_mode), links, info.st_mtime_ns, content, info.st_uid))
print(*sorted(found), sep="\n")
"""


@pytest.fixture
def filled(place: Place, runtime: str) -> Generator[str]:
    with SandboxClient(place.endpoint) as client:
        made = client.create_session(runtime)
        done = client.exec(made, ["python3", "-c", MAKE])
        assert done.exit_code == 0, done.stderr
        yield made
        client.destroy_session(made)


@pytest.fixture
def name(place: Place, request: pytest.FixtureRequest) -> Generator[str]:
    """A name of the test's own, whose snapshot is gone afterwards."""
    chosen = f"t-{abs(hash(request.node.name)):x}"
    yield chosen
    with SandboxClient(place.endpoint) as client:
        if chosen in [item.name for item in client.list_snapshots()]:
            client.delete_snapshot(chosen)


def look(client: SandboxClient, session_id: str) -> list[str]:
    done = client.exec(session_id, ["python3", "-c", LOOK])
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


def test_everything_comes_back_as_it_was(client: SandboxClient, filled: str, name: str) -> None:
    before = look(client, filled)
    assert len(before) == 20
    saved = client.save_snapshot(filled, name)
    assert isinstance(saved, Snapshot)
    assert (saved.name, saved.session_id, saved.file_count) == (name, filled, 15)
    assert saved.layers == (saved.digest,)
    assert 3 << 20 < saved.size_bytes < 4 << 20
    assert look(client, filled) == before, "saving changes nothing"
    assert client.get_snapshot(name) == saved
    assert saved in client.list_snapshots()
    restored = client.restore_snapshot(name, client.get_session(filled).runtime)
    try:
        assert restored != filled
        assert look(client, restored) == before
        hard = client.exec(restored, "echo more >> run.sh; cat deep/hard; rm -r deep")
        assert hard.stdout == "echo ranmore\n", "hard links are links, and it can be written to"
    finally:
        client.destroy_session(restored)


def test_a_snapshot_of_one_runtime_is_restored_on_another(
    place: Place, filled: str, runtime: str, name: str
) -> None:
    with SandboxClient(place.endpoint) as client:
        client.save_snapshot(filled, name)
        other = "gvisor" if runtime == "container" else "container"
        restored = client.restore_snapshot(name, other, env={"X": "y"}, limits={"disk": "64M"})
        assert look(client, restored) == look(client, filled)
        info = client.get_session(restored)
        assert (info.runtime, info.env_keys, info.limits["disk"]) == (other, ["X"], 64 << 20)
        client.destroy_session(restored)


def test_names_are_taken_replaced_and_deleted(
    client: SandboxClient, filled: str, name: str
) -> None:
    first = client.save_snapshot(filled, name)
    with pytest.raises(errors.Conflict, match="exists already"):
        client.save_snapshot(filled, name)
    client.exec(filled, "echo new > new")
    second = client.save_snapshot(filled, name, replace=True)
    assert second.digest != first.digest
    assert second.file_count == first.file_count + 1
    client.delete_snapshot(name)
    for work in (client.delete_snapshot, client.get_snapshot, client.restore_snapshot):
        with pytest.raises(errors.SnapshotNotFound, match="not found"):
            work(name)
    with pytest.raises(errors.SessionNotFound, match="not found"):
        client.save_snapshot("sess-nobody", name)
    with pytest.raises(errors.InvalidRequest, match="not a valid name"):
        client.save_snapshot(filled, "a/b")


def test_an_empty_workspace_is_a_snapshot_too(place: Place, runtime: str, name: str) -> None:
    with SandboxClient(place.endpoint) as client:
        made = client.create_session(runtime)
        assert client.save_snapshot(made, name).file_count == 0
        client.destroy_session(made)
        restored = client.create_session(runtime, snapshot=name)
        assert client.list_files(restored, directories=True) == []
        client.destroy_session(restored)


def test_what_its_own_user_cannot_read_fails_the_save(place: Place, filled: str, name: str) -> None:
    with SandboxClient(place.endpoint) as client:
        client.exec(filled, "chmod 0 data.bin")
        with pytest.raises(errors.ToolFailed, match=r"data.bin: .*Permission denied"):
            client.save_snapshot(filled, name)
        with pytest.raises(errors.SnapshotNotFound):
            client.get_snapshot(name)


def test_a_disk_that_is_too_small_fails_the_restore_and_leaves_nothing(
    place: Place, runtime: str, filled: str, name: str
) -> None:
    with SandboxClient(place.endpoint) as client:
        client.exec(filled, "head -c 12M /dev/urandom > big")
        client.save_snapshot(filled, name)
        before = {item.session_id for item in client.list_sessions()}
        with pytest.raises(errors.LimitExceeded, match=r"disk .* too small") as caught:
            client.restore_snapshot(name, runtime, limits={"disk": "8M"}, session_id="too-small")
        assert "--disk" in caught.value.hint
        assert {item.session_id for item in client.list_sessions()} == before
        ended = client.get_session("too-small")
        assert (ended.phase, ended.ended_reason[:15]) == ("ended", "creation failed")


def test_a_restore_reads_on_while_the_snapshot_is_deleted(
    place: Place, runtime: str, filled: str, name: str
) -> None:
    """The archive is far larger than what can be under way: the deletion comes before its end."""
    with SandboxClient(place.endpoint) as client, ThreadPoolExecutor(1) as pool:
        client.exec(filled, "head -c 60M /dev/urandom > big")
        client.save_snapshot(filled, name)
        task = pool.submit(client.restore_snapshot, name, runtime)
        client.delete_snapshot(name)
        try:
            restored = task.result(40)
        except errors.SnapshotNotFound:
            return  # the deletion was first
        assert look(client, restored) == look(client, filled)
        client.destroy_session(restored)


def test_the_session_s_variables_do_not_change_what_tar_does(
    place: Place, runtime: str, name: str
) -> None:
    with SandboxClient(place.endpoint) as client:
        env = {"TAR_OPTIONS": "--exclude=*", "LC_ALL": "xx", "POSIXLY_CORRECT": "1"}
        made = client.create_session(runtime, env=env)
        client.write_file(made, "a", "b")
        assert client.save_snapshot(made, name).file_count == 1
        restored = client.restore_snapshot(name, runtime, env=env)
        assert client.read_file(restored, "a") == "b"
        for session_id in (made, restored):
            client.destroy_session(session_id)


@pytest.mark.anyio
async def test_the_asynchronous_client_does_the_same(
    place: Place, filled: str, runtime: str, name: str
) -> None:
    async with AsyncSandboxClient(place.endpoint) as client:
        saved = await client.save_snapshot(filled, name)
        assert await client.get_snapshot(name) == saved
        assert saved in await client.list_snapshots()
        restored = await client.restore_snapshot(name, runtime)
        assert await client.read_file(restored, "shut/in") == "in"
        await client.destroy_session(restored)
        await client.delete_snapshot(name)
        with pytest.raises(errors.SnapshotNotFound):
            await client.restore_snapshot(name)
