"""What went wrong, as gRPC says it: one place for every call."""

from __future__ import annotations

import errno
import logging
from typing import Any, NamedTuple, NoReturn

import grpc

from k8e import database, errors
from k8e.gateway.calls import GuestOSError
from k8e.gateway.peers import Refusal

log = logging.getLogger(__name__)

CODE_KEY = "k8e-error-code"
"""Trailing metadata: the stable code of :mod:`k8e.errors`, or an errno name."""
MAX_DETAILS = 2000  # characters; what does not fit into a client's header limit would be lost

_BY_ERRNO = {
    errno.ENOENT: grpc.StatusCode.NOT_FOUND,
    errno.EACCES: grpc.StatusCode.PERMISSION_DENIED,
    errno.EPERM: grpc.StatusCode.PERMISSION_DENIED,
    errno.EROFS: grpc.StatusCode.PERMISSION_DENIED,
    errno.EEXIST: grpc.StatusCode.ALREADY_EXISTS,
    errno.EINVAL: grpc.StatusCode.INVALID_ARGUMENT,
    errno.ENAMETOOLONG: grpc.StatusCode.INVALID_ARGUMENT,
    errno.ENOSPC: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errno.EDQUOT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errno.EFBIG: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errno.ENOMEM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errno.EAGAIN: grpc.StatusCode.RESOURCE_EXHAUSTED,  # fork: the limit of processes
}


class Status(NamedTuple):
    """The three things that a failed call tells its client."""

    status: grpc.StatusCode
    details: str
    code: str


def describe(error: Exception) -> Status:
    """What a client gets to know of ``error``; nothing of what only concerns ourselves."""
    if database.is_full(error):
        error = database.full()
    if isinstance(error, errors.K8eError):
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        return Status(grpc.StatusCode[error.grpc_status], text, error.code)
    if isinstance(error, GuestOSError):
        status = _BY_ERRNO.get(error.errno, grpc.StatusCode.FAILED_PRECONDITION)
        return Status(status, str(error), errno.errorcode.get(error.errno, "EIO"))
    if isinstance(error, Refusal):
        return Status(grpc.StatusCode.UNAUTHENTICATED, str(error), "unauthenticated")
    log.error("a call failed unexpectedly", exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, errors.INTERNAL, "internal")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    status, details, code = describe(error)
    await context.abort(status, as_text(details)[:MAX_DETAILS], ((CODE_KEY, code),))


def as_text(value: str) -> str:
    """``value`` with file names that are no UTF-8 made readable; gRPC sends nothing else."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
