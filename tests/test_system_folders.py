"""Files in folders that another user may change at any moment."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from k8e import access, rights, system
from k8e.cli import state
from k8e.client import login

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root in the home of another user")
THEIRS = 1234


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """The home of another user, as sudo may leave it in the environment; beside it, root's."""
    with tempfile.TemporaryDirectory(prefix="k8e-test-") as folder:
        Path(folder).chmod(0o755)
        found = Path(folder, "home")
        found.mkdir()
        os.chown(found, THEIRS, THEIRS)
        Path(folder, "outside").mkdir(mode=0o755)
        monkeypatch.setenv("HOME", str(found))
        yield found


def link(path: Path) -> Path:
    """A link that the owner of the home has planted; the folder of root's that it leads to."""
    for folder in reversed(path.relative_to(Path.home()).parents[:-1]):
        (Path.home() / folder).mkdir(exist_ok=True)
        os.chown(Path.home() / folder, THEIRS, THEIRS)
    outside = Path.home().parent / "outside"
    path.symlink_to(outside)
    os.chown(path, THEIRS, THEIRS, follow_symlinks=False)
    return outside


@pytest.mark.parametrize("place", [".k8e", ".k8e/sandbox", ".k8e/sandbox/certs"])
def test_credentials_are_not_written_through_a_planted_link(home: Path, place: str) -> None:
    outside = link(home / place)
    with pytest.raises(OSError, match=r"link|directory|director") as caught:
        system.replace_files(home / ".k8e/sandbox/certs/new", {"client.key": b"secret"})
    assert caught.value.errno
    with pytest.raises(Exception, match="cannot be written"):
        login.store(home / ".k8e/sandbox/certs/new", {"client.key": b"secret"})
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("place", [".k8e", ".k8e/sandbox"])
def test_a_token_is_not_made_through_a_planted_link(home: Path, place: str) -> None:
    outside = link(home / place)
    with pytest.raises(Exception, match="cannot be kept"):
        access.token()
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("place", [".k8e", ".k8e/sandbox", ".k8e/sandbox/default"])
def test_the_state_file_is_written_and_removed_with_the_rights_of_the_homes_owner(
    home: Path, place: str
) -> None:
    state.save("default", "sess-1")
    path = state.path_of("default")
    assert (path.stat().st_uid, state.load("default")) == (THEIRS, "sess-1")
    state.forget("sess-1")
    assert not path.exists()
    path.parent.rmdir()
    path.parent.parent.rmdir()
    path.parent.parent.parent.rmdir()
    outside = link(home / place)
    rest = path.relative_to(home / place)
    (outside / rest).parent.mkdir(parents=True, exist_ok=True)
    (outside / rest).write_text('{"session_id": "sess-1"}')
    state.save("default", "sess-2")
    state.forget("sess-1")
    assert (outside / rest).read_text() == '{"session_id": "sess-1"}'


def test_files_appear_whole_and_private_and_links_of_ones_own_are_followed(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "real")
    system.replace_files(tmp_path / "mine" / "new", {"a": b"1", "b": b"2"})
    assert (tmp_path / "real/new/a").read_bytes() == b"1"
    assert (tmp_path / "real/new/b").stat().st_mode & 0o777 == 0o600
    assert system.add_file(tmp_path / "mine" / "c", b"3")
    assert not system.add_file(tmp_path / "mine" / "c", b"4")
    assert sorted(item.name for item in (tmp_path / "real").iterdir()) == ["c", "new"]


def test_who_decides_about_a_path_is_the_first_who_is_not_root(home: Path, tmp_path: Path) -> None:
    assert rights.master_of(tmp_path / "new") is None
    assert rights.master_of(home / "a/b") == rights.User(THEIRS, THEIRS)
    (tmp_path / "loop").symlink_to("loop")
    assert rights.master_of(tmp_path / "loop") is None
    (tmp_path / "way").symlink_to(home)
    assert rights.master_of(tmp_path / "way" / "file") == rights.User(THEIRS, THEIRS)
    file = tmp_path / "file"
    file.write_text("")
    os.chown(file, THEIRS, THEIRS)
    assert rights.master_of(file) is None, "who owns the folder decides what is in it"


def test_root_has_its_rights_back_afterwards(home: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with rights.of_master(home), pytest.raises(PermissionError):
        (closed / "file").write_text("")
    (closed / "file").write_text("")
    assert (closed / "file").stat().st_uid == 0


# Folders of one's own.


def test_a_folder_of_ones_own_is_not_made_where_everybody_can_replace_it(home: Path) -> None:
    open_to_all = home.parent / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(PermissionError, match="every user can replace"):
        system.make_own(open_to_all / "k8e")
    open_to_all.chmod(0o1777)  # as /tmp is
    system.make_own(open_to_all / "k8e")


def test_what_leads_to_a_folder_of_ones_own_is_made_for_its_user_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        system.make_own(home.parent / "outside" / "one" / "two")
    finally:
        os.umask(before)
    for path in ("one", "one/two"):
        assert (home.parent / "outside" / path).stat().st_mode & 0o777 == 0o700


def with_rights(folder: Path) -> None:
    system.make_with_rights(folder, 0o711, set[str](), set[str]())


@pytest.mark.parametrize("make", [system.make_own, with_rights])
def test_a_folder_that_every_user_writes_to_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "theirs").touch()
    with pytest.raises(PermissionError, match="every user may write"):
        make(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


@pytest.mark.parametrize(
    ("rights", "names", "after"),
    [
        (0o700, [], 0o711),
        (0o777, [], 0o711),
        (0o700, ["mark", "theirs"], 0o711),
        (0o700, ["early"], 0o711),
        (0o755, ["theirs"], 0o755),
        (0o711, ["theirs"], 0o711),
    ],
)
def test_only_a_folder_that_is_empty_or_ours_gets_other_rights(
    tmp_path: Path, rights: int, names: list[str], after: int
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(rights)
    for name in names:
        (folder / name).touch()
    system.make_with_rights(folder, 0o711, {"mark"}, {"early"})
    assert stat.S_IMODE(folder.stat().st_mode) == after


@pytest.mark.parametrize(("rights", "why"), [(0o700, "700 where 711"), (0o775, "a group may")])
def test_a_folder_of_others_with_rights_that_do_not_do_is_refused(
    tmp_path: Path, rights: int, why: str
) -> None:
    tmp_path.chmod(rights)
    (tmp_path / "theirs").touch()
    with pytest.raises(PermissionError, match=why):
        system.make_with_rights(tmp_path, 0o711, {"mark"}, {"early"})
    assert stat.S_IMODE(tmp_path.stat().st_mode) == rights
