"""Templates over gRPC: what crosses the wire, and who may do what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.gateway import serving
from tests.gateway.devices import Metadata, ask, new_key

Stub = pb_grpc.SandboxServiceStub
FULL = pb.Template(
    name="whole",
    description="everything",
    runtime_class="container",
    rootfs="dir:/srv/root",
    limits=pb.TemplateLimits(
        cpus=0.5, memory=64 << 20, pids=50, disk=8 << 20, inodes=99, open_files=2000, output=5000
    ),
    env={"A": "ü"},
    labels={"b": "c"},
    allowed_hosts=["none"],
    lifetime=60,
    idle_timeout=30.5,
    warm=pb.TemplateWarmth(
        interpreters=[pb.WarmInterpreter(language="python", modules=["json", "os.path"])]
    ),
    pool_min=0,
    pool_max=3,
)


@pytest.fixture
def whole(stub: Stub) -> Iterator[pb.Template]:
    yield stub.ApplyTemplate(pb.ApplyTemplateRequest(template=FULL))
    stub.DeleteTemplate(pb.DeleteTemplateRequest(name="whole"))


@pytest.fixture(scope="module")
def admin(running: serving.Running) -> Metadata:
    return new_key(running, "template-admin", "admin")


@pytest.fixture(scope="module")
def approver(running: serving.Running) -> Metadata:
    return new_key(running, "template-approver", "approver")


def refused(running: serving.Running, metadata: Metadata, **call: Any) -> str:
    """The code and the words with which an operation of ours is refused."""
    with running.channel() as channel, serving.Frames(channel, metadata) as frames:
        frames.ask(1, **call)
        frame = frames.receive()
    assert frame.kind == wire.ERROR
    told = wire.unpack_dict(frame.body)
    return f"{told['code']}: {told['message']}"


def test_everything_that_a_template_says_crosses_the_wire(whole: pb.Template) -> None:
    expected = pb.Template()
    expected.CopyFrom(FULL)
    expected.source = "api"
    expected.digest = whole.digest
    assert whole == expected
    assert len(whole.digest) == 16


def test_what_is_empty_is_not_said_and_what_is_an_empty_set_is(stub: Stub) -> None:
    asked = pb.Template(name="bare", warm=pb.TemplateWarmth())
    bare = stub.ApplyTemplate(pb.ApplyTemplateRequest(template=asked))
    assert (bare.HasField("warm"), len(bare.warm.interpreters)) == (True, 0)
    assert not bare.HasField("pool_min")
    assert not bare.allowed_hosts
    stub.DeleteTemplate(pb.DeleteTemplateRequest(name="bare"))


def test_agents_see_and_use_templates_but_no_path_of_the_machine(
    running: serving.Running, stub: Stub, agent: Metadata, whole: pb.Template
) -> None:
    seen = stub.GetTemplate(pb.GetTemplateRequest(name="whole"), metadata=agent)
    assert (seen.rootfs, seen.digest) == ("dir", whole.digest)
    listed = stub.ListTemplates(pb.ListTemplatesRequest(), metadata=agent).templates
    assert {item.name: item.rootfs for item in listed}["whole"] == "dir"
    framed = ask(running, agent, op="list_templates")["templates"]
    assert {item["name"]: item["rootfs"] for item in framed}["whole"] == "dir"


CHANGES: list[Callable[[Stub, Metadata], object]] = [
    lambda stub, who: stub.ApplyTemplate(
        pb.ApplyTemplateRequest(template=pb.Template(name="mine", rootfs="dir:/etc")), metadata=who
    ),
    lambda stub, who: stub.DeleteTemplate(pb.DeleteTemplateRequest(name="default"), metadata=who),
]
CALLS: list[dict[str, Any]] = [
    {"op": "apply_template", "template": {"name": "mine", "rootfs": "dir:/etc"}},
    {"op": "delete_template", "name": "default"},
]


@pytest.mark.parametrize("who", ["agent", "approver"])
def test_only_administrators_change_templates(
    running: serving.Running, stub: Stub, who: str, request: pytest.FixtureRequest
) -> None:
    metadata: Metadata = request.getfixturevalue(who)
    for change in CHANGES:
        failed = serving.failing(lambda change=change: change(stub, metadata))
        assert failed.status is grpc.StatusCode.PERMISSION_DENIED
    for call in CALLS:
        assert "denied: " in refused(running, metadata, **call)


def test_administrators_see_and_change_them_without_being_agents(
    stub: Stub, admin: Metadata, approver: Metadata
) -> None:
    asked = pb.ApplyTemplateRequest(template=pb.Template(name="mine", rootfs="tar:/srv/x.tar"))
    assert stub.ApplyTemplate(asked, metadata=admin).rootfs == "tar:/srv/x.tar"
    found = stub.GetTemplate(pb.GetTemplateRequest(name="mine"), metadata=admin)
    assert found.rootfs == "tar:/srv/x.tar"
    assert stub.DeleteTemplate(pb.DeleteTemplateRequest(name="mine"), metadata=admin).ok
    failed = serving.failing(
        lambda: stub.ListTemplates(pb.ListTemplatesRequest(), metadata=approver)
    )
    assert failed.status is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (pb.Template(), "not a valid name"),
        (pb.Template(name="x", rootfs="/etc"), "known are host, dir:/PATH"),
        (pb.Template(name="x", limits=pb.TemplateLimits(memory=1)), "32 MiB to 1 TiB"),
        (pb.Template(name="x", runtime_class="vmware"), "unknown runtime"),
        (pb.Template(name="x", pool_min=2, pool_max=1), "above its max"),
    ],
)
def test_what_is_wrong_in_a_template_is_told(stub: Stub, recipe: pb.Template, said: str) -> None:
    asked = pb.ApplyTemplateRequest(template=recipe)
    failed = serving.failing(lambda: stub.ApplyTemplate(asked))
    assert failed.status is grpc.StatusCode.INVALID_ARGUMENT
    assert said in failed.details


@pytest.mark.parametrize("key", ["rootfs", "warm"])
def test_a_session_cannot_choose_what_only_templates_decide(
    running: serving.Running, agent: Metadata, key: str
) -> None:
    spec = {key: {"kind": "dir", "source": "/etc"}}
    call = {"op": "create_session", "spec": spec}
    assert f"unknown session field '{key}'" in refused(running, agent, **call)
