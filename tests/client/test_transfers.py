"""Files and trees by the SDK, over each transport and on each runtime."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from k8e import AsyncSandboxClient, Copied, SandboxClient, errors
from tests.cli.test_files import look, make_tree

MIB = 1 << 20


class Steps:
    """Records a progress, which must go up to what was promised."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []

    def __call__(self, done: int, total: int | None) -> None:
        assert not self.seen or done > self.seen[-1][0]
        self.seen.append((done, total))

    def check(self, total: int, *, promised: bool = True) -> None:
        assert self.seen[-1] == (total, total if promised else None)
        assert {found for _, found in self.seen} == {total if promised else None}


def test_a_tree_goes_in_and_comes_out_with_progress(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    made = make_tree(tmp_path / "project")
    size = 3 * MIB + 19 + 1 + 3
    steps = Steps()
    copied = client.upload(session_id, tmp_path / "project", "sdk/tree", progress=steps)
    assert copied == Copied(bytes=size, files=4, folders=4, links=3)
    steps.check(size)
    assert len(steps.seen) > 3
    steps = Steps()
    copied = client.download(session_id, "sdk/tree", str(tmp_path / "back"), progress=steps)
    assert copied == Copied(bytes=size, files=4, folders=4, links=3)
    steps.check(size)
    assert look(tmp_path / "back") == made
    client.exec(session_id, "chmod -R u+w sdk; rm -r sdk")


def test_a_tree_is_added_to_a_folder_that_is_there(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    (tmp_path / "a/sub").mkdir(parents=True)
    (tmp_path / "a/sub/new").write_text("new")
    (tmp_path / "a/both").write_text("from here")
    client.write_file(session_id, "add/both", "from there")
    client.write_file(session_id, "add/old", "old", mode=0o600)
    client.chmod(session_id, "add", 0o711)
    client.upload(session_id, tmp_path / "a", "add")
    assert client.stat(session_id, "add").mode == 0o711, "it was there"
    (tmp_path / "out").mkdir(mode=0o705)
    (tmp_path / "out/mine").write_text("mine")
    client.download(session_id, "/workspace/add/", tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o705
    assert {name: item[-1] for name, item in look(tmp_path / "out").items() if "/" not in name} == {
        "both": b"from here",
        "mine": b"mine",
        "old": b"old",
        "sub": 0o755,
    }
    client.remove(session_id, "add", recursive=True)


def test_single_files_keep_their_permissions_and_tell_their_progress(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    data = os.urandom(MIB + 5)
    (tmp_path / "script").write_bytes(data)
    (tmp_path / "script").chmod(0o755)
    steps = Steps()
    copied = client.upload(session_id, str(tmp_path / "script"), "one/script", progress=steps)
    assert copied == Copied(bytes=len(data), files=1)
    steps.check(len(data))
    assert client.stat(session_id, "one/script").mode == 0o755
    steps = Steps()
    client.download(session_id, "one/script", tmp_path / "copy", progress=steps)
    steps.check(len(data))
    assert (tmp_path / "copy").read_bytes() == data
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o755
    # Open files, too.
    steps, sink = Steps(), io.BytesIO()
    client.download(session_id, "one/script", sink, progress=steps)
    steps.check(len(data))
    assert sink.getvalue() == data
    for source, promised in ((io.BytesIO(data), False), ((tmp_path / "copy").open("rb"), True)):
        steps = Steps()
        with source:
            client.upload(session_id, source, "one/again", progress=steps)
        steps.check(len(data), promised=promised)


def test_reading_and_writing_tell_their_progress(client: SandboxClient, session_id: str) -> None:
    steps = Steps()
    client.write_file(session_id, "progress", "ä" * MIB, progress=steps)
    steps.check(2 * MIB)
    steps = Steps()
    client.write_file(session_id, "pieces", (b"x" * 1000 for _ in range(3)), progress=steps)
    assert steps.seen == [(1000, None), (2000, None), (3000, None)]
    for read in (client.read_file, client.read_bytes):
        steps = Steps()
        read(session_id, "progress", progress=steps)
        steps.check(2 * MIB)
    steps = Steps()
    part = client.read_bytes(session_id, "progress", offset=100, length=MIB, progress=steps)
    assert len(part) == MIB
    steps.check(MIB)
    steps = Steps()
    whole = b"".join(client.read_chunks(session_id, "/proc/version", progress=steps))
    assert steps.seen[-1] == (len(whole), None)


def test_a_progress_that_fails_ends_the_copy_and_leaves_nothing(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    client.write_file(session_id, "stopped", bytes(3 * MIB))

    def stop(done: int, _: int | None) -> None:
        if done > MIB:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError):
        client.download(session_id, "stopped", tmp_path / "stopped", progress=stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "big").write_bytes(bytes(3 * MIB))
    with pytest.raises(InterruptedError):
        client.upload(session_id, tmp_path / "big", "stopped-too", progress=stop)
    with pytest.raises(FileNotFoundError):
        client.stat(session_id, "stopped-too")
    assert client.exec(session_id, ["echo", "fine"]).stdout == "fine\n"


def test_what_cannot_be_copied_is_told(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    code = "rm -rf told; mkdir told; cd told; mkfifo pipe; echo x > file; ln -s /etc/passwd out"
    client.exec(session_id, code)
    told: dict[str, str] = {}
    copied = client.download(session_id, "told", tmp_path / "odd", on_skip=told.__setitem__)
    assert (copied.files, copied.skipped, copied.failed) == (1, 2, 0)
    assert told == {
        "/workspace/told/pipe": "it is a fifo",
        "/workspace/told/out": "the link leads out of what is copied",
    }
    with pytest.warns(RuntimeWarning, match="is not copied"):
        client.download(session_id, "told", tmp_path / "odd")
    client.exec(session_id, "rm told/pipe told/out; chmod 0 told/file")
    with pytest.raises(PermissionError):
        client.download(session_id, "told", tmp_path / "odd2")
    copied = client.download(session_id, "told", tmp_path / "odd2", on_skip=told.__setitem__)
    assert (copied.files, copied.failed) == (0, 1)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(errors.InvalidRequest, match="neither a file nor a folder"):
        client.upload(session_id, tmp_path / "fifo", "fifo")


def test_mistakes_are_python_s_own_errors(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    client.write_file(session_id, "mistakes/there", "x")
    client.mkdir(session_id, "mistakes/folder")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("y")
    with pytest.raises(FileNotFoundError):
        client.upload(session_id, tmp_path / "none", "none")
    with pytest.raises(FileNotFoundError):
        client.download(session_id, "none", tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        client.download(session_id, "mistakes/there", tmp_path / "no/such/folder")
    with pytest.raises(IsADirectoryError):
        client.download(session_id, "mistakes/there", tmp_path / "folder")
    with pytest.raises(IsADirectoryError):
        client.upload(session_id, tmp_path / "file", "mistakes/folder")
    assert {item.name for item in tmp_path.rglob("*")} == {"folder", "file"}


def test_a_target_that_is_a_link_is_not_followed(
    client: SandboxClient, session_id: str, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "link").symlink_to("precious")
    client.write_file(session_id, "linked/file", "x")
    with pytest.raises(errors.InvalidRequest, match="cannot be entered"):
        client.download(session_id, "linked", tmp_path / "link")
    client.download(session_id, "linked/file", tmp_path / "link")
    assert (tmp_path / "link").read_text() == "x"
    assert list((tmp_path / "precious").iterdir()) == []


# The asynchronous client.


def sizes(folder: Path) -> list[int]:
    """Of all files; none of them may be one that is under way."""
    names = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in names if path.name.startswith(".k8e")]
    return [path.stat().st_size for path in names]


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
async def aclient(endpoint: str) -> AsyncGenerator[AsyncSandboxClient]:
    async with asyncio.timeout(40), AsyncSandboxClient(endpoint) as client:
        yield client


@pytest.mark.anyio
async def test_the_asynchronous_client_copies_trees(
    aclient: AsyncSandboxClient, session_id: str, tmp_path: Path
) -> None:
    made = make_tree(tmp_path / "project")
    size = 3 * MIB + 19 + 1 + 3
    for _ in range(2):  # once into nothing, once over itself
        steps = Steps()
        copied = await aclient.upload(session_id, tmp_path / "project", "async", progress=steps)
        assert copied == Copied(bytes=size, files=4, folders=4, links=3)
        steps.check(size)
        await aclient.exec(session_id, "chmod -R u+w async")
    steps = Steps()
    await aclient.upload(session_id, tmp_path / "project", "async2")
    await aclient.download(session_id, "async2", tmp_path / "back", progress=steps)
    steps.check(size)
    assert look(tmp_path / "back") == made
    await aclient.exec(session_id, "chmod -R u+w async2; rm -r async async2")
    with pytest.raises(FileNotFoundError):
        await aclient.download(session_id, "async2", tmp_path / "none")


@pytest.mark.anyio
async def test_a_cancelled_copy_leaves_nothing_half(
    aclient: AsyncSandboxClient, session_id: str, tmp_path: Path
) -> None:
    await aclient.write_file(session_id, "half/one", bytes(4 * MIB))
    await aclient.write_file(session_id, "half/two", bytes(4 * MIB))
    descriptors = count_descriptors()
    for moment in range(8):
        seen = asyncio.Event()
        task = asyncio.create_task(
            aclient.download(
                session_id, "half", tmp_path / "half", progress=lambda _, __, seen=seen: seen.set()
            )
        )
        if moment % 2:
            await seen.wait()
        await asyncio.sleep(moment / 1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sizes(tmp_path) in ([], [4 * MIB], [4 * MIB] * 2)
    assert count_descriptors() <= descriptors + 1
    copied = await aclient.download(session_id, "half", tmp_path / "half")
    assert copied.bytes == 8 * MIB


@pytest.mark.anyio
async def test_asynchronous_reads_and_writes_tell_their_progress(
    aclient: AsyncSandboxClient, session_id: str
) -> None:
    steps = Steps()
    await aclient.write_file(session_id, "aprogress", bytes(MIB), progress=steps)
    steps.check(MIB)
    for read in (aclient.read_file, aclient.read_bytes):
        steps = Steps()
        await read(session_id, "aprogress", progress=steps)
        steps.check(MIB)
    steps, sink = Steps(), io.BytesIO()
    copied = await aclient.download(session_id, "aprogress", sink, progress=steps)
    assert (copied.bytes, copied.files) == (MIB, 1)
    steps.check(MIB)
