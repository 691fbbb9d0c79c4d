"""What is said of operations on files that fail."""

from __future__ import annotations

import errno
import os

import pytest

from k8e import errors

LISTING = "LIST"
WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EINVAL}


@pytest.mark.parametrize("code", sorted(errno.errorcode.values()))
def test_only_a_wrong_path_is_answered_with_where_to_look(code: str) -> None:
    error = errors.from_wire({"code": code, "message": "it failed"})
    if not isinstance(error, OSError):
        assert code == "ESRCH"
        return
    hint = errors.file_hint(error, LISTING)
    assert hint
    if error.errno in WRONG_PATH:
        assert hint.endswith(LISTING)


@pytest.mark.parametrize(
    ("number", "inside", "outside"),
    [
        (errno.ENOSPC, "--disk", "a disk of this machine is full"),
        (errno.EDQUOT, "--disk", "your quota"),
        (errno.ENOMEM, "--memory", "this machine has no memory"),
        (errno.EAGAIN, "--pids", "check that it is there"),
        (errno.EMFILE, "--open-files", "ulimit"),
        (errno.EROFS, "/workspace, /tmp", "read-only"),
        (errno.EACCES, "uid 1000", "that you may use it"),
        (errno.EISDIR, "it is a folder", "folder on this machine"),
        (errno.ENOENT, LISTING, "check that it is there"),
    ],
)
def test_a_hint_fits_the_reason_and_the_place(number: int, inside: str, outside: str) -> None:
    told = errors.from_wire({"code": errno.errorcode[number], "message": os.strerror(number)})
    assert isinstance(told, OSError)
    assert inside in errors.file_hint(told, LISTING)
    here = OSError(number, os.strerror(number), "/some/file")
    assert outside in errors.file_hint(here, LISTING)
    assert LISTING not in errors.file_hint(here, LISTING)


def test_a_full_disk_is_not_a_matter_of_permissions() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "free some room" in errors.folder_hint(full, "make it writable")
    closed = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert errors.folder_hint(closed, "make it writable") == "make it writable"
