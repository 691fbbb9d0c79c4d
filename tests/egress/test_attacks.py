"""Frames that no kernel would send, from a sandbox that was broken out of.

What programs try against their network is in ``k8e.conformance``.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import socket

import pytest

from k8e.egress import namespaces
from k8e.egress.netlink import Netlink
from k8e.egress.router import Slot
from tests.egress.far import OTHER, WEB, WEB6
from tests.egress.internet import RESOLVER
from tests.egress.places import Room, Scene

SYN = b"\0\0\0\1\0\0\0\0\x50\x02\xff\xff\0\0\0\0"  # of TCP, behind its ports


@pytest.mark.parametrize("words", [[], ["open"]])
def test_frames_from_a_sandbox_that_was_broken_out_of_get_nothing_out(
    room: Room, words: list[str]
) -> None:
    """Even whoever owns the sandbox's wire can use its own addresses only."""
    room.allow(*words)
    wire = _Wire(room.scene, room.slot)
    room.scene.tap.take()
    for source in ("198.18.77.2", OTHER, RESOLVER, str(room.slot.routers[0]), "127.0.0.1"):
        wire.send(source, WEB)
        assert room.scene.tap.take() == [], source
    for source in ("fd6b:3865:0:1::77", "2606:4700::77", str(room.slot.routers[1])):
        wire.send(source, WEB6)
        assert room.scene.tap.take() == [], source
    wire.send(str(room.slot.address4), WEB)
    wire.send(str(room.slot.address6), WEB6)
    expected = {f"udp {WEB} 443", f"udp {WEB6} 443"} if words else set[str]()
    assert {text for text in room.scene.tap.take() if text.startswith("udp")} == expected


def test_frames_from_a_sandbox_that_waits_in_the_pool_get_nothing_out(room: Room) -> None:
    """Not even with the addresses that it will have once a session has claimed it."""
    room.allow("open")  # a neighbour's policy is nobody else's
    known = set((room.scene.net / "sandboxes").glob("*.json"))
    room.scene.client.set_pool(runtime=room.runtime, min_ready=1, max_ready=1, wait=True)
    try:
        (waiting,) = set((room.scene.net / "sandboxes").glob("*.json")) - known
        slot = Slot(json.loads(waiting.read_text("utf-8"))["slot"])
        wire = _Wire(room.scene, slot)
        room.scene.tap.take()
        for source in (slot.address4, room.slot.address4):
            wire.send(str(source), WEB)
        for source in (slot.address6, room.slot.address6):
            wire.send(str(source), WEB6)
        assert room.scene.tap.take() == []
        _Wire(room.scene, room.slot).send(str(room.slot.address4), WEB)
        assert f"udp {WEB} 443" in room.scene.tap.take()  # the probe is not blind
    finally:
        room.scene.client.set_pool(runtime=room.runtime, min_ready=0, max_ready=0)


class _Wire:
    """The sandbox's own end of its wire, for frames that no kernel would send."""

    def __init__(self, scene: Scene, slot: Slot) -> None:
        self._namespace = scene.net / "slots" / str(slot.number)

        def inside() -> bytes:
            with contextlib.closing(Netlink()) as netlink:
                return {link.name: link.hardware for link in netlink.links()}[slot.interface]

        self._router = namespaces.run_in(scene.router, inside)

    def send(self, source: str, target: str) -> None:
        """A datagram and the first packet of a connection."""
        for protocol, body in ((17, b"\0\x0e\0\0secret"), (6, SYN)):
            packet = _packet(source, target, protocol, b"\x9c\x40\x01\xbb" + body)
            kind = b"\x86\xdd" if ":" in source else b"\x08\x00"
            frame = self._router + b"\x02k8e\0\1" + kind + packet
            namespaces.run_in(self._namespace, functools.partial(_transmit, frame))


def _transmit(frame: bytes) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as raw:
        raw.bind(("eth0", 0))
        raw.send(frame)


def _packet(source: str, target: str, protocol: int, body: bytes) -> bytes:
    """An IP packet with all of its sums; the body's own is where UDP or TCP have it."""
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address(target).packed
    size = len(body)
    checked = _sum(ends + bytes([0, protocol]) + size.to_bytes(2, "big") + body)
    at = 6 if protocol == 17 else 16
    body = body[:at] + checked + body[at + 2 :]
    if ":" in source:
        return b"\x60\0\0\0" + size.to_bytes(2, "big") + bytes([protocol, 64]) + ends + body
    head = b"\x45\0" + (20 + size).to_bytes(2, "big") + b"\0\1\0\0\x40" + bytes([protocol])
    return head + _sum(head + ends) + ends + body


def _sum(data: bytes) -> bytes:
    data += b"\0" * (len(data) % 2)
    total = sum(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2, "big")
