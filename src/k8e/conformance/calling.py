"""Calls of the gateway as a stranger makes them: with a key of one's own, call by call."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator
from typing import Any

import grpc

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.conformance.lab.rooms import Room
from k8e.conformance.outcomes import Broken
from k8e.guest import wire

SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
SECONDS = 40.0
OK = "OK"


class Failed(Broken):
    """A call that did not succeed."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(f"{text} ({status})")
        self.status = status


@contextlib.contextmanager
def channel(room: Room) -> Generator[grpc.Channel]:
    """A connection to the gateway that shows nothing by itself."""
    place = room.scene.place
    place.wait_for_grpc()
    trusted = (place.data / "tls" / "ca.crt").read_bytes()
    with grpc.secure_channel(
        place.environ["K8E_LISTEN"], grpc.ssl_channel_credentials(trusted)
    ) as made:
        yield made


@contextlib.contextmanager
def key(room: Room, *roles: str) -> Generator[str]:
    """A key of somebody else, with these roles."""
    name = f"somebody-{secrets.token_hex(4)}"
    flags = [word for role in roles for word in ("--role", role)]
    made = room.scene.place.json("sandbox", "api-key", "create", name, *flags)
    try:
        yield made["key"]
    finally:
        room.scene.place.json("sandbox", "api-key", "delete", name)


def shown(secret: str) -> tuple[tuple[str, str], ...]:
    """The headers that show a key."""
    return (("authorization", f"Bearer {secret}"),)


def answer(there: grpc.Channel, name: str, asked: Any, secret: str = "") -> Any:
    """What a call answers, which must succeed; without a key it is one of the gateway's user."""
    stub, metadata = pb_grpc.SandboxServiceStub(there), shown(secret) if secret else ()
    try:
        found = getattr(stub, name)(asked, metadata=metadata, timeout=SECONDS)
        return list(found) if SERVICE.methods_by_name[name].server_streaming else found
    except grpc.RpcError as error:
        failed: Any = error
        raise Failed(failed.code().name, f"{name}: {failed.details()}") from None


def status(there: grpc.Channel, name: str, asked: Any, secret: str) -> str:
    """The status of a call; OK if it succeeds."""
    try:
        answer(there, name, asked, secret or " ")  # an empty key is shown too
    except Failed as failed:
        return failed.status
    return OK


def operation(there: grpc.Channel, call: dict[str, Any], secret: str) -> str:
    """The code of the error of an operation on the stream ``Run``; OK if it succeeds."""
    stub = pb_grpc.SandboxServiceStub(there)
    asked = iter([pb.RunFrame(kind=wire.CALL, channel=1, body=wire.pack(call))])
    for frame in stub.Run(asked, metadata=shown(secret), timeout=SECONDS):
        if frame.kind == wire.ERROR:
            return str(wire.unpack_dict(frame.body).get("code"))
        if frame.kind == wire.RESULT:
            return OK
    return "nothing"
