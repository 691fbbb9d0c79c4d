"""Templates with an image: from a registry through the pool to a session and its sub-agent."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from k8e import Sandbox, SandboxClient, errors
from tests.images import registries
from tests.images.building import Built, busybox
from tests.places import Place, eventually


@pytest.fixture(scope="module")
def boxes(registry: str) -> Generator[Place]:
    """A gateway whose template ``box`` is an image with nothing but busybox."""
    layer = busybox(registries.program("busybox")).file("etc/mark", b"from the image\n")
    Built([layer], env=["PATH=/bin"]).push(registry, "box", "1")
    place = Place(K8E_POOL_MAX="2", K8E_POOL_MIN="0")
    place.cli("template", "apply", "-", stdin=f"name: box\nrootfs: image:{registry}/box:1".encode())
    yield place
    place.close()


def test_sessions_of_an_image_are_made_and_kept_ready(boxes: Place, runtime: str) -> None:
    with SandboxClient(boxes.endpoint) as client:
        first = client.create_session(runtime, template="box")
        assert client.exec(first, ["cat", "/etc/mark"]).stdout == "from the image\n"
        child = client.run_subagent(first)
        assert client.exec(child, "cat /etc/mark > seen").exit_code == 0
        assert client.exec(first, "cat seen").stdout == "from the image\n"

        def ready() -> bool:
            pools = {(item["template"], item["runtime"]): item for item in client.pool()}
            return pools["box", runtime]["ready"] > 0

        eventually(ready, seconds=30)
        second = client.create_session(runtime, template="box", env={"MARK": "late"})
        assert client.exec(second, "echo $MARK; cat /etc/mark").stdout == "late\nfrom the image\n"
        pools = {(item["template"], item["runtime"]): item for item in client.pool()}
        assert pools["box", runtime]["hits"] == 1
        with pytest.raises(FileNotFoundError, match="the image has no python3"):
            client.run("print(1)", "python", session_id=second)
        for session_id in (first, second):
            client.destroy_session(session_id)


def test_a_sandbox_object_is_made_from_an_image(boxes: Place, registry: str, runtime: str) -> None:
    with SandboxClient(boxes.endpoint) as client:
        before = {item.name for item in client.list_templates()}
        for _ in range(2):
            with Sandbox(image=f"{registry}/box:1", runtime=runtime, client=client) as sandbox:
                assert sandbox.exec(["cat", "/etc/mark"]).stdout == "from the image\n"
        made = {item.name for item in client.list_templates()} - before
        assert len(made) <= 1
        for name in made:
            client.delete_template(name)


def test_an_image_that_there_is_not_is_told_to_whoever_wants_a_session(
    boxes: Place, registry: str
) -> None:
    recipe = {"name": "nowhere", "rootfs": f"image:{registry}/nothing:1"}
    with SandboxClient(boxes.endpoint) as client:
        client.apply_template(recipe)
        with pytest.raises(errors.ImageNotFound):
            client.create_session("container", template="nowhere")


def test_an_image_that_is_pulled_again_replaces_what_waits(boxes: Place, registry: str) -> None:
    def push(mark: bytes) -> None:
        layer = busybox(registries.program("busybox")).file("etc/mark", mark)
        Built([layer], env=["PATH=/bin"]).push(registry, "moving", "1")

    push(b"old\n")
    recipe = {"name": "moving", "rootfs": f"image:{registry}/moving:1", "runtime": "container"}
    with SandboxClient(boxes.endpoint) as client:
        client.apply_template(recipe)
        client.set_pool("moving", min_ready=1, max_ready=1, wait=True)
        push(b"new\n")
        client.pull_image(f"{registry}/moving:1")
        client.set_pool("moving", min_ready=1, max_ready=1, wait=True)
        session_id = client.create_session(template="moving")
        assert client.exec(session_id, "cat /etc/mark").stdout == "new\n"
        client.destroy_session(session_id)
        client.delete_template("moving")
