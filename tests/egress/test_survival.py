"""Ways out that break. How policies last and change is in ``k8e.conformance``."""

from __future__ import annotations

import concurrent.futures
import contextlib

from k8e.egress import namespaces
from k8e.egress.netlink import Netlink
from tests.egress import places
from tests.egress.far import WEB, WEB6
from tests.egress.places import QUICKLY, Room, Scene
from tests.places import eventually


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
