"""What becomes of networks when policies change, gateways die and ways out break."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from collections.abc import Generator

import pytest

from k8e.egress import namespaces
from k8e.egress.netlink import Netlink
from tests.egress import places
from tests.egress.far import CALLING_PORT, CDN, OTHER, WEB, WEB6, Tap
from tests.egress.places import QUICKLY, Program, Room, Scene
from tests.places import eventually

CALL = f"{OTHER}:{CALLING_PORT}"  # a way out for puppets that no name leads to


# A policy that changes.

CALL_BY_HTTP = "GET /call HTTP/1.1\r\nHost: web.test\r\n\r\n"
WAYS = pytest.mark.parametrize(
    ("words", "attempt"),
    [
        (["web.test"], ["web.test", CALLING_PORT]),
        ([f"{WEB}:{CALLING_PORT}"], [WEB, CALLING_PORT]),
        (["open"], [WEB6, CALLING_PORT]),
        (["strict", "web.test"], ["web.test", 80, CALL_BY_HTTP]),
    ],
    ids=["name", "address", "open", "strict"],
)


def lines(program: Program) -> Generator[str]:
    """What a download prints, without what HTTP says first."""
    while program.end is None:
        line = program.line()
        if line.startswith(("line", "[")):
            yield line


@WAYS
def test_a_download_goes_on_when_the_policy_still_allows_it(
    room: Room, words: list[str], attempt: list[str | int]
) -> None:
    room.allow(*words)
    with room.start("download", *attempt) as program:
        server, received = room.scene.far.caller(), lines(program)
        for number, hosts in enumerate((["a.cdn.test"], ["b.cdn.test", "a.cdn.test"], [])):
            room.allow(*words, *hosts)
            server.sendall(f"line {number}\n".encode())
            assert next(received) == f"line {number}"


@WAYS
@pytest.mark.parametrize("after", [[], ["other.test", "a.cdn.test"]], ids=["nothing", "others"])
def test_a_download_ends_when_the_policy_no_longer_allows_it(
    room: Room, words: list[str], attempt: list[str | int], after: list[str]
) -> None:
    room.allow(*words)
    with room.start("download", *attempt) as program:
        server, received = room.scene.far.caller(), lines(program)
        server.sendall(b"line 0\n")
        assert next(received) == "line 0"
        room.allow(*after)
        with contextlib.suppress(OSError):
            server.sendall(b"line 1\nline 2\n")
        *others, last = received
        assert json.loads(last)[0]["error"] == "ConnectionResetError", last
        assert len(others) <= 2, "only what was under way when the policy changed"
    assert room.ask("tcp", WEB, CALLING_PORT).refused


def test_whoever_speaks_under_an_old_policy_is_cut_at_once(room: Room) -> None:
    room.allow(CALL)
    with room.puppet(OTHER, CALLING_PORT) as puppet:
        assert puppet.attempt("tcp", WEB, 8080).refused
        room.allow(CALL, "web.test")
        assert puppet.attempt("tcp", "web.test", 8080).said == WEB
        room.allow("web.test")
        room.scene.tap.take()
        assert puppet.is_cut()
        assert f"tcp {OTHER} {CALLING_PORT}" not in room.scene.tap.take()


# A gateway that is killed.


def test_a_killed_gateway_leaves_policies_and_connections_as_they_were(room: Room) -> None:
    scene = room.scene
    room.allow("web.test", CALL)
    with room.puppet(OTHER, CALLING_PORT) as puppet:
        assert puppet.attempt("tcp", "web.test", 8080).said == WEB
        scene.place.kill_gateway()
        assert puppet.attempt("tcp", WEB, 8080).said == WEB, "it was open"
        asked = len(scene.internet.asked)
        scene.tap.take()
        for words in (
            ("tcp", CDN, 8080),
            ("udp", CDN, 443),
            ("tcp", "169.254.169.254", 8080),
            ("lookup", "web.test"),
            ("lookup", "other.test"),
        ):
            assert puppet.attempt(*words).refused, words
        assert {text for text in scene.tap.take() if OTHER not in text} == set()
        assert len(scene.internet.asked) == asked
        scene.restart()
        assert puppet.attempt("lookup", "web.test").said == sorted([WEB, WEB6])
        assert puppet.attempt("lookup", "a.cdn.test").refused
        told = scene.client.egress(room.session_id)
        assert "a.cdn.test" in {denial.name for denial in told.denials}
        assert set(told.rules) == {"web.test", f"{OTHER}/32:{CALLING_PORT}"}
        room.allow("web.test")
        assert puppet.is_cut()
    assert room.ask("tcp", "web.test", 8080).said == WEB


def test_a_killed_gateway_lets_nothing_of_a_strict_sandbox_out(room: Room) -> None:
    scene = room.scene
    room.allow("strict", "web.test")
    assert room.ask("fetch", "http://web.test/").error == ""
    words = ["insist", 3, "talk", WEB, 80, "GET / HTTP/1.1\r\nHost: web.test\r\n\r\n"]
    with room.start(*words, exec_id="insist"):
        scene.place.kill_gateway()
        with contextlib.closing(Tap(scene.router, room.slot.interface)) as wire:
            scene.tap.take()
            for _ in range(5):
                eventually(wire.take)
            assert scene.tap.take() == []
        scene.restart()
        told = room.rejoin(*words, exec_id="insist").said
    refused = [outcome for outcome in told if outcome["error"] == "ConnectionRefusedError"]
    assert refused
    assert max(outcome["seconds"] for outcome in refused) < QUICKLY


# Ways out that break.


def test_resolvers_that_do_not_answer_are_named_as_the_cause(scene: Scene) -> None:
    rooms = [Room(scene, runtime, "web.test") for runtime in places.RUNTIMES]
    scene.internet.craft = lambda _: []
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            runs = [pool.submit(room.attempt, ["lookup", "web.test"]) for room in rooms]
    finally:
        scene.internet.craft = None
    for run in runs:
        tried = run.result()
        assert tried.outcomes[0].error == "gaierror"
        assert tried.outcomes[0].seconds < 15
        assert {(denial.name, denial.rule) for denial in tried.denials} == {
            ("web.test", "the resolvers of the host do not answer")
        }
    for room in rooms:
        assert room.ask("tcp", "web.test", 8080).said == WEB
        room.close()


def test_an_uplink_that_is_taken_away_comes_back(room: Room) -> None:
    room.allow("web.test")
    assert room.ask("tcp", "web.test", 8080).said == WEB

    def cut() -> None:
        with contextlib.closing(Netlink()) as netlink:
            netlink.delete_link("up")

    namespaces.run_in(room.scene.router, cut)
    tried = room.attempt(["tcp", WEB, 8080], ["tcp", WEB6, 8080])
    assert max(outcome.seconds for outcome in tried.outcomes) < QUICKLY
    assert eventually(lambda: room.ask("tcp", "web.test", 8080).said) == WEB
