"""Descriptors that are made before they are needed."""

from __future__ import annotations

import errno
import os

import pytest

from k8e.guest import spawn
from k8e.guest.spawn import DescriptorStock


@pytest.fixture
def kept() -> DescriptorStock:
    made = DescriptorStock()
    made.refill()
    return made


def take_all(kept: DescriptorStock) -> list[int]:
    """What one program is given, and our ends of it."""
    return [kept.take_null(), *kept.take_output(), *kept.take_output(), *kept.take_report()]


def close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def test_what_was_made_ahead_is_given_once(kept: DescriptorStock) -> None:
    first, second = take_all(kept), take_all(kept)
    assert len({*first, *second}) == 14
    close_all(first + second)


def test_no_program_inherits_what_was_made_ahead(kept: DescriptorStock) -> None:
    for taken in (take_all(kept), take_all(kept)):
        assert not any(os.get_inheritable(fd) for fd in taken)
        close_all(taken)


def test_what_is_made_ahead_is_like_what_is_made_at_once(kept: DescriptorStock) -> None:
    ahead, at_once = take_all(kept), take_all(kept)
    assert [os.get_blocking(fd) for fd in ahead] == [os.get_blocking(fd) for fd in at_once]
    assert [os.get_blocking(fd) for fd in ahead] == [True, False, True, False, True, True, True]
    assert os.read(ahead[0], 1) == b""
    close_all(ahead + at_once)


def test_where_nothing_more_can_be_opened_only_who_needs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(spawn, "_make_null", refuse)
    kept = DescriptorStock()
    kept.refill()
    with pytest.raises(OSError, match="too many open files"):
        kept.take_null()
