"""Which sandbox has which range of host uids, among all gateways of a host."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k8e import errors
from k8e.runtimes import uids
from k8e.runtimes.uids import Uids

FIRST_ID = 0x6F000000  # no real gateway of this host gives these
SIZE = 65536
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="ids of others are root's to give")
MakeGateway = Callable[..., Uids]


@pytest.fixture
def gateway(tmp_path: Path) -> MakeGateway:
    """Makes the uids of a gateway with a run folder of that name, on one and the same host."""

    def make(name: str = "a", **other: int) -> Uids:
        (tmp_path / name).mkdir(exist_ok=True)
        return Uids(tmp_path / name, claims=tmp_path / "claims", **{"first": FIRST_ID, **other})

    return make


@pytest.fixture
def launch(tmp_path: Path) -> Callable[[str, Uids, str], int]:
    """Does what a launch does: the folder first, then the uids."""

    def take(name: str, gateway: Uids, sandbox_id: str) -> int:
        (tmp_path / name / sandbox_id).mkdir()
        return gateway.take(sandbox_id)

    return take


Launch = Callable[[str, Uids, str], int]


def claims(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "claims").iterdir())


def test_two_sandboxes_never_share_uids(gateway: MakeGateway) -> None:
    one = gateway()
    first, second = one.take("sb-a"), one.take("sb-b")
    assert abs(first - second) >= SIZE
    one.free("sb-a")
    assert one.take("sb-c") == first


def test_sandboxes_of_two_gateways_never_share_uids(gateway: MakeGateway) -> None:
    one, other = gateway("a"), gateway("b")
    taken = [one.take("sb-a"), other.take("sb-b"), one.take("sb-c"), other.take("sb-d")]
    assert len(set(taken)) == 4
    one.free("sb-a")
    assert other.take("sb-e") == taken[0]


def test_gateways_that_take_at_once_get_different_ranges(gateway: MakeGateway) -> None:
    gateways = [gateway(name) for name in "abcd"]

    def take(number: int) -> int:
        return gateways[number % 4].take(f"sb-{number}")

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, range(64)))
    assert len(set(taken)) == 64


def test_a_range_is_free_only_when_nobody_has_it_any_more(gateway: MakeGateway) -> None:
    one, other = gateway("a"), gateway("b")
    base = one.take("sb-parent")
    assert [one.share(name, "sb-parent") for name in ("sb-a", "sb-b")] == [base, base]
    one.free("sb-a")
    one.free("sb-parent")
    assert one.take("sb-other") != base
    assert other.take("sb-another") != base
    one.free("sb-b")
    assert other.take("sb-new") == base


def test_the_uids_of_a_sandbox_that_is_gone_are_not_shared(gateway: MakeGateway) -> None:
    with pytest.raises(errors.SandboxDied, match="gone"):
        gateway().share("sb-a", "sb-parent")


def test_the_uids_of_a_sandbox_that_another_gateway_found_gone_are_not_shared(
    gateway: MakeGateway, launch: Launch, tmp_path: Path
) -> None:
    one = gateway("a")
    launch("a", one, "sb-parent")
    (tmp_path / "a" / "sb-parent").rmdir()  # it is being removed, and not yet freed
    gateway("b").load({})
    with pytest.raises(errors.SandboxDied, match="gone"):
        one.share("sb-child", "sb-parent")


# Crashes.


def test_sandboxes_keep_their_uids_when_their_gateway_is_killed(
    gateway: MakeGateway, launch: Launch
) -> None:
    base = launch("a", gateway("a"), "sb-a")
    other = gateway("b")
    other.load({})
    assert other.take("sb-b") != base
    after = gateway("a")
    after.load({"sb-a": base})
    assert after.share("sb-child", "sb-a") == base
    after.free("sb-a")
    after.free("sb-child")
    assert other.take("sb-c") == base


def test_what_was_claimed_and_never_recorded_is_freed_with_its_sandbox(
    gateway: MakeGateway, launch: Launch, tmp_path: Path
) -> None:
    launch("a", gateway("a"), "sb-a")
    after = gateway("a")
    after.load({})
    (tmp_path / "a" / "sb-a").rmdir()
    after.free("sb-a")
    assert claims(tmp_path) == []


def test_what_a_killed_gateway_removed_and_did_not_free_is_free(
    gateway: MakeGateway, launch: Launch, tmp_path: Path
) -> None:
    base = launch("a", gateway("a"), "sb-a")
    (tmp_path / "a" / "sb-a").rmdir()
    other = gateway("b")
    other.load({})
    assert claims(tmp_path) == []
    assert other.take("sb-b") == base


def test_a_child_keeps_the_uids_of_a_parent_that_was_removed_and_not_freed(
    gateway: MakeGateway, launch: Launch, tmp_path: Path
) -> None:
    one = gateway("a")
    base = launch("a", one, "sb-parent")
    (tmp_path / "a" / "sb-child").mkdir()
    one.share("sb-child", "sb-parent")
    (tmp_path / "a" / "sb-parent").rmdir()
    other = gateway("b")
    other.load({})
    assert claims(tmp_path) == [f"{base}.sb-child"]
    assert other.take("sb-b") != base


@needs_root
def test_uids_that_a_process_still_has_are_not_given_away_though_its_folder_is_gone(
    gateway: MakeGateway, launch: Launch, tmp_path: Path
) -> None:
    base = launch("a", gateway("a"), "sb-a")
    (tmp_path / "a" / "sb-a").rmdir()
    other = gateway("b")
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=base + 1000
    ) as left:
        assert left.stdin is not None
        assert left.stdout is not None
        left.stdin.write(b"x")
        left.stdin.flush()
        assert left.stdout.read(1) == b"x"
        other.load({})
        assert other.take("sb-b") != base
    other.load({})
    assert other.take("sb-c") == base


def test_what_an_older_release_gave_is_claimed(gateway: MakeGateway) -> None:
    one, other = gateway("a"), gateway("b")
    one.load({"sb-a": FIRST_ID, "sb-b": FIRST_ID + 5 * SIZE})
    assert other.take("sb-c") == FIRST_ID + SIZE
    assert one.take("sb-d") == FIRST_ID + 2 * SIZE


# Bounds, and what goes wrong.


def test_other_hosts_can_give_other_and_fewer_uids(
    gateway: MakeGateway, launch: Launch, tmp_path: Path
) -> None:
    few = gateway("a", first=FIRST_ID, size=4096, slots=2)
    assert few.size == 4096
    assert [launch("a", few, name) for name in ("sb-a", "sb-b")] == [FIRST_ID, FIRST_ID + 4096]
    with pytest.raises(errors.LimitExceeded, match="more than 2 sandboxes"):
        few.take("sb-c")
    (tmp_path / "a" / "sb-a").rmdir()  # as a killed gateway leaves it
    assert gateway("b", first=FIRST_ID, size=4096, slots=2).take("sb-c") == FIRST_ID


def test_where_nothing_can_be_claimed_nothing_is_given_and_that_is_told(
    gateway: MakeGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "claims").symlink_to(tmp_path)
    one = gateway()
    one.load({})
    assert "cannot be used" in caplog.text
    with pytest.raises(errors.RuntimeUnusable, match="cannot be used") as caught:
        one.take("sb-a")
    assert "0700" in caught.value.hint


def test_a_folder_that_others_may_write_is_refused(gateway: MakeGateway, tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims").chmod(0o777)
    with pytest.raises(errors.RuntimeUnusable, match="others may write there"):
        gateway().take("sb-a")


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[None]:
    """A gateway that was stopped while it had the lock."""
    (tmp_path / "claims").mkdir(mode=0o700)
    fd = os.open(tmp_path / "claims", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield
    os.close(fd)


@pytest.mark.usefixtures("stopped")
def test_a_gateway_that_stands_still_keeps_nobody_waiting_for_ever(
    gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uids, "LOCK_SECONDS", 0.0)
    one = gateway()
    with pytest.raises(errors.RuntimeUnusable, match="another gateway keeps it locked"):
        one.take("sb-a")
    one.free("sb-a")


def test_names_that_are_no_claims_are_left_alone(gateway: MakeGateway, tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir(mode=0o700)
    for name in ("notes", "12", "x.sb-a", f"{FIRST_ID}.sb-file"):
        (tmp_path / "claims" / name).touch()
    one = gateway()
    one.load({})
    assert one.take("sb-a") == FIRST_ID + SIZE
    assert len(claims(tmp_path)) == 5
