"""``k8e image`` from end to end: a real gateway, a real registry."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from k8e import AsyncSandboxClient, SandboxClient
from k8e.gateway.service import OPERATIONS
from k8e.model import Role
from tests.cli.terminals import Terminal
from tests.images import registries
from tests.images.building import Archive, Built
from tests.places import Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Generator[Place]:
    """A gateway of its own, with a registry as its default that wants a password."""
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    folder = tmp_path_factory.mktemp("registry")
    with registries.running(folder / "r", registries.with_password(folder)) as host:
        file = registries.docker_config(folder / "config.json", host)
        base = Archive().file("base", b"x" * 10)
        upper = Archive().file("f", os.urandom(2_000_000))
        Built([base]).push(host, "team/base", "1", registries.BASIC)
        Built([base, upper], workdir="/app").push(host, "team/tools", "2", registries.BASIC)
        place = Place(K8E_DEFAULT_REGISTRY=host, K8E_REGISTRY_CREDENTIALS=str(file))
        yield place
        place.close()


def layers(place: Place) -> int:
    return len(list((place.data / "images/layers").iterdir()))


def test_an_image_is_pulled_listed_and_removed(place: Place) -> None:
    host = place.environ["K8E_DEFAULT_REGISTRY"]
    pulled = place.json("image", "pull", "team/tools:2")
    assert pulled["name"] == f"{host}/team/tools:2"
    assert (pulled["size_bytes"], pulled["workdir"]) == (2_000_010, "/app")
    assert pulled["platform"] == "linux/amd64"
    base = place.json("image", "pull", f"{host}/team/base:1")
    assert base["layers"] == pulled["layers"][:1]
    assert layers(place) == 2, "what both have is there once"
    assert place.json("image", "list") == {"images": [base, pulled]}
    gone = place.json("image", "remove", "team/tools:2")
    assert gone == {"ok": True, "removed_layers": pulled["layers"][1:]}
    assert place.json("image", "prune") == {"ok": True, "removed_layers": []}
    assert place.json("image", "list") == {"images": [base]}
    assert layers(place) == 1


def test_the_sdk_has_the_same(place: Place) -> None:
    place.json("status")
    with SandboxClient(place.endpoint) as client:
        pulled = client.pull_image("team/base:1")
        assert pulled in client.list_images()
        assert client.prune_images() == []
        assert client.remove_image("team/base:1") == list(pulled.layers)


async def test_the_asynchronous_sdk_too(place: Place) -> None:
    async with AsyncSandboxClient(place.endpoint) as client:
        pulled = await client.pull_image("team/base:1")
        assert pulled in await client.list_images()
        assert await client.prune_images() == []
        assert await client.remove_image("team/base:1") == list(pulled.layers)


def test_errors_say_what_to_do(place: Place) -> None:
    assert "no such image" in place.error("image", "pull", "team/missing:1")
    assert "k8e image list" in place.error("image", "remove", "team/missing:1")
    assert "not the reference of an image" in place.error("image", "pull", "Team/Tools")
    assert "cannot be reached" in place.error("image", "pull", "127.0.0.1:1/x")


@pytest.mark.parametrize("operation", ["pull_image", "list_images", "remove_image", "prune_images"])
def test_images_are_the_admins(operation: str) -> None:
    assert OPERATIONS[operation].roles == {Role.ADMIN}


def test_a_terminal_shows_a_table(place: Place) -> None:
    with Terminal(place, "image", "pull", "team/tools:2") as terminal:
        terminal.until(b'"workdir":"/app"')
    with Terminal(place, "image", "list") as terminal:
        seen = terminal.until(b"1.9 MiB")
        assert b"NAME" in seen
        assert b"team/tools:2" in seen
    place.json("image", "remove", "team/tools:2")
