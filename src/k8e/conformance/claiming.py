"""Sandboxes that waited in the pool: what each may reach is its session's alone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from collections.abc import Generator, Iterable, Sequence

from k8e.conformance.behaviours import equal, expect, in_a_room
from k8e.conformance.lab.far import CDN, OTHER, WEB
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.rooms import Room, Words
from k8e.egress.router import Slot

_NAMED = {"web.test": WEB, "other.test": OTHER, "a.cdn.test": CDN}
_POLICIES: tuple[tuple[str, ...], ...] = (
    ("web.test:8080",),
    ("other.test:8080",),
    ("strict", "a.cdn.test"),
    (),
)
"""What sessions ask for that claim at the same moment; each of them something else."""


@in_a_room("policy.claimed")
def claimed(room: Room) -> None:
    """A sandbox that waits reaches nothing; claimed, it reaches its session's hosts alone."""
    before = _sandboxes(room)
    with _ready(room, len(_POLICIES)) as waiting, _claimed(room, _POLICIES) as claimants:
        names = [claimant.record.stem for claimant in claimants]
        equal(sorted(names), sorted(waiting), "sandboxes of sessions, beside those that waited")
        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(_reaches_its_own, claimants, _POLICIES))
        # By now, names have opened addresses to their neighbours.
        for claimant, words in zip(claimants, _POLICIES, strict=True):
            _reaches_no_other(claimant, words)
        others = _sandboxes(room).items()
        successors = [slot for name, slot in others if name not in {*before, *names}]
        _have_no_policy(room, successors)


@contextlib.contextmanager
def _ready(room: Room, count: int) -> Generator[dict[str, Slot]]:
    """Have sandboxes wait, which reach nothing; none does after the block."""
    client, before = room.scene.client, _sandboxes(room)
    client.set_pool(runtime=room.runtime, min_ready=count, max_ready=count, wait=True)
    try:
        waiting = {name: slot for name, slot in _sandboxes(room).items() if name not in before}
        equal(len(waiting), count, "sandboxes that wait")
        _have_no_policy(room, waiting.values())
        yield waiting
    finally:
        client.set_pool(runtime=room.runtime, min_ready=0, max_ready=0)
        eventually(lambda: set(_sandboxes(room)) <= set(before))


def _sandboxes(room: Room) -> dict[str, Slot]:
    """Every sandbox of the gateway, with its place at the router."""
    found: dict[str, Slot] = {}
    for path in (room.scene.net / "sandboxes").glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # it ends while we look
            found[path.stem] = Slot(json.loads(path.read_text("utf-8"))["slot"])
    return found


def _have_no_policy(room: Room, slots: Iterable[Slot]) -> None:
    held = room.scene.elements()
    equal([slot for slot in slots if f'"{slot.interface}"' in held], [], "that have a policy")


@contextlib.contextmanager
def _claimed(room: Room, policies: Sequence[tuple[str, ...]]) -> Generator[list[Room]]:
    """Sessions that were made at once, each with its own words and tenant."""
    with contextlib.ExitStack() as ending, concurrent.futures.ThreadPoolExecutor() as threads:
        rooms = [
            threads.submit(Room, room.scene, room.runtime, *words, tenant=f"tenant-{number}")
            for number, words in enumerate(policies)
        ]
        for made in concurrent.futures.wait(rooms).done:
            if made.exception() is None:
                ending.callback(made.result().close)
        yield [made.result() for made in rooms]


def _own(words: tuple[str, ...]) -> str:
    """The host that a policy allows; empty if there is none."""
    return words[-1].partition(":")[0] if words else ""


def _reaches_its_own(claimant: Room, words: tuple[str, ...]) -> None:
    own = _own(words)
    if "strict" in words:
        said = str(claimant.ask("fetch", f"http://{own}/").said)
        expect(f'"host": "{own}"' in said, f"{own} is not reached under {words}: {said}")
    elif own:
        equal(claimant.ask("tcp", own, 8080).said, _NAMED[own], f"{own} under {words}")
        equal(claimant.ask("tcp", _NAMED[own], 8080).said, _NAMED[own], f"its address ({words})")


def _reaches_no_other(claimant: Room, words: tuple[str, ...]) -> None:
    """Neither by name nor by address, and no packet of it gets out."""
    others = {name: at for name, at in _NAMED.items() if name != _own(words)}
    attempts: list[Words] = [["lookup", name] for name in others]
    for name, address in others.items():
        attempts += [["tcp", address, 8080], ["udp", address, 443]]
        attempts += [["fetch", f"http://{address}/", "", name]]
    claimant.scene.become_quiet()
    claimant.scene.forget()
    claimant.refused(*attempts)
    claimant.silence(f"under {words}")
    expect(not claimant.scene.internet.asked, f"a name of others was asked for under {words}")
