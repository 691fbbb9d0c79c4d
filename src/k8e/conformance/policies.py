"""Policies over time: from the first moment, on open connections, and without a gateway."""

from __future__ import annotations

import contextlib
import json
import statistics

from k8e.conformance.behaviours import equal, expect, in_a_room
from k8e.conformance.lab.far import CALLING_PORT, CDN, OTHER, WEB, WEB6, Tap
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.rooms import QUICKLY, Program, Puppet, Room, Scene

CALL = f"{OTHER}:{CALLING_PORT}"  # a way out for puppets that no name leads to
_BY_HTTP = "GET /call HTTP/1.1\r\nHost: web.test\r\n\r\n"
_WAYS = {
    ("web.test",): ("web.test", CALLING_PORT),
    (f"{WEB}:{CALLING_PORT}",): (WEB, CALLING_PORT),
    ("open",): (WEB6, CALLING_PORT),
    ("strict", "web.test"): ("web.test", 80, _BY_HTTP),
}
"""Policies, and what they let a program download from."""


def _line(program: Program) -> str:
    """The next thing that a download prints, without what HTTP says first."""
    while not (line := program.line()).startswith(("line", "[")) and program.end is None:
        pass
    return line


@in_a_room("policy.first-moment")
def first_moment(room: Room) -> None:
    """A session has its policy from its first moment, and no network before it has one."""
    with room.beside("web.test:8080") as new:
        equal(new.ask("tcp", "web.test", 8080).said, WEB, "what is allowed")
        expect(new.is_refused("tcp", OTHER, 8080), "what is not allowed is reached")
    with room.beside() as new:
        new.refused(["tcp", WEB, 8080], ["lookup", "web.test"])


@in_a_room("policy.kept-connections")
def kept_connections(room: Room) -> None:
    """A change of policy leaves open connections that it still allows as they are."""
    for words, attempt in _WAYS.items():
        room.allow(*words)
        with room.start("download", *attempt) as program:
            server = room.scene.far.caller()
            for number, more in enumerate((["a.cdn.test"], ["b.cdn.test", "a.cdn.test"], [])):
                room.allow(*words, *more)
                server.sendall(f"line {number}\n".encode())
                equal(_line(program), f"line {number}", f"a download under {words}")


@in_a_room("policy.cut-connections")
def cut_connections(room: Room) -> None:
    """A tightened policy ends open connections at once, both ways."""
    for words, attempt in _WAYS.items():
        room.allow(*words)
        with room.start("download", *attempt) as program:
            server = room.scene.far.caller()
            server.sendall(b"line 0\n")
            equal(_line(program), "line 0", f"a download under {words}")
            room.allow("other.test", "a.cdn.test")
            with contextlib.suppress(OSError):
                server.sendall(b"line 1\nline 2\n")
            later = [_line(program) for _ in range(3)]
            ends = [json.loads(line)[0]["error"] for line in later if line.startswith("[")]
            equal(ends, ["ConnectionResetError"], f"the end of a download: {later}")
    room.allow(CALL)
    with room.puppet(OTHER, CALLING_PORT) as puppet:
        room.allow("web.test")
        room.scene.tap.take()
        expect(puppet.is_cut(), "a connection under an old policy goes on")
        packets = room.scene.tap.take()
        expect(f"tcp {OTHER} {CALLING_PORT}" not in packets, f"what it said got out: {packets}")


@in_a_room("policy.gateway-dies")
def gateway_dies(room: Room) -> None:
    """Without its gateway a sandbox keeps what was open and gets nothing new; then all goes on."""
    scene = room.scene
    room.allow("web.test", CALL)
    with room.puppet(OTHER, CALLING_PORT) as puppet:
        equal(puppet.attempt("tcp", "web.test", 8080).said, WEB, "an allowed name")
        scene.place.kill_gateway()
        try:
            _nothing_new(scene, puppet)
        finally:
            scene.restart()  # others use it, too
        equal(puppet.attempt("lookup", "web.test").said, sorted([WEB, WEB6]), "after a restart")
        expect(puppet.is_refused("lookup", "a.cdn.test"), "a name that is not allowed")
        told = scene.client.egress(room.session_id)
        expect("a.cdn.test" in {item.name for item in told.denials}, "a refusal is not told")
        room.allow("web.test")
        expect(puppet.is_cut(), "a connection under an old policy goes on after a restart")
    equal(room.ask("tcp", "web.test", 8080).said, WEB, "the name in the end")


def _nothing_new(scene: Scene, puppet: Puppet) -> None:
    """What was open goes on, and nothing else gets out."""
    equal(puppet.attempt("tcp", WEB, 8080).said, WEB, "what was open")
    asked = len(scene.internet.asked)
    scene.tap.take()
    for words in (
        ("tcp", CDN, 8080),
        ("udp", CDN, 443),
        ("tcp", "169.254.169.254", 8080),
        ("lookup", "web.test"),
        ("lookup", "other.test"),
    ):
        expect(puppet.is_refused(*words), f"{words} without a gateway")
    # Of what was open, also to the other address of that name, the last packets may come late.
    new = [text for text in scene.tap.take() if text.split()[1] not in (OTHER, WEB, WEB6)]
    equal(new, [], "what got out")
    equal(len(scene.internet.asked), asked, "questions that reached a resolver")


@in_a_room("policy.strict-gateway-dies")
def strict_gateway_dies(room: Room) -> None:
    """Without the proxy of strict mode nothing gets out, and refusals stay quick."""
    scene = room.scene
    room.allow("strict", "web.test")
    equal(room.ask("fetch", "http://web.test/").error, "", "an allowed host")
    client, enough = scene.client, "enough"
    client.exec(room.session_id, ["rm", "-f", enough])
    words = ["insist", enough, "talk", WEB, 80, "GET / HTTP/1.1\r\nHost: web.test\r\n\r\n"]
    with room.start(*words, exec_id="insist"):
        scene.place.kill_gateway()
        with contextlib.closing(Tap(scene.router, room.slot.interface)) as wire:
            scene.tap.take()
            for _ in range(5):
                eventually(wire.take)
            room.silence()
        scene.restart()
        scene.client.write_file(room.session_id, enough, "")
        told = room.rejoin(*words, exec_id="insist").said
    refused = [item for item in told if item["error"] == "ConnectionRefusedError"]
    expect(refused, "nothing was refused while there was no gateway")
    usual = statistics.median(item["seconds"] for item in refused)
    expect(usual < QUICKLY, f"a refusal took {usual:.1f} s")


@in_a_room("policy.nothing-left")
def nothing_left(room: Room) -> None:
    """A session that ends leaves neither rules, records, namespaces nor links."""
    scene = room.scene
    with room.beside("web.test", "93.184.216.0/24:22", "open") as ending:
        equal(ending.ask("tcp", "web.test", 8080).said, WEB, "an allowed name")
        slot, record = ending.slot, ending.record
        expect(f'"{slot.interface}"' in scene.elements(), "it has no rules")
    expect(not record.exists(), "its record is left")
    expect(not (scene.net / "slots" / str(slot.number)).exists(), "its namespace is left")
    expect(f'"{slot.interface}"' not in scene.elements(), "its rules are left")
    eventually(lambda: slot.interface not in scene.links())
