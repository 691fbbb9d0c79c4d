"""Errors as gRPC statuses; :mod:`k8e.errors` has the table."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import grpc

from k8e.gateway import refusals

CODE_KEY = "k8e-error-code"
"""Trailing metadata: the stable code of :mod:`k8e.errors`, or an errno name."""
MAX_DETAILS = 2000  # characters; a client would lose an error that exceeds its header limit


class RpcStatus(NamedTuple):
    """The three parts of a failed call's answer."""

    status: grpc.StatusCode
    details: str
    code: str


def describe(error: Exception) -> RpcStatus:
    """The answer to ``error``, without anything that concerns only this machine."""
    found = refusals.describe(error)
    return RpcStatus(grpc.StatusCode[found.status.grpc], found.text, found.status.code)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    status, details, code = describe(error)
    await context.abort(status, as_text(details)[:MAX_DETAILS], ((CODE_KEY, code),))


def as_text(value: str) -> str:
    """``value`` with file names that are not UTF-8 made readable; gRPC sends nothing else."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
