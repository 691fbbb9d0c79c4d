"""What is in the components folder is used only if it is what was put there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k8e import errors
from k8e.distro.component_store import ComponentStore, State
from k8e.distro.components import CILIUM, RUNC, Component


def put(store: ComponentStore, component: Component, content: bytes = b"program") -> None:
    """Admit files of this content as if they had been built."""
    made = store.scratch(component)
    for name in component.files:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
        (made / name).chmod(0o777)
    for name in component.folders:
        (made / name / "below").mkdir(parents=True)
        (made / name / "below/file").write_bytes(content)
    store.admit(component, made, "built with go9.9", 1.0)


@pytest.fixture
def store(tmp_path: Path) -> ComponentStore:
    found = ComponentStore(tmp_path / "components")
    put(found, RUNC)
    return found


def state(store: ComponentStore, component: Component = RUNC, *, thorough: bool = False) -> State:
    return store.look(component, thorough=thorough).state


def test_what_was_admitted_can_be_used(store: ComponentStore) -> None:
    path = store.program("runc")
    assert path.read_bytes() == b"program"
    assert path.stat().st_mode & 0o777 == 0o755
    finding = store.look(RUNC, thorough=True)
    assert finding.state is State.PRESENT
    assert (finding.source, finding.size) == ("built with go9.9", len(b"program"))


def test_what_was_never_admitted_is_missing_and_says_what_to_do(store: ComponentStore) -> None:
    path = store.folder / "bin/etcd"
    path.write_bytes(b"from somewhere")
    path.chmod(0o755)
    with pytest.raises(errors.ToolFailed, match="not installed") as caught:
        store.program("etcd")
    assert "k8e components install etcd" in caught.value.hint


def overwrite(path: Path) -> None:
    path.write_bytes(b"another")


def overwrite_and_set_the_times_back(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"another")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_another_in_its_place(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"another")
    other.chmod(0o755)
    shutil.copystat(path, other)
    other.rename(path)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def remove(path: Path) -> None:
    path.unlink()


def give_away(path: Path) -> None:
    os.chown(path, 1000, 1000)


CHANGES = (
    overwrite,
    overwrite_and_set_the_times_back,
    put_another_in_its_place,
    open_to_all,
    remove,
    give_away,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda item: item.__name__)
def test_a_program_that_was_changed_is_refused(
    store: ComponentStore, change: Callable[[Path], None]
) -> None:
    if change is give_away and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    change(store.folder / "bin/runc")
    assert state(store) is State.WRONG
    with pytest.raises(errors.ToolFailed, match=r"runc .*cannot be used"):
        store.program("runc")


def test_what_is_wrong_is_told_by_both_checksums(store: ComponentStore) -> None:
    overwrite(store.folder / "bin/runc")
    detail = store.look(RUNC).detail
    assert detail.count("checksum") == 1
    assert ", not " in detail


def test_a_file_in_a_folder_counts(store: ComponentStore) -> None:
    put(store, CILIUM)
    assert state(store, CILIUM) is State.PRESENT
    (store.folder / "share/cilium/bpf/below/file").write_bytes(b"another")
    assert state(store, CILIUM) is State.WRONG
    with pytest.raises(errors.ToolFailed):
        store.file("share/cilium/bpf")
    put(store, CILIUM, b"newer")
    assert (store.file("share/cilium/bpf") / "below/file").read_bytes() == b"newer"


def test_a_copy_of_the_folder_can_be_used(store: ComponentStore, tmp_path: Path) -> None:
    shutil.copytree(store.folder, tmp_path / "copy")
    copy = ComponentStore(tmp_path / "copy")
    assert copy.program("runc").read_bytes() == b"program"
    overwrite(copy.folder / "bin/runc")
    assert state(copy) is State.WRONG


def test_a_copy_is_read_once(store: ComponentStore, tmp_path: Path) -> None:
    with store.locked(lambda: None):
        pass
    shutil.copytree(store.folder, tmp_path / "copy")
    copy = ComponentStore(tmp_path / "copy")
    manifest = copy.folder / "manifest.json"
    first = manifest.read_bytes()
    assert state(copy) is State.PRESENT
    second = manifest.read_bytes()
    assert second != first
    assert state(copy) is State.PRESENT
    assert manifest.read_bytes() == second
    overwrite(copy.folder / "bin/runc")
    assert state(copy) is State.WRONG


def test_what_an_earlier_release_made_is_outdated(store: ComponentStore) -> None:
    assert state(store, replace(RUNC, version="v9.9.9")) is State.OUTDATED
    assert state(store, replace(RUNC, builds=())) is State.OUTDATED
    assert state(store, replace(RUNC, use="other words")) is State.PRESENT


@pytest.mark.parametrize("name", ["manifest.json", "."])
def test_who_may_change_the_manifest_vouches_for_nothing(store: ComponentStore, name: str) -> None:
    (store.folder / name).chmod(0o777)
    assert state(store) is State.MISSING
    with pytest.raises(errors.ToolFailed):
        store.program("runc")


@pytest.mark.parametrize("text", ["", "[]", '{"components": {"runc": 1}}', "{" * 10_000])
def test_a_damaged_manifest_is_as_good_as_none(store: ComponentStore, text: str) -> None:
    (store.folder / "manifest.json").write_text(text, "utf-8")
    assert state(store) is State.MISSING
    put(store, RUNC, b"again")
    assert state(store) is State.PRESENT


def test_a_folder_that_others_can_change_is_not_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with (
        pytest.raises(errors.InvalidRequest, match="belongs to others"),
        ComponentStore(tmp_path).locked(lambda: None),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(errors.InvalidRequest, match="cannot be made") as caught,
        ComponentStore(tmp_path / "file/components").locked(lambda: None),
    ):
        pass
    assert "K8E_COMPONENTS_DIR" in caught.value.hint
