"""Which gateway a client talks to: a given one, that of the environment, or this host's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from k8e import errors

DEFAULT_PORT = 50051


@dataclass(frozen=True)
class Endpoint:
    """Where a gateway is."""

    socket: str = ""
    """Path of a unix socket; nothing is started if nobody listens there."""
    target: str = ""
    """Host and port of a gRPC endpoint. Neither: this host's gateway, started when needed."""
    api_key: str = field(default="", repr=False)


def resolve(endpoint: str | None, api_key: str | None = None) -> Endpoint:
    """The endpoint that was asked for, in the order argument, environment, default."""
    text = endpoint or os.environ.get("K8E_SANDBOX_ENDPOINT") or ""
    key = api_key or os.environ.get("K8E_SANDBOX_APIKEY") or ""
    if not text:
        return Endpoint()
    if text.startswith("unix:"):
        return Endpoint(socket=text.removeprefix("unix:").replace("//", "", 1))
    for prefix in ("https://", "grpcs://"):
        text = text.removeprefix(prefix)
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):  # a name, or an IPv6 address in brackets
        return Endpoint(target=f"{text}:{DEFAULT_PORT}", api_key=key)
    if not host or not port.isdigit():
        raise errors.InvalidRequest(
            f"{text!r} is not an endpoint",
            hint="endpoints look like gateway.example:50051 or unix:/run/k8e/gateway.sock",
        )
    return Endpoint(target=text, api_key=key)
