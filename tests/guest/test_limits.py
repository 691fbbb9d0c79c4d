"""Which limits a program has met, as the guest finds out."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

import pytest

from k8e.guest import limits as guest_limits


class Told(NamedTuple):
    """What statvfs says of a place."""

    f_bavail: int = 1000
    f_blocks: int = 2000
    f_frsize: int = 4096
    f_files: int = 100
    f_ffree: int = 50
    f_bfree: int = 1000


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, Told]:
    """Places that are not as they should be."""
    found: dict[str, Told] = {}

    def statvfs(path: str) -> Told:
        return found.get(path, Told())

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(guest_limits, "COUNTED", {})
    monkeypatch.setattr(guest_limits, "SESSION_LIMITS", {})
    return found


def test_where_there_is_room_no_limit_was_met(places: dict[str, Told]) -> None:
    assert guest_limits.limits_met(b"no such file") == []


@pytest.mark.parametrize(
    ("place", "told", "limit"),
    [
        ("/workspace", Told(f_bavail=0), "disk"),
        ("/workspace", Told(f_bavail=30), "disk"),  # what ext4 keeps back
        ("/workspace", Told(f_ffree=0), "inodes"),
        ("/tmp", Told(f_bavail=0), "memory"),
        ("/home", Told(f_ffree=0), "memory"),
        ("/dev/shm", Told(f_bavail=2), "memory"),
    ],
)
def test_what_is_full_was_met(places: dict[str, Told], place: str, told: Told, limit: str) -> None:
    places[place] = told
    assert guest_limits.limits_met(b"") == [limit]
    assert guest_limits.limits_met(b"No space left on device") == [limit]


def test_a_place_that_does_not_count_is_not_full(places: dict[str, Told]) -> None:
    places["/tmp"] = Told(f_bavail=0, f_blocks=0, f_files=0, f_ffree=0)
    assert guest_limits.limits_met(b"") == []


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (b"dd: error writing 'x': No space left on device", "disk"),
        (b"OSError: [Errno 24] Too many open files: '/dev/null'", "open_files"),
        (b"RuntimeError: can't start new thread", "pids"),
        (b"bash: fork: retry: Resource temporarily unavailable", "pids"),
        (b"sh: 1: Cannot fork", "pids"),
    ],
)
def test_last_words_tell_of_limits(places: dict[str, Told], words: bytes, limit: str) -> None:
    assert guest_limits.limits_met(words) == [limit]


def test_processes_are_counted_where_the_sandbox_holds_their_limit(
    places: dict[str, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_limits, "UID", os.getuid())
    monkeypatch.setattr(guest_limits, "COUNTED", {"pids": 1 << 20})
    assert guest_limits.limits_met(b"") == []
    monkeypatch.setattr(guest_limits, "COUNTED", {"pids": 2})
    assert guest_limits.limits_met(b"") == ["pids"]


def test_errors_of_the_guest_name_the_limit(
    places: dict[str, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guest_limits.why_refused(errno.ENOSPC) == ""  # before there is a session
    assert "pids is reached" in str(guest_limits.no_more_processes())
    limits = {"disk": 8 << 20, "memory": 64 << 20, "pids": 40}
    monkeypatch.setattr(guest_limits, "SESSION_LIMITS", limits)
    assert "limit disk of /workspace is 8 MiB" in guest_limits.why_refused(errno.ENOSPC)
    places["/workspace"] = Told(f_blocks=100_000, f_bfree=90_000, f_bavail=0)
    assert "disk of the gateway is nearly full" in guest_limits.why_refused(errno.ENOSPC)
    assert guest_limits.why_refused(errno.ENOENT) == ""
    refused = guest_limits.no_more_processes()
    assert isinstance(refused, BlockingIOError)
    assert "limit pids of the session is 40" in str(refused)
